"""The steps around training: download a dataset or model, and export the trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from trainjob.data import file_manifest, signing, transfer
from trainjob.data.card import card
from trainjob.data.export_evaluation import GATE_DECIDES, Evaluation
from trainjob.data.file_manifest import ContentManifest
from trainjob.data.locations import ModelRef, join, parse, parse_store, parse_target
from trainjob.data.meter import Notify
from trainjob.data.models import ModelFacts, check_model
from trainjob.data.options import check_if_missing
from trainjob.data.provenance import Record, public, statement
from trainjob.data.selection import as_patterns, select, wanted
from trainjob.data.stores.base import read_small
from trainjob.data.stores.opening import opened
from trainjob.data.transfer import Check
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    ModelNotFound,
    RegistryConflict,
    SourceNotFound,
    UnsafePath,
)
from trainjob.progress.reading import history_of
from trainjob.registry import Mode, Registry, connect
from trainjob.registry.base import (
    ModelVersion,
    check_export_id,
    check_metrics,
    check_name,
    check_promotion,
    check_rule,
)
from trainjob.registry.provenance import tags as provenance_tags
from trainjob.settings import Settings

_TAG = "trainjob.tag"
"""Tag of versions in a container registry, which are registered by digest: the location with the image's tag."""


@dataclass(frozen=True)
class Initialized:
    """Result of `initialize`.

    Attributes:
        uri: Location of the files; empty for a fresh start.
        digest: ``sha256:<root digest>``; empty for a fresh start.
        bytes: Size of all files.
        files: Their number.
        source: The source, as the author wrote it.
        version: Version of the registered model; None for datasets and plain locations.
        fresh: The model did not exist, and the author chose to start without one.
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
    """Result of `export`.

    Attributes:
        uri: Location of the model.
        digest: ``sha256:<root digest>`` of its files.
        name: Model in the registry.
        version: Version in the registry.
        promoted: Whether the alias points to the version.
        reason: Why it was promoted or not.
        bytes: Size of all files.
        files: Their number.
        parameters: Number of parameters; 0 if the files do not contain it.
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
    verify_key: str | None = None,
    progress: Notify | None = None,
) -> Initialized:
    """Download a dataset or a model to ``target``, from which training reads it.

    Args:
        source: A location, or a registered model (``models:/name@alias``, ``models:/name/version``), whose files are
            verified against the digest in the registry.
        target: Location of a directory, which is created.
        digest: Required digest: SHA-256 in hexadecimal of a single file, or ``sha256:<root digest>``.
        include: Shell patterns; only matching paths are copied.
        exclude: Shell patterns of paths that are not copied.
        registry: The registry for ``models:/``; see `trainjob.registry.connect`.
        if_missing: ``fresh``: start without a model if it is not registered yet; ``fail``: raise ModelNotFound.
        verify_key: Path of a public key. All files must be signed with its private key (``model.sig`` of OpenSSF Model
            Signing at the source). Default: ``TRAINJOB_VERIFY_KEY``.
        progress: Called with lines for people.

    Raises:
        ModelNotFound: The model does not exist, and ``if_missing`` is ``fail``.
        RegistryUnavailable: The registry cannot be reached. This never counts as a missing model.
        TrainJobError: Any error of `trainjob.data.transfer.copy`.
    """
    location = parse(source)
    include, exclude = as_patterns(include), as_patterns(exclude)
    into = parse_target(target).uri
    expected = file_manifest.check_digest(digest)
    key = verify_key or Settings().verify_key
    verify = signing.verifier(key) if key else None
    check_if_missing(if_missing, location)
    if not isinstance(location, ModelRef):
        check = _signed(source, verify, include, exclude, progress)
        manifest = transfer.copy(
            source, target, include=include, exclude=exclude, digest=expected, progress=progress, check=check
        )
        return _initialized(into, manifest, source, None)
    try:
        found = _registry(registry).resolve(location.name, location.alias or location.version or "latest")
    except ModelNotFound as error:
        if if_missing != "fresh":
            raise
        if progress is not None:
            progress(f"{error}; starting fresh, since if_missing is 'fresh'")
        return Initialized("", "", 0, 0, source, None, fresh=True)
    if include or exclude:
        # A part of the model has another digest than the registered one; the source's manifest verifies each file.
        held = transfer.read_manifest(found.uri)
        if found.digest and (held is None or not file_manifest.matches(held, found.digest)):
            raise ChecksumMismatch(
                f"{found.uri} changed since it was registered as version {found.version} of {found.name!r}"
            )
    elif found.digest:
        if expected and expected.removeprefix("sha256:") != found.digest.removeprefix("sha256:"):
            raise ChecksumMismatch(
                f"version {found.version} of {found.name!r} has digest {found.digest}, not {expected}"
            )
        expected = found.digest
    check = _signed(found.uri, verify, include, exclude, progress)
    manifest = transfer.copy(
        found.uri, target, include=include, exclude=exclude, digest=expected, progress=progress, check=check
    )
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
    sign: str | None = None,
    history: Mapping[str, Any] | None = None,
    evaluation: str | None = None,
    progress: Notify | None = None,
) -> Exported:
    """Store a trained model, register it as a version, and move ``alias`` to it if it is better.

    Idempotent: a repeated call returns the same version, and completes it if the first call was killed.

    Args:
        source: The model: a file or a directory.
        target: Directory of all models. The model is stored at ``<target>/<name>/<hash of export_id>``; in a container
            registry (``oci``) at ``<target>/<name>:<hash of export_id>``, and it is registered by its digest.
        name: Model in the registry.
        export_id: ID of the export: the same for every retry, different for any other export.
        registry: The registry; see `trainjob.registry.connect`.
        metrics: Measured metrics of the model.
        alias: Alias for the version, such as ``champion``; see `trainjob.registry.base.Registry.promote`. An export
            moves it once: a later call with the same ``export_id`` leaves it where others have moved it.
        metric: Metric that must be better than that of the alias's current version; None: always move the alias.
        mode: Whether a higher (``max``) or lower (``min``) metric is better.
        min_improvement: Required improvement, in units of the metric.
        provenance: Written beside the model, to ``provenance.json`` and, unless the model has that file,
            ``MODEL_CARD.md``: ``datasets``, ``base_model`` and ``images`` (each ``{"uri", "digest"}`` or a URI),
            ``code`` (``{"uri", "revision"}``), ``trainjob``, ``run``, and any other fields. JSON values only; secrets
            are left out. With MLflow as the registry, the TrainJob in it (``trainjob``: ``uid``, ``name``) gets a
            separate run, whose parameters are ``parameters``.
        allow_pickle: Accept all formats, including pickles and others that can run code when they are loaded.
        sign: Path of a private key to sign the model with (``model.sig`` of OpenSSF Model Signing, beside it).
            Default: ``TRAINJOB_SIGN_KEY``.
        history: Metrics over time for that run, in the form of `trainjob._jobs.results.TrainJobResult`.
        evaluation: Directory or file of the report of `trainjob.data.evaluate.evaluate` about this model. Its metrics
            replace ``metrics``, and its gate decides alone about the alias: ``metric`` and ``min_improvement`` must be
            left out. The alias also stays if another version has become the champion since the evaluation.
        progress: Called with lines for people.

    Raises:
        RegistryConflict: Another model was exported under this ``export_id``.
        ConfigurationError: The evaluation is of another model.
        CorruptData: The files are not a valid model, changed during the export, or could run code when they are loaded.
        TrainJobError: Any error of `trainjob.data.transfer.copy` and `trainjob.registry.base.Registry`.
    """
    check_name(name)
    evaluated = Evaluation.read(evaluation) if evaluation else None
    if evaluated is not None and (metric is not None or min_improvement):
        raise ConfigurationError(GATE_DECIDES)
    measured = check_metrics(evaluated.metrics if evaluated is not None else metrics or {})
    check_rule(metric, mode, min_improvement)
    check_promotion(measured, alias, metric)
    curves = history_of(history or {})
    if history and not curves:
        raise ConfigurationError('history must be {"metric": [[step, time, value], ...]}, with at most 256 points')
    check_export_id(export_id)
    key = sign or Settings().sign_key
    signer = signing.signer(key) if key else None
    records = _registry(registry)
    uri = _location(target, name, export_id)
    facts, checked = _check_files(
        source, allow_pickle, {file_manifest.PROVENANCE, *([file_manifest.SIGNATURE] if signer else [])}
    )
    origin = public(provenance or {})
    tags = {"trainjob.parameters": str(facts.parameters), **provenance_tags(origin)}
    tags |= evaluated.tags if evaluated is not None else {}
    registered = records.check(name, uri, export_id=export_id, metrics=measured, tags=tags)

    def sidecars(manifest: ContentManifest) -> Mapping[str, bytes]:
        if manifest.origin != checked:
            raise CorruptData(f"{source} changed while it was exported; export it again when nothing writes to it")
        known = Record(name, export_id, uri, manifest, facts, measured, origin)
        files = {file_manifest.PROVENANCE: statement(known), file_manifest.CARD: card(known)}
        if evaluated is not None:
            evaluated.check_model(source, manifest.digest)
            files |= evaluated.sidecars(uri, manifest)
        # The signature is last, since it covers the others. An author's card is one of the model's files.
        return files | ({file_manifest.SIGNATURE: signer(manifest, name, files)} if signer else {})

    _refuse_other_content(source, uri, export_id, registered, signed=signer is not None, evaluated=evaluated)
    manifest = transfer.copy(source, uri, progress=progress, sidecars=sidecars)
    if evaluated is not None:  # also if the model was there already
        evaluated.check_model(source, manifest.digest)
    tags["trainjob.bytes"] = str(manifest.size)
    written, uri = uri, _pinned(uri)
    if uri != written:
        tags[_TAG] = written
    version = records.register(
        name, uri, export_id=export_id, digest=manifest.digest, metrics=measured, tags=tags, history=curves
    )
    promoted, reason = False, "no alias was requested"
    if alias is not None:
        promoted, reason = _promote(
            records, version, alias, evaluated, metric=metric, mode=mode, min_improvement=min_improvement
        )
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


