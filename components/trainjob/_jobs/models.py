"""Models trained by TrainJobs: their location, and the provenance that the job records.

`find` reads any job that is Complete. `export` passes the result to `trainjob.data.export`, which the export steps of
Airflow and KFP use, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainjob import data
from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.results import TrainJobResult, check_report, result_of
from trainjob._support import volumes
from trainjob._support.display import iso, numeric
from trainjob._support.kube_objects import mapping, mappings, rank_of, training_container
from trainjob.data.locations import parse_store
from trainjob.errors import ConfigurationError, NotFound, TrainJobFailed
from trainjob.job import KEY, JobRef, spec_hash
from trainjob.registry.base import storable_metrics
from trainjob.status import Observation, Phase, observe

if TYPE_CHECKING:
    from trainjob.data import Exported

_RECORDED = ("trainjob", "run", "datasets", "base_model", "images")
"""Fields of the provenance that the job sets."""
_INPUT, _OUTPUT = "TRAINJOB_INPUT_", "TRAINJOB_OUTPUT_"
_BASE_MODELS = ("model", "base_model")
"""Names of inputs that are base models of the training. Every registered model is one, too."""
_REGISTERED = re.compile(r"(?:models:/|model-registry://)", re.IGNORECASE)
_PULLED = re.compile(r"@(sha256:[0-9a-f]{64})$")


@dataclass(frozen=True)
class TrainedModel:
    """A model that a job trained.

    Attributes:
        ref: The job.
        source: Location of the model.
        export_id: Unique to this output of this job; the same for all its exports.
        metrics: The job's final metrics that are finite numbers.
        provenance: Provenance that the job records, for `trainjob.data.export`.
        history: The job's metrics over time, see `trainjob._jobs.results.TrainJobResult`.
        target: Directory of all models of this machine; empty for a job on a cluster.
    """

    ref: JobRef
    source: str
    export_id: str
    metrics: Mapping[str, float]
    provenance: Mapping[str, Any]
    history: Mapping[str, Any]
    target: str = ""


async def find(backend: Backend, ref: JobRef, output: str = "model", *, source: str | None = None) -> TrainedModel:
    """Find the model that a job trained.

    Args:
        backend: Backend of the job.
        ref: The job; without a UID, the current job of that name.
        output: Name of the output that is the model, as the script reported it or else in ``outputs`` of the spec.
        source: Path of the model on this machine, if the output is a path in the pods of a cluster.

    Raises:
        NotFound: The job does not exist.
        TrainJobFailed: The job failed or was cancelled; with the diagnosis.
        ConfigurationError: The job has not finished, has no such output, or this machine cannot read the output.
    """
    trainjob = await backend.get(ref.namespace, ref.name)
    if trainjob is None or ref.uid not in ("", JobRef.of(trainjob).uid):
        raise NotFound(f"there is no TrainJob {ref}{f' with UID {ref.uid}' if ref.uid else ''}")
    ref = JobRef.of(trainjob)
    evidence = await backend.evidence(ref)
    observation = observe(evidence.trainjob)
    if not observation.phase.terminal:
        raise ConfigurationError(
            f"TrainJob {ref} is {observation.phase}; only a Complete job can be exported. Wait for it:"
            f" trainjob wait {ref}"
        )
    if evidence.trainjob is None or observation.phase is not Phase.COMPLETE:
        raise TrainJobFailed(replace(diagnosis_of(evidence), job=str(ref)))
    check_report(ref, evidence)
    result = result_of(ref, evidence, observation, backend.now())
    outputs = {**_locations(evidence.trainjob, _OUTPUT), **result.outputs}
    home = backend.home
    return TrainedModel(
        ref,
        _location(ref, output, outputs, source, here=home is not None),
        f"trainjob/{ref}/{ref.uid}/{output}",
        numeric(result.metrics),
        _provenance(evidence, observation, result, outputs),
        result.history,
        target=str(home / "models") if home is not None else "",
    )


def export(
    model: TrainedModel,
    target: str | None = None,
    *,
    name: str,
    export_id: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    evaluation: str | None = None,
    **options: Any,
) -> Exported:
    """Export `model` with the metrics and the provenance of its job. Idempotent: a retry returns the same version.

    Args:
        model: See `find`.
        target: Directory of all models; that of `model` if left out.
        name: Name of the model in the registry.
        export_id: Replaces that of `model`, to export the same output again.
        provenance: Fields that the job does not record, such as ``code``; see `trainjob.data.export`.
        evaluation: Location of an evaluation report about this model, whose metrics replace those of the job and whose
            gate decides about ``alias``; see `trainjob.data.export`.
        **options: ``registry``, ``alias``, ``metric``, ``mode``, ``min_improvement``, ``allow_pickle``, ``sign`` and
            ``progress`` of `trainjob.data.export`.

    Raises:
        ConfigurationError: ``provenance`` has a field that the job sets, ``target`` is missing, or ``evaluation`` is of
            another model, or has no gate that could decide about ``alias``.
        TrainJobError: See `trainjob.data.export`.
    """
    from trainjob.data.export_evaluation import Evaluation  # noqa: PLC0415 - imports all stores, for exports only

    if own := sorted({*_RECORDED} & {*(provenance or {})}):
        raise ConfigurationError(
            f"provenance has {', '.join(own)}, which TrainJob {model.ref} records; leave it out, or register the model"
            " manually: trainjob registry register"
        )
    if evaluation and options.get("alias") and Evaluation.read(evaluation).decision is None:
        raise ConfigurationError(
            f"the evaluation {evaluation} has no gate, which decides whether {options['alias']!r} moves; evaluate the"
            " model with a gate, or leave out alias (--alias)"
        )
    where = target or model.target
    if not where:
        raise ConfigurationError(
            f"TrainJob {model.ref} ran on a cluster, so the directory of all models is unknown; set target (--target),"
            " such as s3://bucket/models"
        )
    return data.export(  # the package imports it now
        model.source,
        where,
        name=name,
        export_id=export_id or model.export_id,
        metrics=storable_metrics(model.metrics, options.get("progress")),
        provenance={**(provenance or {}), **model.provenance},
        history=model.history,
        evaluation=evaluation,
        **options,
    )


def _locations(trainjob: TrainJob, prefix: str) -> dict[str, str]:
    """Inputs or outputs of the spec, by name, as the author wrote them."""
    return {
        str(variable["name"]).removeprefix(prefix).lower(): volumes.as_claim(str(variable["value"]))
        for variable in mappings(trainjob, "spec", "trainer", "env")
        if str(variable.get("name")).startswith(prefix) and variable.get("value")
    }


def _location(ref: JobRef, output: str, outputs: Mapping[str, object], source: str | None, *, here: bool) -> str:
    """The location of an output for this machine."""
    value = outputs.get(output)
    if not isinstance(value, str) or not value:
        found = ", ".join(name for name, each in outputs.items() if isinstance(each, str) and each) or "none"
        raise ConfigurationError(
            f"TrainJob {ref} has no location as output {output!r}; its text outputs: {found}. Choose one with output"
            " (--output), or report it in the script:"
            f" trainjob.progress.report(outputs={{{output!r}: 's3://…'}})"
        )
    if "://" not in value and not value.startswith("/"):
        raise ConfigurationError(
            f"output {output!r} of TrainJob {ref} is the relative path {value!a}; report a URI or an absolute path in"
            " the script"
        )
    location = parse_store(value)
    if here or not location.on_disk:
        return location.uri
    if not source:
        raise ConfigurationError(
            f"output {output!r} of TrainJob {ref} is {location}, which only pods of its cluster can read; if the volume"
            " is mounted on this machine, set its path with source (--source). Otherwise export it in the cluster"
            " (ModelExportOperator, export_model), or write the output to a store such as s3://"
        )
    return parse_store(source).uri


def _provenance(
    evidence: Evidence, observation: Observation, result: TrainJobResult, outputs: Mapping[str, object]
) -> dict[str, Any]:
    trainjob = evidence.trainjob or {}
    runtime = mapping(trainjob, "spec", "runtimeRef")
    key = str(mapping(trainjob, "metadata", "annotations").get(KEY) or "")
    job = {
        "namespace": result.namespace,
        "name": result.name,
        "uid": result.uid,
        "attempt": result.attempt,
        "key": key,
        "runtime": runtime.get("name"),
        "runtime_kind": runtime.get("kind"),
        "spec_hash": spec_hash(trainjob),
        "started": iso(observation.admitted or observation.created),
        "finished": iso(observation.finished),
        "metrics": dict(result.metrics),
        "outputs": dict(outputs),
    }
    base_models, datasets = sources_of(trainjob)
    found = {
        "trainjob": {name: value for name, value in job.items() if value},
        "run": _run(key),
        "datasets": datasets,
        "base_model": base_models[0] if len(base_models) == 1 else base_models,
        "images": list(_images(evidence)),
    }
    return {name: value for name, value in found.items() if value}


def sources_of(trainjob: TrainJob) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Base models and datasets of a job, each with ``name`` and ``uri``, as far as its spec names them."""
    base_models: list[dict[str, str]] = []
    datasets: list[dict[str, str]] = []
    for name, uri in _sources(trainjob):
        (base_models if name in _BASE_MODELS or _REGISTERED.match(uri) else datasets).append({"name": name, "uri": uri})
    return base_models, datasets


