"""SIGKILL of the launcher of a study at random times and files, which is then run again; and two launchers at once.

A campaign (`tests.campaigns`) of 200 kills. No trial is lost or run twice, and the trials are those of a search that
nothing disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import campaigns
from tests.local.conftest import Jobs
from tests.local.forks import FORKS
from tests.local.test_tuning import SPACE, Searches
from tests.processes import eventually

from trainjob import Phase, TrainJobClient, TrainJobSpec
from trainjob.status import observe
from trainjob.tuning import Study, StudyState, Trial, read_study, tune
from trainjob.tuning.journal import open_journal
from trainjob.tuning.sampling import Sampling

pytestmark = pytest.mark.timeout(1800)

KILLS = campaigns.runs(200, 20)
TRIALS = 6


def launcher(study: dict[str, Any], template: dict[str, Any], key: str, journal: str, home: Path) -> None:
    os.environ["TRAINJOB_HOME"] = str(home)
    with TrainJobClient("local") as client, open_journal(journal) as opened:
        spec = TrainJobSpec.parse(template)
        client.call(lambda: tune(client.backend, Study.read(study), spec, key, opened, namespace=client.namespace))


def _loss(parameters: Mapping[str, Any]) -> float:
    """What `tests.local.test_tuning.SCRIPT` reports in its last step."""
    return float((float(parameters["x"]) - 1) ** 2 + float(parameters["n"]) + 5 - 5)


def undisturbed(study: Study) -> list[tuple[Mapping[str, Any], float]]:
    sampling = Sampling(study)
    trials: list[tuple[Mapping[str, Any], float]] = []
    for number in range(study.max_trials):
        parameters = sampling.ask(number)
        trials.append((parameters, _loss(parameters)))
        sampling.end(Trial(number, parameters, "complete", trials[-1][1]), {})
    return trials


class Launchers:
    """Starts launchers of studies."""

    def __init__(self, jobs: Jobs, directory: Path) -> None:
        self.searches = Searches(jobs, directory)
        self.home = jobs.home

    def start(self, key: str, study: Study) -> BaseProcess:
        words = (study.model_dump(), self.searches.template, key, self.journal(key), self.home)
        process = FORKS.Process(target=launcher, args=words, daemon=True)
        process.start()
        return process

    def journal(self, key: str) -> str:
        return (self.searches.directory / "journal" / key).as_uri()

    def files(self, key: str) -> int:
        return sum(1 for _ in (self.searches.directory / "journal" / key).rglob("*.json"))

    def state(self, key: str) -> StudyState:
        with open_journal(self.journal(key)) as journal:
            state = read_study(journal)
        assert state is not None
        return state


@pytest.fixture
def launchers(jobs: Jobs, tmp_path: Path) -> Launchers:
    return Launchers(jobs, tmp_path)


@pytest.mark.full
def test_a_killed_launcher_loses_and_doubles_no_trial(launchers: Launchers, record_property: campaigns.Record) -> None:
    campaigns.begin(record_property, KILLS)
    killed = number = 0
    while killed < KILLS:
        rng, number, key = random.Random(f"{campaigns.SEED}/{number}"), number + 1, f"study-{number}"
        sampler = {"name": "tpe", "seed": number, "options": {"n_startup_trials": 3}}
        study = launchers.searches.study(space=SPACE, max_trials=TRIALS, parallel=1, sampler=sampler)
        here = 0
        while True:
            files = launchers.files(key)
            process = launchers.start(key, study)
            if killed == KILLS:
                process.join(120)
            elif rng.random() < 0.3:
                process.join(rng.uniform(0.02, 1.5))
            else:  # at a file of the journal, however slow the machine is
                more, began = rng.randint(1, 5), time.monotonic()
                while process.exitcode is None and launchers.files(key) < files + more:
                    assert time.monotonic() < began + 60
                    process.join(0.002)
                process.join(rng.choice([0.0, rng.uniform(0, 0.1)]))
            if process.exitcode is not None:
                break
            assert killed < KILLS, "the last launcher does not end"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed, here = killed + 1, here + 1
        assert process.exitcode == 0
        state = launchers.state(key)
        expected = undisturbed(study)
        assert [trial.state for trial in state.trials] == ["complete"] * TRIALS
        assert [trial.parameters for trial in state.trials] == [parameters for parameters, _ in expected]
        assert [trial.value for trial in state.trials] == pytest.approx([value for _, value in expected])
        assert state.ended
        assert [launchers.searches.count(key, trial) for trial in range(TRIALS)] == [1] * TRIALS
        campaigns.done(f"{key}: {here} kills")


def test_two_launchers_at_once_are_one_study(launchers: Launchers) -> None:
    study = launchers.searches.study(max_trials=5, parallel=2)
    both = [launchers.start("both", study) for _ in range(2)]
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert [trial.state for trial in launchers.state("both").trials] == ["complete"] * 5
    assert [launchers.searches.count("both", number) for number in range(5)] == [1] * 5


def test_trials_keep_running_without_their_launcher(launchers: Launchers) -> None:
    """The next launcher finds the results of those that ended meanwhile."""
    study = launchers.searches.study(max_trials=2, parallel=2)
    process = launchers.start("orphans", study)
    client = launchers.searches.jobs.client

    def begun() -> list[bool]:
        """Of each trial. One whose launcher dies before it starts the ranks waits for the next launcher."""
        phases = [observe(job).phase for job in client.list()]
        return [phase is Phase.RUNNING or phase.terminal for phase in phases]

    eventually(lambda: begun() == [True, True])
    assert process.pid is not None
    psutil.Process(process.pid).kill()
    process.join()
    eventually(lambda: all(job["status"].get("conditions") for job in client.list()), 60)
    began = time.monotonic()
    again = launchers.start("orphans", study)
    again.join(60)
    assert again.exitcode == 0
    assert time.monotonic() - began < 30
    assert [trial.state for trial in launchers.state("orphans").trials] == ["complete"] * 2
    assert [launchers.searches.count("orphans", number) for number in range(2)] == [1, 1]
