"""The journal of a study in a directory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from trainjob.errors import ConfigurationError, CorruptData, TrainJobError
from trainjob.tuning import read_study
from trainjob.tuning.journal import open_journal


def _create(uri: str, count: int) -> list[dict[str, Any]]:
    """Create one file by so many writers at once; returns what each of them got."""
    ready, found = threading.Barrier(count), dict[int, dict[str, Any]]()

    def write(number: int) -> None:
        with open_journal(uri) as journal:
            ready.wait()
            found[number] = journal.create("asked/00000", {"parameters": {"x": number}})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(count)]


def test_of_20_writers_one_creates_a_file(tmp_path: Path) -> None:
    found = _create((tmp_path / "study").as_uri(), 20)
    assert len(found) == 20
    assert all(each == found[0] for each in found)
    assert sorted(path.name for path in (tmp_path / "study" / "asked").iterdir()) == ["00000.json"]


def test_a_journal_reads_what_another_one_wrote(tmp_path: Path) -> None:
    uri = (tmp_path / "study").as_uri()
    with open_journal(uri) as one, open_journal(uri) as two:
        assert two.read("study") is None
        assert two.all("asked") == {}
        assert one.create("study", {"a": 1}) == {"a": 1}
        assert two.create("study", {"a": 2}) == {"a": 1}
        one.create("asked/00000", {"parameters": {}})
        one.create("asked/00001", {"parameters": {}})
        assert sorted(two.all("asked")) == ["00000", "00001"]
        (tmp_path / "study" / "asked" / "00001.json.part").write_text("{")
        (tmp_path / "study" / "notes.txt").write_text("mine")
        assert sorted(two.all("asked")) == ["00000", "00001"]


@pytest.mark.parametrize(
    "text", ["", "{", '{"parameters": {"x": 1}', "[]", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "\xff"]
)
def test_a_file_that_is_cut_or_damaged_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "00000.json").write_text(text, encoding="latin-1")
    with open_journal(tmp_path.as_uri()) as journal, pytest.raises(CorruptData) as caught:
        journal.all("asked")
    assert "asked/00000.json is damaged" in str(caught.value)
    assert "remove the file to repeat what it records, or use another key" in str(caught.value)


GOOD: dict[str, dict[str, Any]] = {
    "study": {"format": 1, "study": {"metric": "loss"}, "template": {}, "key": "k", "namespace": "ns", "began": 1.0},
    "asked/00000": {"parameters": {"x": 1}},
    "ended/00000": {"state": "complete", "value": 1.0, "values": [[1, 1.0]]},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("study", {"format": 1, "study": {"metric": "loss"}}),
        ("study", {"format": 1, "study": 5, "key": "k", "namespace": "ns"}),
        ("asked/00000", {}),
        ("asked/00000", {"parameters": [1]}),
        ("asked/00000", {"parameters": {"x": [1]}}),
        ("ended/00000", {"state": "fine"}),
        ("ended/00000", {"state": "running"}),
        ("ended/00000", {"state": "complete", "value": "low"}),
        ("ended/00000", {"state": "complete", "value": 1.0, "values": [1]}),
        ("ended/00000", {"state": "complete", "value": 1.0, "values": 7}),
    ],
)
def test_a_file_with_other_content_is_named(tmp_path: Path, name: str, value: dict[str, Any]) -> None:
    with open_journal(tmp_path.as_uri()) as journal:
        for each, content in (GOOD | {name: value}).items():
            journal.create(each, content)
        with pytest.raises(CorruptData, match=rf"{name}.json in the journal of the study is damaged"):
            read_study(journal)


def test_a_study_is_read(tmp_path: Path) -> None:
    with open_journal(tmp_path.as_uri()) as journal:
        for name, value in GOOD.items():
            journal.create(name, value)
        journal.create("asked/00002", {"parameters": {"x": 2}})  # 1 is missing: it is asked for again
        journal.create("launches/00000", {"max_trials": 3})
        state = read_study(journal)
    assert state is not None
    assert [(trial.number, trial.state, trial.value) for trial in state.trials] == [(0, "complete", 1.0)]
    assert state.fields == {"metric": "loss", "max_trials": 3}
    assert not state.ended


@pytest.mark.parametrize(("trials", "ended"), [(3, True), (4, False)])
def test_a_study_has_ended_with_the_limits_of_its_latest_launch(tmp_path: Path, trials: int, ended: bool) -> None:
    """The later one of two launchers at once was killed, or one that was to continue with more trials."""
    with open_journal(tmp_path.as_uri()) as journal:
        for name, value in GOOD.items():
            journal.create(name, value)
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
