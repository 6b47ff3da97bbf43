"""Values as texts for readers: without secrets, of bounded length; numbers, times and durations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, overload

from trainjob._support.control_characters import one_line, plain
from trainjob._support.masking import masked_lines, public
from trainjob._support.numbers import is_finite

_LONGEST = 2000  # characters of a line of a log or of a message


def short_text(value: object) -> str:
    """The value as text of at most 2,000 characters on one line, without control sequences and secrets."""
    return "" if value is None else one_line(public(str(value)), _LONGEST)


def shown_lines(log: Iterable[str]) -> list[str]:
    """The lines of one log without secrets and control sequences, each of at most 2,000 characters."""
    return [one_line(line, _LONGEST) for line in masked_lines(plain(line[: 2 * _LONGEST]) for line in log)]


def public_values(values: Mapping[str, bool | float | str]) -> dict[str, bool | float | str]:
    """Metrics or outputs without secrets."""
    return {short_text(name): short_text(each) if isinstance(each, str) else each for name, each in values.items()}


def numeric(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics or outputs that are finite numbers."""
    return {name: value for name, value in values.items() if is_finite(value)}


def rounded(value: float | str) -> str:
    """A metric or an output for display: numbers with six digits, bools as in JSON."""
    if isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else str(value).lower()
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


@overload
def iso(time: datetime | float, precision: str = "auto") -> str: ...


@overload
def iso(time: None) -> None: ...


def iso(time: datetime | float | None, precision: str = "auto") -> str | None:
    """The time, or the seconds since 1970, in RFC 3339 in UTC; `precision` as `timespec` of `datetime.isoformat`."""
    if time is None:
        return None
    moment = datetime.fromtimestamp(time, UTC) if isinstance(time, int | float) else time.astimezone(UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def short(duration: timedelta | float) -> str:
    """A duration, or a number of seconds, in at most two units: ``0.4s``, ``12s``, ``1m20s``, ``2h05m``, ``3d04h``."""
    seconds = max(0.0, duration.total_seconds() if isinstance(duration, timedelta) else duration)
    if seconds < 1:
        return f"{int(seconds * 10) / 10:.1f}s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"
