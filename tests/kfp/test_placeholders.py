"""Placeholders where KFP leaves them: within a text, a list or a dict (driver/resolve.go); and the workspace, which KFP
mounts only for a step that has its path in a parameter that is text by itself (needsWorkspaceMount in driver.go)."""

from __future__ import annotations

from typing import Any

import pytest
from kfp import dsl

from trainjob import InvalidSpec
from trainjob.spec import for_every_node
from trainjob_kfp.execution import Execution
from trainjob_kfp.runtime import spec_of

STEP = Execution("kfp/run/uuid/train", "run", "train")
MOUNTED = {
    "volumes": [{"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": "w-kfp-workspace"}}],
    "volume_mounts": [{"mountPath": "/kfp-workspace", "name": "kfp-workspace"}],
}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"model": f"file://{dsl.WORKSPACE_PATH_PLACEHOLDER}/model"}, {"model": "file:///kfp-workspace/model"}),
        ([f"--out=s3://m/{dsl.PIPELINE_JOB_ID_PLACEHOLDER}/x"], ["--out=s3://m/run/x"]),
        (f"s3://m/{dsl.PIPELINE_TASK_NAME_PLACEHOLDER}", "s3://m/train"),
        (f"s3://m/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}", f"s3://m/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}"),
    ],
)
def test_a_step_replaces_those_that_it_knows(given: Any, meant: Any) -> None:
    assert STEP.plain(given) == meant


def asked(config: dict[str, Any], fields: dict[str, Any], *, local: bool = False, **added: Any) -> Any:
    execution = Execution(STEP.key, STEP.run, STEP.task, local=local)
    fields = {"runtime": "torch-distributed", "command": ["train"], **fields}
    return spec_of(execution, fields, {"spec": added, "task_config": config})


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_a_workspace_that_is_named_has_to_be_mounted(where: str) -> None:
    named = {where: {"model": "file:///kfp-workspace/model"}}
    with pytest.raises(InvalidSpec, match="KFP has not mounted the workspace"):
        asked({}, named)
    assert getattr(asked(MOUNTED, named), where) == named[where]


def test_so_it_is_in_what_is_added() -> None:
    with pytest.raises(InvalidSpec, match="KFP has not mounted the workspace"):
        asked({}, {}, checkpoints="file:///kfp-workspace/checkpoints")


def test_with_kfp_local_it_is_a_directory() -> None:
    assert asked({}, {"outputs": {"model": "file:///kfp-workspace/model"}}, local=True)


def test_a_mount_of_ones_own_is_as_good() -> None:
    claim = {"name": "own", "persistentVolumeClaim": {"claimName": "own"}}
    mounts = [{"name": "node", "volumeMounts": [{"name": "own", "mountPath": "/kfp-workspace"}]}]
    patch = for_every_node("torch-distributed", {"volumes": [claim], "containers": mounts}, "example.com/me")
    assert asked({}, {"inputs": {"data": "file:///kfp-workspace/data"}}, runtime_patches=[patch])
