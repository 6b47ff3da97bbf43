"""The journal of a study: in a directory, or in an Optuna storage on SQLite; `tests.local` has PostgreSQL."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from tests.trees import tree

from trainjob.errors import ConfigurationError, CorruptData, StoreUnavailable, TrainJobError
from trainjob.tuning import read_study
from trainjob.tuning.journal import journal_location, open_journal
from trainjob.tuning.trials import Journal

pytestmark = pytest.mark.timeout(120)

SPACE = {
    "x": {"type": "float", "low": 0.001, "high": 1, "log": True},
    "n": {"type": "int", "low": 1, "high": 9, "step": 2},
    "optimizer": {"type": "categorical", "choices": ["sgd", "adam", True]},
    "momentum": {"type": "float", "low": 0, "high": 1, "when": {"optimizer": "sgd"}},
}
HEADER: dict[str, Any] = {
    "format": 1,
    "study": {"space": SPACE, "metric": "loss", "direction": "minimize"},
    "template": {"command": ["train"]},
    "key": "digits/search",
    "namespace": "ns",
    "began": 1.0,
}
SECRET = "pa#ss/w@rd"


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with Optuna's tables, which take a second to create."""
    path = tmp_path_factory.mktemp("optuna") / "empty.db"
    with open_journal(f"sqlite:///{path}#none"):
        pass
    return path.read_bytes()


@pytest.fixture
def url(tmp_path: Path, tables: bytes) -> str:
    (tmp_path / "studies.db").write_bytes(tables)
    return f"sqlite:///{tmp_path}/studies.db"


@pytest.fixture
def journal(url: str) -> Iterator[Journal]:
    with open_journal(f"{url}#a") as opened:
        yield opened


@pytest.fixture
def shown(url: str) -> Iterator[RDBStorage]:
    """The database as Optuna's own programs open it."""
    storage = RDBStorage(url)
    yield storage
    storage.remove_session()
    storage.engine.dispose()


def ended(state: str, value: float | None, *values: float, **more: Any) -> dict[str, Any]:
    return {"state": state, "value": value, "values": [[i, each] for i, each in enumerate(values, 1)], **more}


