"""The one reader and the one writer of durations. Imports the standard library only."""

from __future__ import annotations

import re
from datetime import timedelta

EXAMPLES = "90s, 15m, 1h30m, 2d or PT2H"

_N = r"(\d+(?:\.\d+)?)"
_SHORT = re.compile(rf"(?:{_N}d)?(?:{_N}h)?(?:{_N}m)?(?:{_N}s?)?", re.ASCII)
_ISO = re.compile(rf"P(?:{_N}D)?(?:T(?=\d)(?:{_N}H)?(?:{_N}M)?(?:{_N}S)?)?", re.ASCII)


def parse_duration(text: str) -> timedelta:
    """Read ``90`` (seconds), ``90s``, ``15m``, ``1h30m``, ``2d``, or ISO 8601 of days and less: ``P1DT12H``.

    Raises:
        ValueError: The text is not a duration above 0.
    """
    parts = _SHORT.fullmatch(text.strip()) or _ISO.fullmatch(text.strip())
    try:
        days, hours, minutes, seconds = (float(number or 0) for number in parts.groups()) if parts else (0, 0, 0, 0)
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except OverflowError:
        found = timedelta(0)
    if not found:
        raise ValueError(f"{text!r} is not a duration such as {EXAMPLES}")
    return found


def iso_duration(duration: timedelta) -> str:
    """A duration in ISO 8601, rounded to seconds: ``P30D``, ``PT5400S``."""
    seconds = round(duration.total_seconds())
    return f"P{seconds // 86400}D" if seconds % 86400 == 0 else f"PT{seconds}S"
