"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainjob.verdicts import RetryVerdict


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but something will be missed."""
    FAILURE = "failure"
    """Something that this package does will not work."""
    SKIPPED = "skipped"
    """It could not be found out."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What was looked at: a stable word for programs.
        level: How much it matters.
        message: What was found.
        advice: What to do; empty where there is nothing to do.
        retry: Of a failure: whether it can go away by itself.
    """

    check: str
    level: Level
    message: str
    advice: str = ""
    retry: RetryVerdict = RetryVerdict.CONFIGURATION