def _sources(trainjob: TrainJob) -> Iterator[tuple[str, str]]:
    """The sources of Trainer's initializers and the inputs of the spec, by name."""
    for kind in ("dataset", "model"):
        if uri := mapping(trainjob, "spec", "initializer", kind).get("storageUri"):
            yield kind, str(uri)
    yield from _locations(trainjob, _INPUT).items()


def _images(evidence: Evidence) -> Iterator[dict[str, str]]:
    """The image of rank 0 with the digest that its node pulled; the image of the spec if the pod is gone."""
    latest = sorted(evidence.pods, key=lambda pod: str(mapping(pod, "metadata").get("creationTimestamp")), reverse=True)
    for pod in latest:
        trains = training_container(pod)
        states = [each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == trains]
        images = [
            str(each.get("image") or "") for each in mappings(pod, "spec", "containers") if each.get("name") == trains
        ]
        if rank_of(pod) in ("node-0", "launcher-0") and any(images):
            pulled = _PULLED.search(str(states[0].get("imageID"))) if states else None
            yield {"uri": images[0], **({"digest": pulled[1]} if pulled and "@" not in images[0] else {})}
            return
    if image := mapping(evidence.trainjob, "spec", "trainer").get("image"):
        yield {"uri": str(image)}


def _run(key: str) -> Any:
    """The orchestrator's run that launched the job, as the export steps record it; empty if there is none."""
    kind, _, rest = key.partition("/")
    if kind == "airflow":
        return key
    return {"kfp": rest.partition("/")[0]} if kind == "kfp" and rest else ""
