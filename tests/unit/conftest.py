"""Fixtures of unit tests: the command line program, a cluster that it is connected to, and folders to copy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.trees import tree
from tests.unit.copied import FILES
from tests.unit.program import Program, exit_of

from trainjob.data import copy


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """Calls the program; returns its exit code, stdout and stderr."""
    return partial(exit_of, capsys)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DirectBackend:
    """A cluster in this process, which the program is connected to."""
    made = DirectBackend()
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: made)
    return made


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches look again at once."""
    monkeypatch.setattr("trainjob._jobs.launching._AGAIN", 0)
    monkeypatch.setattr("trainjob._jobs.fencing._POLL", 0)


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes are reported one by one, and a log without lines is complete at once."""
    monkeypatch.setattr("trainjob._backends.kubernetes.pod_watch._GROUP_SECONDS", 0.01)
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._EMPTY_SECONDS", 0.01)


# ---------------------------------------------------------------- copies between folders


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", FILES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def first(source: Path, tmp_path: Path) -> Path:
    """A copy of the source, which has a manifest."""
    copy(str(source), str(tmp_path / "first"))
    return tmp_path / "first"
