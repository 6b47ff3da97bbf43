"""Hyperparameter searches with real trials: in this process, and by launchers that can be killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.local.conftest import Jobs
from tests.local.forks import FORKS

from trainjob import TrainJobClient, TrainJobSpec
from trainjob.errors import SourceNotFound
from trainjob.job import labels_of
from trainjob.tuning import Study, StudyResult, StudyState, Trial, read_study, tune
from trainjob.tuning.journal import open_journal
from trainjob.tuning.sampling import Sampling

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


def loss(parameters: Mapping[str, Any]) -> float:
    """What `SCRIPT` reports in its last step."""
    return (float(parameters["x"]) - 1) ** 2 + float(parameters["n"])


def study_of(**fields: Any) -> dict[str, Any]:
    return {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 4, "parallel": 2} | fields


def template_of(directory: Path, seconds: float = 0) -> dict[str, Any]:
    """The TrainJob of a trial, whose script is written there."""
    script = directory / "trial.py"
    script.write_text(SCRIPT)
    return {
        "runtime": "trainjob-step",
        "command": [sys.executable, str(script), "--x=$(KUBEFLOW_TRAINER_OPT_X)"],
        "outputs": {"model": (directory / "models").as_uri()},
        "env": {"STEP_SECONDS": str(seconds)},
    }


def undisturbed(study: Study) -> list[tuple[Mapping[str, Any], float]]:
    """Parameters and values of the trials of a search by one launcher with one trial at a time."""
    sampling = Sampling(study)
    trials: list[tuple[Mapping[str, Any], float]] = []
    for number in range(study.max_trials):
        parameters = sampling.ask(number)
        trials.append((parameters, loss(parameters)))
        sampling.end(Trial(number, parameters, "complete", trials[-1][1]), {})
    return trials


class Searches:
    """Runs studies with the local backend.

    Args:
        jobs: For their trials.
        directory: For the script, the models and the journals.
        journal: URI of the journal of a key; by default in the directory.
        environment: Environment variables of launchers.
    """

    def __init__(
        self,
        jobs: Jobs,
        directory: Path,
        journal: Callable[[str], str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.jobs, self.directory, self._environment = jobs, directory, environment or {}
        self.journal = journal or (lambda key: (directory / "journal" / key).as_uri())
        self.template = template_of(directory)
        self.script = directory / "trial.py"
        self.seen: list[Sequence[Trial]] = []

    def run(self, key: str = "study", template: dict[str, Any] | None = None, **fields: Any) -> StudyResult:
        study, client = Study.read(study_of(**fields)), self.jobs.client
        spec, namespace = TrainJobSpec.parse(template or self.template), client.namespace

        def on_change(trials: Sequence[Trial]) -> None:
            self.seen.append(list(trials))

        with open_journal(self.journal(key)) as journal:
            return client.call(
                lambda: tune(client.backend, study, spec, key, journal, namespace=namespace, on_change=on_change)
            )

    def start(self, key: str, study: Study) -> BaseProcess:
        """Start a launcher."""
        environment = {**self._environment, "TRAINJOB_HOME": str(self.jobs.home)}
        words = (study.model_dump(), self.template, key, self.journal(key), environment)
        process = FORKS.Process(target=launcher, args=words, daemon=True)
        process.start()
        return process

    def end(self, key: str, study: Study) -> None:
        """Run a launcher to the end of the study."""
        process = self.start(key, study)
        process.join(120)
        assert process.exitcode == 0

    def entries(self, key: str) -> int:
        """Number of entries of the journal; 0 as long as it does not exist."""
        with suppress(SourceNotFound), open_journal(self.journal(key)) as journal:
            return sum(len(journal.all(folder)) for folder in ("asked", "ended", "launches"))
        return 0

    def state(self, key: str) -> StudyState:
        with open_journal(self.journal(key)) as journal:
            state = read_study(journal)
        assert state is not None
        return state

    def count(self, key: str, trials: int) -> list[int]:
        """Number of jobs of each trial."""
        client = self.jobs.client

        async def found() -> list[int]:
            labels = [labels_of(f"{key}/{number}") for number in range(trials)]
            return [len(await client.backend.find(client.namespace, each)) for each in labels]

        return client.call(found)


def launcher(
    study: dict[str, Any], template: dict[str, Any], key: str, journal: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    with TrainJobClient("local") as client, open_journal(journal) as opened:
        spec = TrainJobSpec.parse(template)
        client.call(lambda: tune(client.backend, Study.read(study), spec, key, opened, namespace=client.namespace))
