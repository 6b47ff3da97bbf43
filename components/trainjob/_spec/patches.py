"""Changes to a runtime for one job only (``spec.runtimePatches``), as Trainer's API allows them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from trainjob._spec.base import Part
from trainjob._spec.parts import Env, ObjectName, SecretRef, env_api

_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)+")


# Volume sources of Kubernetes 1.34 (core/v1 VolumeSource) that have not been removed.
_VOLUME_SOURCES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "fc", "hostPath", "image", "iscsi", "nfs"),
    *("persistentVolumeClaim", "projected", "secret"),
    *(
        "awsElasticBlockStore",
        "azureDisk",
        "azureFile",
        "cephfs",
        "cinder",
        "flexVolume",
        "flocker",
        "gcePersistentDisk",
    ),
    *("gitRepo", "glusterfs", "photonPersistentDisk", "portworxVolume", "quobyte", "rbd", "scaleIO", "storageos"),
    "vsphereVolume",
)

_LAUNCHER_IS_A_NODE = ("deepspeed-distributed", "mlx-distributed")
"""Runtimes that Trainer ships whose MPI launcher trains, too (``mpi.runLauncherAsNode``), as a separate Job. Runtimes
with other names are unknown, and Trainer's webhook refuses a patch of a Job that the runtime lacks."""


def for_every_node(
    runtime: str, pod: Mapping[str, Any], manager: str, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An entry of ``spec.runtimePatches`` that changes the pods of all nodes.

    Args:
        runtime: Name of the job's runtime.
        pod: The changes, a PodSpecPatch as in the API; the training container is called ``node``.
        manager: Name of the patch's manager, such as ``trainjob.dev/checkpoints``.
        metadata: Labels and annotations to add to the pods.
    """
    template = {**({"metadata": dict(metadata)} if metadata else {}), "spec": dict(pod)}
    names = ["node", "launcher"] if runtime in _LAUNCHER_IS_A_NODE else ["node"]
    jobs = [{"name": name, "template": {"spec": {"template": template}}} for name in names]
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


class MetadataPatch(Part):
    """Labels and annotations to add."""

    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class VolumeMount(Part):
    """Mount of a pod's volume in a container."""

    name: Annotated[str, Field(min_length=1)]
    mount_path: Annotated[str, Field(min_length=1)]
    sub_path: str | None = None
    sub_path_expr: str | None = None
    read_only: bool | None = None
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] | None = None
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None


class Toleration(Part):
    """A node taint that the pod tolerates."""

    key: str | None = None
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.key and self.operator != "Exists":
            raise ValueError("without a key it needs operator: Exists, which tolerates every taint")
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists does not allow a value")
        return self


def _is_volume(volume: dict[str, Any]) -> dict[str, Any]:
    """Check for a name and one source, as in the API. The API server checks the fields of the source."""
    sources = [field for field in volume if field != "name"]
    if not isinstance(volume.get("name"), str) or len(sources) != 1 or not isinstance(volume[sources[0]], Mapping):
        raise ValueError("needs a name and one source such as persistentVolumeClaim: {claimName: …}")
    if sources[0] not in _VOLUME_SOURCES:
        near = difflib.get_close_matches(sources[0], _VOLUME_SOURCES, 1)
        raise ValueError(f"{sources[0]} is not a kind of volume{f' (did you mean {near[0]}?)' if near else ''}")
    return volume


Volume = Annotated[dict[str, Any], AfterValidator(_is_volume)]
"""A volume of a pod."""


class ContainerPatch(Part):
    """Allowed changes to a container of the runtime."""

    name: str
    env: Env | None = None
    volume_mounts: list[VolumeMount] | None = None
    security_context: dict[str, Any] | None = None

    def api(self) -> dict[str, Any]:
        """The part as in the API."""
        part = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        return {**part, "env": env_api(self.env)} if self.env is not None else part


