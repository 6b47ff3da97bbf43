"""The functions that a training script calls, the checks of their arguments, and the state of the process."""

from __future__ import annotations

import atexit
import math
import os

from .counter import Counter
from .message import (
    MAX_METRICS,
    MAX_NAME,
    MAX_SECONDS,
    MAX_STEPS,
    MAX_VALUE,
    RESERVED,
    Report,
    is_output,
    text_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, SupportsFloat

    from .message import Value
    from .reporter import Reporter

    Given = Value | SupportsFloat

STALL_TIMEOUT = "TRAINJOB_STALL_TIMEOUT"
"""Environment variable: seconds without a step after which the waiter fails the job."""


def report(
    *,
    progress: float | None = None,
    metrics: Mapping[str, Given] | None = None,
    outputs: Mapping[str, Given] | None = None,
    remaining_seconds: float | None = None,
    step: SupportsFloat | None = None,
    total_steps: SupportsFloat | None = None,
    checkpoint: bool = False,
) -> None:
    """Report progress, metrics and outputs of this training.

    Calls accumulate: a later value replaces the earlier one of the same name, all others stay. Call it from rank 0 or
    from every rank: on each node only local rank 0 writes the termination message, and only global rank 0 posts to the
    status API. A channel that fails warns once on stderr and never raises.

    Args:
        progress: Progress in percent, 0 to 100. Rounded down, so that 100 means complete. If left out, it is derived
            from `step` and `total_steps`.
        metrics: Up to 256, names and values up to 64 characters. Numbers may be NumPy, JAX or Torch scalars. If
            they do not fit, those not updated for the longest time are dropped first, then the largest.
        outputs: Name to URI of an output, other short text, finite number or bool. Never dropped.
        remaining_seconds: Estimated time to the end, 0 or more. Rounded up. Until a call sets it, it is derived from
            the progress, at the speed of the latest half of the time since the first report.
        step: Step of the metrics, 0 or more, for their history. If left out, that of the latest call that had one, or
            the number of this call if none had.
        total_steps: Number of steps of the whole training, 1 or more. Later calls may leave it out.
        checkpoint: Whether the training has just completed a checkpoint, at `step`; shown on its timeline.

    Raises:
        ValueError: An argument is out of range, or the outputs alone exceed 4096 bytes. Nothing was changed.
    """
    change = _checked(progress, metrics, outputs, remaining_seconds)
    number, total = _steps("step", step, 0), _steps("total_steps", total_steps, 1)
    _made().report(change, _number("progress", progress), number, total, checkpoint=checkpoint)
    _counter.count += 1
    _counter.reported = _counter.reported if number is None else number
    if _counter.unwatched:
        watch()


def step(step: SupportsFloat | None = None) -> None:
    """Count a step of this rank, for the detection of hangs. Call it once per step on every rank; it takes below 1 us.

    Without `TrainJobSpec.stall_timeout` it has no effect. `report` counts, too, so that a script which reports each
    step on every rank does not need this function.

    Args:
        step: Number of the step, the same on all ranks; if left out, calls are counted. A rank behind the others is
            found by it. Anything but an int is converted at once, so a tensor on a device is waited for.

    Raises:
        ValueError: The step is not a whole number.
    """
    counter = _counter
    if step is None:
        counter.steps += 1
    else:
        # Not by the watchdog: it would wait for a device that hangs.
        counter.step = step if type(step) is int else _steps("step", step, 0)
    counter.count += 1
    if counter.unwatched:
        watch()


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
    except ValueError:
        return
    if 0 < seconds < math.inf:
        from .watchdog import Watchdog

        Watchdog(counter, seconds).start()


def report_returned(value: Any) -> None:
    """Report the return value of a function trainer. Its launcher calls this; training scripts do not need it.

    Args:
        value: JSON.

    Raises:
        ValueError: The value does not fit beside the outputs. Nothing was changed.
    """
    _made().report_returned(value)


def flush() -> None:
    """Post the pending state to the status API, and write the latest points of the history.

    Called automatically at interpreter exit; needed before ``os._exit``. Takes at most 5 s, even if the server is
    unreachable. `flush` and `report` may be called in a signal handler.
    """
    if _reporter is not None:
        _reporter.flush()


# --- arguments -----------------------------------------------------------------------------------------------------


def _checked(
    progress: float | None,
    metrics: Mapping[str, Given] | None,
    outputs: Mapping[str, Given] | None,
    remaining_seconds: float | None,
) -> Report:
    done = _number("progress", progress)
    if done is not None and not 0 <= done <= 100:  # also catches NaN
        raise ValueError(f"progress must be a percentage from 0 to 100, not {progress!r}")
    left = _number("remaining_seconds", remaining_seconds)
    if left is not None and not 0 <= left < math.inf:
        raise ValueError(f"remaining_seconds must be a finite number, 0 or more, not {remaining_seconds!r}")
    if metrics is not None and len(metrics) > MAX_METRICS:
        raise ValueError(f"metrics has {len(metrics)} entries; Trainer accepts {MAX_METRICS}")
    if reserved := [name for name in metrics or () if str(name).startswith(RESERVED)]:
        raise ValueError(f"metrics: {reserved[0]!r} begins with {RESERVED!r}, which is reserved; choose another name")
    return Report(
        progress=None if done is None else int(done),
        remaining_seconds=None if left is None else min(math.ceil(left), MAX_SECONDS),
        metrics={_name("metrics", name): _metric(name, value) for name, value in (metrics or {}).items()},
        outputs={_name("outputs", name): _output(name, value) for name, value in (outputs or {}).items()},
    )


def _number(argument: str, value: SupportsFloat | None) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{argument} is not a number: {value!r}") from error


def _steps(argument: str, value: SupportsFloat | None, least: int) -> int | None:
    number = _number(argument, value)
    if number is not None and not (number.is_integer() and least <= number <= MAX_STEPS):
        raise ValueError(f"{argument} must be a whole number from {least} to {MAX_STEPS}, not {value!r}")
    return None if number is None else int(number)


def _name(argument: str, name: object) -> str:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME:
        raise ValueError(f"{argument}: a name must have 1 to {MAX_NAME} characters, not {name!r}")
    return name


def _metric(name: str, given: Given) -> Value:
    value = _value("metrics", name, given)
    text = text_of(value)
    if not text or len(text) > MAX_VALUE:
        raise ValueError(f"metrics[{name!r}] must be 1 to {MAX_VALUE} characters long, not {len(text)}: {text[:80]!r}")
    return value


def _output(name: str, given: Given) -> Value:
    value = _value("outputs", name, given)
    if not is_output(value):
        raise ValueError(f"outputs[{name!r}] must be finite, not {value!r}, which JSON does not support")
    return value


def _value(argument: str, name: str, given: Given) -> Value:
    """The bool, number or text; scalars of NumPy, JAX and Torch become those of Python."""
    if isinstance(given, str):
        return str(given)
    try:
        if isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool"):
            return bool(given)
        scalar: Any = given
        try:
            return int(scalar.__index__())  # ints of any library
        except (AttributeError, TypeError):
            return float(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}[{name!r}] is not a bool, number or text: {given!r}") from error


# --- state ---------------------------------------------------------------------------------------------------------


def _made() -> Reporter:
    """The reporter of this process. The first report creates it, so that the import of this package stays fast."""
    global _reporter  # noqa: PLW0603 - the state of the process
    if _reporter is None:
        from .reporter import Reporter

        with _counter.lock:
            made = Reporter()
            if _reporter is None:  # neither another thread nor a signal handler was faster
                _reporter = made
    return _reporter


_reporter: Reporter | None = None
_counter = Counter()


def _after_fork() -> None:
    # A lock held by another thread would stay locked in the child forever, and the parent posts the pending status.
    global _reporter, _counter  # noqa: PLW0603 - the state of the process
    _reporter = None
    _counter = Counter()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
