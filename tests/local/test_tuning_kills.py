"""Launchers of a study that are killed at random times and run again, or run at once.

A campaign (`tests.campaigns`) of 200 kills. No trial is lost or run twice, and the trials are those of a search that
nothing disturbed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from tests import campaigns
from tests.local.conftest import Jobs
from tests.local.searches import Searches, study_of, undisturbed
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import eventually

from trainjob.tuning import Study

pytestmark = pytest.mark.timeout(1800)

KILLS = campaigns.runs(200, 20)
TRIALS = 6
PASSWORD = "p#ss/w@rd"


def tpe(seed: int, max_trials: int, startup: int) -> Study:
    sampler = {"name": "tpe", "seed": seed, "options": {"n_startup_trials": startup}}
    return Study.read(study_of(max_trials=max_trials, parallel=1, sampler=sampler))


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


@pytest.fixture
def searches(jobs: Jobs, tmp_path: Path) -> Searches:
    return Searches(jobs, tmp_path)


def wait_at_random(process: BaseProcess, searches: Searches, key: str, chance: random.Random) -> None:
    """Wait for a random time, or for an entry of the journal, however slow the machine is; or for the end."""
    before = searches.entries(key)
    if chance.random() < 0.3:
        process.join(chance.uniform(0.02, 1.5))
        return
    more, began = chance.randint(1, 5), time.monotonic()
    while process.exitcode is None and searches.entries(key) < before + more:
        assert time.monotonic() < began + 60
        process.join(0.002)
    process.join(chance.choice([0.0, chance.uniform(0, 0.1)]))


@pytest.mark.full
def test_a_killed_launcher_loses_and_doubles_no_trial(searches: Searches, record_property: campaigns.Record) -> None:
    campaigns.begin(record_property, KILLS)
    killed = number = 0
    while killed < KILLS:
        chance, number, key = random.Random(f"{campaigns.SEED}/{number}"), number + 1, f"study-{number}"
        study, before = tpe(number, TRIALS, 3), killed
        while killed < KILLS:
            process = searches.start(key, study)
            wait_at_random(process, searches, key, chance)
            if process.exitcode is not None:
                break
            kill(process)
            killed += 1
        searches.end(key, study)
        state, expected = searches.state(key), undisturbed(study)
        assert state.ended
        assert [trial.state for trial in state.trials] == ["complete"] * TRIALS
        assert [trial.parameters for trial in state.trials] == [parameters for parameters, _ in expected]
        assert [trial.value for trial in state.trials] == pytest.approx([value for _, value in expected])
        assert searches.count(key, TRIALS) == [1] * TRIALS
        campaigns.done(f"{key}: {killed - before} kills")


# ---------------------------------------------------------------- several launchers, and Optuna's storages


@pytest.fixture(
    params=["directory", *(pytest.param(name, marks=pytest.mark.full) for name in ("sqlite", "postgresql"))]
)
def stored(
    request: pytest.FixtureRequest, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Searches, str]]:
    """Searches, and the URL of the storage of their journals."""
    if request.param == "directory":
        yield Searches(jobs, tmp_path), ""
    elif request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/studies.db"
        yield Searches(jobs, tmp_path, lambda key: f"{url}#{key}"), url
    elif not PROGRAMS:
        pytest.skip("needs PostgreSQL (Debian: postgresql)")
    else:
        monkeypatch.setenv("DB_PASSWORD", PASSWORD)
        with PostgreSQL() as server:
            url = server.url.replace("postgres@", "postgres:$(DB_PASSWORD)@")
            journal, environment = (lambda key: f"{url}#{key}"), {"DB_PASSWORD": PASSWORD}
            yield Searches(jobs, tmp_path, journal, environment), server.url


def assert_each_trial_ran_once(searches: Searches, url: str, key: str, trials: int) -> None:
    """Also as Optuna shows them."""
    state = searches.state(key)
    assert state.ended
    assert [trial.state for trial in state.trials] == ["complete"] * trials
    assert searches.count(key, trials) == [1] * trials
    if not url:
        return
    shown = optuna.load_study(study_name=key, storage=url).trials
    # Launchers that added a trial at the same time left one for the next number.
    assert {trial.state for trial in shown[trials:]} <= {TrialState.WAITING}
    assert [
        (each.state, each.value, each.params, list(each.intermediate_values.items())) for each in shown[:trials]
    ] == [(TrialState.COMPLETE, trial.value, trial.parameters, trial.values) for trial in state.trials]


def kill_at(process: BaseProcess, searches: Searches, key: str, entries: int) -> None:
    """Kill a launcher once its journal has that many entries."""
    eventually(lambda: searches.entries(key) >= entries, 120)
    kill(process)


def test_launchers_at_once_and_killed_ones_are_one_study(stored: tuple[Searches, str]) -> None:
    """The journal is empty when two launchers begin."""
    searches, url = stored
    study = Study.read(study_of(max_trials=4))
    first, second = (searches.start("both", study) for _ in range(2))
    kill_at(first, searches, "both", 4)
    second.join(120)
    assert second.exitcode == 0
    assert_each_trial_ran_once(searches, url, "both", 4)

    study = tpe(1, max_trials=3, startup=2)
    for entries in (1, 4):
        kill_at(searches.start("killed", study), searches, "killed", entries)
    searches.end("killed", study)
    assert_each_trial_ran_once(searches, url, "killed", 3)
    assert [trial.parameters for trial in searches.state("killed").trials] == [each for each, _ in undisturbed(study)]
