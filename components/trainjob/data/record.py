"""Where a model came from, written beside it: an in-toto statement with a SLSA provenance predicate.

https://slsa.dev/spec/v1.0/provenance. It is the same for every try of an export, so it holds no time of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trainjob import __version__
from trainjob.data.content import ContentManifest
from trainjob.data.locations import ACCOUNT, ACCOUNTS, BUCKETS
from trainjob.data.models import ModelFacts
from trainjob.errors import ConfigurationError
from trainjob.masking import holds_secret, names_a_secret

KINDS = {"datasets": "dataset", "base_model": "base model", "images": "image", "code": "code"}
"""Fields of a provenance that name what the model was made of -> what one of them is called."""

_HIDDEN = "(left out: a secret)"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PINNED = re.compile(r"(?P<uri>.*)@(?P<digest>sha256:[0-9a-f]{64})")
# Their keys and names may have all characters in them that are something else in other URLs.
_WHOLE = ({*BUCKETS} - ACCOUNTS) | {"file", "hf", "model-registry", "pvc"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")


@dataclass(frozen=True)
class Record:
    """What is known of an exported model.

    Attributes:
        name: Model in the registry.
        export_id: Of the export; its version is not known before it is whole.
        uri: Where it is stored.
        manifest: Its files.
        facts: What they say.
        metrics: What it was measured to reach.
        provenance: What the author says, as `public` gives it back.
    """

    name: str
    export_id: str
    uri: str
    manifest: ContentManifest
    facts: ModelFacts
    metrics: Mapping[str, float]
    provenance: Mapping[str, Any]

    def origins(self, field: str) -> list[dict[str, Any]]:
        """The datasets, base models, images or code that are given, as in-toto ResourceDescriptors."""
        given = self.provenance.get(field)
        values = given if isinstance(given, list) else [given]
        return [_resource(KINDS[field], value) for value in values if value]

    @property
    def run(self) -> str:
        """Which run of an orchestrator made it, as text: ``kfp/<run id>``, the key of an Airflow task."""
        run = self.provenance.get("run")
        if isinstance(run, Mapping):
            return "/".join(f"{kind}/{_text(value)}" for kind, value in run.items())
        return _text(run) if run else ""

    @property
    def rest(self) -> dict[str, Any]:
        """What else the author says."""
        return {key: value for key, value in self.provenance.items() if key not in (*KINDS, "trainjob", "run")}


def public(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A provenance as it may be read by everyone who can read the model.

    Tokens, private keys and passwords are left out, URLs lose their user and query (which is where a signed one has
    its signature), and NaN and infinity, which JSON does not know, become text.

    Raises:
        ConfigurationError: It is not made of JSON values.
    """
    try:
        value: dict[str, Any] = json.loads(json.dumps(_public(provenance)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"provenance has to be made of JSON values: {error}") from None
    return value


def statement(record: Record) -> bytes:
    """The statement as JSON."""
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
                "resolvedDependencies": [origin for field in KINDS for origin in record.origins(field)],
            },
            "runDetails": {
                "builder": {"id": "trainjob", "version": {"trainjob": __version__}},
                "metadata": {"invocationId": record.run} if record.run else {},
            },
        },
    }
    return json.dumps(value, sort_keys=True, indent=2).encode() + b"\n"


def _public(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _public(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_public(each, name) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        return value
    text = _URL.sub(lambda match: _plain_url(match[0]), value)
    return _HIDDEN if names_a_secret(name, text) or holds_secret(text) else text


def _plain_url(url: str) -> str:
    """Without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    account = scheme.lower() in ACCOUNTS and ACCOUNT.fullmatch(rest.partition("/")[0])
    if scheme.lower() in _WHOLE or account:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return _HIDDEN
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else f"{scheme}://{rest}"


def _resource(kind: str, origin: Any) -> dict[str, Any]:
    """What `origin`, ``{"uri": …, "digest": "sha256:…"}`` or a URI, names, as an in-toto ResourceDescriptor."""
    if not isinstance(origin, Mapping):
        pinned = _PINNED.fullmatch(_text(origin))
        origin = pinned.groupdict() if pinned else {"uri": _text(origin)}
        if kind == "code" and _COMMIT.fullmatch(origin["uri"]):
            origin = {"revision": origin["uri"]}
    known = dict(_fields(kind, origin))
    more = {key: value for key, value in origin.items() if key not in ("name", "uri", "digest", "revision")}
    return {"name": kind, **known, **({"annotations": more} if more else {})}


def _fields(kind: str, origin: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    uri, digest, revision = (origin.get(name) for name in ("uri", "digest", "revision"))
    if origin.get("name"):
        yield "name", f"{kind} {_text(origin['name'])}"
    if isinstance(revision, str) and _COMMIT.fullmatch(revision) and not digest:
        digest = {"gitCommit": revision}
    elif revision:
        uri = f"{_text(uri or '')}@{_text(revision)}"
    if uri:
        yield "uri", _text(uri)
    if isinstance(digest, Mapping):
        yield "digest", dict(digest)
    elif digest:
        algorithm, _, hexadecimal = _text(digest).rpartition(":")
        yield "digest", {algorithm or "sha256": hexadecimal}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
