"""The executor input: which execution a process belongs to, and the values of its parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kfp import dsl
from tests.hostile_documents import DOCUMENTS

from trainjob.errors import ConfigurationError
from trainjob.job import job_name
from trainjob_kfp.execution import Execution, artifact_location, location

RUN, UUID = "0d9f8a9e-6c1d-4a53-9f0e-2f1d5b1c7a11", "5f7c1a52-58f0-4d0e-8a0e-6c2f4c9b7d33"
REMOTE = f"minio://mlpipeline/v2/artifacts/retrain/{RUN}/train/{UUID}"
LOCAL_RUN = "retrain-2026-11-21-10-10-10-123456"
LOCAL = f"/somewhere/local_outputs/{LOCAL_RUN}/train"
ITERATIONS = [LOCAL.replace("/train", f"/for-loop-1-iteration-{number}/train") for number in (0, 1)]


def argv(root: str, *outputs: str, parameters: dict[str, Any] | None = None) -> list[str]:
    given = {
        "inputs": {"parameterValues": parameters or {}},
        "outputs": {
            "artifacts": {name: {"artifacts": [{"name": name, "uri": f"{root}/{name}"}]} for name in outputs},
            "outputFile": f"{root}/executor_output.json",
        },
    }
    return ["executor_main.py", "--executor_input", json.dumps(given), "--function_to_execute", "train"]


def execution(root: str, **parameters: Any) -> Execution:
    return Execution.of(argv(root, "model", parameters=parameters))


@pytest.mark.parametrize(
    "outputs",
    [("model", "metrics"), ("metrics", "model"), ("executor-logs-0",), ("executor-logs-1", "model")],
)
def test_the_key_is_the_same_on_every_try(outputs: tuple[str, ...]) -> None:
    found = Execution.of(argv(REMOTE, *outputs))
    assert found.key == f"kfp/{RUN}/{UUID}/train"
    assert (found.run, found.task, found.local, found.pipeline) == (RUN, "train", False, "retrain")
    assert job_name(found.key, 1).startswith("train-"), "jobs are named after their task"


def test_another_execution_has_another_key() -> None:
    first, second = execution(REMOTE), execution(REMOTE.replace(UUID, RUN))
    assert first.key != second.key
    assert job_name(first.key, 1) != job_name(second.key, 1)


@pytest.mark.parametrize("outputs", [("model",), ()], ids=["artifact", "output file"])
@pytest.mark.parametrize("root", [LOCAL, *ITERATIONS], ids=["task", "first iteration", "second iteration"])
def test_kfp_local_has_no_uuid(root: str, outputs: tuple[str, ...]) -> None:
    found = Execution.of(argv(root, *outputs))
    assert found.key.startswith(f"kfp/{LOCAL_RUN}/")
    assert found.key.endswith("/train")
    assert (found.run, found.task, found.local, found.pipeline) == (LOCAL_RUN, "train", True, "retrain")


def test_with_kfp_local_directory_and_parameters_identify_an_execution() -> None:
    """Iterations of a ParallelFor differ in one or the other."""
    found = [execution(LOCAL, lr=0.1), execution(LOCAL, lr=0.2), *map(execution, ITERATIONS)]
    assert len({each.key for each in found}) == 4
    assert execution(LOCAL, lr=0.1).key == found[0].key


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
        execution(root)


def test_a_process_outside_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not a step of a pipeline"):
        Execution.of(["python"])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_an_executor_input_that_is_not_readable_is_refused(document: str) -> None:
    text = DOCUMENTS[document].decode("utf-8", "replace")
    with pytest.raises(ConfigurationError):
        Execution.of(["executor_main.py", "--executor_input", text])


@pytest.mark.parametrize(
    ("index", "tried", "verdict"),
    [(None, None, "retry"), ("0", 1, "retry"), ("1", 2, "verdict"), ("2", 3, "verdict")],
)
def test_only_on_retries_of_kfp_the_diagnosis_decides(
    index: str | None, tried: int | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KFP_RETRY_INDEX", raising=False)
    if index is not None:
        monkeypatch.setenv("KFP_RETRY_INDEX", index)
    found = execution(REMOTE)
    assert (found.tried, found.after_failure(user_errors=True)) == (tried, verdict)


def test_an_unknown_try_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_RETRY_INDEX", "x")
    assert execution(REMOTE).tried is None


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
        # KFP does not replace these inside a text, a list or a dict (driver/resolve.go).
        ({"model": f"file://{dsl.WORKSPACE_PATH_PLACEHOLDER}/model"}, {"model": "file:///kfp-workspace/model"}),
        ([f"--out=s3://m/{dsl.PIPELINE_JOB_ID_PLACEHOLDER}/x"], [f"--out=s3://m/{RUN}/x"]),
        (f"s3://m/{dsl.PIPELINE_TASK_NAME_PLACEHOLDER}", "s3://m/train"),
        (f"s3://m/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}", f"s3://m/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}"),
    ],
)
def test_values_are_restored_as_written_in_the_pipeline(given: Any, meant: Any) -> None:
    parameters = {"pipelinechannel--data-uri": "s3://data/x", "pipelinechannel--epochs": 8.0}
    got = execution(REMOTE, **parameters).plain(given)
    assert got == meant
    assert json.dumps(got) == json.dumps(meant), "2 and 2.0 are equal, but not the same text"


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
        ("s3://bucket/w/", LOCAL, f"s3://bucket/w/{LOCAL_RUN}/train/model"),
        ("s3://bucket/w", ITERATIONS[0], f"s3://bucket/w/{LOCAL_RUN}/for-loop-1-iteration-0/train/model"),
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
