"""TrainJobs of Trainer 2.3 adapted to the recorded schemas of 2.1, 2.2 and 2.3, or the reasons why that fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit.schemas import recorded

from trainjob import TrainJobSpec
from trainjob._backends.kubernetes.trainer_releases import SchemaCompatibility, adapt, release_of
from trainjob._manifest.render import render
from trainjob._manifest.retry_changes import Changes

SCHEMAS = {release: SchemaCompatibility(recorded(release)) for release in ("2.1", "2.2", "2.3")}
SIDECAR = {"name": "sidecar", "env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
POD = {
    "serviceAccountName": "trainer",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
    "imagePullSecrets": [{"name": "registry"}],
    "containers": [SIDECAR],
}


def job(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    fields = {"runtimeRef": {"name": "torch-distributed"}, **(spec or {})}
    return {"metadata": {"name": "job", "namespace": "ns", **metadata}, "spec": fields}


def patched(*replicated_jobs: dict[str, Any], **template: Any) -> dict[str, Any]:
    spec = {"spec": {"replicatedJobs": list(replicated_jobs)}} if replicated_jobs else {}
    return {"manager": "a.b/c", "trainingRuntimeSpec": {"template": {**template, **spec}}}


def replicated(name: str, **pod_template: Any) -> dict[str, Any]:
    return {"name": name, "template": {"spec": {"template": pod_template}}}


def selecting(name: str, value: str) -> dict[str, Any]:
    return replicated(name, spec={"nodeSelector": {"a": value}})


def override(name: str, value: str) -> dict[str, Any]:
    return {"targetJobs": [{"name": name}], "spec": {"nodeSelector": {"a": value}}}


def adapted(release: str, trainjob: dict[str, Any]) -> dict[str, Any]:
    before = copy.deepcopy(trainjob)
    result, problems = adapt(trainjob, SCHEMAS[release])
    assert [str(each) for each in problems] == []
    assert trainjob == before, "the argument is not changed"
    assert result["metadata"] == trainjob["metadata"], "metadata are not adapted"
    return dict(result["spec"])


@pytest.mark.parametrize("release", ["2.1", "2.2", "2.3"])
def test_release_is_recognized_by_its_schema(release: str) -> None:
    assert release_of(recorded(release)) == release
    assert release_of({"properties": {"podSpecOverrides": {}}}) == "", "2.0"


@pytest.mark.parametrize("release", SCHEMAS)
def test_all_releases_can_exclude_nodes(release: str) -> None:
    spec = TrainJobSpec.parse({"runtime": "r", "on_retry": {"node_lost": {"max_excluded_nodes": 1}}})
    found = str(adapted(release, render(spec, "key", 2, "ns", changes=Changes(excluded_nodes=("gpu-7",)))))
    assert "{'key': 'kubernetes.io/hostname', 'operator': 'NotIn', 'values': ['gpu-7']}" in found


def test_patches_are_not_changed_for_2_2() -> None:
    patches = [patched(replicated("node", spec=POD), metadata={"labels": {"team": "a"}})]
    trainjob = job({"trainer": {"numNodes": 2}, "runtimePatches": patches, "activeDeadlineSeconds": 5})
    assert adapted("2.2", trainjob) == trainjob["spec"]


@pytest.mark.parametrize(
    ("patches", "wanted"),
    [
        ([patched(replicated("node", spec=POD))],
         {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": POD}]}),
        ([patched(replicated("node", metadata={"labels": {"a": "1"}, "annotations": {"b": "2"}}))],
         {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}],
         "metadata": {"labels": {"a": "1"}, "annotations": {"b": "2"}}}]}),
        ([patched(metadata={"labels": {"a": "1", "b": "1"}, "annotations": {"c": "1"}}),
         patched(metadata={"labels": {"b": "2"}})], {"labels": {"a": "1", "b": "2"}, "annotations": {"c": "1"}}),
        ([patched(selecting("node", "1"), selecting("launcher", "2")), patched(selecting("node", "3"))],
         {"podTemplateOverrides": [override("node", "1"), override("launcher", "2"), override("node", "3")]}),
        ([], {}),
        ([patched(replicated("node"))], {}),
        ([{"manager": "a.b/c", "time": "2026-01-01T00:00:00Z", "trainingRuntimeSpec": {}}], {}),
    ],
    ids=["pod", "pod-metadata", "jobset-metadata", "order", "none", "empty", "bookkeeping"],
)  # fmt: skip
def test_patches_become_overrides_in_2_1(patches: list[Any], wanted: dict[str, Any]) -> None:
    trainer = {"trainer": {"numNodes": 2}}
    assert adapted("2.1", job({**trainer, "runtimePatches": patches})) == {**job()["spec"], **trainer, **wanted}


def test_explicit_2_1_overrides_come_before_patches() -> None:
    patches = [patched(selecting("node", "2"), metadata={"labels": {"b": "2"}})]
    given = {"podTemplateOverrides": [override("node", "1")], "labels": {"a": "1", "b": "1"}, "runtimePatches": patches}
    spec = adapted("2.1", job(given))
    assert spec["podTemplateOverrides"] == [override("node", "1"), override("node", "2")]
    assert spec["labels"] == {"a": "1", "b": "2"}


NODE = "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[0].template"
GRACE = job({"runtimePatches": [patched(replicated("node", spec={"terminationGracePeriodSeconds": 5}))]})
CONTAINER = {"name": "s", "securityContext": {"runAsUser": 1}}
SECURITY = job({"runtimePatches": [patched(replicated("node", spec={"containers": [CONTAINER]}))]})


@pytest.mark.parametrize(
    ("release", "trainjob", "wanted"),
    [
        ("2.1", GRACE, [f"{NODE}.spec.template.spec.terminationGracePeriodSeconds"]),
        ("2.2", GRACE, [f"{NODE}.spec.template.spec.terminationGracePeriodSeconds"]),
        ("2.1", SECURITY, [f"{NODE}.spec.template.spec.containers[0].securityContext"]),
        ("2.2", SECURITY, []),
        ("2.1", job({"runtimePatches": [patched({"name": "node", "template": {"metadata": {"labels": {"a": "1"}}}})]}),
         [f"{NODE}.metadata.labels.a"]),
        ("2.1", job({"runtimePatches": [patched(metadata={"labels": {"a": "1"}, "name": "x"})]}),
         ["spec.runtimePatches[0].trainingRuntimeSpec.template.metadata.name"]),
        ("2.3", job({"trainer": {"imag": "x", "env": [{"name": "A"}, {"nam": "B"}]}, "podTemplateOverrides": [],
                     "labels": {"a": "1"}}),
         ["spec.trainer.imag", "spec.trainer.env[1].nam", "spec.podTemplateOverrides", "spec.labels"]),
        ("2.1", job({"activeDeadlineSeconds": 5, "runtimePatches": GRACE["spec"]["runtimePatches"]}),
         ["spec.activeDeadlineSeconds", f"{NODE}.spec.template.spec.terminationGracePeriodSeconds"]),
    ],
)  # fmt: skip
def test_unsupported_fields_are_reported_by_path(release: str, trainjob: dict[str, Any], wanted: list[str]) -> None:
    assert [each.path for each in adapt(trainjob, SCHEMAS[release])[1]] == wanted


def test_problem_lists_supported_fields_and_an_alternative() -> None:
    problems = {each.path.rpartition(".")[2]: str(each) for each in adapt(GRACE, SCHEMAS["2.1"])[1]}
    text = problems["terminationGracePeriodSeconds"]
    assert "fields here are: affinity, containers, imagePullSecrets, initContainers, nodeSelector," in text
    assert "set it in a separate training runtime" in text
    (deadline,) = adapt(job({"activeDeadlineSeconds": 5}), SCHEMAS["2.1"])[1]
    assert "fields here are: annotations, initializer, labels, managedBy, podTemplateOverrides," in str(deadline)
    assert deadline.instead == "leave it out and wait with run_timeout, or upgrade Kubeflow Trainer"


EVERY: dict[str, Any] = {
    "runtime": {"name": "r", "kind": "TrainingRuntime"}, "image": "i", "command": ["a"], "args": ["b"],
    "env": {"A": "1", "B": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}},
    "num_nodes": 2, "num_proc_per_node": 2, "resources_per_node": {"cpu": 1, "memory": "1Gi", "gpu": 1},
    "suspend": True, "active_deadline_seconds": 5, "managed_by": "kueue.x-k8s.io/multikueue",
    "inputs": {"dataset": "s3://a"}, "outputs": {"model": "s3://b"}, "checkpoints": "pvc://claim/path",
}  # fmt: skip


def test_2_3_supports_every_field_of_a_spec() -> None:
    """A spec without a `manifest` never causes a problem on 2.3."""
    pod = {
        **POD,
        "initContainers": [SIDECAR],
        "containers": [{**SIDECAR, "securityContext": {"runAsUser": 1}}],
        "securityContext": {"fsGroup": 1},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}},
        "schedulingGates": [{"name": "a.b/c"}],
        "terminationGracePeriodSeconds": 5,
    }
    metadata = {"labels": {"a": "1"}, "annotations": {"b": "2"}}
    node = replicated("node", metadata=metadata, spec=pod)
    node["template"]["metadata"] = metadata
    source = {"storage_uri": "hf://org/x", "env": {"A": "1"}, "secret_ref": {"name": "s"}}
    more = {"initializer": {"dataset": source, "model": source}, "runtime_patches": [patched(node, metadata=metadata)]}
    spec = TrainJobSpec.parse(EVERY | more)
    left_out = set(TrainJobSpec.model_fields) - spec.model_fields_set
    others = {"func", "func_args", "packages_to_install", "pip_index_urls", "torchtune"}  # become command and args
    metadata_fields = {"labels", "annotations", "owner_reference", "on_retry", "unattended", "unattended_after"}
    assert left_out == {
        "manifest",
        "pod",
        "stall_timeout",
        *others,
        *metadata_fields,
    }  # the second: annotation and variable
    trainjob = render(spec, "key", 1, "ns")
    assert adapted("2.3", trainjob) == trainjob["spec"]


@pytest.mark.parametrize(
    ("release", "kueue_patches", "labels", "refused"),
    [
        ("2.1", True, {"kueue.x-k8s.io/queue-name": "gpus"}, True),
        ("2.1", True, {}, False),
        ("2.1", False, {"kueue.x-k8s.io/queue-name": "gpus"}, False),
        ("2.2", True, {"kueue.x-k8s.io/queue-name": "gpus"}, False),
    ],
)
def test_a_queue_without_runtime_patches_is_rejected(
    release: str, kueue_patches: bool, labels: dict[str, str], refused: bool
) -> None:
    """Kueue 0.17 and newer start a job with a runtimePatch: without that field, it stays suspended."""
    _, problems = adapt(
        job({"runtimePatches": []}, labels=labels), SchemaCompatibility(recorded(release), kueue_patches)
    )
    assert [each.path for each in problems] == (["metadata.labels.kueue.x-k8s.io/queue-name"] if refused else [])
    assert all("queue gpus for ever" in each.message for each in problems)


@pytest.mark.parametrize("release", SCHEMAS)
def test_pvc_volumes_of_a_queued_job_fit_all_releases(release: str) -> None:
    """Kueue adds a patch: since 0.17 to `runtimePatches`, before to the `podTemplateOverrides` of 2.1."""
    given = {"checkpoints": "pvc://c/x", "inputs": {"data": "pvc://d/y"}, "labels": {"kueue.x-k8s.io/queue-name": "q"}}
    found = adapted(release, render(TrainJobSpec.parse({"runtime": "r", "command": ["x"], **given}), "key", 1, "ns"))
    patches = found.get("runtimePatches", [])
    assert [each["manager"] for each in patches] == (
        [] if release == "2.1" else ["trainjob.dev/checkpoints", "trainjob.dev/claims"]
    )
    overrides = found.get("podTemplateOverrides", [])
    jobs = [job for each in patches for job in each["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]]
    pods = [*(each["spec"] for each in overrides), *(job["template"]["spec"]["template"]["spec"] for job in jobs)]
    claims = [volume["persistentVolumeClaim"]["claimName"] for pod in pods for volume in pod["volumes"]]
    assert claims == ["c", "d"]
