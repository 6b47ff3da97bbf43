"""Evaluate, gate and export in DAGs: real jobs, a real registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, TaskGroup
from tests.airflow.conftest import Run

from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.evaluation import ModelEvaluationOperator, ModelGateOperator

KEY = "airflow/x/dag/run/-1/export"
SCORED = {
    "namespace": "ns", "name": "evaluate-1", "uid": "u-2", "attempt": 1, "seconds": {}, "metrics": {"accuracy": 0.9},
    "outputs": {
        "uri": "file:///w/evaluation", "digest": "sha256:ee", "candidate": "sha256:cc", "champion": "1",
        "passed": True, "rule": "metrics.accuracy.min", "reason": "accuracy is 0.9; at least 0.2",
    },
}  # fmt: skip
FAILED = {**SCORED, "outputs": {**SCORED["outputs"], "passed": False}}  # type: ignore[dict-item]


def score(model: str, dataset: str) -> dict[str, Any]:
    """The last byte of the "model" is how many of ten examples it gets right."""
    from pathlib import Path

    right = Path(model, "model.safetensors").read_bytes()[-1]
    each = [int(number < right) for number, _ in enumerate(Path(dataset).read_text().split())]
    print("scored", right)
    return {"metrics": {"accuracy": sum(each) / len(each)}, "scores": {"accuracy": each}}


def model(path: Path, right: int) -> str:
    """A small, valid model."""
    path.mkdir(exist_ok=True)
    head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes([right]))
    (path / "config.json").write_text("{}")
    return str(path)


def evaluation(**fields: Any) -> ModelEvaluationOperator:
    given = {"candidate": "file:///m", "dataset": "file:///d", "target": "file:///e", "function": score}
    return ModelEvaluationOperator(task_id="evaluate", **{**given, **fields})


GATE = {"metrics": {"accuracy": {"min": 0.6}}}


def evaluating(directory: Path, right: int) -> DAG:
    """evaluate, gate, and what follows a gate."""
    test = directory / "test.txt"
    test.write_text("0 1 2 3 4 5 6 7 8 9\n")
    with DAG(f"evaluating_{right}") as dag:
        evaluate = ModelEvaluationOperator(
            task_id="evaluate",
            candidate=model(directory / f"model-{right}", right),
            dataset=test.as_uri(),
            target=f"{directory}/evaluation/{{{{ run_id }}}}",
            function=score,
            gate=GATE,
            outlets=[Asset("evaluated")],
        )
        ModelGateOperator(task_id="gate", evaluation=evaluate.output) >> EmptyOperator(task_id="export")
    return dag


def test_a_model_that_does_not_pass_ends_the_run(run: Run, tmp_path: Path) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    good = run(evaluating(tmp_path, 8))
    assert good.states == {"evaluate": "success", "gate": "success", "export": "success"}, good.log[-6000:]
    outputs = good.xcoms["evaluate"]["outputs"]
    assert (outputs["passed"], outputs["rule"], outputs["champion"]) == (True, "metrics.accuracy.min", "")
    assert outputs["reason"] in good.log
    assert "scored 8" in good.log
    assert good.xcoms["evaluate"]["metrics"] == {"accuracy": 0.8}
    assert (good.xcoms["gate"]["passed"], good.xcoms["gate"]["rule"]) == (True, outputs["rule"])
    with create_session() as session:
        events = session.execute(select(AssetEvent).where(AssetEvent.source_run_id == good.run_id)).scalars()
        extras = [(event.source_task_id, event.extra["passed"], event.extra["rule"]) for event in events]
    assert extras == [("evaluate", True, outputs["rule"])]

    bad = run(evaluating(tmp_path, 5))
    assert bad.states == {"evaluate": "success", "gate": "failed", "export": "upstream_failed"}
    error = bad.errors["gate"]
    assert isinstance(error, TrainJobFatal), "no retry"
    assert str(error).startswith("the gate did not pass: metrics.accuracy.min: accuracy")


def gated(evaluation: Any, **gate: Any) -> DAG:
    with DAG("gated") as dag:
        decide = ModelGateOperator(task_id="gate", evaluation=evaluation, **gate)
        with TaskGroup("release"):
            decide >> [EmptyOperator(task_id="one"), EmptyOperator(task_id="two")]
        decide >> EmptyOperator(task_id="export") >> EmptyOperator(task_id="deploy")
    return dag


def ended(run: Run, dag: DAG) -> str:
    """First letter of the state of each task after the gate."""
    done = run(dag)
    names = ("release.one", "release.two", "export", "deploy")
    return "".join(str(done.states.get(name))[:2] for name in names)


def test_the_verdict_skips_tasks(run: Run) -> None:
    done, skipped = "su", "sk"
    assert ended(run, gated(SCORED)) == done * 4
    assert ended(run, gated(FAILED, skip=True)) == skipped * 4
    assert ended(run, gated(SCORED, skip=True)) == done * 4
    assert ended(run, gated(FAILED, if_failed="release")) == done * 2 + skipped * 2
    assert ended(run, gated(SCORED, if_failed="release")) == skipped * 2 + done * 2
    assert ended(run, gated(SCORED, if_passed=["export"], skip=True)) == skipped * 2 + done * 2


NO_VERDICT = "task gate: evaluation has no verdict; set gate in the ModelEvaluationOperator"


@pytest.mark.parametrize(
    ("given", "branches", "problem"),
    [
        ({**SCORED, "outputs": {}}, {}, NO_VERDICT),
        ({**SCORED, "outputs": {"passed": "false"}}, {}, NO_VERDICT),
        ({}, {}, NO_VERDICT),
        (SCORED, {"if_passed": "deploy"}, "if_passed and if_failed must name tasks directly after gate; deploy is not"),
    ],
    ids=["no outputs", "text", "empty", "unknown branch"],
)
def test_a_gate_that_cannot_decide_fails(run: Run, given: Any, branches: dict[str, str], problem: str) -> None:
    error = run(gated(given, **branches)).errors["gate"]
    assert isinstance(error, TrainJobFatal)
    assert str(error) == problem


def export(**fields: Any) -> ModelExportOperator:
    given = {"source": "file:///m", "target": "s3://models", "name": "m", "evaluation": SCORED}
    return ModelExportOperator(task_id="t", **{**given, **fields})


def test_the_job_gets_the_function_and_the_rules() -> None:
    command = evaluation(gate=GATE, code={"revision": "c" * 40}).spec_fields(KEY)["command"]
    given = dict(word.removeprefix("--").split("=", 1) for word in command[4:])
    assert given["function"] == "score"
    assert "\ndef score(model: str, dataset: str)" in given["function-source"]
    assert json.loads(given["gate"]) == GATE
    words = ["python", "evaluate.py", "{model}", "--price=$5"]
    command = evaluation(function=None, command=words).spec_fields(KEY)["command"]
    assert command[-5:] == ["--", "python", "evaluate.py", "{model}", "--price=$$5"]


def test_an_export_takes_the_evaluation_of_an_xcom() -> None:
    made = export(metrics={**SCORED, "uid": "u-1", "metrics": {"accuracy": 0.7}}).options(KEY)
    assert made["evaluation"] == "file:///w/evaluation"
    assert made["export_id"] == f"{KEY}/u-1/sha256:ee", "another evaluation is another export"
    assert made["provenance"]["trainjob"]["uid"] == "u-1"
    assert export().options(KEY)["metrics"] == {"accuracy": 0.9}
    located = export(evaluation="s3://w/e").options(KEY)
    assert (located["evaluation"], located["export_id"]) == ("s3://w/e", KEY)
    assert export(export_id="mine").options(KEY)["export_id"] == "mine"
