"""The steps around training: bring a dataset or model, and export what was trained."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainjob import __version__
from trainjob.data import content, transfer
from trainjob.data.content import ContentManifest
from trainjob.data.locations import ModelRef, join, parse, parse_store
from trainjob.data.models import ModelFacts, check_model
from trainjob.data.selection import select
from trainjob.data.stores import open_store
from trainjob.data.transfer import Notify
from trainjob.errors import ChecksumMismatch, ConfigurationError, ModelNotFound, RegistryConflict
from trainjob.registry import Mode, Registry, connect
from trainjob.registry.base import check_alias, check_metrics, check_name


@dataclass(frozen=True)
class Initialized:
    """What `initialize` brought.

    Attributes:
        uri: Where it is now; empty for a fresh start.
        digest: ``sha256:<root digest>``; empty for a fresh start.
        bytes: Size of all files.
        files: Their number.
        source: The location it came from, as the author wrote it.
        version: Version of the registered model it is; None for datasets and plain locations.
        fresh: There was no such model, and the author chose to start without one.
    """

    uri: str
    digest: str
    bytes: int
    files: int
    source: str
    version: str | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Exported:
    """What `export` made.

    Attributes:
        uri: Where the model is.
        digest: ``sha256:<root digest>`` of its files.
        name: Model in the registry.
        version: Version in the registry.
        promoted: The alias points to it.
        reason: Why, or why not.
        bytes: Size of all files.
        files: Their number.
        parameters: Number of parameters, where its files tell; else 0.
    """

    uri: str
    digest: str
    name: str
    version: str
    promoted: bool
    reason: str
    bytes: int
    files: int
    parameters: int = field(default=0)


def initialize(
    source: str,
    target: str,
    *,
    digest: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    registry: str | Registry | None = None,
    if_missing: Literal["fail", "fresh"] = "fail",
    progress: Notify | None = None,
) -> Initialized:
    """Bring a dataset or a model to ``target``, where training finds it.

    Args:
        source: A location, or a registered model (``models:/name@alias``, ``models:/name/version``), whose files are
            then checked against the digest in the registry.
        target: Directory; see `trainjob.data.transfer.copy`.
        digest: What it has to be; see there.
        include: See there.
        exclude: See there.
        registry: Where to look for ``models:/``; see `trainjob.registry.connect`.
        if_missing: ``fresh``: that the model is not registered yet is no error, training starts without one.
        progress: Takes lines for people.

    Raises:
        ModelNotFound: No such model, and ``if_missing`` is ``fail``.
        RegistryUnavailable: The registry cannot be reached; never taken for a missing model.
        TrainJobError: What `trainjob.data.transfer.copy` raises.
    """
    location = parse(source)
    into = parse_store(target).uri
    wanted = transfer.check_digest(digest)
    if not isinstance(location, ModelRef):
        if if_missing != "fail":
            raise ConfigurationError(f"if_missing={if_missing!r} is for registered models (models:/name@alias) only")
        manifest = transfer.copy(source, target, include=include, exclude=exclude, digest=wanted, progress=progress)
        return _initialized(into, manifest, source, None)
    try:
        found = _registry(registry).resolve(location.name, location.alias or location.version or "latest")
    except ModelNotFound as error:
        if if_missing != "fresh":
            raise
        if progress is not None:
            progress(f"{error}; starting fresh, as asked for")
        return Initialized("", "", 0, 0, source, None, fresh=True)
    if include or exclude:
        # Part of a model has another digest than the whole; the source's own manifest still vouches for each file.
        held = transfer.read_manifest(found.uri)
        if found.digest and (held is None or not transfer.matches(held, found.digest)):
            raise ChecksumMismatch(f"{found.uri} is not what version {found.version} of {found.name!r} was: it changed")
    elif found.digest:
        if wanted and wanted.removeprefix("sha256:") != found.digest.removeprefix("sha256:"):
            raise ChecksumMismatch(f"version {found.version} of {found.name!r} has digest {found.digest}, not {wanted}")
        wanted = found.digest
    manifest = transfer.copy(found.uri, target, include=include, exclude=exclude, digest=wanted, progress=progress)
    return _initialized(into, manifest, source, found.version)


def export(
    source: str,
    target: str,
    *,
    name: str,
    export_id: str,
    registry: str | Registry | None = None,
    metrics: Mapping[str, float] | None = None,
    alias: str | None = None,
    metric: str | None = None,
    mode: Mode = "max",
    min_improvement: float = 0.0,
    provenance: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    progress: Notify | None = None,
) -> Exported:
    """Store a trained model, register it as a version, and make it the holder of ``alias`` if it is better.

    Done twice it gives one version; killed at any instant, the same call again finishes that version.

    Args:
        source: The model: a file or a directory.
        target: Directory of all models; this one goes to ``<target>/<name>/<hash of export_id>``.
        name: Model in the registry.
        export_id: The same for every try of the same export, and for no other.
        registry: See `trainjob.registry.connect`.
        metrics: What the model was measured to reach.
        alias: Name such as ``champion`` to give to the version; see `trainjob.registry.base.Registry.promote`.
        metric: Metric that has to be better than that of the version which holds ``alias``; None: move it always.
        mode: Whether more of it is better, or less.
        min_improvement: By how much, in units of the metric.
        provenance: Written into ``provenance.json`` beside the model: ``datasets`` and ``base_model`` (URIs and
            digests), ``trainjob``, ``run``, and whatever else tells where it came from. JSON values only.
        allow_pickle: Take weights in formats that can run code when they are loaded.
        progress: Takes lines for people.

    Raises:
        RegistryConflict: Another model was exported under this ``export_id``.
        CorruptData: The files are no sound model.
        TrainJobError: What `trainjob.data.transfer.copy` and `trainjob.registry.base.Registry` raise.
    """
    check_name(name)
    measured = check_metrics(metrics or {})
    _check_promotion(measured, alias, metric, mode)
    if not export_id:
        raise ConfigurationError("export_id is empty; it has to be the same when the same export is tried again")
    records = _registry(registry)
    uri = join(target, name, hashlib.sha256(export_id.encode()).hexdigest()[:16])
    facts = _check_files(source, allow_pickle)
    record = {"name": name, "export_id": export_id, "metrics": measured, "parameters": facts.parameters}

    def sidecars(manifest: ContentManifest) -> Mapping[str, bytes]:
        return {content.PROVENANCE: _statement(uri, manifest, record, provenance or {})}

    _refuse_other_content(source, uri, export_id)
    manifest = transfer.copy(source, uri, progress=progress, sidecars=sidecars)
    tags = {"trainjob.bytes": str(manifest.size), "trainjob.parameters": str(facts.parameters)}
    tags |= {f"trainjob.provenance.{key}": _text(value) for key, value in (provenance or {}).items()}
    version = records.register(name, uri, export_id=export_id, digest=manifest.digest, metrics=measured, tags=tags)
    promoted, reason = False, "no alias was asked for"
    if alias is not None:
        verdict = records.promote(
            name, version.version, alias=alias, metric=metric, mode=mode, min_improvement=min_improvement
        )
        promoted, reason = verdict.promoted, verdict.reason
    if progress is not None:
        progress(f"version {version.version} of {name!r}: {reason}")
    return Exported(
        uri,
        manifest.digest,
        name,
        version.version,
        promoted,
        reason,
        manifest.size,
        len(manifest.files),
        facts.parameters,
    )


def _registry(registry: str | Registry | None) -> Registry:
    return connect(registry) if registry is None or isinstance(registry, str) else registry


def _initialized(uri: str, manifest: ContentManifest, source: str, version: str | None) -> Initialized:
    return Initialized(uri, manifest.digest, manifest.size, len(manifest.files), source, version)


def _check_promotion(metrics: Mapping[str, float], alias: str | None, metric: str | None, mode: str) -> None:
    """Find before the upload what the registry would find after it."""
    if alias is None and metric is not None:
        raise ConfigurationError(f"metric={metric!r} decides over an alias, but no alias is given")
    if alias is not None:
        check_alias(alias)
    if metric is not None and metric not in metrics:
        have = ", ".join(sorted(metrics)) or "none"
        raise ConfigurationError(f"metric {metric!r} is to decide over {alias!r}, but the metrics given are: {have}")
    if mode not in ("max", "min"):
        raise ConfigurationError(f"mode is 'max' or 'min', not {mode!r}")


def _check_files(source: str, allow_pickle: bool) -> ModelFacts:
    store = open_store(parse_store(source))
    selection = select(store, (), ())
    if selection.promised is None and any(entry.path == content.PROVENANCE for entry in selection.entries):
        raise ConfigurationError(f"{content.PROVENANCE} is written by the export; rename the one in {source}")
    return check_model(store, selection.entries, allow_pickle=allow_pickle, single=selection.single)


def _refuse_other_content(source: str, uri: str, export_id: str) -> None:
    """A finished export is never overwritten: its version may be in use."""
    held = transfer.read_manifest(uri)
    if held is None:
        return
    found = transfer.scan(source)
    if found.digest != held.digest:
        raise RegistryConflict(
            f"{uri} holds the model that was exported under {export_id!r}, and {source} is another one"
            f" ({found.digest}, not {held.digest}); use a new export_id for a new model"
        )


def _statement(uri: str, manifest: ContentManifest, record: Mapping[str, Any], given: Mapping[str, Any]) -> bytes:
    """An in-toto statement with a SLSA provenance predicate, https://slsa.dev/spec/v1.0/provenance."""
    origins = [*(given.get("datasets") or []), *filter(None, [given.get("base_model")])]
    rest = {key: value for key, value in given.items() if key not in ("datasets", "base_model", "trainjob", "run")}
    value = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": uri, "digest": {"sha256": manifest.digest.removeprefix("sha256:")}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://github.com/kubeflow/trainer#TrainJob",
                "externalParameters": {**record, **rest},
                "resolvedDependencies": [_resource(origin) for origin in origins],
            },
            "runDetails": {
                "builder": {"id": "trainjob", "version": {"trainjob": __version__}},
                "metadata": {"invocationId": given.get("run"), "trainjob": given.get("trainjob")},
            },
        },
    }
    try:
        return json.dumps(_finite(value), sort_keys=True, indent=2).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"provenance has to be made of JSON values: {error}") from None


def _resource(origin: Any) -> Any:
    """An in-toto ResourceDescriptor, whose digest is a mapping by algorithm, of ``{"uri", "digest": "sha256:…"}``."""
    if not isinstance(origin, Mapping) or not isinstance(origin.get("digest"), str):
        return origin
    algorithm, _, value = origin["digest"].rpartition(":")
    return {**origin, "digest": {algorithm or "sha256": value}}


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity; they become text."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
