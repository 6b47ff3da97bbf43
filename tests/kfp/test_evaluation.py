"""The component ``evaluate_model``, and ``export_model`` with an evaluation."""

# No `from __future__ import annotations`: KFP reads those of components as objects.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kfp import dsl
from tests.fakes.model_registry import FakeRegistry
from tests.kfp.pipelines import compiled

from trainjob import registry
from trainjob.data import export
from trainjob_kfp import evaluate_model, export_model, load
from trainjob_kfp.compile import COMPILED
from trainjob_kfp.runtime import _read_evaluation

if TYPE_CHECKING:
    from tests.kfp.conftest import Ended, Steps

GATE = {"metrics": {"accuracy": {"min_improvement": 0, "min": 0.2}}, "min_examples": 10}
# The last byte of the "model" is how many of ten examples it gets right.
SCRIPT = """
import json, pathlib, sys
model, dataset, scores = sys.argv[1:]
right = pathlib.Path(model, "model.safetensors").read_bytes()[-1]
each = [int(number < right) for number, _ in enumerate(pathlib.Path(dataset).read_text().split())]
found = {
    "metrics": {"accuracy": sum(each) / len(each)},
    "scores": {"accuracy": each},
    "confusion": {"labels": ["yes", "no"], "counts": [[right, 10 - right], [0, 0]]},
    "roc": {"false_positive_rate": [0, 0.5, 1], "true_positive_rate": [0, 0.8, 1], "threshold": [1, 0.5, 0]},
}
pathlib.Path(scores).write_text(json.dumps(found))
print("scored", right)
"""


def score(model: str, dataset: str) -> dict[str, Any]:
    """Scores of one model."""
    import pathlib

    del dataset
    return {"metrics": {"accuracy": pathlib.Path(model, "model.safetensors").read_bytes()[-1] / 10}, "examples": 10}


def model(steps: "Steps", right: int) -> str:
    path = steps.directory / f"model-{right}"
    path.mkdir(exist_ok=True)
    head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes([right]))
    return str(path)


def evaluate(steps: "Steps", right: int, **parameters: Any) -> "Ended":
    data = steps.directory / "test.txt"
    data.write_text("0 1 2 3 4 5 6 7 8 9\n")
    script = steps.directory / "score.py"
    script.write_text(SCRIPT)
    given = {
        "candidate": model(steps, right),
        "dataset": str(data),
        "champion": "models:/m@champion",
        "command": ["python", str(script), "{model}", "{dataset}", "{scores}"],
        "gate": {**GATE, "min_examples": 10.0},  # KFP passes numbers inside mappings as floats
        "target": str(steps.directory / f"evaluation-{right}"),
        "spec": {"labels": {"number": str(right)}},
    }
    # Each evaluation is an execution, which KFP gives a directory and a key.
    steps.environment["KFP_RETRY_INDEX"] = "0"
    return steps.run("evaluate_model", **{**given, **parameters})


def test_the_verdict_of_both_models_is_an_output(steps: "Steps") -> None:
    with FakeRegistry() as fake:
        steps.environment["TRAINJOB_REGISTRY"] = f"kubeflow+{fake.url}"
        records = registry.connect(steps.environment["TRAINJOB_REGISTRY"])
        models = str(steps.directory / "models")
        export(model(steps, 5), models, name="m", export_id="1", registry=records, alias="champion")
        ended = evaluate(steps, 8, target="")
    assert ended.code == 0, ended.log
    outputs = ended.output["parameterValues"]
    assert (outputs["passed"], outputs["rule"]) == (True, "metrics.accuracy.min_improvement")
    assert outputs["champion_version"] == "1"
    own = steps.artifact_root("evaluate_model") / "evaluated"
    assert outputs["evaluation"] == own.as_uri()
    assert json.loads((own / "evaluation.json").read_text())["decision"]["passed"] is True
    assert "scored 8" in ended.log
    assert "scored 5" in ended.log
    assert outputs["result"]["metrics"] == {"accuracy": 0.8}
    made = {name: each["artifacts"][0] for name, each in ended.output["artifacts"].items()}
    assert made["metrics"]["metadata"] == {"accuracy": 0.8, "champion.accuracy": 0.5}
    shown = made["classification"]["metadata"]
    assert shown["confusionMatrix"]["rows"] == [{"row": [8.0, 2.0]}, {"row": [0.0, 0.0]}]
    assert [each["confidenceThreshold"] for each in shown["confidenceMetrics"]] == [1.0, 0.5, 0.0]
    assert made["evaluated"]["metadata"]["passed"] is True
    assert made["evaluated"]["metadata"]["digest"] == outputs["digest"]
    page = Path(made["report"]["uri"]).read_text()
    assert outputs["result"]["name"] in page
    assert '"rule":"metrics.accuracy.min_improvement"' in page.replace('": ', '":')


