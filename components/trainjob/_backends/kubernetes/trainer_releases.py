"""Schema compatibility: TrainJobs adapted to the fields that a cluster's Trainer supports.

`trainjob._manifest.render` writes for Trainer 2.3. Older releases lack some of its fields, and 2.1 has
`podTemplateOverrides`, `labels` and `annotations` in place of `runtimePatches`. A launch is one request, so the release
is not determined first. If the server refuses unknown fields, the client reads its schema, adapts the object, sends it
again and remembers the schema for the next launch. A field without a place in the schema is an error before the job is
created; no field is dropped silently.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import ApiError, BadRequest, ObjectNotFound, Transient
from trainjob._support.kube_objects import mapping
from trainjob.errors import Problem, Rejected
from trainjob.job import API_VERSION, KIND
from trainjob.status import QUEUE_LABEL

Schema = Mapping[str, Any]
"""An OpenAPI v3 schema."""

_KUEUE_API = "kueue.x-k8s.io/v1beta2"
_NEW_IN_KUEUE_0_17 = "preemptionGates"  # a field of Workload.spec

_PATCHED_POD = "runtimePatches.trainingRuntimeSpec.template.spec.replicatedJobs.template.spec.template.spec"
_NEW_IN_TRAINER_2_3 = "terminationGracePeriodSeconds"  # a field of such a pod

_ADVICE = {
    "spec.activeDeadlineSeconds": "leave it out and wait with run_timeout, or upgrade Kubeflow Trainer",
    "spec.runtimePatches": "leave it out, set it in a separate training runtime, or upgrade Kubeflow Trainer",
    "": "leave it out, use a supported field, or use a Kubeflow Trainer that supports it",
}


@dataclass(frozen=True)
class SchemaCompatibility:
    """What a cluster supports.

    Attributes:
        spec: Schema of a TrainJob's spec.
        kueue_patches: Whether the cluster's Kueue starts jobs by `runtimePatches`: 0.17 (kueue#10127) and newer.
    """

    spec: Schema
    kueue_patches: bool = False


def adapt(trainjob: TrainJob, supported: SchemaCompatibility) -> tuple[dict[str, Any], list[Problem]]:
    """A TrainJob of Trainer 2.3 adapted to `supported`, and its unsupported fields by their path in `trainjob`."""
    spec: dict[str, Any] = copy.deepcopy(dict(trainjob["spec"]))
    problems: list[Problem] = []
    patches: list[Any] = []
    if not has_patches(supported.spec):
        patches = spec.pop("runtimePatches", None) or []
        queue = mapping(trainjob, "metadata", "labels").get(QUEUE_LABEL)
        if queue and supported.kueue_patches:
            problems.append(_never_admitted(queue))
    problems += _unknown(spec, supported.spec, "spec")
    problems += _as_overrides(patches, spec, _fields(supported.spec))
    return {**trainjob, "spec": spec}, problems


def _as_overrides(patches: list[Any], spec: dict[str, Any], fields: Schema) -> Iterator[Problem]:
    """Convert `runtimePatches` to the fields of Trainer 2.1 in `spec`; the rest of them are problems.

    Both are strategic merge patches of the same pod templates, applied in the order of the list. The manager and time
    of a patch have no field in 2.1 and no effect on the job in any release.
    """
    template = ("trainingRuntimeSpec", "template")
    override = mapping(fields, "podTemplateOverrides", "items")
    overrides = []
    for i, patch in enumerate(patches):
        where = f"spec.runtimePatches[{i}]"
        _take(patch, "manager")
        _take(patch, "time")
        for kind in {"labels", "annotations"} & set(fields):
            if pairs := _take(patch, *template, "metadata", kind):
                spec[kind] = {**(spec.get(kind) or {}), **pairs}
        for j, job in enumerate(mapping(patch, *template, "spec").get("replicatedJobs") or []):
            name, pod = _take(job, "name"), _take(job, "template", "spec", "template")
            if pod:
                at = f"{where}.trainingRuntimeSpec.template.spec.replicatedJobs[{j}].template.spec.template"
                yield from _unknown(pod, override, at)
                overrides.append({**pod, "targetJobs": [{"name": name}]})
        yield from _leftovers(patch, where, override)
    if overrides:
        spec["podTemplateOverrides"] = [*(spec.get("podTemplateOverrides") or []), *overrides]


def _take(value: Any, *path: str) -> Any:
    """Remove the value at `path` and return it."""
    *parents, last = path
    for name in parents:
        value = value.get(name) if isinstance(value, dict) else None
    return value.pop(last, None) if isinstance(value, dict) else None


def _leftovers(value: Any, path: str, override: Schema) -> Iterator[Problem]:
    """A problem for each string, number and boolean in `value`."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leftovers(part, f"{path}.{name}", override)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _leftovers(part, f"{path}[{i}]", override)
    elif value is not None:
        yield _problem(path, override, "in podTemplateOverrides")


