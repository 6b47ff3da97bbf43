"""Fixtures of unit tests: the command line program, and a cluster that it is connected to."""

from __future__ import annotations

from functools import partial

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program, exit_of


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
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes are reported one by one, and a log without lines is complete at once."""
    monkeypatch.setattr("trainjob._backends.kubernetes.pod_informer._GROUP_SECONDS", 0.01)
    monkeypatch.setattr("trainjob._backends.kubernetes.pods._EMPTY_SECONDS", 0.01)