@pytest.fixture(params=["directory", "database"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal of either kind."""
    if request.param == "directory":
        return (tmp_path / "study").as_uri()
    return f"{request.getfixturevalue('url')}#a"


def test_of_6_writers_one_creates_an_entry(uri: str) -> None:
    ready = threading.Barrier(6)

    def write(number: int) -> dict[str, Any]:
        with open_journal(uri) as journal:
            ready.wait(60)
            return journal.create("asked/00000", {"parameters": {"x": number}})

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(write, range(6)))
    assert all(each == found[0] for each in found)
    with open_journal(uri) as again:
        assert again.all("asked") == {"00000": found[0]}


def test_a_journal_reads_what_another_one_wrote(uri: str) -> None:
    with open_journal(uri) as journal, open_journal(uri) as other:
        assert (other.read("study"), other.all("asked")) == (None, {})
        assert journal.create("study", HEADER) == HEADER
        assert other.create("study", {**HEADER, "began": 2.0}) == HEADER
        journal.create("asked/00000", {"parameters": {"x": 0.5}})
        assert other.all("asked") == {"00000": {"parameters": {"x": 0.5}}}
        assert other.create("asked/00000", {"parameters": {"x": 0.7}}) == {"parameters": {"x": 0.5}}


def test_other_studies_and_other_files_are_left_out(journal: Journal, url: str, tmp_path: Path) -> None:
    journal.create("study", HEADER)
    with open_journal(f"{url}#b") as another:
        assert (another.read("study"), another.all("asked")) == (None, {})
    tree(tmp_path, {"asked/00001.json.part": b"{", "notes.txt": b"mine"})
    with open_journal(tmp_path.as_uri()) as files:
        files.create("asked/00000", {"parameters": {}})
        assert sorted(files.all("asked")) == ["00000"]


# ---------------------------------------------------------------- in a directory


GOOD: dict[str, dict[str, Any]] = {
    "study": HEADER,
    "asked/00000": {"parameters": {"x": 1}},
    "ended/00000": {"state": "complete", "value": 1.0, "values": [[1, 1.0]]},
}


@contextmanager
def good_journal(folder: Path) -> Iterator[Journal]:
    with open_journal(folder.as_uri()) as journal:
        for name, value in GOOD.items():
            journal.create(name, value)
        yield journal


ASKED, ENDED = "asked/00000", "ended/00000"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((ASKED, text) for text in ("", "{", '{"parameters": {"x": 1}', "[]", "null", '{"a": NaN}', "\xff")),
        (ASKED, '{"a": 1, "a": 2}'),
        ("study", '{"format": 1, "study": {"metric": "loss"}}'),
        ("study", '{"format": 1, "study": 5, "key": "k", "namespace": "ns"}'),
        *((ASKED, text) for text in ("{}", '{"parameters": [1]}', '{"parameters": {"x": [1]}}')),
        *((ENDED, text) for text in ('{"state": "fine"}', '{"state": "running"}')),
        (ENDED, '{"state": "complete", "value": "low"}'),
        *((ENDED, f'{{"state": "complete", "value": 1.0, "values": {values}}}') for values in ("[1]", "7")),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    given = {f"{each}.json": json.dumps(value).encode() for each, value in GOOD.items()}
    tree(tmp_path, given | {f"{name}.json": text.encode("latin-1")})
    named = rf"{name}.json .*is damaged.*remove the file to repeat what it records, or use another key"
    with open_journal(tmp_path.as_uri()) as journal, pytest.raises(CorruptData, match=named):
        read_study(journal)


def test_a_study_is_read(tmp_path: Path) -> None:
    with good_journal(tmp_path) as journal:
        journal.create("asked/00002", {"parameters": {"x": 2}})  # 1 is missing: it is asked for again
        journal.create("launches/00000", {"max_trials": 3})
        state = read_study(journal)
    assert state is not None
    assert [(trial.number, trial.state, trial.value) for trial in state.trials] == [(0, "complete", 1.0)]
    assert state.fields == {**HEADER["study"], "max_trials": 3}
    assert not state.ended


@pytest.mark.parametrize(("trials", "ended"), [(3, True), (4, False)])
def test_a_study_has_ended_with_the_limits_of_its_latest_launch(tmp_path: Path, trials: int, ended: bool) -> None:
    """The later one of two launchers at once was killed, or one that was to continue with more trials."""
    with good_journal(tmp_path) as journal:
        journal.create("launches/00000", {"max_trials": 3})
        journal.create("launches/00001", {"max_trials": trials})
        journal.create("ends/00000", {"reason": "max_trials of 3 is reached"})
        state = read_study(journal)
    assert state is not None
    assert (state.ended, state.reason) == (ended, "max_trials of 3 is reached" if ended else "")


@pytest.mark.parametrize("uri", ["hf://models/me/model", "https://example.com/x", "models:/x/1"])
def test_a_place_that_cannot_hold_a_journal_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    with pytest.raises(TrainJobError) as caught, open_journal(uri) as journal:
        journal.create("study", {})
    assert isinstance(caught.value, ConfigurationError) or "write" in str(caught.value)


# ---------------------------------------------------------------- in a database


def test_optuna_shows_the_study_as_its_own(journal: Journal, url: str, shown: RDBStorage) -> None:
    journal.create("study", HEADER)
    journal.create("launches/00000", {"max_trials": 5})
    adam = [{"x": x, "n": n, "optimizer": "adam"} for x, n in ((0.2, 9), (0.3, 5), (0.4, 7))]
    sgd = {"x": 0.01, "n": 3, "optimizer": "sgd", "momentum": 0.5}
    asked = [sgd, {"x": 0.1, "n": 1, "optimizer": True}, *adam]
    for number, parameters in enumerate(asked):
        journal.create(f"asked/{number:05}", {"parameters": parameters})
    journal.create("ended/00003", ended("failed", None, reason="node-0 exited with code 3", job="j-3"))
    journal.create("ended/00001", ended("pruned", 3.0, 4.0, 3.0, reason="worse than other trials"))
    journal.create("ended/00000", ended("complete", 0.5, 2.0, 1.0, metrics={"loss": 0.5}, outputs={"model": "s3://m"}))
    journal.create("ended/00004", ended("stopped", 0.7, 0.7))
    journal.create("ends/00000", {"reason": "max_trials of 5 is reached"})
    study = optuna.load_study(study_name="digits/search", storage=shown)
    assert (study.best_trial.number, study.best_value, study.best_params) == (0, 0.5, asked[0])
    assert study.metric_names == ["loss"]
    trials = study.trials
    assert [trial.params for trial in trials] == asked
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL]
    assert [trial.state for trial in trials] == states
    assert [trial.value for trial in trials] == [0.5, 3.0, None, None, None]
    assert [trial.intermediate_values for trial in trials] == [{1: 2.0, 2: 1.0}, {1: 4.0, 2: 3.0}, {}, {}, {1: 0.7}]
    assert trials[0].distributions == {
        "x": FloatDistribution(0.001, 1, log=True),
        "n": IntDistribution(1, 9, step=2),
        "optimizer": CategoricalDistribution(["sgd", "adam", True]),
        "momentum": FloatDistribution(0, 1),
    }
    assert trials[0].user_attrs == {"trainjob.metrics": {"loss": 0.5}, "trainjob.outputs": {"model": "s3://m"}}
    assert trials[3].user_attrs == {"trainjob.reason": "node-0 exited with code 3", "trainjob.job": "j-3"}
    with open_journal(f"{url}#a") as other:
        state = read_study(other)
    assert state is not None
    assert [each.state for each in state.trials] == ["complete", "pruned", "running", "failed", "stopped"]
    assert state.ended


def test_the_next_launch_writes_what_a_killed_one_did_not(
    url: str, monkeypatch: pytest.MonkeyPatch, shown: RDBStorage
) -> None:
    """The first launcher writes its journal, and nothing for people."""
    with monkeypatch.context() as patched, open_journal(f"{url}#a") as killed:
        patched.setattr("trainjob.tuning.storage._Shown.write", lambda *_: None)
        killed.create("study", HEADER)
        for number in range(3):
            killed.create(f"asked/{number:05}", {"parameters": {"x": 0.1, "n": 1, "optimizer": "adam"}})
        killed.create("ended/00001", ended("complete", 1.0, 1.0))
    assert optuna.load_study(study_name="digits/search", storage=shown).trials == []
    with open_journal(f"{url}#a") as first, open_journal(f"{url}#a") as second:
        for each in (first, second):
            each.create("study", HEADER)
            each.create("launches/00001", {})
        first.create("ended/00000", ended("complete", 2.0))
        second.create("ended/00002", ended("complete", 3.0))
        first.create("ends/00001", {})
    study = optuna.load_study(study_name="digits/search", storage=shown)
    assert [trial.value for trial in study.trials if trial.state is not TrialState.WAITING] == [2.0, 1.0, 3.0]


def test_a_study_that_a_person_removed_from_the_dashboard_is_written_again(
    journal: Journal, url: str, caplog: pytest.LogCaptureFixture, shown: RDBStorage
) -> None:
    journal.create("study", HEADER)
    journal.create("asked/00000", {"parameters": {"x": 0.1, "n": 1, "optimizer": "adam"}})
    optuna.delete_study(study_name="digits/search", storage=shown)
    journal.create("ended/00000", ended("complete", 2.0))
    with caplog.at_level(logging.WARNING, "trainjob"):
        journal.create("ends/00000", {})
    assert "misses trials" in caplog.text
    with open_journal(f"{url}#a") as again:
        again.create("study", HEADER)
        again.create("ends/00000", {})
    assert optuna.load_study(study_name="digits/search", storage=shown).best_value == 2.0


@pytest.mark.parametrize("number", range(10))
def test_another_launcher_may_begin_the_study_between_any_two_requests(
    journal: Journal, url: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It also adds its first trial."""
    requests = iter(range(1000))
    served = {
        name: getattr(RDBStorage, name) for name in vars(RDBStorage) if name.startswith(("get_", "create_", "set_"))
    }

    def begin() -> None:
        with open_journal(f"{url}#a") as other:
            other.create("study", HEADER)
            other.create("asked/00000", {"parameters": {"x": 0.5, "n": 1, "optimizer": True}})

    def replaced(name: str) -> Any:
        def request(storage: RDBStorage, *given: Any, **named: Any) -> Any:
            result = served[name](storage, *given, **named)
            if next(requests) == number:
                begin()
            return result

        return request

    for name in served:
        monkeypatch.setattr(RDBStorage, name, replaced(name))
    assert journal.create("study", HEADER) == HEADER
    assert next(requests) > number, "the other launcher has begun"


def test_another_study_with_that_name_is_refused(journal: Journal, shown: RDBStorage) -> None:
    own = optuna.create_study(study_name="digits/search", storage=shown)
    own.optimize(lambda trial: trial.suggest_float("y", 0, 1), n_trials=1)
    with pytest.raises(ConfigurationError, match="has another study with the name digits/search; use another key"):
        journal.create("study", HEADER)
    assert own.user_attrs == {}
    assert journal.read("study") is None


def test_a_journal_that_was_removed_or_changed_is_refused(journal: Journal, url: str, shown: RDBStorage) -> None:
    journal.create("study", HEADER)
    database = url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE trial_user_attributes SET value_json = '[]' WHERE key = 'value'")
    with open_journal(f"{url}#a") as other, pytest.raises(CorruptData, match="trial 0 of the Optuna study trainjob-jo"):
        other.all("asked")
    optuna.delete_study(study_name="trainjob-journal/a", storage=shown)
    with pytest.raises(CorruptData, match=f"{database}#a was removed while the study ran"):
        journal.all("asked")


def test_the_location_of_a_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:$(DB_PASSWORD)@db:5432/optuna"
    assert journal_location("abc", url) == f"{url}#abc"
    monkeypatch.setenv("TRAINJOB_WORKSPACE", url)
    assert journal_location("abc") == f"{url}#abc"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@db/optuna",
        "postgresql://db/optuna?user=me&password=hunter2",
        "postgresql://me:$(DB_PASSWORD)hunter2@db/optuna",
    ],
)
def test_a_literal_password_is_refused(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"write its name in place of the password: postgresql.*\$\(DB_"
    ) as caught:
        journal_location("abc", url)
    with pytest.raises(ConfigurationError) as opened, open_journal(f"{url}#abc"):
        pass
    for error in (caught.value, opened.value):
        assert SECRET not in str(error)
        assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("uri", "error", "problem"),
    [
        ("sqlite:///x.db", ConfigurationError, "has no name of a study; write sqlite:///x.db#name"),
        ("sqlite://#abc", ConfigurationError, "is lost with its process; write sqlite:////"),
        ("sqlite:///:memory:#abc", ConfigurationError, "is lost with its process"),
        ("sqlite:////nonexistent/x.db#abc", StoreUnavailable, "sqlite:////nonexistent/x.db: unable to open database"),
        ("mysql+nosuchdriver://db/optuna#abc", ConfigurationError, "the driver of the database .* is not installed"),
        ("postgresql://db:port/optuna#abc", ConfigurationError, "is not the URL of a database, such as"),
        ("postgresql://me:$(UNSET_PASSWORD)@db/x#abc", ConfigurationError, "variable UNSET_PASSWORD, which is not set"),
        ("redis://db/0#abc", ConfigurationError, "redis:// is not a supported scheme"),
    ],
)
def test_a_url_that_cannot_hold_a_journal(uri: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem), open_journal(uri) as journal:
        journal.create("study", HEADER)
