"""Settings of a KFP task apply to the TrainJob. The task config was recorded from a KFP 2.17.0 backend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render
from trainjob._spec import for_every_node
from trainjob_kfp import task_config
from trainjob_kfp.execution import Execution
from trainjob_kfp.runtime import spec_of

AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
        }
    }
}
TOLERATIONS = [{"effect": "NoExecute", "key": "nvidia.com/gpu", "operator": "Exists", "tolerationSeconds": 300.0}]
VOLUMES = [
    {"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": "tc-flmrt-kfp-workspace"}},
    {"name": "mysecret", "secret": {"optional": False, "secretName": "mysecret"}},
]
MOUNTS = [
    {"mountPath": "/kfp-workspace", "name": "kfp-workspace"},
    {"mountPath": "/data/sec", "name": "mysecret", "subPath": "sub"},
]
RECORDED: dict[str, Any] = {
    "affinity": AFFINITY,
    "tolerations": TOLERATIONS,
    "node_selector": {"pool": "gpu"},
    "env": [
        {"name": "PLAIN", "value": "v1"},
        {
            "name": "SECRET_TOKEN",
            "valueFrom": {"secretKeyRef": {"key": "token", "name": "mysecret", "optional": False}},
        },
        {"name": "CM_K", "valueFrom": {"configMapKeyRef": {"key": "k", "name": "mycm", "optional": False}}},
        {"name": "MY_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "TRAINJOB_NAMESPACE", "value": "teams"},
    ],
    "volumes": VOLUMES,
    "volume_mounts": MOUNTS,
    "resources": {"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}, "requests": {"cpu": "500m"}},
}
FIELDS = {"runtime": "torch-distributed", "command": ["train"], "env": {"PLAIN": "mine"}}


def rendered(fields: dict[str, Any], added: dict[str, Any], config: dict[str, Any] = RECORDED) -> dict[str, Any]:
    plain = Execution("k", "run", "task").plain(config)
    given, others = task_config.apply(plain, fields, added)
    return render(TrainJobSpec.parse({**given, **others}), "k", 1, "ns")


@pytest.mark.parametrize(
    ("requested", "arrived", "names"),
    [
        ({"accelerator_count": 2.0, "accelerator_type": "nvidia.com/gpu"}, {}, ["accelerator_count"]),
        ({"accelerator_count": 2.0}, {"limits": {"cpu": "4", "memory": "8Gi"}}, ["accelerator_count"]),
        ({"accelerator_count": "2"}, {"limits": {"nvidia.com/gpu": "2"}}, []),
        ({"accelerator_count": 0.0}, {}, []),
        ({"cpu_limit": 4.0, "memory_limit": "8Gi"}, {"limits": {"memory": "8Gi"}}, ["cpu_limit"]),
        ({"cpu_request": 1.0, "memory_request": 5.0}, {"limits": {"cpu": "1"}}, ["cpu_request", "memory_request"]),
        ({"runtime": "x", "pipelinechannel--gpus": 2.0}, {}, []),
    ],
)
def test_resources_that_kfp_drops_are_reported(
    requested: dict[str, Any], arrived: dict[str, Any], names: list[str]
) -> None:
    """An `int` parameter of a pipeline in `set_accelerator_limit`: the run succeeded without a GPU (KFP 2.17.0)."""
    problems = task_config.lost_resources({"resources": arrived}, requested)
    assert [problem.path for problem in problems] == names
    assert all("a pipeline parameter of type str" in str(InvalidSpec([problem])) for problem in problems)


def test_all_task_settings_reach_the_nodes() -> None:
    trainjob = rendered(FIELDS, {})
    trainer = trainjob["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == RECORDED["resources"]
    env = {each["name"]: each.get("value", each.get("valueFrom")) for each in trainer["env"]}
    assert env == {
        "PLAIN": "mine",
        "SECRET_TOKEN": {"secretKeyRef": {"key": "token", "name": "mysecret", "optional": False}},
        "CM_K": {"configMapKeyRef": {"key": "k", "name": "mycm", "optional": False}},
        "MY_POD": {"fieldRef": {"fieldPath": "metadata.name"}},
    }, "the component's env wins, and variables of the step are not passed on"
    (patch,) = trainjob["spec"]["runtimePatches"]
    assert patch["manager"] == task_config.MANAGER
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job == {
        "name": "node",
        "template": {
            "spec": {
                "template": {
                    "spec": {
                        "nodeSelector": {"pool": "gpu"},
                        "tolerations": [{**TOLERATIONS[0], "tolerationSeconds": 300}],
                        "affinity": AFFINITY,
                        "volumes": VOLUMES,
                        "containers": [{"name": "node", "volumeMounts": MOUNTS}],
                    }
                }
            }
        },
    }
    assert '"tolerationSeconds": 300}' in json.dumps(trainjob), "KFP passes 300 as a float"


def test_the_launcher_of_mpi_runtimes_gets_the_patch() -> None:
    for runtime, jobs in (("deepspeed-distributed", ["node", "launcher"]), ("my-mpi", ["node"])):
        (patch,) = rendered({**FIELDS, "runtime": runtime}, {})["spec"]["runtimePatches"]
        assert [job["name"] for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]] == jobs


@pytest.mark.parametrize(
    "config", [{}, dict.fromkeys(RECORDED), {**dict.fromkeys(RECORDED), "env": [], "resources": {}}]
)
def test_an_empty_task_config_changes_nothing(config: dict[str, Any]) -> None:
    assert task_config.apply(config, FIELDS, {"labels": {"a": "b"}}) == (FIELDS, {"labels": {"a": "b"}})


def test_patches_of_the_spec_are_kept() -> None:
    own = {"manager": "example.com/team", "trainingRuntimeSpec": {}}
    patches = rendered(FIELDS, {"runtime_patches": [own]})["spec"]["runtimePatches"]
    assert [patch["manager"] for patch in patches] == [task_config.MANAGER, "example.com/team"]


def test_settings_given_twice_are_refused() -> None:
    twice = {"manager": task_config.MANAGER, "trainingRuntimeSpec": {}}
    with pytest.raises(InvalidSpec) as caught:
        task_config.apply(RECORDED, {**FIELDS, "resources_per_node": {"gpu": 1}}, {"runtime_patches": [twice]})
    assert [problem.path for problem in caught.value.problems] == ["resources_per_node", "spec.runtime_patches"]


# ---------------------------------------------------------------- the workspace of a run

# KFP mounts it only for a step that has its path in a text parameter (needsWorkspaceMount in driver.go).
INSIDE = {"model": "file:///kfp-workspace/model"}
OWN = for_every_node(
    "torch-distributed",
    {
        "volumes": [{"name": "own", "persistentVolumeClaim": {"claimName": "own"}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "own", "mountPath": "/kfp-workspace"}]}],
    },
    "example.com/me",
)


def parsed(fields: dict[str, Any], config: dict[str, Any], *, local: bool = False, **added: Any) -> TrainJobSpec:
    fields = {"runtime": "torch-distributed", "command": ["train"], **fields}
    return spec_of(Execution("k", "run", "task", local=local), fields, {"spec": added, "task_config": config})


@pytest.mark.parametrize(
    ("fields", "added"),
    [({"inputs": INSIDE}, {}), ({"outputs": INSIDE}, {}), ({}, {"checkpoints": "file:///kfp-workspace/checkpoints"})],
    ids=["inputs", "outputs", "spec"],
)
def test_a_workspace_path_needs_the_mounted_workspace(fields: dict[str, Any], added: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="KFP has not mounted the workspace"):
        parsed(fields, {}, **added)
    mounted = parsed(fields, RECORDED, **added)
    assert {name: getattr(mounted, name) for name in fields} == fields
    assert parsed(fields, {}, local=True, **added), "with kfp.local, the workspace needs no mount"
    assert parsed(fields, {}, runtime_patches=[OWN], **added)