def _promote(
    records: Registry,
    version: ModelVersion,
    alias: str,
    evaluated: Evaluation | None,
    **rule: Any,
) -> tuple[bool, str]:
    """Move the alias to the version if the rule or the gate of the evaluation allows it; returns whether, and why."""
    if evaluated is not None and (refused := evaluated.refusal(records, version, alias)):
        return False, refused
    verdict = records.promote(version.name, version.version, alias=alias, once=True, **rule)
    if verdict.promoted and evaluated is not None and evaluated.decision is not None:
        return evaluated.moved(records, version, alias, verdict.previous, evaluated.decision)
    return verdict.promoted, verdict.reason


def _registry(registry: str | Registry | None) -> Registry:
    return connect(registry) if registry is None or isinstance(registry, str) else registry


def _location(target: str, name: str, export_id: str) -> str:
    """The location of an export: a directory, or a tag of the model's repository."""
    key = hashlib.sha256(export_id.encode()).hexdigest()[:16]
    if parse_target(target).scheme != "oci":
        return join(target, name, key)
    return parse_store(f"{join(target, name.lower())}:{key}").uri


def _pinned(uri: str) -> str:
    """The location by digest in a container registry, where a tag can be moved to another model."""
    location = parse_store(uri)
    # Not for Hub repositories: another export changes the commit, so that a retry would have another location.
    if location.scheme != "oci":
        return uri
    with opened(location) as store:
        return store.resolved().uri


