"""Studies in an Optuna storage: two launchers at once, killed launchers, and what Optuna shows of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from tests.local.conftest import Jobs
from tests.local.forks import FORKS
from tests.local.test_tuning_kills import Launchers, launcher, undisturbed
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import eventually

from trainjob.tuning import Study
from trainjob.tuning.journal import open_journal

pytestmark = pytest.mark.timeout(600)

PASSWORD = "p#ss/w@rd"


def _launcher(*words: object) -> None:
    os.environ["DB_PASSWORD"] = PASSWORD
    launcher(*words)  # type: ignore[arg-type]


class StorageLaunchers(Launchers):
    """Starts launchers of studies in an Optuna storage.

    Attributes:
        url: URL of the storage.
    """

    url: str

    def start(self, key: str, study: Study) -> BaseProcess:
        words = (study.model_dump(), self.searches.template, key, self.journal(key), self.home)
        process = FORKS.Process(target=_launcher, args=words, daemon=True)
        process.start()
        return process

    def journal(self, key: str) -> str:
        return f"{self.url}#{key}"

    def kill(self, process: BaseProcess, key: str, entries: int) -> None:
        """Kill a launcher once its journal has that many entries."""
        with open_journal(self.journal(key)) as journal:
            folders = ("asked", "ended", "launches")
            eventually(lambda: sum(len(journal.all(folder)) for folder in folders) >= entries, 120)
        process.kill()
        process.join()

    def check(self, key: str, trials: int) -> list[optuna.trial.FrozenTrial]:
        """Check that no trial was lost or run twice, also as Optuna shows them; returns Optuna's trials."""
        state = self.state(key)
        assert state.ended
        assert [trial.state for trial in state.trials] == ["complete"] * trials
        assert [self.searches.count(key, number) for number in range(trials)] == [1] * trials
        study = optuna.load_study(study_name=key, storage=self.url.replace("$(DB_PASSWORD)", ""))
        # Launchers that added a trial at the same time left one for the next number.
        assert {trial.state for trial in study.trials[trials:]} <= {TrialState.WAITING}
        shown = study.trials[:trials]
        assert [(each.state, each.value, each.params) for each in shown] == [
            (TrialState.COMPLETE, trial.value, trial.parameters) for trial in state.trials
        ]
        assert [list(each.intermediate_values.items()) for each in shown] == [trial.values for trial in state.trials]
        return shown


@pytest.fixture(params=["sqlite", *(["postgresql"] if PROGRAMS else [])])
def launchers(
    request: pytest.FixtureRequest, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StorageLaunchers]:
    made = StorageLaunchers(jobs, tmp_path)
    if request.param == "sqlite":
        made.url = f"sqlite:///{tmp_path}/studies.db"
        yield made
        return
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)
    with PostgreSQL() as server:
        made.url = server.url.replace("postgres@", "postgres:$(DB_PASSWORD)@")
        yield made


@pytest.mark.full
def test_launchers_at_once_and_killed_ones_are_one_study(launchers: StorageLaunchers) -> None:
    """The database is empty when two launchers begin."""
    study = launchers.searches.study(max_trials=4, parallel=2)
    first, second = (launchers.start("both", study) for _ in range(2))
    launchers.kill(first, "both", 4)
    second.join(120)
    assert second.exitcode == 0
    launchers.check("both", 4)

    sampler = {"name": "tpe", "seed": 1, "options": {"n_startup_trials": 2}}
    study = launchers.searches.study(max_trials=3, parallel=1, sampler=sampler)
    for entries in (1, 4):
        launchers.kill(launchers.start("killed", study), "killed", entries)
    last = launchers.start("killed", study)
    last.join(120)
    assert last.exitcode == 0
    assert [trial.params for trial in launchers.check("killed", 3)] == [each for each, _ in undisturbed(study)]
