"""The component ``tune``: real studies on the local backend, in a step's process."""

# No `from __future__ import annotations`: KFP reads those of components as objects.
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kfp import dsl
from tests.fakes.model_registry import FakeRegistry
from tests.kfp.conftest import document_of
from tests.kfp.pipelines import compiled
from tests.processes import eventually, read_until, rest_of

from trainjob import Phase, registry
from trainjob.job import KEY
from trainjob.status import observe
from trainjob_kfp import export_model, tune
from trainjob_kfp.execution import Execution
from trainjob_kfp.studies import workspace_of

if TYPE_CHECKING:
    from tests.kfp.conftest import Steps

STUDY = {
    "space": {
        "x": {"type": "float", "low": -2.0, "high": 2.0},
        "kind": {"type": "categorical", "choices": ["a", "b"]},
        "n": {"type": "int", "low": 1.0, "high": 3.0, "when": {"kind": "a"}},
    },
    "metric": "loss",
    "direction": "minimize",
    "max_trials": 3.0,  # KFP passes numbers inside mappings as floats
    "parallel": 2.0,
}
# Fits y = x * t to one point by gradient descent: the loss that is left depends on the parameter.
SCRIPT = """
import os, pathlib, sys, time
from trainjob import progress
x, number = float(sys.argv[1]), os.environ["TRAINJOB_TRIAL"]
print("trial", number, "began with", *sys.argv[1:], flush=True)
gate = pathlib.Path(f"gate-{number}")
deadline = time.monotonic() + 60
while gate.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
weight = 0.0
for step in range(1, 4):
    weight -= 0.1 * 2 * (weight * x - 1) * x
    progress.report(step=step, total_steps=3, metrics={"loss": (weight * x - 1) ** 2})
target = pathlib.Path(os.environ["TRAINJOB_OUTPUT_MODEL"].removeprefix("file://"))
target.mkdir(parents=True, exist_ok=True)
head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
(target / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes([int(number)]))
"""
TEMPLATE = {
    "runtime": "trainjob-step",
    "command": ["python", "trial.py", "$(KUBEFLOW_TRAINER_OPT_X)", "n=$(KUBEFLOW_TRAINER_OPT_N)"],
}


@pytest.fixture(autouse=True)
def with_optuna(steps: "Steps") -> None:
    """As in a step image that was built with the extra ``tune``."""
    steps.python = sys.executable


def given(steps: "Steps", **changes: Any) -> dict[str, Any]:
    script = steps.directory / "trial.py"
    script.write_text(SCRIPT.replace('f"gate-{number}"', f"{str(steps.directory)!r}, f'gate-{{number}}'"))
    command = ["python", str(script), *TEMPLATE["command"][2:]]
    study = {**STUDY, "max_trials": changes.pop("max_trials", 3.0)}
    return {"study": study, **TEMPLATE, "command": command, **changes}


def keys(steps: "Steps") -> list[str]:
    """Keys of all trials' jobs: one of a trial that ran twice is there twice."""
    return sorted(job["metadata"]["annotations"][KEY].rpartition("/")[2] for job in steps.jobs())


def test_the_best_model_goes_on_as_any_model(steps: "Steps") -> None:
    ended = steps.run("tune", **given(steps))
    assert ended.code == 0, ended.log
    outputs = ended.output["parameterValues"]
    result, best = outputs["result"], outputs["result"]["best"]
    root = steps.artifact_root("tune")
    own = root / "model"
    assert outputs["model_uri"] == f"{own.as_uri()}/{best['number']}"
    assert (own / str(best["number"]) / "model.safetensors").read_bytes()[-1] == best["number"]

    assert result["counts"] == {"complete": 3}
    values = [each["value"] for each in result["trials"]]
    assert values == sorted(values)
    assert best["value"] == values[0] == best["metrics"]["loss"]
    journal = Path(result["journal"].removeprefix("file://"))
    assert journal.parent == root / "studies"
    assert {each.name for each in (journal / "ended").iterdir()} == {f"0000{number}.json" for number in range(3)}
    for number in range(3):
        assert f"trial {number} complete, loss" in ended.log
    assert f"best: trial {best['number']}, loss" in ended.log

    made = {name: each["artifacts"][0] for name, each in ended.output["artifacts"].items()}
    assert made["metrics"]["metadata"] == {"loss": best["value"], "trials": 3, "trials.complete": 3}
    metadata = made["model"]["metadata"]
    assert metadata["uri"] == outputs["model_uri"]
    assert (metadata["trial"], metadata["trainjob"]) == (best["number"], best["job"])
    assert metadata["parameter.x"] == best["parameters"]["x"]
    assert metadata["metric.loss"] == best["value"]
    document = document_of(Path(made["report"]["uri"]).read_text())
    assert (document["kind"], document["key"], len(document["trials"])) == ("study", result["key"], 3)

    with FakeRegistry() as fake:
        steps.environment["TRAINJOB_REGISTRY"] = f"kubeflow+{fake.url}"
        exported = steps.run("export_model", source=outputs["model_uri"], name="m", metrics=result, in_pod=True)
        assert exported.code == 0, exported.log
        (version,) = registry.connect(steps.environment["TRAINJOB_REGISTRY"]).list("m")
    assert version.metrics == {"loss": pytest.approx(best["value"])}
    (manifest,) = (steps.artifact_root("export_model") / "exported").rglob("provenance.json")
    definition = json.loads(manifest.read_text())["predicate"]["buildDefinition"]
    assert definition["internalParameters"]["trainjob"] == {"name": best["job"]}
    assert definition["externalParameters"]["study"] == {
        "key": result["key"],
        "trial": best["number"],
        "parameters": best["parameters"],
    }