def _unknown(value: Any, schema: Schema, path: str) -> Iterator[Problem]:
    """A problem for each field in `value` that `schema` lacks. The server checks types and limits."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if isinstance(value, Mapping):
        fields, others = _fields(schema), schema.get("additionalProperties")
        for name, part in value.items():
            at = f"{path}.{name}"
            if name in fields:
                yield from _unknown(part, fields[name], at)
            elif isinstance(others, Mapping):
                yield from _unknown(part, others, at)
            elif not others:
                yield _problem(at, schema, "here")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _unknown(part, mapping(schema, "items"), f"{path}[{i}]")


def _fields(schema: Schema) -> Schema:
    return mapping(schema, "properties")


def _problem(path: str, schema: Schema, where: str) -> Problem:
    supported = ", ".join(sorted(_fields(schema))) or "none"
    message = f"is not supported by this cluster's Kubeflow Trainer, whose fields {where} are: {supported}"
    return Problem(path, message, next(text for start, text in _ADVICE.items() if path.startswith(start)))


def _never_admitted(queue: object) -> Problem:
    return Problem(
        f"metadata.labels.{QUEUE_LABEL}",
        f"the job would wait in queue {queue} for ever: this cluster's Kueue starts a TrainJob through "
        "spec.runtimePatches, which its Kubeflow Trainer does not support",
        "upgrade Kubeflow Trainer to 2.2, or use Kueue 0.16; without the label the job runs without a queue",
    )


async def spec_schema(client: ApiClient, api_version: str, kind: str) -> Schema:
    """The schema of a kind's spec in this cluster.

    Raises:
        ObjectNotFound: The cluster has no such kind.
        ApiError: The request failed.
    """
    document = await client.send(Request("GET", f"/openapi/v3/apis/{api_version}"))
    for schema in mapping(document, "components", "schemas").values():
        of = schema.get("x-kubernetes-group-version-kind") or []
        if any(each.get("kind") == kind for each in of):
            return mapping(schema, "properties", "spec")
    raise ObjectNotFound(404, "NotFound", f"the OpenAPI document of {api_version} has no {kind}")


def has_patches(spec: Schema) -> bool:
    """Whether TrainJobs of this schema have `runtimePatches`, as in Trainer 2.2 and newer."""
    return "runtimePatches" in _fields(spec)


def release_of(spec: Schema) -> str:
    """The release of Trainer with this schema: 2.1, 2.2, or 2.3 for 2.3 and newer; empty if older than 2.1."""
    if "podTemplateOverrides" in _fields(spec):
        return "2.1"
    if not has_patches(spec):
        return ""
    pod = spec
    for name in _PATCHED_POD.split("."):
        field = mapping(_fields(pod), name)
        pod = mapping(field, "items") or field
    return "2.3" if _NEW_IN_TRAINER_2_3 in _fields(pod) else "2.2"


async def _kueue_needs_patches(client: ApiClient) -> bool:
    """Whether the cluster has a Kueue that starts TrainJobs only by `runtimePatches`.

    Raises:
        ApiError: A request failed.
    """
    try:
        return _NEW_IN_KUEUE_0_17 in _fields(await spec_schema(client, _KUEUE_API, "Workload"))
    except ObjectNotFound:
        return False


class AdaptingClient:
    """Creates TrainJobs adapted to the cluster's schema, and remembers the schema.

    Args:
        client: The connection.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._supported: SchemaCompatibility | None = None

    async def create(self, request: Request) -> dict[str, Any]:
        """Send a POST whose body is a TrainJob of Trainer 2.3: one request while the remembered schema is current.

        Raises:
            Rejected: The cluster does not support some of its fields; no job was created.
            ApiError: The request failed.
        """
        trainjob = _with_probe(request.body)
        # The remembered schema may predate an upgrade, so that only a refusal of the unchanged object is final.
        for supported in [self._supported, None] if self._supported is not None else [None]:
            body, problems = (trainjob, []) if supported is None else adapt(trainjob, supported)
            if problems:
                continue
            try:
                created = await self._client.send(replace(request, body=body))
            except BadRequest as error:
                if "strict decoding error" not in error.message:
                    raise
                refusal = error
            else:
                self._supported = supported
                return created
        name = f"TrainJob {trainjob['metadata']['namespace']}/{trainjob['metadata']['name']}"
        self._supported = await self._read_schema(name, refusal)
        body, problems = adapt(trainjob, self._supported)
        if problems:
            raise Rejected(f"{name} cannot run on this cluster:" + "".join(f"\n  - {each}" for each in problems))
        return await self._client.send(replace(request, body=body))

    async def _read_schema(self, name: str, refusal: ApiError) -> SchemaCompatibility:
        try:
            spec = await spec_schema(self._client, API_VERSION, KIND)
            return SchemaCompatibility(spec, not has_patches(spec) and await _kueue_needs_patches(self._client))
        except Transient:
            raise
        except ApiError as error:
            raise Rejected(
                f"{name} was refused: {refusal.message}. The supported fields cannot be read ({error}): "
                "leave those fields out, or bind the ClusterRole system:discovery"
            ) from error


def _with_probe(trainjob: TrainJob) -> TrainJob:
    """A queued job with an empty `runtimePatches`, which Kueue may need: a Trainer without the field refuses it."""
    if QUEUE_LABEL not in mapping(trainjob, "metadata", "labels"):
        return trainjob
    return {**trainjob, "spec": {"runtimePatches": [], **trainjob["spec"]}}
