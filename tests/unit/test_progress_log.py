"""The log lines for changes of a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainjob import Diagnosis, LogLine, Observation, Phase, RetryVerdict
from trainjob._jobs import progress_log
from trainjob._jobs.progress_log import LogSink, ProgressLogger
from trainjob.errors import Category

OSC = "\x1b]52;c;ZXZpbA==\x07"


@pytest.fixture
def lines() -> list[str]:
    """The lines of the log."""
    return []


@pytest.fixture
def log(lines: list[str]) -> ProgressLogger:
    return ProgressLogger(LogSink(lines.append))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time by a number of seconds."""
    now = 100.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("trainjob._jobs.progress_log.time.monotonic", lambda: now)
    return move


def test_no_control_sequence_reaches_the_log(log: ProgressLogger, lines: list[str]) -> None:
    log.line(LogLine("t", "node-0", f"{OSC}a \x1b[31mred\x1b[0m \x9b2Jb \u202eturned"))
    log.change(
        Observation(Phase.QUEUED, message=f"{OSC}queued", progress=3, metrics={"loss": f"{OSC}x"}), f"{OSC}notice"
    )
    log.crash(Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, f"{OSC}why", rank="node-0", log=(f"{OSC}last",)))
    text = "\n".join(lines)
    assert "[node-0] a red b \ufffdturned" in text
    for word in ("queued", "notice", "progress: 3 %, loss x", "why", "| last"):
        assert word in text
    assert "\x1b" not in text
    assert "\x9b" not in text


def test_each_change_is_logged_once(log: ProgressLogger, lines: list[str]) -> None:
    queued = Observation(Phase.QUEUED, message="waiting for admission")
    log.change(queued, "")
    log.change(queued, "the API server answers again")
    log.change(Observation(Phase.RUNNING), "")
    assert lines == ["TrainJob is Queued: waiting for admission", "the API server answers again", "TrainJob is Running"]


def test_a_log_of_several_jobs_names_the_job(lines: list[str]) -> None:
    log = ProgressLogger(LogSink(lines.append, job="TrainJob ml/train"))
    log.change(Observation(Phase.RUNNING, progress=42, remaining_seconds=70, metrics={"loss": 0.3125}), "resumed")
    assert lines == [
        "TrainJob ml/train: resumed",
        "TrainJob ml/train is Running",
        "TrainJob ml/train: progress: 42 %, about 1m10s left, loss 0.3125",
    ]


def test_progress_is_logged_at_intervals_and_at_the_end(lines: list[str], clock: Callable[[float], None]) -> None:
    log = ProgressLogger(LogSink(lines.append), progress_seconds=5)
    for seconds, observation in (
        (0, Observation(Phase.RUNNING, progress=1)),
        (1, Observation(Phase.RUNNING, progress=2)),
        (5, Observation(Phase.RUNNING, progress=3)),
        (5, Observation(Phase.RUNNING, progress=3)),
        (1, Observation(Phase.RUNNING, metrics={"loss": 1.5})),
        (0, Observation(Phase.COMPLETE, progress=100)),
    ):
        clock(seconds)
        log.change(observation)
    assert [line for line in lines if "TrainJob" not in line] == [
        "progress: 1 %", "progress: 3 %", "metrics: loss 1.5", "progress: 100 %"
    ]  # fmt: skip


def test_progress_is_logged_in_steps_and_at_the_end(lines: list[str]) -> None:
    log = ProgressLogger(LogSink(lines.append), progress_step=10)
    for percent in (0, 9, 10, 19.5, 25, 99, 100):
        log.change(Observation(Phase.RUNNING, progress=percent))
    log.change(Observation(Phase.RUNNING, metrics={"loss": 1.5}))
    assert lines[1:] == [f"progress: {percent} %" for percent in (0, 10, 25, 99, 100)]


def test_lines_of_ranks_are_limited_and_the_rest_is_counted(
    lines: list[str], clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_log, "MAX_LINES", 2)
    log = ProgressLogger(LogSink(lines.append), limited=True)
    for i in range(5):
        log.line(LogLine("t", "node-0", str(i)))
    clock(10)
    log.line(LogLine("t", "node-0", "5"))
    log.end()
    assert lines == ["[node-0] 0", "[node-0] 1", "(3 lines were left out: more than 2 in 10 s)", "[node-0] 5"]


def test_crashes_are_logged_as_warnings(lines: list[str]) -> None:
    warnings: list[str] = []
    log = ProgressLogger(LogSink(lines.append, warnings.append))
    log.crash(Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "why", rank="node-0", log=("last",)))
    assert lines == []
    assert warnings[-2:] == ["last lines of node-0:", "  | last"]
