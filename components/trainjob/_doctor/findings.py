"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainjob.errors import RetryVerdict


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but a function is limited."""
    FAILURE = "failure"
    """A function of this package does not work."""
    SKIPPED = "skipped"
    """The check could not be made, or it found that something is absent which only some jobs need."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        check: Name of the check, stable for programs.
        level: Severity.
        message: What was found.
        advice: What to do; empty if nothing has to be done.
        retry: Of a failure: whether it can resolve itself.
    """

    check: str
    level: Level
    message: str
    advice: str = ""
    retry: RetryVerdict = RetryVerdict.CONFIGURATION