def test_a_model_that_does_not_pass_is_no_error(steps: "Steps") -> None:
    ended = evaluate(steps, 1, champion="")
    assert ended.code == 0, ended.log
    outputs = ended.output["parameterValues"]
    assert (outputs["passed"], outputs["champion_version"]) == (False, "")
    assert outputs["reason"] == "accuracy is 0.1; at least 0.2"
    (evaluated,) = ended.output["artifacts"]["evaluated"]["artifacts"]
    reference = json.loads(Path(evaluated["uri"]).read_text())
    assert reference["uri"] == outputs["evaluation"] == (steps.directory / "evaluation-1").as_uri()


def test_a_function_evaluates(steps: "Steps") -> None:
    source = {"name": "score", "source": "def score(model, dataset):\n    return {'metrics': {'accuracy': 0.5}}\n"}
    ended = evaluate(steps, 5, command=[], function=source, champion="", gate={})
    assert ended.code == 0, ended.log
    outputs = ended.output["parameterValues"]
    assert (outputs["passed"], outputs["rule"]) == (False, ""), "no gate, no verdict"
    assert outputs["result"]["metrics"] == {"accuracy": 0.5}


def test_a_step_without_access_to_the_report_logs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _read_evaluation(f"file://{tmp_path}/none") == {}
    line = capsys.readouterr().out
    assert line.startswith(f"this step cannot read file://{tmp_path}/none, so the report and the artifact")


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"command": ["true"]}, "the evaluation of the candidate wrote no scores"),
        ({"gate": {"metrics": {"accuracy": {"minimum": 1}}}}, "gate.metrics.accuracy.minimum"),
        ({"spec": {"runtime": "x"}}, "set the parameter runtime instead"),
    ],
)
def test_a_failed_evaluation_fails_the_step(steps: "Steps", parameters: dict[str, Any], problem: str) -> None:
    ended = evaluate(steps, 5, champion="", **parameters)
    assert ended.code == 1
    assert problem in ended.termination_message


@pytest.mark.parametrize("loaded", [False, True])
def test_the_verdict_drives_a_condition(loaded: bool, tmp_path: Path) -> None:
    component = load(COMPILED / "evaluate_model.yaml") if loaded else evaluate_model

    @dsl.pipeline(name="conditional")  # type: ignore[untyped-decorator]  # KFP has no types
    def conditional(data: str, least: float) -> None:
        task = component(
            candidate=data,
            dataset=data,
            function=score,
            gate={"metrics": {"accuracy": {"min": least}}},
            code={"revision": data},
        )
        with dsl.If(task.outputs["passed"] == True):  # noqa: E712 - KFP builds a condition from the comparison
            export_model(source=data, name="m", evaluation=task.outputs["evaluation"], alias="champion")

    spec, _ = compiled(conditional, tmp_path / "conditional.yaml")
    tasks = spec["root"]["dag"]["tasks"]
    condition = tasks["condition-1"]["triggerPolicy"]["condition"]
    assert condition == "inputs.parameter_values['pipelinechannel--evaluate-model-passed'] == true"
    given = tasks["evaluate-model"]["inputs"]["parameters"]["function"]["runtimeValue"]["constant"]
    assert given["name"] == "score"
    assert given["source"].startswith("def score(model: str, dataset: str)")