def _initialized(uri: str, manifest: ContentManifest, source: str, version: str | None) -> Initialized:
    return Initialized(uri, manifest.digest, manifest.size, len(manifest.files), source, version)


def _signed(
    source: str,
    verify: signing.Verify | None,
    include: Sequence[str],
    exclude: Sequence[str],
    progress: Notify | None,
) -> Check | None:
    """Make the check of the signature of `source`, which reports files that it does not cover."""
    if verify is None:
        return None
    beside = _beside(source, file_manifest.SIDECARS)
    if file_manifest.SIGNATURE not in beside:
        raise ChecksumMismatch(f"{source} is not signed: {file_manifest.SIGNATURE} does not exist")
    reported: set[str] = set()

    def check(manifest: ContentManifest) -> None:
        uncovered = verify(manifest, beside, source, lambda path: wanted(path, include, exclude))
        if progress is not None and reported.isdisjoint(uncovered) and uncovered:
            reported.update(uncovered)
            progress(
                f"the signature of {source} covers its {len(manifest.files)} files; not covered: {', '.join(uncovered)}"
            )

    return check


def _beside(uri: str, paths: Iterable[str]) -> dict[str, list[bytes]]:
    """The contents of those of `paths` that exist, each with all versions that the store has."""
    found = {}
    with opened(parse_store(uri)) as store:
        for path in paths:
            versions = list(store.sidecar_versions(path))
            with suppress(SourceNotFound, UnsafePath):  # it does not exist, or the source is a file
                found[path] = versions or [read_small(store, path)]
    return found


