"""Placeholders that KFP does not replace: inside a text, a list or a dict (driver/resolve.go). And the workspace, which
KFP mounts only for a step that has its path in a text parameter (needsWorkspaceMount in driver.go)."""

from __future__ import annotations

from typing import Any

import pytest
from kfp import dsl

from trainjob import InvalidSpec
from trainjob._spec import for_every_node
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
def test_a_step_replaces_known_placeholders(given: Any, meant: Any) -> None:
    assert STEP.plain(given) == meant


def parsed_spec(config: dict[str, Any], fields: dict[str, Any], *, local: bool = False, **added: Any) -> Any:
    execution = Execution(STEP.key, STEP.run, STEP.task, local=local)
    fields = {"runtime": "torch-distributed", "command": ["train"], **fields}
    return spec_of(execution, fields, {"spec": added, "task_config": config})


@pytest.mark.parametrize("where", ["inputs", "outputs"])
def test_a_workspace_path_needs_the_mounted_workspace(where: str) -> None:
    named = {where: {"model": "file:///kfp-workspace/model"}}
    with pytest.raises(InvalidSpec, match="KFP has not mounted the workspace"):
        parsed_spec({}, named)
    assert getattr(parsed_spec(MOUNTED, named), where) == named[where]


def test_a_workspace_path_in_the_spec_needs_the_mount_too() -> None:
    with pytest.raises(InvalidSpec, match="KFP has not mounted the workspace"):
        parsed_spec({}, {}, checkpoints="file:///kfp-workspace/checkpoints")


def test_with_kfp_local_the_workspace_needs_no_mount() -> None:
    assert parsed_spec({}, {"outputs": {"model": "file:///kfp-workspace/model"}}, local=True)


def test_a_mount_by_a_runtime_patch_is_accepted() -> None:
    claim = {"name": "own", "persistentVolumeClaim": {"claimName": "own"}}
    mounts = [{"name": "node", "volumeMounts": [{"name": "own", "mountPath": "/kfp-workspace"}]}]
    patch = for_every_node("torch-distributed", {"volumes": [claim], "containers": mounts}, "example.com/me")
    assert parsed_spec({}, {"inputs": {"data": "file:///kfp-workspace/data"}}, runtime_patches=[patch])
