"""TrainJobs in the shape that a cluster's Trainer serves.

`trainjob.manifest` writes for Trainer 2.3. Older releases lack some of its fields, and 2.1 has `podTemplateOverrides`,
`labels` and `annotations` in place of `runtimePatches`. Which release a cluster has is not asked beforehand, because a
launch is one request. Only where the server refuses unknown fields is its schema read, the object adapted and sent
again, and the schema remembered for the next launch. What has no place in the schema is an error before anything is
created; nothing is dropped in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainjob.backends.base import TrainJob
from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.errors import ApiError, BadRequest, ObjectNotFound, Transient
from trainjob.errors import Problem, Rejected
from trainjob.kube_objects import mapping
from trainjob.spec import API_VERSION, KIND
from trainjob.status import QUEUE_LABEL

Schema = Mapping[str, Any]
"""An OpenAPI v3 schema."""

_KUEUE_API = "kueue.x-k8s.io/v1beta2"
_NEW_IN_KUEUE_0_17 = "preemptionGates"  # a field of Workload.spec

_PATCHED_POD = "runtimePatches.trainingRuntimeSpec.template.spec.replicatedJobs.template.spec.template.spec"
_NEW_IN_TRAINER_2_3 = "terminationGracePeriodSeconds"  # a field of such a pod

_INSTEAD = {
    "spec.activeDeadlineSeconds": "leave it out and wait with run_timeout, or upgrade Kubeflow Trainer",
    "spec.runtimePatches": "leave it out, put it into a training runtime of your own, or upgrade Kubeflow Trainer",
    "": "leave it out, write what is served, or have a Kubeflow Trainer that serves it",
}


@dataclass(frozen=True)
class SchemaCompatibility:
    """What a cluster serves.

    Attributes:
        spec: Schema of a TrainJob's spec.
        kueue_patches: Whether there is a Kueue that starts jobs by `runtimePatches`: 0.17 (kueue#10127) and newer.
    """

    spec: Schema
    kueue_patches: bool = False


def adapt(trainjob: TrainJob, served: SchemaCompatibility) -> tuple[dict[str, Any], list[Problem]]:
    """A TrainJob of Trainer 2.3 as `served` has it, and what has no place there, by its path in `trainjob`."""
    spec: dict[str, Any] = copy.deepcopy(dict(trainjob["spec"]))
    problems: list[Problem] = []
    patches: list[Any] = []
    if not has_patches(served.spec):
        patches = spec.pop("runtimePatches", None) or []
        queue = mapping(trainjob, "metadata", "labels").get(QUEUE_LABEL)
        if queue and served.kueue_patches:
            problems.append(_never_admitted(queue))
    problems += _unknown(spec, served.spec, "spec")
    problems += _as_overrides(patches, spec, _fields(served.spec))
    return {**trainjob, "spec": spec}, problems


def _as_overrides(patches: list[Any], spec: dict[str, Any], fields: Schema) -> Iterator[Problem]:
    """Write `runtimePatches` into `spec` as Trainer 2.1 has it; whatever is left of them is a problem.

    Both are strategic merge patches of the same pod templates, applied in the order of the list. Who wrote a patch, and
    when, has no place in 2.1 and no effect on the job in any release.
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
        yield from _left(patch, where, override)
    if overrides:
        spec["podTemplateOverrides"] = [*(spec.get("podTemplateOverrides") or []), *overrides]


def _take(value: Any, *path: str) -> Any:
    """What is under `path`, which is then no more there."""
    *parents, last = path
    for name in parents:
        value = value.get(name) if isinstance(value, dict) else None
    return value.pop(last, None) if isinstance(value, dict) else None


def _left(value: Any, path: str, override: Schema) -> Iterator[Problem]:
    """A problem for each text, number and switch in `value`."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _left(part, f"{path}.{name}", override)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _left(part, f"{path}[{i}]", override)
    elif value is not None:
        yield _problem(path, override, "in podTemplateOverrides")


def _unknown(value: Any, schema: Schema, path: str) -> Iterator[Problem]:
    """A problem for each field in `value` that `schema` has no place for. The server checks types and limits."""
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
    served = ", ".join(sorted(_fields(schema))) or "nothing"
    message = f"is not served by this cluster's Kubeflow Trainer, which has {where}: {served}"
    return Problem(path, message, next(text for start, text in _INSTEAD.items() if path.startswith(start)))


def _never_admitted(queue: object) -> Problem:
    return Problem(
        f"metadata.labels.{QUEUE_LABEL}",
        f"the job would wait in queue {queue} for ever: this cluster's Kueue starts a TrainJob through "
        "spec.runtimePatches, which its Kubeflow Trainer does not serve",
        "upgrade Kubeflow Trainer to 2.2, or keep to Kueue 0.16; without the label the job runs unqueued",
    )


async def spec_schema(client: ApiClient, api_version: str, kind: str) -> Schema:
    """The schema that a cluster serves of a kind's spec.

    Raises:
        ObjectNotFound: there is no such kind.
        ApiError: See `ApiClient.send`.
    """
    document = await client.send(Request("GET", f"/openapi/v3/apis/{api_version}"))
    for schema in mapping(document, "components", "schemas").values():
        of = schema.get("x-kubernetes-group-version-kind") or []
        if any(each.get("kind") == kind for each in of):
            return mapping(schema, "properties", "spec")
    raise ObjectNotFound(404, "NotFound", f"the OpenAPI document of {api_version} has no {kind}")


def has_patches(spec: Schema) -> bool:
    """Whether TrainJobs of that schema have `runtimePatches`: those of Trainer 2.2 and newer."""
    return "runtimePatches" in _fields(spec)


def release_of(spec: Schema) -> str:
    """The release of Trainer whose TrainJobs have that schema: 2.1, 2.2, or 2.3 for any newer one; empty if older."""
    if "podTemplateOverrides" in _fields(spec):
        return "2.1"
    if not has_patches(spec):
        return ""
    pod = spec
    for name in _PATCHED_POD.split("."):
        field = mapping(_fields(pod), name)
        pod = mapping(field, "items") or field
    return "2.3" if _NEW_IN_TRAINER_2_3 in _fields(pod) else "2.2"


async def kueue_needs_patches(client: ApiClient) -> bool:
    """Whether there is a Kueue that starts TrainJobs by `runtimePatches` alone.

    Raises:
        ApiError: See `ApiClient.send`.
    """
    try:
        return _NEW_IN_KUEUE_0_17 in _fields(await spec_schema(client, _KUEUE_API, "Workload"))
    except ObjectNotFound:
        return False


class AdaptingClient:
    """Creates TrainJobs in the shape that the cluster serves, and remembers that shape.

    Args:
        client: Of the cluster.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._served: SchemaCompatibility | None = None

    async def create(self, request: Request) -> dict[str, Any]:
        """Send a POST whose body is a TrainJob of Trainer 2.3: one request wherever the shape is the last known one.

        Raises:
            Rejected: The cluster has no place for some of it; nothing was created.
            ApiError: See `ApiClient.send`.
        """
        trainjob = _with_probe(request.body)
        # What is remembered may be from before an upgrade, so that only the author's own shape is refused for good.
        for served in [self._served, None] if self._served is not None else [None]:
            body, problems = (trainjob, []) if served is None else adapt(trainjob, served)
            if problems:
                continue
            try:
                created = await self._client.send(replace(request, body=body))
            except BadRequest as error:
                if "strict decoding error" not in error.message:
                    raise
                refusal = error
            else:
                self._served = served
                return created
        name = f"TrainJob {trainjob['metadata']['namespace']}/{trainjob['metadata']['name']}"
        self._served = await self._ask(name, refusal)
        body, problems = adapt(trainjob, self._served)
        if problems:
            raise Rejected(f"{name} cannot run here as asked for:" + "".join(f"\n  - {each}" for each in problems))
        return await self._client.send(replace(request, body=body))

    async def _ask(self, name: str, refusal: ApiError) -> SchemaCompatibility:
        try:
            spec = await spec_schema(self._client, API_VERSION, KIND)
            return SchemaCompatibility(spec, not has_patches(spec) and await kueue_needs_patches(self._client))
        except Transient:
            raise
        except ApiError as error:
            raise Rejected(
                f"{name} was refused: {refusal.message}. What is served instead cannot be read ({error}): "
                "leave those fields out, or bind the ClusterRole system:discovery"
            ) from error


def _with_probe(trainjob: TrainJob) -> TrainJob:
    """A queued job with an empty list of patches, so that a Trainer without them says so: Kueue may depend on them."""
    if QUEUE_LABEL not in mapping(trainjob, "metadata", "labels"):
        return trainjob
    return {**trainjob, "spec": {"runtimePatches": [], **trainjob["spec"]}}