def test_a_retry_after_a_kill_continues_the_study(steps: "Steps") -> None:
    for number in (1, 2):
        (steps.directory / f"gate-{number}").touch()
    arguments = given(steps)
    first = steps.start("tune", **arguments)
    read_until(first, "trial 2 running")  # so trial 0 has ended
    steps.signal(first, signal.SIGKILL)
    assert first.wait(60) != 0

    stopped = steps.run("cleanup", run_id=steps.artifact_root("tune").parts[-3])
    assert stopped.code == 0, stopped.log
    assert len(stopped.output["parameterValues"]["stopped"]) == 2, "trials have the label of their run"
    for number in (1, 2):
        (steps.directory / f"gate-{number}").unlink()
    steps.environment["KFP_RETRY_INDEX"] = "1"
    ended = steps.run("tune", **arguments)
    assert ended.code == 0, ended.log
    assert keys(steps) == ["0", "1", "2"], "no trial was launched twice"
    assert ended.output["parameterValues"]["result"]["counts"] == {"complete": 3}


@pytest.mark.parametrize(("action", "left"), [("suspend", Phase.SUSPENDED), ("cancel", Phase.CANCELLED)])
def test_terminate_stops_the_running_trials(steps: "Steps", action: str, left: Phase) -> None:
    for number in range(2):
        (steps.directory / f"gate-{number}").touch()
    arguments = given(steps, max_trials=2.0, on_kill_action=action)
    step = steps.start("tune", **arguments)
    read_until(step, "trial 1 running")
    steps.signal(step, signal.SIGTERM)
    log = rest_of(step)
    assert f"the trials were asked to stop ({action})" in log
    eventually(lambda: [observe(job).phase for job in steps.jobs()] == [left, left])
    (journal,) = steps.artifact_root("tune").glob("studies/*")
    assert len(list((journal / "asked").iterdir())) == 2
    assert not (journal / "ended").exists(), "a trial that was stopped has no outcome, so it runs again"


ANOTHER_RUN_CANNOT = ("outputs.model: is missing", "owned_by_run: cannot be combined with key", "workspace: is missing")


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({"key": "digits", "owned_by_run": True}, ANOTHER_RUN_CANNOT),
        (
            {"study": {**STUDY, "space": {"x": {"type": "float", "low": 5, "high": 1}}}},
            ("space.x: low is 5,",),
        ),
    ],
    ids=["a key of several runs", "a value that only the run knows"],
)
def test_a_study_that_cannot_run_is_refused(steps: "Steps", changes: dict[str, Any], problems: tuple[str, ...]) -> None:
    ended = steps.run("tune", **{**given(steps), **changes})
    assert (ended.code, steps.jobs()) == (1, [])
    assert "Traceback" not in ended.log
    assert [problem for problem in problems if problem not in ended.termination_message] == []


def test_with_a_key_another_run_continues_the_study(steps: "Steps") -> None:
    where = {
        "key": "digits/search",
        "workspace": (steps.directory / "w").as_uri(),
        "outputs": {"model": (steps.directory / "models").as_uri()},
    }
    first = steps.run("tune", **given(steps, max_trials=1.0, **where))
    more = steps.run("tune", **given(steps, max_trials=2.0, **where))
    assert (first.code, more.code) == (0, 0), more.log
    assert keys(steps) == ["0", "1"]


def test_the_journal_is_where_all_tries_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    execution = Execution("kfp/run/uuid/tune", "run", "tune")
    model = "minio://bucket/v2/artifacts/p/run/tune/uuid/model"
    monkeypatch.delenv("TRAINJOB_WORKSPACE", raising=False)
    assert workspace_of(execution, {"workspace": ""}, model) == "s3://bucket/v2/artifacts/p/run/tune/uuid"
    monkeypatch.setenv("TRAINJOB_WORKSPACE", "s3://team/w")
    assert workspace_of(execution, {"workspace": ""}, model) == "s3://team/w"
    assert workspace_of(execution, {"workspace": "s3://other"}, model) == "s3://other"


def test_the_outputs_are_inputs_of_export_model(tmp_path: Path) -> None:
    """A value of the study may be known only in the run."""

    @dsl.pipeline(name="wrapper")  # type: ignore[untyped-decorator]  # KFP has no types
    def wrapper(low: float = 0.1) -> None:
        tuned = tune(study={**STUDY, "space": {"x": {"type": "float", "low": low, "high": 1}}}, **TEMPLATE)
        export_model(source=tuned.outputs["model_uri"], name="m", metrics=tuned.outputs["result"])

    spec, _ = compiled(wrapper, tmp_path / "pipeline.yaml")
    taken = spec["root"]["dag"]["tasks"]["export-model"]["inputs"]["parameters"]
    assert {name: taken[name]["taskOutputParameter"]["outputParameterKey"] for name in ("source", "metrics")} == {
        "source": "model_uri",
        "metrics": "result",
    }
