"""Kubeconfig files, merged and checked as by kubectl.

Fields and rules are those of client-go (32ce75a7d6bc, ``tools/clientcmd``: ``api/v1/types.go``, ``loader.go``,
``validation.go``). `Cluster`, `User`, `Exec` and `Context` have every field that has an effect. Those in `REFUSED` are
refused, and kubectl ignores the rest, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from trainjob._support.foreign import LIMITS, Unreadable
from trainjob._support.foreign_yaml import yaml_of
from trainjob._support.urls import is_url
from trainjob.errors import ConfigurationError

_LIMITS = replace(LIMITS, of="a kubeconfig")  # one with 100 clusters has 300 KB

_PATHS = {"clusters": ("certificate-authority",), "users": ("client-certificate", "client-key", "tokenFile")}
"""Fields with a path, relative to the directory of their kubeconfig."""

_AUTH_PROVIDER = (
    "auth providers are not supported: use the exec plugin of your provider, such as gke-gcloud-auth-plugin, kubelogin"
    " (Azure) or kubectl-oidc_login"
)
_BASIC = "Kubernetes has no basic authentication since 1.19: use a token, a client certificate or an exec plugin"
REFUSED: Mapping[str, str] = {"auth-provider": _AUTH_PROVIDER, "username": _BASIC, "password": _BASIC}
"""Fields of a user that are refused, with the reason. To ignore one could make the user anonymous."""


_NAMES = {"as_": "as", "token_file": "tokenFile", "api_version": "apiVersion", "install_hint": "installHint"}
_NAMES |= {"provide_cluster_info": "provideClusterInfo", "interactive_mode": "interactiveMode"}
_WORDS = {str: "text", bool: "true or false", list: "a list", dict: "a mapping"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Cluster:
    """How to reach an API server."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EnvironmentVariable:
    """A variable of a plugin's environment."""

    name: str = ""
    value: str = field(default="", repr=False)


@dataclass(frozen=True)
class Exec:
    """A credential plugin."""

    api_version: str = ""
    command: str = ""
    args: list[str] = field(default_factory=list, repr=False)
    env: list[EnvironmentVariable] = field(default_factory=list)
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = "IfAvailable"


@dataclass(frozen=True)
class User:
    """Who one is."""

    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    token_file: str = ""
    as_: str = ""
    as_uid: str = ""
    as_groups: list[str] = field(default_factory=list)
    as_user_extra: dict[str, list[str]] = field(default_factory=dict)
    exec: Exec | None = None


@dataclass(frozen=True)
class Context:
    """A cluster, a user and a namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


def fields_of(kind: type) -> dict[str, str]:
    """The fields of `Cluster`, `User`, `Exec` or `Context`: name in a kubeconfig -> attribute."""
    return {_NAMES.get(each.name) or each.name.replace("_", "-"): each.name for each in fields(kind)}


def _checked(hint: Any, value: Any, path: str) -> Any:
    """`value` as an object of the type `hint`; null counts as not set, as in Go."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is UnionType:
        return _checked(arguments[0], value, path)
    if hint is Any:
        return value
    made = dict if is_dataclass(origin) else origin
    if not isinstance(value, made):
        raise ConfigurationError(f"{path or 'it'} is not {_WORDS[made]}")
    if origin is list:
        return [_checked(arguments[0], each, f"{path}.{number}") for number, each in enumerate(value)]
    if origin is dict:
        return {str(name): _checked(arguments[1], each, path) for name, each in value.items()}
    if made is origin:
        return value
    hints = get_type_hints(origin)
    present = {name: attribute for name, attribute in fields_of(origin).items() if value.get(name) is not None}
    below = f"{path}." if path else ""
    return origin(**{key: _checked(hints[key], value[name], f"{below}{name}") for name, key in present.items()})


