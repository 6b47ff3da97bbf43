"""Reads a termination message: `read` and its `Report`.

The writer may be an older or another program, so nothing that it wrote is trusted: texts are cleaned, values of wrong
types count as absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .message import (
    MAX_BYTES,
    MAX_NAME,
    MAX_POINTS,
    MAX_SECONDS,
    MAX_VALUE,
    RESERVED,
    VERSION,
    clean,
    decoded,
    is_output,
    key,
)

Value = bool | int | float | str
Point = tuple[int, float, float]


@dataclass(frozen=True)
class Report:
    """The latest report of a training.

    Attributes:
        progress: Percentage, 0 to 100; None if it was never reported.
        remaining_seconds: The script's estimate, or one derived from its progress; None if unknown.
        metrics: Name to bool, number or text; NaN and infinity are numbers.
        outputs: Name to URI, other short text, number or bool; may be empty.
        updated: RFC 3339 time in UTC; empty if the writer left it out.
        returned: The return value of a function trainer, a JSON value; None if there is none.
        history: Metric to its earlier values, oldest first: step, Unix time in seconds, value. The history of
            ``trainjob.checkpoint`` has the steps and times of the checkpoints.
        details: ``step`` of the latest report, step of the latest ``checkpoint``, and ``estimate``, ``speed`` if the
            remaining time was derived from the progress; only what is known.
    """

    progress: int | None = None
    remaining_seconds: int | None = None
    metrics: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    updated: str = ""
    returned: Any = None
    history: dict[str, list[Point]] = field(default_factory=dict)
    details: dict[str, Value] = field(default_factory=dict)


def read(text: str) -> Report | None:
    """Parse a termination message; None if it has another format or is incomplete.

    Unknown keys are ignored; known keys with a wrong type count as absent.
    """
    message = decoded(text)
    version = message.get("trainjob")
    if type(version) is not int or version != VERSION:  # `True == 1`; a later one may use the same keys otherwise
        return None
    metrics, details = metrics_of(message.get("metrics"))
    outputs, updated = message.get("outputs"), message.get("lastUpdatedTime")
    outputs = outputs if isinstance(outputs, dict) else {}
    try:
        returned = clean(message.get("returned"))
    except ValueError:
        returned = None
    return Report(
        progress=_whole(message.get("progressPercentage"), 100),
        remaining_seconds=_whole(message.get("estimatedRemainingSeconds"), MAX_SECONDS),
        metrics=metrics,
        outputs={key(name)[:MAX_NAME]: clean(value) for name, value in outputs.items() if is_output(value)},
        updated=clean(updated) if isinstance(updated, str) else "",
        returned=returned,
        history=history_of(message.get("history")),
        details=details,
    )


def newer_version(text: str) -> int | None:
    """The version of a termination message that `read` does not support, because a newer trainjob wrote it."""
    number = decoded(text).get("trainjob")
    return number if type(number) is int and number > VERSION else None


def _whole(value: object, top: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
        return None
    return int(value)


def metrics_of(entries: object) -> tuple[dict[str, Value], dict[str, Value]]:
    """The metrics in a message or in Trainer's status, and the details that travel with them, by their names.

    Malformed ones are left out, names are cut.
    """
    found: dict[str, Value] = {}
    for entry in entries if isinstance(entries, list) else ():
        name, given = (entry.get("name"), entry.get("value")) if isinstance(entry, dict) else (None, None)
        value = value_of(clean(given)) if isinstance(given, str) else given
        if isinstance(name, str) and name and (is_output(value) or isinstance(value, float)):
            found[key(name)[:MAX_NAME]] = value
    details = {name[len(RESERVED) :]: found.pop(name) for name in list(found) if name.startswith(RESERVED)}
    return found, details


def value_of(text: str) -> Value:
    """The value of a metric's text: a bool or number (``true``, ``False``, ``7``, ``0.31``, ``nan``), else the text."""
    if text in ("true", "True", "false", "False"):
        return text[0] in "tT"
    if "_" in text or len(text) > MAX_VALUE:  # a digit separator, in Python only
        return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def history_of(value: object) -> dict[str, list[Point]]:
    """The history in a message or result; empty if it is malformed, or has more points than `report` writes."""
    try:
        found = _unpacked(value) if isinstance(value, str) else value
        if not isinstance(found, dict) or sum(map(len, found.values())) > MAX_POINTS:
            return {}
        history = {key(name): [_point(*point) for point in points] for name, points in found.items() if points}
    except (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: points for name, points in history.items() if 0 < len(name) <= MAX_NAME}


def _point(*numbers: object) -> Point:
    known = [float(each) for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)]
    step, moment, value = known
    if not (step.is_integer() and math.isfinite(moment) and math.isfinite(value)):
        raise ValueError(f"not a step, a time and a value: {numbers!r}")
    return int(step), moment, value


def _unpacked(text: str) -> dict[str, list[Point]]:
    import binascii
    import json
    import zlib

    try:  # with a limit, since 4 KB may decompress to 4 MB
        plain = zlib.decompressobj().decompress(binascii.a2b_base64(text), 64 * MAX_POINTS + MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    history = {}
    for name, (steps, moments, values) in json.loads(plain).items():
        times = [moment / 10 for moment in accumulate(moments)]
        history[name] = list(zip(accumulate(steps), times, values, strict=True))
    return history
