"""The executor input: which execution a process belongs to, and the values of its parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainjob.errors import ConfigurationError
from trainjob.job import job_name
from trainjob_kfp.execution import Execution, artifact_location, location

RUN, UUID = "0d9f8a9e-6c1d-4a53-9f0e-2f1d5b1c7a11", "5f7c1a52-58f0-4d0e-8a0e-6c2f4c9b7d33"
REMOTE = f"minio://mlpipeline/v2/artifacts/retrain/{RUN}/train/{UUID}"
LOCAL = "/somewhere/local_outputs/retrain-2026-11-21-10-10-10-123456/train"


def argv(root: str, *outputs: str, parameters: dict[str, Any] | None = None) -> list[str]:
    given = {
        "inputs": {"parameterValues": parameters or {}},
        "outputs": {
            "artifacts": {name: {"artifacts": [{"name": name, "uri": f"{root}/{name}"}]} for name in outputs},
            "outputFile": "/x",
        },
    }
    return ["executor_main.py", "--executor_input", json.dumps(given), "--function_to_execute", "train"]


@pytest.mark.parametrize(
    "outputs",
    [("model", "metrics"), ("metrics", "model"), ("executor-logs-0",), ("executor-logs-1", "model")],
)
def test_the_key_is_the_same_on_every_try(outputs: tuple[str, ...]) -> None:
    execution = Execution.of(argv(REMOTE, *outputs))
    assert execution.key == f"kfp/{RUN}/{UUID}/train"
    assert (execution.run, execution.task, execution.local) == (RUN, "train", False)


def test_another_execution_has_another_key() -> None:
    first, second = (Execution.of(argv(root, "model")) for root in (REMOTE, REMOTE.replace(UUID, RUN)))
    assert first.key != second.key
    assert job_name(first.key, 1) != job_name(second.key, 1)


def test_kfp_local_has_no_uuid() -> None:
    execution, same = (Execution.of(argv(LOCAL, "model", parameters={"lr": 0.1})) for _ in range(2))
    run = "retrain-2026-11-21-10-10-10-123456"
    assert execution.key.startswith(f"kfp/{run}/")
    assert execution.key.endswith("/train")
    assert (execution.run, execution.task, execution.local, same.key) == (run, "train", True, execution.key)
    other = Execution.of(argv(LOCAL, "model", parameters={"lr": 0.2}))
    assert other.key != execution.key, "with kfp.local, iterations of a ParallelFor differ only in their parameters"


def test_iterations_of_kfp_local_have_the_run_and_task_of_their_loop() -> None:
    loops = [LOCAL.replace("/train", f"/for-loop-1-iteration-{number}/train") for number in (0, 1)]
    executions = [Execution.of(argv(root, "model")) for root in loops]
    assert {each.run for each in executions} == {"retrain-2026-11-21-10-10-10-123456"}
    assert {each.task for each in executions} == {"train"}
    assert len({each.key for each in executions}) == 2


def test_iterations_of_kfp_local_write_into_the_directory_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_WORKSPACE", "s3://work")
    root = LOCAL.replace("/train", "/for-loop-1-iteration-0/train")
    run = "retrain-2026-11-21-10-10-10-123456"
    assert artifact_location(f"{root}/model") == f"s3://work/{run}/for-loop-1-iteration-0/train/model"


def test_with_kfp_local_the_output_file_identifies_a_step_without_artifacts() -> None:
    given = {"outputs": {"outputFile": f"{LOCAL}/executor_output.json"}}
    execution = Execution.of(["x", "--executor_input", json.dumps(given)])
    assert (execution.run, execution.task) == ("retrain-2026-11-21-10-10-10-123456", "train")


@pytest.mark.parametrize(
    "root",
    [
        f"minio://mlpipeline/v2/artifacts/retrain/{RUN}/train",  # no UUID of the execution
        f"s3://bucket/retrain/not-a-run/train/{UUID}",
        "/somewhere/local_outputs/retrain/train",  # no time
        "/train",
        "",
    ],
)
def test_a_location_without_a_run_is_refused(root: str) -> None:
    """A guessed key could be that of another run, and the step would adopt the job of that run."""
    with pytest.raises(ConfigurationError, match="cannot determine the run"):
        Execution.of(argv(root, "model"))


def test_the_name_of_the_pipeline() -> None:
    assert [Execution.of(argv(root, "model")).pipeline for root in (REMOTE, LOCAL)] == ["retrain", "retrain"]


def test_jobs_are_named_after_their_task() -> None:
    assert job_name(Execution.of(argv(REMOTE, "model")).key, 1).startswith("train-")


def test_a_process_outside_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a step of a pipeline"):
        Execution.of(["python"])


@pytest.mark.parametrize(("index", "verdict"), [(None, "retry"), ("0", "retry"), ("1", "verdict"), ("2", "verdict")])
def test_only_on_retries_of_kfp_the_diagnosis_decides(
    index: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if index is None:
        monkeypatch.delenv("KFP_RETRY_INDEX", raising=False)
    else:
        monkeypatch.setenv("KFP_RETRY_INDEX", index)
    assert Execution.of(argv(REMOTE, "model")).after_failure(user_errors=True) == verdict


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (2.0, 2),
        (0.5, 0.5),
        (True, True),
        ("2.0", "2.0"),
        ({"gpu": 2.0, "deep": [1.0, {"x": 3.0}]}, {"gpu": 2, "deep": [1, {"x": 3}]}),
        ("{{$.inputs.parameters['pipelinechannel--data-uri']}}", "s3://data/x"),
        (["--n={{$.inputs.parameters['pipelinechannel--epochs']}}"], ["--n=8"]),
        ({"a": "{{$.inputs.parameters['unknown']}}"}, {"a": "{{$.inputs.parameters['unknown']}}"}),
    ],
)
def test_values_are_restored_as_written_in_the_pipeline(given: Any, meant: Any) -> None:
    parameters = {"pipelinechannel--data-uri": "s3://data/x", "pipelinechannel--epochs": 8.0}
    got = Execution.of(argv(REMOTE, "model", parameters=parameters)).plain(given)
    assert got == meant
    assert json.dumps(got) == json.dumps(meant), "2 and 2.0 are equal, but not the same text"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--epochs=8.0", "--epochs=8"), ("8.0", "8"), ("18.0", "18.0"), ("8.05", "8.05"), ("v8.0.1", "v8.0.1")],
)
def test_whole_numbers_that_kfp_local_inserts_as_floats_are_restored(given: str, meant: str) -> None:
    execution = Execution.of(argv(LOCAL, "model", parameters={"pipelinechannel--epochs": 8.0}))
    assert execution.plain(given) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("/a b/c", "file:///a%20b/c"),
        ("minio://mlpipeline/v2/x", "s3://mlpipeline/v2/x"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("models:/digits@champion", "models:/digits@champion"),
        ("", ""),
    ],
)
def test_locations(given: str, meant: str) -> None:
    assert location(given) == meant


@pytest.mark.parametrize(
    ("workspace", "root", "meant"),
    [
        ("s3://bucket/w/", LOCAL, "s3://bucket/w/retrain-2026-11-21-10-10-10-123456/train/model"),
        ("s3://bucket/w", REMOTE, REMOTE.replace("minio", "s3") + "/model"),
        ("file:///elsewhere", LOCAL, f"file://{LOCAL}/model"),
        ("", LOCAL, f"file://{LOCAL}/model"),
    ],
)
def test_artifacts_of_kfp_local_are_located_in_the_workspace(
    workspace: str, root: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINJOB_WORKSPACE", workspace)
    assert artifact_location(f"{root}/model") == meant
