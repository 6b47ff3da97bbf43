"""Provenance of a model, written beside it: an in-toto statement with a SLSA provenance predicate.

https://slsa.dev/spec/v1.0/provenance. Retries of an export write the same statement: its times are those of the job
that trained the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from trainjob._support.kube_objects import parse_time
from trainjob._support.masking import holds_secret, names_a_secret
from trainjob.data.file_manifest import ContentManifest
from trainjob.data.locations import ACCOUNT, ACCOUNTS, BUCKETS
from trainjob.data.models import ModelFacts
from trainjob.errors import ConfigurationError
from trainjob.version import __version__

KINDS = {"datasets": "dataset", "base_model": "base model", "images": "image", "code": "code"}
"""Fields of a provenance with the model's inputs -> name of one such input."""

BUILDER = "https://trainjob.dev/builders/export@v1"
"""``builder.id`` of every statement, for policies. Its version changes with the meaning of the statement's fields; the
version of trainjob is in ``builder.version``."""

_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")  # characters that PostgreSQL and UTF-8 cannot store
_HIDDEN = "(left out: a secret)"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PINNED = re.compile(r"(?P<uri>.*)@(?P<digest>sha256:[0-9a-f]{64})")
# Keys and names of these may contain all characters that are reserved in other URLs.
_NOT_SPLIT = ({*BUCKETS} - ACCOUNTS) | {"file", "hf", "model-registry", "pvc"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?://[^/?#]*)?")  # with the authority
_IN_URIS = ":/?#@!$&'()*+,;=-._~%"  # RFC 3986, "reserved" and "unreserved", and "%" of encoded characters
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HEX = re.compile(r"[0-9a-f]+")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)")  # RFC 3339
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


@dataclass(frozen=True)
class Record:
    """Provenance and facts of an exported model.

    Attributes:
        name: Model in the registry.
        export_id: ID of the export. The version is not known before the export is complete.
        uri: Location of the model.
        manifest: Its files.
        facts: Facts from its files.
        metrics: Its measured metrics.
        provenance: Provenance from the author, as returned by `public`.
    """

    name: str
    export_id: str
    uri: str
    manifest: ContentManifest
    facts: ModelFacts
    metrics: Mapping[str, float]
    provenance: Mapping[str, Any]

    def origins(self, field: str) -> list[dict[str, Any]]:
        """The given datasets, base models, images or code, as in-toto ResourceDescriptors.

        Locations are as the author wrote them, and need not be URIs.
        """
        given = self.provenance.get(field)
        values = given if isinstance(given, list) else [given]
        return [_resource(KINDS[field], value) for value in values if value]

    @property
    def run(self) -> str:
        """The orchestrator's run that made the model, as text: ``kfp/<run id>``, the key of an Airflow task."""
        run = self.provenance.get("run")
        if isinstance(run, Mapping):
            return "/".join(f"{kind}/{_text(value)}" for kind, value in run.items())
        return _text(run) if run else ""

    @property
    def rest(self) -> dict[str, Any]:
        """Further fields of the provenance."""
        return {key: value for key, value in self.provenance.items() if key not in (*KINDS, "trainjob", "run")}