def _check_files(source: str, allow_pickle: bool, written: set[str]) -> tuple[ModelFacts, str]:
    """Facts from the model's files, and the fingerprint of the checked files (`ContentManifest.origin`)."""
    with opened(parse_store(source)) as store:
        selection = select(store, (), ())
        for path in sorted(written & {entry.path for entry in selection.entries}):
            raise ConfigurationError(f"the export writes {path}; rename {path} in {source}")
        facts = check_model(store, selection.entries, allow_pickle=allow_pickle, single=selection.single)
        return facts, selection.origin


def _refuse_other_content(
    source: str,
    uri: str,
    export_id: str,
    registered: ModelVersion | None,
    *,
    signed: bool,
    evaluated: Evaluation | None,
) -> None:
    """Refuse to overwrite a finished export, since its version may be in use, and another model than the evaluated one.

    The latter only where a second read is cheap; after the upload, it is refused anyway.
    """
    before = registered.tags.get(_TAG, registered.uri) if registered else ""
    if registered and before not in ("", uri):
        raise RegistryConflict(
            f"{export_id!r} was exported to {before} as version {registered.version} of {registered.name!r}, not to"
            f" {uri}; use a new export_id to export it again"
        )
    held = transfer.read_manifest(uri)
    digests = {held.digest if held else "", registered.digest if registered else ""} - {""}
    if digests and (others := digests - {(found := transfer.scan(source)).digest}):
        raise RegistryConflict(
            f"{export_id!r} was used to export another model to {uri}: {source} has digest {found.digest}, not"
            f" {', '.join(sorted(others))}; use a new export_id for a new model"
        )
    if held is None:
        if evaluated is not None and parse_store(source).on_disk:
            evaluated.check_model(source, transfer.scan(source).digest)
        return
    if signed and not _beside(uri, [file_manifest.SIGNATURE]):
        raise RegistryConflict(
            f"{export_id!r} was used to export {uri} without a signature; use a new export_id to sign it"
        )
    if evaluated is not None and evaluated.as_json() not in _beside(uri, [file_manifest.EVALUATION]).get(
        file_manifest.EVALUATION, ()
    ):
        raise RegistryConflict(
            f"{export_id!r} was used to export {uri} without this evaluation; use a new export_id to export it with the"
            f" evaluation in {evaluated.uri}"
        )
