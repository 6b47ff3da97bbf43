"""The functions that a training script calls, and the state of the process that they report."""

from __future__ import annotations

import atexit
import math
import os

from . import calls
from .calls import Call, Counter, warn_once
from .message import MAX_STEPS, STALL_TIMEOUT, described

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import SupportsFloat

    from .message import Value
    from .reporter import Reporter

    Given = Value | SupportsFloat | None


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
        call.metrics = call.values("metrics", metrics, calls.metric)
        call.outputs = call.values("outputs", outputs, calls.output)
        counter.reported = counter.reported if call.step is None else call.step
        reporter = _made()
        if reporter is None:
            _waiting.append(call)
        else:
            reporter.report(call)
            _send_waiting(reporter)
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
        warn_once("watchdog", f"the watchdog of this rank failed: {described(error)}")


def flush() -> None:
    """Post the pending state to the status API, and write the latest points of the history.

    Called automatically at interpreter exit; needed before ``os._exit``. Takes at most 5 s, even if the server is
    unreachable. `flush` and `report` may be called in a signal handler.
    """
    try:
        reporter = _made() if _waiting else _reporter
        if reporter is not None:
            _send_waiting(reporter)
            reporter.flush()
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end a training
        warn_once("flush", f"flush failed: {described(error)}")


def merge(field: str, value: object) -> None:
    """Set a field of the message, such as the return value of a function trainer: for programs that start a training.

    Raises:
        ValueError: The value does not fit beside the outputs. Nothing was changed.
    """
    reporter = _made()
    if reporter is None:
        raise ValueError("called by a signal handler that interrupts the first report")
    reporter.merge(field, value)


def _made() -> Reporter | None:
    """The reporter of this process. The first report creates it, so that the import of this package stays fast.

    Returns:
        None in a signal handler that interrupts the creation: the module is imported in part only.
    """
    global _reporter  # noqa: PLW0603 - the state of the process
    counter = _counter
    with counter.lock:
        if _reporter is None and not counter.creating:
            counter.creating = True
            try:
                from .reporter import Reporter

                _reporter = Reporter(warn_once)
            finally:
                counter.creating = False
        return _reporter


def _send_waiting(reporter: Reporter) -> None:
    while _waiting:
        reporter.report(_waiting.pop(0))


_reporter: Reporter | None = None
_waiting: list[Call] = []  # of signal handlers that have interrupted the creation of the reporter
_counter = Counter()


def _after_fork() -> None:
    # A lock held by another thread would stay locked in the child forever, and the parent posts the pending status.
    global _reporter, _counter
    _reporter, _counter = None, Counter()
    _waiting.clear()
    calls.warned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
