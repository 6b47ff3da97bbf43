"""What a script has called: the arguments of a call, and the steps of the process."""

from __future__ import annotations

import math
import os
import threading

from .message import MAX_METRICS, MAX_NAME, MAX_STEPS, MAX_VALUE, RESERVED, is_output, key, scalar, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from .message import Value

    _T = TypeVar("_T")

_STRICT = "TRAINJOB_STRICT_PROGRESS"
_MAX_WARNINGS = 100  # of a process: the reasons have names of types
warned: set[str] = set()


class Counter:
    """The steps of this process, for the watchdog. `step` runs in each step of a training, so it only adds to these."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # as in `Reporter`
        self.creating = False  # this process creates its reporter
        self.unwatched = True  # no watchdog was started, and `watch` has not found that there must be none
        self.count = 0  # calls of `step` and `report`
        self.steps = 0  # calls of `step` without a number
        self.step: int | None = None  # latest number given to `step`
        self.reported: int | None = None  # latest number given to `report`

    def number(self) -> dict[str, int]:
        """``step`` or ``steps``, which can be compared between ranks that have the same of both; empty if unknown."""
        if self.step is not None:
            return {"step": self.step}
        if self.steps:
            return {"steps": self.steps}
        return {} if self.reported is None else {"step": self.reported}


class _RefusedError(Exception):
    """Why a value is not reported, in words that are the same for all such values."""


class Call:
    """What of the arguments of one call can be reported, and why the rest cannot."""

    progress: float | None = None
    remaining: float | None = None
    step: int | None = None
    total_steps: int | None = None
    checkpoint = False
    metrics: Mapping[str, Value] = {}
    outputs: Mapping[str, Value] = {}

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}  # reason -> line

    def refuse(self, argument: str, reason: str, name: object = None, detail: object = "") -> None:
        """Note why an argument, or the part of it with this name, is left out or changed."""
        where = argument if name is None else f"{argument}[{name!r}]"
        self._refused.setdefault(f"{argument} {reason}", f"{where} {reason}{detail}")

    def end(self) -> None:
        """Log each reason once per process; with ``TRAINJOB_STRICT_PROGRESS=1`` raise them."""
        if self._refused and os.environ.get(_STRICT) == "1":
            raise ValueError("; ".join(self._refused.values()))
        for reason, line in self._refused.items():
            warn_once(reason, f"{line}; the training continues, and this is not logged again")

    def number(self, argument: str, given: object, most: float) -> float | None:
        """An argument as a number from 0 to `most`."""
        number = None if given is None else self._converted(argument, given, _number)
        if number is not None and not 0 <= number <= most:
            self.refuse(argument, "is out of range; the nearest valid number is reported")
        return None if number is None else min(max(number, 0), most)

    def whole(self, argument: str, given: object, least: int) -> int | None:
        """An argument as a whole number."""
        return None if given is None else self._converted(argument, given, lambda value: _whole(value, least))

    def values(self, argument: str, given: Any, convert: Callable[[object], Value]) -> dict[str, Value]:
        """The valid ones of metrics or outputs."""
        found: dict[str, Value] = {}
        try:
            for number, (name, value) in enumerate(() if given is None else given.items()):
                if number == MAX_METRICS:
                    self.refuse(argument, f"has more than {MAX_METRICS} entries; the others are left out")
                    break
                text = self._converted(f"a name of {argument}", name, _name)
                if text is not None and len(text) > MAX_NAME:
                    text = text[:MAX_NAME]
                    self.refuse(argument, f"has a name of more than {MAX_NAME} characters, which is cut", text)
                valid = None if text is None else self._converted(argument, value, convert, text)
                if text is not None and valid is not None:
                    found[text] = valid
        except Exception:  # noqa: BLE001 - of any class, since methods of the mapping are called
            self.refuse(argument, f"is a {type(given).__name__} not a mapping of names to values")
        return found

    def _converted(
        self, argument: str, given: object, convert: Callable[[object], _T], name: object = None
    ) -> _T | None:
        try:
            return convert(given)
        except _RefusedError as error:
            self.refuse(argument, str(error), name)
        except Exception:  # noqa: BLE001 - of any class, since methods of the value are called
            self.refuse(argument, f"is a {type(given).__name__} that cannot be reported", name)
        return None


def _number(given: object) -> float:
    number = float(scalar(given))
    if not math.isfinite(number):
        raise _RefusedError("is not finite")
    return number


def _whole(given: object, least: int) -> int:
    number = _number(given)
    if not (number.is_integer() and least <= number <= MAX_STEPS):
        raise _RefusedError(f"is not a whole number from {least} to {MAX_STEPS}")
    return int(number)


def _name(given: object) -> str:
    name = key(str(scalar(given)))
    if not name or name.startswith(RESERVED):
        raise _RefusedError(f"is empty or begins with {RESERVED!r}, which is reserved")
    return name


def metric(given: object) -> Value:
    """The value of a metric."""
    value = scalar(given)
    if isinstance(value, str) and not 0 < len(value) <= MAX_VALUE:
        raise _RefusedError(f"is text of 0 or more than {MAX_VALUE} characters")
    return value if isinstance(value, float) else output(value)


def output(given: object) -> Value:
    """The value of an output."""
    value = scalar(given)
    if not is_output(value):
        raise _RefusedError(f"is not finite, or has more than {MAX_VALUE} digits")
    return value


def warn_once(reason: str, text: str) -> None:
    """Log the first line with this reason."""
    if reason not in warned and len(warned) < _MAX_WARNINGS:
        warned.add(reason)
        warn(text)
