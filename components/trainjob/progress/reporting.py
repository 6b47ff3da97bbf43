"""The functions that a training script calls, and the state of the process that they report."""

from __future__ import annotations

import atexit
import math
import os
import threading

from .message import (
    MAX_METRICS,
    MAX_NAME,
    MAX_STEPS,
    MAX_VALUE,
    RESERVED,
    STALL_TIMEOUT,
    described,
    is_output,
    key,
    scalar,
    warn,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, SupportsFloat, TypeVar

    from .message import Value
    from .reporter import Reporter

    Given = Value | SupportsFloat | None
    _T = TypeVar("_T")

_STRICT = "TRAINJOB_STRICT_PROGRESS"
_MAX_WARNINGS = 100  # of a process: the reasons have names of types


def report(
    *,
    progress: SupportsFloat | None = None,
    metrics: Mapping[str, Given] | None = None,
    outputs: Mapping[str, Given] | None = None,
    remaining_seconds: SupportsFloat | None = None,
    step: SupportsFloat | None = None,
    total_steps: SupportsFloat | None = None,
    checkpoint: bool = False,
) -> None:
    """Report progress, metrics and outputs of this training.

    Calls accumulate: a later value replaces the earlier one of the same name, all others stay. Call it from rank 0 or
    from every rank: on each node only local rank 0 writes the termination message, and only global rank 0 posts to the
    status API. What cannot be reported is left out; for each reason, and each channel that fails, stderr has one line.

    Args:
        progress: Percent; the nearest of 0 to 100 is reported. Rounded down, so that 100 means complete. If left out,
            it is derived from `step` and `total_steps`.
        metrics: Up to 256, names and values up to 64 characters. Numbers may be scalars, or arrays of one element, of
            NumPy, JAX or PyTorch. If they do not fit, those not updated for the longest time are dropped first, then
            the largest.
        outputs: Name to URI of an output, other short text, finite number or bool. Never dropped; one that does not
            fit into 4096 bytes beside the earlier ones is refused.
        remaining_seconds: Estimated time to the end, 0 or more. Rounded up. Until a call sets it, it is derived from
            the progress, at the speed of the latest half of the time since the first report.
        step: Step of the metrics, 0 or more, for their history. If left out, that of the latest call that had one, or
            the number of this call if none had.
        total_steps: Number of steps of the whole training, 1 or more. Later calls may leave it out.
        checkpoint: Whether the training has just completed a checkpoint, at `step`; shown on its timeline.

    Raises:
        ValueError: With ``TRAINJOB_STRICT_PROGRESS=1``, after the rest was reported: what was refused.
    """
    counter, call = _counter, Call()
    counter.count += 1
    if counter.unwatched:
        watch()
    try:
        call.progress = call.number("progress", progress, 100)
        call.remaining = call.number("remaining_seconds", remaining_seconds, math.inf)
        call.step = call.whole("step", step, 0)
        call.total_steps = call.whole("total_steps", total_steps, 1)
        call.checkpoint = bool(checkpoint)
        call.metrics = call.values("metrics", metrics, _metric)
        call.outputs = call.values("outputs", outputs, _output)
        counter.reported = counter.reported if call.step is None else call.step
        _made().report(call)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end a training
        call.refuse("report", "failed: ", detail=described(error))
    call.end()


def step(step: SupportsFloat | None = None) -> None:
    """Count a step of this rank, for the detection of hangs. Call it once per step on every rank; it takes below 1 us.

    Without `TrainJobSpec.stall_timeout` it has no effect. `report` counts, too, so that a script which reports each
    step on every rank does not need this function.

    Args:
        step: Number of the step, the same on all ranks; if left out, or no whole number, calls are counted. A rank
            behind the others is found by it. Anything but an int is converted at once, so a tensor on a device is
            waited for.

    Raises:
        ValueError: With ``TRAINJOB_STRICT_PROGRESS=1``: the step is not a whole number.
    """
    counter = _counter
    counter.count += 1
    if counter.unwatched:
        watch()
    if step is None:
        counter.steps += 1
    elif type(step) is int and 0 <= step <= MAX_STEPS:
        counter.step = step
    else:  # not by the watchdog: it would wait for a device that hangs
        call = Call()
        number = call.whole("step", step, 0)
        if number is None:
            counter.steps += 1
        else:
            counter.step = number
        call.end()


def watch() -> None:
    """Start the watchdog of this rank, if the job has a `TrainJobSpec.stall_timeout`; a later call does nothing.

    The first `report` or `step` calls this. Call it at the start of a script to get the stacks of a rank that hangs
    before its first step.
    """
    counter = _counter
    with counter.lock:
        if not counter.unwatched:
            return
        counter.unwatched = False
    try:
        seconds = float(os.environ.get(STALL_TIMEOUT) or 0)
        if 0 < seconds < math.inf:
            from .watchdog import Watchdog

            Watchdog(counter, seconds).start()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end a training
        _warn_once("watchdog", f"the watchdog of this rank failed: {described(error)}")


def flush() -> None:
    """Post the pending state to the status API, and write the latest points of the history.

    Called automatically at interpreter exit; needed before ``os._exit``. Takes at most 5 s, even if the server is
    unreachable. `flush` and `report` may be called in a signal handler.
    """
    try:
        if _reporter is not None:
            _reporter.flush()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end a training
        _warn_once("flush", f"flush failed: {described(error)}")


def merge(field: str, value: object) -> None:
    """Set a field of the message, such as the return value of a function trainer: for programs that start a training.

    Raises:
        ValueError: The value does not fit beside the outputs. Nothing was changed.
    """
    _made().merge(field, value)


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
            _warn_once(reason, f"{line}; the training continues, and this is not logged again")

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
            self.refuse(argument, f"is a {type(given).__name__} that is no mapping of names to values")
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


def _metric(given: object) -> Value:
    value = scalar(given)
    if isinstance(value, str) and not 0 < len(value) <= MAX_VALUE:
        raise _RefusedError(f"is text of 0 or more than {MAX_VALUE} characters")
    return value if isinstance(value, float) else _output(value)


def _output(given: object) -> Value:
    value = scalar(given)
    if not is_output(value):
        raise _RefusedError(f"is not finite, or has more than {MAX_VALUE} digits")
    return value


class Counter:
    """The steps of this process, for the watchdog. `step` runs in each step of a training, so it only adds to these."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # as in `Reporter`
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


def _made() -> Reporter:
    """The reporter of this process. The first report creates it, so that the import of this package stays fast."""
    global _reporter  # noqa: PLW0603 - the state of the process
    if _reporter is None:
        from .reporter import Reporter

        with _counter.lock:
            made = Reporter(_warn_once)
            if _reporter is None:  # neither another thread nor a signal handler was faster
                _reporter = made
    return _reporter


def _warn_once(reason: str, text: str) -> None:
    if reason not in _warned and len(_warned) < _MAX_WARNINGS:
        _warned.add(reason)
        warn(text)


_reporter: Reporter | None = None
_counter = Counter()
_warned: set[str] = set()


def _after_fork() -> None:
    # A lock held by another thread would stay locked in the child forever, and the parent posts the pending status.
    global _reporter, _counter, _warned
    _reporter, _counter, _warned = None, Counter(), set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
