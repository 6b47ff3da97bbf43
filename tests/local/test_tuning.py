"""Hyperparameter search with real trials on the local backend."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import TrainJobSpec
from trainjob.errors import StudyFailed
from trainjob.job import labels_of
from trainjob.tuning import Study, StudyResult, Trial, tune
from trainjob.tuning.journal import open_journal

pytestmark = pytest.mark.timeout(300)

SPACE = {"x": {"type": "float", "low": -2, "high": 2}, "n": {"type": "int", "low": 1, "high": 3}}
# The loss is (x - 1)^2 + n, which the trial approaches in five steps.
SCRIPT = """
import os, sys, time
from trainjob import progress
x, n = (float(os.environ["KUBEFLOW_TRAINER_OPT_" + name]) for name in ("X", "N"))
assert sys.argv[1:] == [f"--x={os.environ['KUBEFLOW_TRAINER_OPT_X']}"], sys.argv
for step in range(1, 6):
    progress.report(step=step, total_steps=5, metrics={"loss": (x - 1) ** 2 + n + 5 - step})
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
progress.report(outputs={"model": os.environ["TRAINJOB_OUTPUT_MODEL"]})
"""


class Searches:
    """Runs studies with the local backend."""

    def __init__(self, jobs: Jobs, directory: Path) -> None:
        self.jobs = jobs
        self.directory = directory
        self.script = directory / "trial.py"
        self.script.write_text(SCRIPT)
        self.seen: list[Sequence[Trial]] = []

    @property
    def template(self) -> dict[str, Any]:
        return {
            "runtime": "trainjob-step",
            "command": [sys.executable, str(self.script), "--x=$(KUBEFLOW_TRAINER_OPT_X)"],
            "outputs": {"model": (self.directory / "models").as_uri()},
        }

    def study(self, **fields: Any) -> Study:
        given = {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 4, "parallel": 2}
        return Study.read(given | fields)

    def run(self, key: str = "study", template: dict[str, Any] | None = None, **fields: Any) -> StudyResult:
        study, client = self.study(**fields), self.jobs.client
        spec = TrainJobSpec.parse(template or self.template)
        with open_journal((self.directory / "journal" / key).as_uri()) as journal:
            return client.call(
                lambda: tune(
                    client.backend,
                    study,
                    spec,
                    key,
                    journal,
                    namespace=client.namespace,
                    on_change=lambda trials: self.seen.append(list(trials)),
                )
            )

    def count(self, key: str, number: int) -> int:
        """Number of jobs of a trial."""
        client = self.jobs.client
        return len(client.call(lambda: client.backend.find(client.namespace, labels_of(f"{key}/{number}"))))


@pytest.fixture
def searches(jobs: Jobs, tmp_path: Path) -> Searches:
    return Searches(jobs, tmp_path)


def test_a_study_finds_the_best_trial(searches: Searches) -> None:
    result = searches.run(max_trials=6)
    assert [trial.state for trial in result.trials] == ["complete"] * 6
    assert result.best.value == min(trial.value for trial in result.trials if trial.value is not None)
    assert result.reason == "max_trials of 6 is reached"
    for trial in result.trials:
        x, n = float(trial.parameters["x"]), int(trial.parameters["n"])
        assert trial.value == pytest.approx((x - 1) ** 2 + n, abs=1e-3)
        assert trial.outputs == {"model": (searches.directory / "models" / str(trial.number)).as_uri()}
        assert [step for step, _ in trial.values][-1] == 5
        assert searches.count("study", trial.number) == 1
    assert json.loads(json.dumps(result.as_dict()))["best"]["number"] == result.best.number
    assert max(len([trial for trial in trials if trial.state == "running"]) for trials in searches.seen) == 2


def test_a_finished_study_is_not_run_again(searches: Searches) -> None:
    first = searches.run()
    assert searches.run() == first
    assert [searches.count("study", number) for number in range(4)] == [1] * 4


def test_a_study_is_continued_with_more_trials(searches: Searches) -> None:
    first = searches.run(max_trials=2)
    more = searches.run(max_trials=5, parallel=3)
    assert more.trials[:2] == first.trials
    assert len(more.trials) == 5


def test_a_pruned_trial_is_cancelled_within_seconds(searches: Searches) -> None:
    """The threshold prunes trials whose first values are high; they would last for a minute."""
    template = searches.template | {"env": {"STEP_SECONDS": "12"}}
    started = time.monotonic()
    with pytest.raises(StudyFailed, match="no trial of study study has completed"):
        searches.run(
            template=template,
            max_trials=2,
            pruner={"name": "threshold", "options": {"upper": 0.1, "n_warmup_steps": 0}},
        )
    assert time.monotonic() - started < 20
    trials = searches.seen[-1]
    assert [trial.state for trial in trials] == ["pruned", "pruned"]
    assert all(trial.value is not None and trial.value > 0.1 for trial in trials)
    client = searches.jobs.client
    for ref in [client.find(trial.job) for trial in trials]:
        eventually(lambda ref=ref: client.call(lambda: client.backend.stopped(ref)))  # type: ignore[misc]


def test_failed_trials_do_not_fail_the_study(searches: Searches) -> None:
    searches.script.write_text(SCRIPT.replace("for step", "if n == 2: raise SystemExit(3)\nfor step"))
    result = searches.run(space={"x": SPACE["x"], "n": {"type": "int", "low": 1, "high": 2}}, max_trials=6)
    failed = [trial for trial in result.trials if trial.state == "failed"]
    assert failed
    assert {trial.parameters["n"] for trial in failed} == {2}
    assert failed[0].reason == "node-0 exited with code 3"
    assert result.best.parameters["n"] == 1


def test_of_several_ranks_that_report_the_first_one_counts(searches: Searches) -> None:
    searches.script.write_text(
        "import os\nfrom trainjob import progress\nrank = int(os.environ['JOB_COMPLETION_INDEX'])\n"
        "progress.report(metrics={'loss': rank + float(os.environ['KUBEFLOW_TRAINER_OPT_X'])})\n"
    )
    result = searches.run(template=searches.template | {"num_nodes": 2}, max_trials=2)
    assert [trial.value for trial in result.trials] == [trial.parameters["x"] for trial in result.trials]


def test_the_study_ends_at_a_value(searches: Searches) -> None:
    template = searches.template | {"env": {"STEP_SECONDS": "0.1"}}
    result = searches.run(template=template, max_trials=50, stop_at=100.0)
    assert result.reason == "loss has reached 100"
    assert len(result.trials) <= 3
    assert {trial.state for trial in result.trials} <= {"complete", "stopped"}


def test_limits_of_failures_and_time(searches: Searches) -> None:
    searches.script.write_text("raise SystemExit(1)")
    with pytest.raises(StudyFailed, match="2 trials have failed, more than max_failed_trials"):
        searches.run("failures", max_trials=50, max_failed_trials=1, parallel=1)
    searches.script.write_text(SCRIPT)
    result = searches.run("time", max_trials=50, max_seconds=3, parallel=1)
    assert result.reason == "max_seconds of 3.0 have passed"
    assert 1 <= len(result.trials) < 50


def test_a_grid_ends_by_itself(searches: Searches) -> None:
    space = {"x": {"type": "categorical", "choices": [0.5, 1]}, "n": SPACE["n"]}
    result = searches.run(space=space, sampler={"name": "grid"}, max_trials=50, parallel=3)
    assert len({json.dumps(trial.parameters, sort_keys=True) for trial in result.trials}) == 6
    assert result.reason == "the grid has no further combination"
    assert result.best.parameters == {"x": 1, "n": 1}


def test_conditional_parameters(searches: Searches) -> None:
    searches.script.write_text(
        "import os, sys\nfrom trainjob import progress\n"
        "momentum = os.environ.get('KUBEFLOW_TRAINER_OPT_MOMENTUM')\n"
        "assert (momentum is None) == (os.environ['KUBEFLOW_TRAINER_OPT_OPTIMIZER'] == 'adam')\n"
        "assert len(sys.argv) == 2 + (momentum is not None), sys.argv\n"
        "progress.report(metrics={'loss': float(momentum or 0.5)})"
    )
    space = {
        "momentum": {"type": "float", "low": 0, "high": 1, "when": {"optimizer": "sgd"}},
        "optimizer": {"type": "categorical", "choices": ["sgd", "adam"]},
    }
    words = ["--optimizer=$(KUBEFLOW_TRAINER_OPT_OPTIMIZER)", "--momentum=$(KUBEFLOW_TRAINER_OPT_MOMENTUM)"]
    template = searches.template | {"command": [sys.executable, str(searches.script), *words]}
    result = searches.run(template=template, space=space, max_trials=8, sampler={"name": "random"})
    assert [trial.state for trial in result.trials] == ["complete"] * 8
    assert {len(trial.parameters) for trial in result.trials} == {1, 2}
