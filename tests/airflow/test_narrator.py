"""What of a job's text reaches the log of a task."""

from __future__ import annotations

from typing import Any

from trainjob import Diagnosis, LogLine, Observation, Phase, RetryVerdict
from trainjob.diagnosis import Category
from trainjob_airflow.narrator import ProgressLogger

OSC = "\x1b]52;c;ZXZpbA==\x07"


class Log:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, /, *args: Any) -> None:
        self.lines.append(event % args)

    warning = info


def test_no_control_sequence_reaches_the_log_of_a_task() -> None:
    log = Log()
    say = ProgressLogger(log)
    say.line(LogLine("t", "node-0", f"{OSC}a \x1b[31mred\x1b[0m \x9b2Jb \u202eturned"))
    say.change(
        Observation(Phase.QUEUED, message=f"{OSC}queued", progress=3, metrics={"loss": f"{OSC}x"}), f"{OSC}notice"
    )
    say.crash(Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, f"{OSC}why", rank="node-0", log=(f"{OSC}last",)))
    text = "\n".join(log.lines)
    assert "[node-0] a red b \ufffdturned" in text
    for said in ("queued", "notice", "progress: 3 %, loss x", "why", "| last"):
        assert said in text
    assert "\x1b" not in text
    assert "\x9b" not in text