class PodSpecPatch(Part):
    """Allowed changes to a pod; all other changes need a custom runtime."""

    service_account_name: ObjectName | None = None
    volumes: list[Volume] | None = None
    init_containers: list[ContainerPatch] | None = None
    containers: list[ContainerPatch] | None = None
    image_pull_secrets: list[SecretRef] | None = None
    security_context: dict[str, Any] | None = None
    node_selector: dict[str, str] | None = None
    affinity: dict[Literal["nodeAffinity", "podAffinity", "podAntiAffinity"], dict[str, Any]] | None = None
    tolerations: list[Toleration] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None
    termination_grace_period_seconds: Annotated[int, Field(ge=0)] | None = None

    def api(self) -> dict[str, Any]:
        """The part as in the API."""
        part = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        for field, containers in (("containers", self.containers), ("initContainers", self.init_containers)):
            if containers is not None:
                part[field] = [container.api() for container in containers]
        return part


class PodTemplatePatch(Part):
    """A pod template's metadata and spec."""

    metadata: MetadataPatch | None = None
    spec: PodSpecPatch | None = None


class JobSpecPatch(Part):
    """Spec of a Job."""

    template: PodTemplatePatch | None = None


class JobTemplatePatch(Part):
    """A Job template's metadata and spec."""

    metadata: MetadataPatch | None = None
    spec: JobSpecPatch | None = None


class ReplicatedJobPatch(Part):
    """Patch of one replicated job of the runtime (``node``, ``launcher``, ``dataset-initializer``, …)."""

    name: str
    template: JobTemplatePatch | None = None


class JobSetSpecPatch(Part):
    """Spec of the JobSet."""

    replicated_jobs: list[ReplicatedJobPatch] | None = None


class JobSetTemplatePatch(Part):
    """The JobSet's metadata (the only way for labels to reach it) and spec."""

    metadata: MetadataPatch | None = None
    spec: JobSetSpecPatch | None = None


class TrainingRuntimeSpecPatch(Part):
    """Root of a patch."""

    template: JobSetTemplatePatch | None = None


class RuntimePatch(Part):
    """A change to the runtime for this job only, merged by Trainer (``spec.runtimePatches``)."""

    manager: Annotated[str, Field(min_length=1, max_length=253)] = "trainjob.dev/author"
    training_runtime_spec: TrainingRuntimeSpecPatch

    @field_validator("manager")
    @classmethod
    def _domain_prefixed(cls, value: str) -> str:
        if not _MANAGER.fullmatch(value):
            raise ValueError("must be a domain-prefixed path such as example.com/team")
        return value

    def api(self) -> dict[str, Any]:
        """The part as in the API."""
        part = self.model_dump(by_alias=True, exclude_none=True, mode="json")
        for replicated_job, patched in zip(self._replicated_jobs(), _rendered_jobs(part), strict=True):
            pod = _pod_spec(replicated_job)
            if pod is not None:
                patched["template"]["spec"]["template"]["spec"] = pod.api()
        return part

    def _replicated_jobs(self) -> list[ReplicatedJobPatch]:
        template = self.training_runtime_spec.template
        return (template.spec.replicated_jobs or []) if template and template.spec else []

    def containers(self) -> Iterator[tuple[str, ContainerPatch]]:
        """Every container patch with its path."""
        for i, job in enumerate(self._replicated_jobs()):
            pod = _pod_spec(job)
            for field in ("containers", "init_containers"):
                for j, container in enumerate((getattr(pod, field) or []) if pod else []):
                    yield f"replicated_jobs[{i}].{field}[{j}]", container


def _pod_spec(job: ReplicatedJobPatch) -> PodSpecPatch | None:
    if job.template and job.template.spec and job.template.spec.template:
        return job.template.spec.template.spec
    return None


def _rendered_jobs(patch: dict[str, Any]) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = (
        patch["trainingRuntimeSpec"].get("template", {}).get("spec", {}).get("replicatedJobs") or []
    )
    return jobs
