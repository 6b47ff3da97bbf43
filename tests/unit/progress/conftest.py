"""A reporter without a state, whose messages go to a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.progress.reports import ENVIRONMENT

from trainjob.progress import calls, reporter, reporting


@pytest.fixture(autouse=True)
def new_reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[reporter.Reporter]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    new = reporter.Reporter(calls.warn_once)
    monkeypatch.setattr(calls, "warned", set())
    monkeypatch.setattr(reporting, "_reporter", new)
    yield new

    def end() -> bool:
        return threading.Event().wait()

    # A thread that still retries would post to the next test's server. It cannot raise: pytest would report that.
    vars(new.poster).update(_send=end, _warn=lambda *_: None)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(path))
    return path
