"""Locations: URIs of datasets and models. Standard library only.

A location is one of:

* ``file:///abs/path`` (a plain local path is accepted and becomes one), ``s3://bucket/key``, ``http(s)://host/path``:
  files in a store, a `Location`;
* ``pvc://claim/path``: a `Location` on a PersistentVolumeClaim, which a job that uses the location mounts in its pods;
* ``gs://bucket/key``, ``az://container/key``, ``abfs(s)://container/key``, the last also with the account, as in
  ``abfss://container@account.dfs.core.windows.net/key``: a `Location` too;
* ``hf://[datasets/|spaces/]namespace/name[@revision][/path]``: a repository of the Hugging Face Hub, in its own
  grammar; a `Location` as well;
* ``oci://registry[:port]/repository:tag`` or ``...@sha256:digest``: a model in a container registry, a `Location` too;
  without tag and digest a parent for models, below which an export chooses a repository;
* ``models:/name@alias``, ``models:/name/version``: a registered model in MLflow's own notation, a `ModelRef`;
  ``model-registry://`` instead of ``models:/``, as in KServe, is the same. The registry is a setting.

A trailing slash means a directory and is kept. Without it, the location may be a single file or a directory; the store
is queried.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from trainjob._support import volumes
from trainjob.errors import ConfigurationError, UnsafePath

SUPPORTED = ("abfs", "abfss", "az", "file", "gs", "hf", "http", "https", "model-registry", "models", "oci", "pvc", "s3")
BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container", "abfs": "container", "abfss": "container"}
"""Schemes of object stores, and their word for a bucket. Keys are not percent-encoded, as in the stores' own tools."""
ACCOUNTS = frozenset({"abfs", "abfss"})
"""Schemes that may have an account after the container (`ACCOUNT`), so that ``@`` does not indicate a credential."""
ACCOUNT = re.compile(r"[a-z0-9-]+@[a-z0-9]{3,24}\.(?:dfs|blob)\.[a-z0-9.-]+")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(?=/)")
_MODEL = re.compile(
    r"(?:models:/+|model-registry://)(?P<name>[^/:@]+)(?:@(?P<alias>[^/:@]+)|/(?P<version>[^/:@]+))", re.IGNORECASE
)
# OCI distribution-spec 1.1, "Pulling manifests": repository names and tags; of digests, only sha256.
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?)/"
    rf"(?P<path>{_NAME}(?:/{_NAME})*(?::[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?)"
)
# huggingface_hub.utils.parse_hf_uri: "@" counts only after namespace and name; revisions with slashes are encoded.
_HUB = re.compile(
    r"(?:(?P<kind>models|datasets|spaces)/)?(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/[0-9]+)(?=/|$)|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_HUB_KINDS = {"datasets": "dataset", "spaces": "space"}
_HUB_OTHER = frozenset({"buckets", "dataset", "kernel", "kernels", "model", "space"})
# Query fields that make a URL a credential: signed URLs of S3, Google and Azure, and common names of tokens.
_SECRET_QUERY = re.compile(
    r"(?:^|&)(?:x-(?:amz|goog)-[^=]*|signature|sig|(?:access_?|auth_?)?token|api_?key)=", re.IGNORECASE
)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SEGMENT = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Location:
    """A location in a store.

    Attributes:
        scheme: One of `SUPPORTED` but ``models`` and ``model-registry``, in lower case.
        authority: Bucket or container (`BUCKETS`), ``host[:port]`` (``http``, ``oci``), repository with its revision
            (``hf``), PersistentVolumeClaim (``pvc``); empty for ``file``.
        path: Decoded path without leading and trailing slash; ``""`` is the root. For ``oci`` the repository with its
            tag or digest.
        directory: Whether it was written with a trailing slash.
        query: Query of an ``http`` location, without ``?``.
    """

    scheme: str
    authority: str
    path: str
    directory: bool = False
    query: str = ""

    @property
    def uri(self) -> str:
        """The location as a URI; ``parse(x.uri) == x``."""
        raw = self.scheme in BUCKETS or self.scheme == "hf"
        path = self.path if raw else quote(self.path, safe="/!$&'()*+,;=:@-._~")
        slash = "/" if self.directory and path else ""
        return f"{self.scheme}://{self.authority}/{path}{slash}" + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """The last segment of the path."""
        return self.path.rpartition("/")[2]

    @property
    def on_disk(self) -> bool:
        """Whether the location is in this machine's file system: ``file`` or ``pvc``."""
        return self.scheme in ("file", "pvc")

    @property
    def writable(self) -> bool:
        """Whether the location can be written; web servers can only be read."""
        return self.scheme not in ("http", "https")

    @property
    def local(self) -> Path:
        """The path on this machine; only if `on_disk`.

        Raises:
            ConfigurationError: The location is not on disk, or its PersistentVolumeClaim is not mounted.
        """
        if not self.on_disk:
            raise ConfigurationError(f"{self.uri} is not a local path")
        if self.scheme == "file":
            return Path("/" + self.path)
        mount = volumes.directory(self.authority)
        if not mount.is_dir():
            raise ConfigurationError(
                f"PersistentVolumeClaim {self.authority} is not mounted at {mount}: a job mounts the claims of its"
                " step, inputs and outputs; elsewhere write the location as file:///path"
            )
        return mount / self.path

    def child(self, path: str) -> Location:
        """The location of ``path`` below this one; raises UnsafePath if ``path`` leaves it."""
        checked = safe_path(path.rstrip("/"))
        return replace(self, path=f"{self.path}/{checked}".lstrip("/"), directory=path.endswith("/"))

    def __str__(self) -> str:
        return self.uri


@dataclass(frozen=True)
class ModelRef:
    """A registered model: exactly one of alias and version is set."""

    name: str
    alias: str | None = None
    version: str | None = None

    @property
    def uri(self) -> str:
        """``models:/name@alias`` or ``models:/name/version``."""
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/{self.version}"

    def __str__(self) -> str:
        return self.uri


def safe_path(path: str) -> str:
    """Check the relative path of a file in a dataset or model, and return it.

    Raises:
        UnsafePath: The path is absolute, has an empty, ``.`` or ``..`` segment, a backslash or a control character, or
            is not valid Unicode. On some machines it would be written outside its target, or could not be written.
    """
    if not path or path.startswith("/"):
        reason = "is empty or absolute"
    elif "\\" in path:
        reason = "has a backslash"
    elif _CONTROL.search(path):
        reason = "has a control character"
    elif _SEGMENT.search(path):
        reason = "has an empty, '.' or '..' segment"
    elif _SURROGATE.search(path):
        reason = "is not valid UTF-8"
    else:
        return path
    raise UnsafePath(f"unsafe path {path!a}: it {reason}; rename the file or exclude it")


def parse(uri: str | os.PathLike[str]) -> Location | ModelRef:
    """Parse a location.

    Raises:
        ConfigurationError: The text is not a location, its scheme is not supported, or it contains credentials.
        UnsafePath: The path of a URI has ``..`` or control characters (a plain local path is normalized instead).
    """
    text = os.fspath(uri)
    match = _SCHEME.match(text)
    if match is None:
        return _local(text)
    scheme = match.group(1).lower()
    if scheme in ("models", "model-registry"):
        return _model(text, scheme)
    if scheme not in SUPPORTED:
        raise ConfigurationError(
            f"{scheme}:// is not a supported scheme; supported: {', '.join(SUPPORTED)}, and plain local paths"
        )
    if not text[match.end() :].startswith("//"):
        raise ConfigurationError(f"write {scheme}:// with two slashes, as in {scheme}://...")
    if scheme == "hf":
        return _hub(text[match.end() + 2 :])
    if scheme == "oci":
        return _image(text[match.end() + 2 :])
    if scheme in BUCKETS:
        # Not urlsplit: '?', '#' and '%' are ordinary characters of keys.
        authority, _, path = text[match.end() + 2 :].partition("/")
        query = ""
    else:
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise ConfigurationError(f"not a valid {scheme} location: {error}") from None
        authority, path, query = parts.netloc, unquote(parts.path).removeprefix("/"), parts.query
    _refuse_secrets(scheme, authority, query)
    return _checked(scheme, authority, path, query)


def parse_store(uri: str | os.PathLike[str]) -> Location:
    """Parse a location in a store; raises ConfigurationError for a registered model (``models:/...``)."""
    location = parse(uri)
    if isinstance(location, ModelRef):
        raise ConfigurationError(f"{location} is a registered model; use a location in a store instead")
    return location


def parse_target(uri: str | os.PathLike[str]) -> Location:
    """Parse a location that is to be written; raises ConfigurationError if it can only be read."""
    location = parse_store(uri)
    check_writable(location)
    return location


def check_writable(location: Location) -> None:
    """Raise ConfigurationError if the location can only be read."""
    if not location.writable:
        raise ConfigurationError(
            f"the target {public(location)} cannot be written: {location.scheme}:// can only be read; choose a target"
            " in an object store (such as s3://bucket/path) or a directory"
        )


def public(location: Location) -> str:
    """The location without its query, which may contain secrets."""
    return location.uri.partition("?")[0] if location.query else location.uri


def join(uri: str, *paths: str) -> str:
    """Append relative paths to ``uri``; a trailing slash of the last one is kept.

    Raises:
        UnsafePath: A path leaves ``uri``.
    """
    location = parse_store(uri)
    for path in paths:
        location = location.child(path)
    return location.uri


def _local(text: str) -> Location:
    if not text or "\0" in text:
        raise ConfigurationError("the location is empty; write one such as s3://bucket/data/ or /data/set")
    path = os.path.abspath(Path(text).expanduser())  # noqa: PTH100 - normalizes '..' as a shell user expects
    return Location("file", "", path.strip("/"), directory=text.endswith("/"))


def _model(text: str, scheme: str) -> ModelRef:
    match = _MODEL.fullmatch(text)
    if match is None:
        start = f"{scheme}:/" if scheme == "models" else f"{scheme}://"
        raise ConfigurationError(f"{text!r} is not a registered model: write {start}name@alias or {start}name/version")
    return ModelRef(match["name"], alias=match["alias"], version=match["version"])


def _image(text: str) -> Location:
    match = _IMAGE.fullmatch(text.removesuffix("/"))
    if match is None:
        if "@" in text.partition("/")[0]:
            _refuse_secrets("oci", text.partition("/")[0], "")
        raise ConfigurationError(
            f"oci://{text.partition('?')[0]} is not a location in a registry: write oci://registry/repository:tag or"
            " oci://registry/repository@sha256:digest, with the repository in lower case"
        )
    return Location("oci", match["host"].lower(), match["path"], directory=text.endswith("/"))


def hub_parts(location: Location) -> tuple[str, str, str]:
    """The parts of an ``hf`` location: ``model``, ``dataset`` or ``space``; ``namespace/name``; the revision."""
    match = _HUB.fullmatch(location.authority)
    if match is None:
        raise ConfigurationError(f"{location} is not a repository")
    kind = _HUB_KINDS.get(match["kind"] or "", "model")
    return kind, match["repo"], unquote(match["revision"] or "main")


def at_revision(location: Location, revision: str) -> Location:
    """The same ``hf`` location at another revision."""
    match = _HUB.fullmatch(location.authority)
    repo = location.authority if match is None or match["revision"] is None else location.authority[: match.end("repo")]
    return replace(location, authority=f"{repo}@{revision}")


def _hub(text: str) -> Location:
    first = text.partition("/")[0]
    if "@" in first and "/" in text and first.partition("@")[0].count("/") == 0:
        _refuse_secrets("hf", first, "")
    match = _HUB.fullmatch(text.rstrip("/"))
    if match is None or first in _HUB_OTHER or match["repo"].partition("/")[0] in ("models", "datasets", "spaces"):
        raise ConfigurationError(
            f"hf://{text} is not a repository: write hf://namespace/name, hf://datasets/namespace/name or"
            " hf://spaces/namespace/name, optionally followed by @revision and /path"
        )
    kind = f"{match['kind']}/" if match["kind"] in _HUB_KINDS else ""
    revision = f"@{match['revision']}" if match["revision"] else ""
    return _checked("hf", f"{kind}{match['repo']}{revision}", (match["path"] or "") + "/" * text.endswith("/"), "")


def _refuse_secrets(scheme: str, authority: str, query: str) -> None:
    # The message does not quote the location, which contains the secret.
    account = scheme in ACCOUNTS and ACCOUNT.fullmatch(authority)
    if ("@" in authority and not account) or _SECRET_QUERY.search(query):
        raise ConfigurationError(
            f"this {scheme}:// location contains credentials, and locations are written to logs and registries; set"
            " credentials in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) or in a Kubernetes"
            " Secret"
        )


def _checked(scheme: str, authority: str, path: str, query: str) -> Location:
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise ConfigurationError(f"file://{authority}/... has a host; write file:///absolute/path")
        authority, query = "", ""
    elif scheme == "pvc" and not re.fullmatch(volumes.NAME, authority):
        raise ConfigurationError(f"pvc://{authority}/{path} has no valid PersistentVolumeClaim; write pvc://claim/path")
    elif not authority:
        what = BUCKETS.get(scheme, "host")
        raise ConfigurationError(f"no {what} in {scheme}:///{path}; write {scheme}://{what}/...")
    directory = path.endswith("/") or not path
    path = path.rstrip("/")
    if path:
        safe_path(path)
    return Location(scheme, authority, path, directory=directory, query=query)