@dataclass(frozen=True)
class KubeConfig:
    """The merged content of kubeconfig files: of two entries with the same name the first applies.

    Attributes:
        current_context: Name of the current context; empty if no file sets one.
        contexts: Contexts by name.
        clusters: Clusters by name; paths are absolute if the kubeconfig is a file.
        users: Users by name; paths as in `clusters`.
    """

    current_context: str = ""
    contexts: Mapping[str, Any] = field(default_factory=dict)
    clusters: Mapping[str, Any] = field(default_factory=dict)
    users: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_text(cls, text: str) -> KubeConfig:
        """Read YAML or JSON.

        Raises:
            ConfigurationError: The text is neither, or not a mapping.
        """
        return _parsed(text, "the text given as kubeconfig", None)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> KubeConfig:
        """Read and merge files; missing ones are skipped, as by kubectl.

        Raises:
            ConfigurationError: No file exists, or one cannot be read.
        """
        merged = None
        for path in paths:
            try:
                with path.open("rb") as file:
                    text = file.read(_LIMITS.size + 1).decode("utf-8-sig")
            except FileNotFoundError:
                continue
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"the kubeconfig {path} cannot be read: {error}") from error
            read = _parsed(text, str(path), path.absolute().parent)
            merged = read if merged is None else merged._merged_with(read)
        if merged is None:
            raise ConfigurationError(f"there is no kubeconfig at {', '.join(map(str, paths))}")
        return merged

    def _merged_with(self, later: KubeConfig) -> KubeConfig:
        return KubeConfig(
            self.current_context or later.current_context,
            {**later.contexts, **self.contexts},
            {**later.clusters, **self.clusters},
            {**later.users, **self.users},
        )

    def context(self, name: str | None) -> Context:
        """The context of that name; None is the current one.

        Raises:
            ConfigurationError: There is no such context.
        """
        name = name or self.current_context
        if not name:
            raise ConfigurationError("it sets no current-context")
        return _entry(Context, self.contexts, name, "context")

    def cluster(self, context: Context) -> Cluster:
        """The cluster of a context.

        Raises:
            ConfigurationError: There is no such cluster, or it has no address.
        """
        found = _entry(Cluster, self.clusters, context.cluster, "cluster")
        if not is_url(found.server, "https", "http"):
            raise ConfigurationError(
                f"cluster {context.cluster!r} has no server, the URL of an API server such as https://host:6443"
            )
        check_no_login(found.server, f"the server of cluster {context.cluster!r}")
        if found.insecure_skip_tls_verify and (found.certificate_authority or found.certificate_authority_data):
            raise ConfigurationError(
                f"cluster {context.cluster!r} has a certificate-authority and insecure-skip-tls-verify: remove one"
            )
        return found

    def user(self, context: Context) -> User:
        """The user of a context.

        Raises:
            ConfigurationError: There is no such user, or it has a setting that is not supported.
        """
        found = _entry(User, self.users, context.user, "user")
        for name, why in REFUSED.items():
            if self.users[context.user].get(name):
                raise ConfigurationError(f"user {context.user!r} has {name}, but {why}")
        if not found.as_ and (found.as_uid or found.as_groups or found.as_user_extra):
            raise ConfigurationError(f"user {context.user!r} has as-uid, as-groups or as-user-extra without as: set as")
        return found


@lru_cache(maxsize=16)  # a command reads the same files six times
def _parsed(text: str, name: str, directory: Path | None) -> KubeConfig:
    content = _decoded(text, name)
    entries = {kind: _by_name(content.get(kind), kind[:-1], name) for kind in ("contexts", "clusters", "users")}
    if directory is not None:
        _make_absolute(entries, directory)
    return KubeConfig(str(content.get("current-context") or ""), **entries)


def _decoded(text: str, name: str) -> dict[str, Any]:
    """The mapping in a kubeconfig, empty for an empty file."""
    try:
        content = yaml_of(text, name, _LIMITS)
    except Unreadable as error:  # whose words about a mistake may quote the file, including tokens
        why = error.why if error.limit or error.why.startswith("has the key") else "is neither YAML nor JSON"
        raise ConfigurationError(f"{name} {why}{error.where}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigurationError(f"{name} is neither YAML nor JSON of a kubeconfig")
    return content or {}


def _make_absolute(entries: dict[str, dict[str, Any]], directory: Path) -> None:
    """Paths are relative to the directory of their kubeconfig; a command without a slash is looked up in PATH."""
    for kind, names in _PATHS.items():
        for entry in entries[kind].values():
            plugin = entry.get("exec")
            if isinstance(plugin, dict) and os.sep in str(plugin.get("command")):
                entry["exec"] = {**plugin, "command": str(directory / str(plugin["command"]))}
            entry.update({name: str(directory / str(entry[name])) for name in names if entry.get(name)})


def _by_name(entries: object, kind: str, file: str) -> dict[str, dict[str, Any]]:
    """The entries of a list such as ``users``: name -> value of ``user``."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get(kind) or {}, dict):
            name = str(entry.get("name"))
            if name in found:
                raise ConfigurationError(f"{file} has two {kind}s named {name!r}: remove one")
            found[name] = entry.get(kind) or {}
    return found


def _entry(kind: type[_T], entries: Mapping[str, Any], name: str, what: str) -> _T:
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        raise ConfigurationError(f"there is no {what} {name!r} (there are: {known})")
    try:
        found: _T = _checked(kind, entries[name], "")
    except ConfigurationError as error:
        raise ConfigurationError(f"{what} {name!r}, field {error}") from None
    return found


def check_no_login(url: str, name: str) -> None:
    """Refuse a URL with a user or password: httpx would send them instead of the token.

    Raises:
        ConfigurationError: With `name`, and without the URL.
    """
    if "@" in urlsplit(url).netloc:
        raise ConfigurationError(f"{name} has a user or password in its URL, but {_BASIC}")


def paths(given: str | None) -> list[Path]:
    """The files of `given`, of ``KUBECONFIG`` (several, separated as in ``PATH``), or ``~/.kube/config``."""
    listed = [given] if given else [path for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    return [Path(path).expanduser() for path in dict.fromkeys(listed or ["~/.kube/config"])]