def public(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance without secrets, for everyone who can read the model.

    Tokens, private keys and passwords are left out. URLs lose their user and query (a signed URL has its signature in
    the query). NaN and infinity, which JSON does not have, become text. Characters that databases cannot store (NUL,
    lone surrogates) become U+FFFD.

    Raises:
        ConfigurationError: It contains other values than those of JSON.
    """
    try:
        value: dict[str, Any] = json.loads(json.dumps(_public(provenance)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"provenance must consist of JSON values: {error}") from None
    return value


def statement(record: Record) -> bytes:
    """Make the statement, as JSON."""
    manifest, facts = record.manifest, record.facts
    inside = {"parameters": facts.parameters, "bytes": manifest.size, "formats": list(facts.formats)}
    trained = {key: record.provenance[key] for key in ("trainjob", "run") if record.provenance.get(key)}
    value = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": record.uri, "digest": {"sha256": manifest.digest.removeprefix("sha256:")}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://github.com/kubeflow/trainer#TrainJob",
                "externalParameters": {
                    "name": record.name,
                    "export_id": record.export_id,
                    "metrics": _public(record.metrics),
                    **record.rest,
                },
                "internalParameters": {**inside, **trained},
                "resolvedDependencies": [
                    _dependency(KINDS[field], origin) for field in KINDS for origin in record.origins(field)
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"trainjob": __version__}},
                "metadata": dict(_metadata(record)),
            },
        },
    }
    return json.dumps(value, sort_keys=True, indent=2).encode() + b"\n"


def _metadata(record: Record) -> Iterator[tuple[str, str]]:
    """The ID of the run, and the times of its job if given."""
    job = record.provenance.get("trainjob")
    job = job if isinstance(job, Mapping) else {}
    identity = [_text(job[name]) for name in ("namespace", "name", "uid") if job.get(name)]
    if run := record.run or "/".join(identity):
        yield "invocationId", run
    for name, given in (("startedOn", job.get("started")), ("finishedOn", job.get("finished"))):
        if isinstance(given, str) and _TIME.fullmatch(given) and parse_time(given) is not None:
            yield name, given


def _public(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {_UNSTORABLE.sub("\ufffd", str(key)): _public(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_public(each, name) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        return value
    text = _URL.sub(lambda match: _plain_url(match[0]), _UNSTORABLE.sub("\ufffd", value))
    return _HIDDEN if names_a_secret(name, text) or holds_secret(text) else text


def _plain_url(url: str) -> str:
    """The URL without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    account = scheme.lower() in ACCOUNTS and ACCOUNT.fullmatch(rest.partition("/")[0])
    if scheme.lower() in _NOT_SPLIT or account:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return _HIDDEN
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else f"{scheme}://{rest}"


def _resource(kind: str, origin: Any) -> dict[str, Any]:
    """The ResourceDescriptor of `origin`, which is ``{"uri": …, "digest": "sha256:…"}`` or a URI."""
    if not isinstance(origin, Mapping):
        text = _text(origin)
        origin = {"revision": text} if kind == "code" and _COMMIT.fullmatch(text) else {"uri": text}
    uri, digest, revision = (origin.get(name) for name in ("uri", "digest", "revision"))
    uri = _text(uri) if uri else ""
    if isinstance(revision, str) and _COMMIT.fullmatch(revision) and not digest:
        digest = {"gitCommit": revision}
    elif revision:
        uri = f"{uri}@{_text(revision)}"
    elif not digest and (pinned := _PINNED.fullmatch(uri)):
        uri, digest = pinned.groups()
    digests = digest if isinstance(digest, Mapping) else _digest_set(digest)
    known = {
        "name": f"{kind} {_text(origin['name'])}" if origin.get("name") else kind,
        "uri": uri,
        "digest": {str(algorithm): _text(value) for algorithm, value in digests.items() if algorithm and value},
    }
    more = {key: value for key, value in origin.items() if key not in ("name", "uri", "digest", "revision")}
    if digest and not digests:
        more["digest"] = digest
    return {key: value for key, value in {**known, "annotations": more}.items() if value}


def _dependency(kind: str, origin: Mapping[str, Any]) -> dict[str, Any]:
    """One of `Record.origins` as a dependency. A location that is not a URI is added to its name."""
    text = origin.get("uri", "")
    uri = _uri(kind, text)
    located = {"uri": uri} if uri else {"name": f"{origin['name']} {text}".rstrip()}
    return {name: value for name, value in origin.items() if name != "uri"} | located


def _digest_set(digest: Any) -> dict[str, str]:
    """In-toto's form of ``sha256:<hex>`` or of the digits alone; empty for anything else."""
    algorithm, _, digits = _text(digest or "").lower().rpartition(":")
    return {algorithm or "sha256": digits} if _HEX.fullmatch(digits) else {}


def _uri(kind: str, text: str) -> str:
    """`text` as a URI of RFC 3986, which in-toto requires; empty if that is impossible.

    An image without a scheme becomes ``oci://``, with the registry and path that container runtimes add.
    """
    if kind == "image" and text and "://" not in text and not text.startswith("pkg:"):
        host, slash, _ = text.partition("/")
        if not slash or not (host == "localhost" or {".", ":"} & {*host}):
            text = f"docker.io/{'' if slash else 'library/'}{text}"
        text = f"oci://{text}"
    elif text.startswith("/"):
        text = f"file://{text}"
    if not (start := _SCHEME.match(text)):
        return ""
    # Brackets surround IPv6 addresses.
    encoded = quote(start[0], safe=f"{_IN_URIS}[]") + quote(text[start.end() :], safe=_IN_URIS)
    return _PERCENT.sub("%25", encoded)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
