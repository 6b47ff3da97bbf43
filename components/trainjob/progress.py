"""Reports progress, metrics and outputs of a training script.

    from trainjob import progress

    progress.report(step=400, total_steps=1000, metrics={"loss": 0.31})
    progress.report(outputs={"model": "s3://models/digits/7"})

This file needs only the standard library and may be copied next to a script. Without a channel, on a laptop or in a
notebook, `report` only checks its arguments. It selects its channels from the environment at each call:

* Trainer's status API (gate ``TrainJobStatus``, Trainer >= 2.2), if ``KUBEFLOW_TRAINER_SERVER_URL``, ``_CA_CERT`` and
  ``_TOKEN`` are set. A background thread posts the latest state, at most once per second; the last state is posted at
  interpreter exit, within at most 5 s. This API has no field for outputs.
* The termination message of the container: the file named by ``TRAINJOB_TERMINATION_LOG``, or inside Kubernetes
  ``/dev/termination-log``. Written during the call, so it survives a SIGKILL right after it.

A metric or output is a bool, a number or text, and keeps its type for all readers. Trainer's API supports text only, so
a metric is written as text there and in the message, and `read` converts it back: ``true`` and ``false``, a number, or
the text itself.

Three facts that are no metrics travel as metrics, whose names begin with the reserved prefix ``trainjob.``:
``trainjob.step``, the latest step; ``trainjob.checkpoint``, the step of the latest checkpoint; ``trainjob.estimate``,
``speed`` if the remaining time was derived from the progress. `read` returns them as `Report.details`.

A reader of both channels takes each metric from the message, which is always up to date. From the API it takes only
metrics that the message lacks: those without space in it, and those of other programs (Hugging Face's callback).

The message is one JSON object of at most 4096 bytes. Unknown fields are left out. Other programs may write it, too::

    {"trainjob": 1, "lastUpdatedTime": "2026-01-31T12:00:00Z", "progressPercentage": 40,
     "estimatedRemainingSeconds": 90, "metrics": [{"name": "loss", "value": "0.31"}],
     "outputs": {"model": "s3://models/digits/7", "promoted": true},
     "history": {"loss": [[100, 1769860800.0, 0.9], [400, 1769860860.0, 0.31]]}}

``returned`` is the return value of a function trainer, any JSON value, see `trainjob.returned`.

``history`` has the earlier values of each metric that is a finite number: step, Unix time in seconds, value. It uses
the bytes that the other fields leave free, for at most 256 points of all metrics together. More points are thinned by
min-max decimation: consecutive reports form buckets of equal size, and each bucket keeps its lowest and its highest
value; the first and the last value stay. `report` writes it compressed, as text: base64 of zlib of ``{"loss": [steps,
times in 0.1 s, values]}``, with steps and times as differences to their predecessors. It is renewed once per second,
and at interpreter exit.

If ``TRAINJOB_STALL_TIMEOUT`` (seconds) is set, a watchdog thread writes lines to stderr, from which the waiter of the
job finds out whether the rank makes progress. It starts at the first call of `report` or `step`, or by `watch`::

    trainjob.rank {"rank": 3, "world": 4, "count": 120, "step": 120, "step_seconds": 0.0121,
                   "spent": {"all": 1.45, "waiting": 0.2}, "time": 1769860800.0}

(without the line break). One when it starts, one at the first step, and at most one each quarter of the timeout while
the rank makes steps. When no step was counted for half of the timeout (before the first step: for all of it), one with
``stalled_seconds``, and the Python stacks of all threads, each line with a prefix: ``trainjob.stack 3| ``. At
interpreter exit, one with ``ended``. ``count`` is the number of calls; ``step`` is the latest step that the script
gave, or ``steps`` the number of calls of `step` without one. ``spent`` has the seconds from the first step to the
latest, and how many of them the main thread spent ``waiting`` for other ranks in a collective, waiting for a
``device``, and ``loading`` data, by looks at its stack about ten times a second: they show a rank that is slower than
the others.

If `py-spy <https://github.com/benfred/py-spy>`_ is on the ``PATH``, the stacks of a rank that stalls have the native
frames, too.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time

# `typing`, `json` and `dataclasses` would take nine tenths of this module's import time. Most runs do not need them.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType
    from typing import Any, SupportsFloat

    Value = bool | int | float | str
    Given = Value | SupportsFloat
    Point = tuple[int, float, float]
    _Entry = tuple[float, int, int, float]  # of a series: value, number, step, time

__all__ = ["Report", "flush", "read", "report", "step", "watch"]

VERSION = 1
MAX_BYTES = 4096  # kubelet: MaxContainerTerminationMessageLength; it cuts off the rest
MAX_METRICS = 256  # these three: validation of TrainJob.status.trainerStatus in Trainer's CRD
MAX_NAME = 64
MAX_VALUE = 64
MAX_SECONDS = 2**31 - 1  # int32 in Trainer's API
MAX_STEPS = 2**53  # exact in all JSON readers
MAX_POINTS = 256  # of the history, of all metrics together: 8 KB as JSON in a result
RESERVED = "trainjob."
"""Prefix of the names of `Report.details` among the metrics."""

STALL_TIMEOUT = "TRAINJOB_STALL_TIMEOUT"
"""Environment variable: seconds without a step after which the waiter fails the job."""
RANK_MARKER = "trainjob.rank "
"""Begin of a watchdog's line about its rank; JSON follows."""
STACK_MARKER = "trainjob.stack "
"""Begin of a line of a stack; the number of the rank, ``| `` and the text follow."""
WAITING, DEVICE, LOADING = "waiting", "device", "loading"
"""What a marker's ``spent`` has, besides ``all``."""
NATIVE_HEADING = "native frames by py-spy"
"""Line of a stack after which the stacks of py-spy follow, that of the main thread first."""
_NATIVE_SECONDS = 10  # that py-spy may take
_WATCHDOG = "trainjob-watchdog"  # name of its thread
_LONGEST_TICK = 0.1  # seconds between two looks of the watchdog, on average
_GOLDEN = 0.618  # pauses that differ by this sequence do not keep step with the training

# Files of Python frames, as regular expressions.
NEUTRAL_FILES = (
    r"(^|/)(threading|queue|selectors|socket|ssl|subprocess|contextlib)\.py$|concurrent/futures/|asyncio/"
    r"|torch/distributed/(c10d_logger|utils)\.py$|torch/utils/_contextlib\.py$|torch/_ops\.py$|torch/_tensor\.py$"
    r"|torch/autograd/function\.py$|jax/_src/(?!distributed|multihost)|<frozen"
)
"""They wait for something, whatever it is: the frame that called them tells."""
COLLECTIVE_FILES = (
    r"torch/distributed/|torch/_C/_distributed|jax/experimental/multihost_utils\.py$|jax/_src/(distributed|multihost)"
    r"|mpi4py/|horovod/|deepspeed/comm/|oneccl|torch_xla/core/xla_model\.py$|xgboost/collective\.py$"
)
"""A process waits in these for other ranks."""
BACKWARD_FILES = r"torch/autograd/graph\.py$"
"""The reducers of DistributedDataParallel and FSDP wait in here for other ranks, in native code."""
DEVICE_FILES = r"torch/(cuda|xpu|hpu|npu)/(__init__|streams)\.py$|jax/_src/(array|api)\.py$|/jaxlib/"
"""These wait for a device, which may wait for another rank: nothing follows from them."""
_LOADING_FILES = (
    r"(^|/)(torch/utils/data|tensorflow/python/data|datasets/formatting|grain|streaming/base|webdataset|nvidia/dali)/"
    r"|(^|/)datasets/(iterable|arrow)_dataset\.py$"
)
_STACK_LINES = 300  # of one rank: the threads of data loaders are many
_FRAMES = 60  # of one thread
_ATOMIC = 4096  # PIPE_BUF of Linux: a write of at most so many bytes is not mixed with others

_BUCKETS = MAX_POINTS // 2  # of one metric, in memory
_HISTORY_INTERVAL = 1.0
_HISTORY_SLACK = 64  # bytes by which the other fields may grow until the history is renewed
_SAMPLES = 64  # of the progress, to estimate the remaining time

_POST_INTERVAL = 1.0
_POST_SHARE = 20  # pauses per post: Trainer's server handles 5 posts a second for all jobs, other posts wait
_POST_TIMEOUT = 5.0
_MAX_BACKOFF = 30.0
_FLUSH_TRIES = 2
_FLUSH_TIMEOUT = 5.0
_DEFAULT_LOG = "/dev/termination-log"
_TYPES = (bool, int, float, str)  # in messages; a bool is an int, too


class Report:
    """The latest report of a training. Immutable; equal if all attributes are.

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

    __slots__ = ("details", "history", "metrics", "outputs", "progress", "remaining_seconds", "returned", "updated")
    __match_args__ = (
        "progress",
        "remaining_seconds",
        "metrics",
        "outputs",
        "updated",
        "returned",
        "history",
        "details",
    )

    progress: int | None
    remaining_seconds: int | None
    metrics: dict[str, Value]
    outputs: dict[str, Value]
    updated: str
    returned: Any
    history: dict[str, list[Point]]
    details: dict[str, Value]

    def __init__(  # noqa: PLR0917 - `__reduce__` gives them by position
        self,
        progress: int | None = None,
        remaining_seconds: int | None = None,
        metrics: dict[str, Value] | None = None,
        outputs: dict[str, Value] | None = None,
        updated: str = "",
        returned: Any = None,
        history: dict[str, list[Point]] | None = None,
        details: dict[str, Value] | None = None,
    ) -> None:
        kept = (metrics or {}, outputs or {}, updated, returned, history or {}, details or {})
        values = (progress, remaining_seconds, *kept)
        for name, value in zip(self.__match_args__, values, strict=True):
            object.__setattr__(self, name, value)

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign {value!r} to {name!r}: a Report is immutable")

    def __reduce__(self) -> tuple[type[Report], tuple[object, ...]]:
        return Report, self._values()

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, Report) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it holds dicts

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__match_args__)})"


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
    number = _steps("step", step, 0)
    _counter.count += 1
    _counter.reported = _counter.reported if number is None else number
    if _counter.unwatched:
        watch()
    _reporter.report(
        change,
        _number("progress", progress),
        number,
        _steps("total_steps", total_steps, 1),
        checkpoint=checkpoint,
    )


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

    The first `report` or `step` calls this. Call it at the begin of a script to get the stacks of a rank that hangs
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
        _Watchdog(counter, seconds).start()


def report_returned(value: Any) -> None:
    """Report the return value of a function trainer. Its launcher calls this; training scripts do not need it.

    Args:
        value: JSON.

    Raises:
        ValueError: The value does not fit beside the outputs. Nothing was changed.
    """
    _reporter.report_returned(value)


def flush() -> None:
    """Post the pending state to the status API, and write the latest points of the history.

    Called automatically at interpreter exit; needed before ``os._exit``. Takes at most 5 s, even if the server is
    unreachable. `flush` and `report` may be called in a signal handler.
    """
    _reporter.flush()


def read(text: str) -> Report | None:
    """Parse a termination message; None if it has another format or is incomplete.

    Text after the object is ignored, since the writer truncates the file after writing and may be killed in between.
    Unknown keys are ignored; known keys with a wrong type count as absent.
    """
    import json  # noqa: PLC0415

    try:
        message, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    # `True == 1`, and a later version may use the same keys for other values.
    if not isinstance(message, dict) or type(message.get("trainjob")) is not int or message["trainjob"] != VERSION:
        return None
    metrics = message.get("metrics")
    outputs = message.get("outputs")
    updated = message.get("lastUpdatedTime")
    named = dict(_named(entry) for entry in metrics if _named(entry)[0]) if isinstance(metrics, list) else {}
    values, details = split(named)
    return Report(
        progress=_whole(message.get("progressPercentage"), 100),
        remaining_seconds=_whole(message.get("estimatedRemainingSeconds"), MAX_SECONDS),
        metrics=values,
        outputs={k: v for k, v in outputs.items() if _is_output(v)} if isinstance(outputs, dict) else {},
        updated=updated if isinstance(updated, str) else "",
        returned=_strict(message.get("returned")),
        history=history_of(message.get("history")),
        details=details,
    )


def split(named: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """The metrics, and the details that travel with them, by their names without the reserved prefix."""
    details = {name[len(RESERVED) :]: value for name, value in named.items() if name.startswith(RESERVED)}
    return {name: value for name, value in named.items() if not name.startswith(RESERVED)}, details


def value_of(text: str) -> Value:
    """The value of a metric's text: a bool or number (``true``, ``False``, ``7``, ``0.31``, ``nan``), else the text."""
    if text in ("true", "True", "false", "False"):
        return text[0] in "tT"
    if "_" in text:  # a digit separator, in Python only
        return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def text_of(value: Value) -> str:
    """A metric as text for Trainer's API; the inverse of `value_of`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def history_of(value: object) -> dict[str, list[Point]]:
    """The history in a message or result; empty if it is malformed, or has more points than `report` writes."""
    try:
        found = _unpacked(value) if isinstance(value, str) else value
        if not isinstance(found, dict) or sum(map(len, found.values())) > MAX_POINTS:
            return {}
        history = {name: [_point(*point) for point in points] for name, points in found.items() if points}
    except (ArithmeticError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: points for name, points in history.items() if 0 < len(name) <= MAX_NAME}


def _point(*numbers: object) -> Point:
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise TypeError(f"not a number among {numbers!r}")
    step, moment, value = map(float, numbers)  # type: ignore[arg-type]  # they are numbers
    if not (step.is_integer() and math.isfinite(moment) and math.isfinite(value)):
        raise ValueError(f"not a step, a time and a value: {numbers!r}")
    return int(step), moment, value


def _unpacked(text: str) -> dict[str, list[Point]]:
    import binascii  # noqa: PLC0415 - scripts import this module at their start, and may report nothing
    import json  # noqa: PLC0415 - as above
    import zlib  # noqa: PLC0415 - as above

    try:  # with a limit, since 4 KB may decompress to 4 MB
        plain = zlib.decompressobj().decompress(binascii.a2b_base64(text), 64 * MAX_POINTS + MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    history = {}
    for name, (steps, moments, values) in json.loads(plain).items():
        times = [moment / 10 for moment in _sums(moments)]
        history[name] = list(zip(_sums(steps), times, values, strict=True))
    return history


def _packed(history: Mapping[str, list[Point]]) -> str:
    import binascii  # noqa: PLC0415 - as above
    import zlib  # noqa: PLC0415 - as above

    columns = {}
    for name, points in history.items():
        steps = [step for step, _, _ in points]
        moments = [round(10 * moment) for _, moment, _ in points]
        values = [float(f"{value:.6g}") for _, _, value in points]
        columns[name] = (_differences(steps), _differences(moments), values)
    return binascii.b2a_base64(zlib.compress(_encode(columns), 9), newline=False).decode()


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in zip([0, *values[:-1]], values, strict=True)]


def _sums(differences: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for difference in differences:
        total += difference
        sums.append(total)
    return sums


def _whole(value: object, top: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
        return None
    return int(value)


def _is_output(value: object) -> bool:
    return isinstance(value, _TYPES) and not (isinstance(value, float) and not math.isfinite(value))


def _strict(value: object) -> object:
    """The value; None if it contains a NaN or an infinity, which other JSON parsers reject."""
    import json  # noqa: PLC0415 - scripts import this module at their start, and may report nothing

    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value


def _named(entry: object) -> tuple[str, Value]:
    """Name and value of one metric; an empty name if it is malformed."""
    if not isinstance(entry, dict):
        return "", ""
    name, value = entry.get("name"), entry.get("value")
    if not isinstance(name, str) or not isinstance(value, _TYPES):
        return "", ""
    return name, value_of(value) if isinstance(value, str) else value


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
    if not _is_output(value):
        raise ValueError(f"outputs[{name!r}] must be finite, not {value!r}, which JSON does not support")
    return value


def _value(argument: str, name: str, given: Given) -> Value:
    """The bool, number or text; scalars of NumPy, JAX and Torch become those of Python."""
    if isinstance(given, str):
        return str(given)
    try:
        if isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool"):
            return bool(given)
        try:
            return int(given.__index__())  # type: ignore[attr-defined]  # ints of any library
        except (AttributeError, TypeError):
            return float(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}[{name!r}] is not a bool, number or text: {given!r}") from error


# --- state ---------------------------------------------------------------------------------------------------------


class _Reporter:
    """The accumulated report, and its channels."""

    def __init__(self) -> None:
        # A signal handler may call `report` or `flush` while its thread is in one of them: a plain lock would never be
        # released then. So nothing here iterates over what such a call changes.
        self._lock = threading.RLock()
        self._calls = 0
        self._sent = 0  # the calls of which the channels have the state
        self._progress: float | None = None
        self._remaining: int | None = None
        self._total_steps: int | None = None
        self._step: int | None = None
        self._checkpoint: int | None = None
        self._speed = _Speed()
        self._series: dict[str, _Series] = {}
        self._packed = ""  # the history as it was at `_packed_at`
        self._packed_at = -math.inf
        self._outdated = False  # whether `_packed` lacks points, or does not fit anymore
        # Name to (number of the call that set it, value), the oldest first.
        self._metrics: dict[str, tuple[int, Value]] = {}
        self._outputs: dict[str, Value] = {}
        self._returned: object = None
        self._warned: set[str] = set()
        self.poster = _Poster(self.warn)

    def report(
        self,
        change: Report,
        progress: float | None = None,
        step: int | None = None,
        total_steps: int | None = None,
        *,
        checkpoint: bool = False,
    ) -> None:
        """Add a change; `progress` is exact, and rounded down in `change`."""
        with self._lock:
            outputs = self._outputs | change.outputs
            if change.outputs:
                # With the longest header, so that a later call without outputs cannot exceed the limit either.
                size = len(_encode(_message(100, MAX_SECONDS, [], outputs, self._returned)))
                if size > MAX_BYTES:
                    raise ValueError(
                        f"outputs need {size} bytes; a termination message has {MAX_BYTES}. "
                        "Write the list to a file and report the URI of that file"
                    )
            self._calls += 1
            self._outputs = outputs
            self._total_steps = total_steps or self._total_steps
            self._step = self._step if step is None else step
            if checkpoint:
                self._checkpoint = (self._step or 0) if step is None else step
                self._remember(RESERVED + "checkpoint", self._checkpoint, self._checkpoint)
            if progress is None and step is not None and self._total_steps:
                progress = min(100.0, 100 * step / self._total_steps)
            if progress is not None:
                self._progress = progress
                self._speed.add(time.monotonic(), progress)
            self._remaining = self._remaining if change.remaining_seconds is None else change.remaining_seconds
            for name, value in change.metrics.items():
                self._metrics.pop(name, None)
                self._metrics[name] = (self._calls, value)
                self._remember(name, self._calls if self._step is None else self._step, value)
            for name in list(self._metrics)[:-MAX_METRICS]:
                self._metrics.pop(name, None)
                self._series.pop(name, None)
            self._send()

    def report_returned(self, value: object) -> None:
        from trainjob.returned import too_large  # noqa: PLC0415 - imports json, as above

        with self._lock:
            size = len(_encode(_message(100, MAX_SECONDS, [], self._outputs, value)))
            if size > MAX_BYTES:
                raise ValueError(too_large(len(_encode(value)), size))
            self._returned = value
            self._sent = -1
            self._send()

    def flush(self) -> None:
        """See `flush`."""
        with self._lock:
            self._send()  # if a signal handler has interrupted a report
            if self._outdated:
                self._packed_at = -math.inf
                self._write()
        self.poster.flush()

    def _remember(self, name: str, step: int, value: Value) -> None:
        if not isinstance(value, bool | str) and math.isfinite(value):
            self._series.setdefault(name, _Series()).add(step, time.time(), float(value))
            self._outdated = True

    def _write(self) -> None:
        if path := termination_log():
            try:
                _write(path, self._fitting())
            except OSError as error:
                self.warn("termination message", error)

    def _estimate(self) -> int | None:
        """The script's estimate of the remaining seconds; without one, an estimate from its progress."""
        return self._speed.remaining(time.monotonic()) if self._remaining is None else self._remaining

    def _details(self) -> list[tuple[str, Value]]:
        known = {"step": self._step, "checkpoint": self._checkpoint}
        found: list[tuple[str, Value]] = [
            (RESERVED + name, value) for name, value in known.items() if value is not None
        ]
        if self._remaining is None and self._estimate() is not None:
            found.append((RESERVED + "estimate", "speed"))
        return found

    def _send(self) -> None:
        # Under the lock, so that a slower thread does not overwrite a newer message with an older one.
        while self._sent != self._calls:  # again if a signal handler has reported something newer in between
            calls = self._calls
            self._write()
            if all(os.environ.get(name) for name in _API):
                self._post()
            self._sent = calls

    def _post(self) -> None:
        latest = [(name, value) for name, (_, value) in reversed(list(self._metrics.items()))]
        metrics = [*self._details(), *latest][:MAX_METRICS]  # without those not updated for the longest time
        status = _message(self._progress, self._estimate(), metrics, {})
        del status["trainjob"]
        if _rank("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK") == 0:
            self.poster.post(_encode({"trainerStatus": status}))

    def _fitting(self) -> bytes:
        """The current message, without metrics that do not fit, and with as much history as fits."""
        details = self._details()
        bare = _encode(_message(self._progress, self._estimate(), details, self._outputs, self._returned))
        if len(bare) > MAX_BYTES:
            details = []
            bare = _encode(_message(self._progress, self._estimate(), [], self._outputs, self._returned))
        room = MAX_BYTES - len(bare) - len('"metrics":[],')
        kept = dict(self._metrics)
        size = {name: len(_encode({"name": name, "value": text_of(value)})) + 1 for name, (_, value) in kept.items()}
        total = sum(size.values())
        for name in sorted(kept, key=lambda name: (kept[name][0], -size[name])):
            if total <= room:
                break
            del kept[name]
            total -= size[name]
        metrics = [*details, *((name, value) for name, (_, value) in kept.items())]
        history = self._history(room - total - len('"history":"",'))
        return _encode(
            _message(self._progress, self._estimate(), metrics, self._outputs, self._returned, history=history)
        )

    def _history(self, room: int) -> str:
        """The history as text of at most `room` bytes; renewed once per second, since renewing takes milliseconds."""
        if self._outdated and time.monotonic() - self._packed_at >= _HISTORY_INTERVAL:
            self._packed = self._thinned(room - _HISTORY_SLACK)
            self._packed_at, self._outdated = time.monotonic(), False
        if len(self._packed) <= room:
            return self._packed
        self._outdated = True  # the next renewal, or the flush at exit, makes it fit
        return ""

    def _thinned(self, room: int) -> str:
        # Of too many metrics, those not updated for the longest time are dropped first, as above.
        latest = {name: number for name, (number, _) in dict(self._metrics).items()}
        series = dict(self._series)
        names = sorted(series, key=lambda name: -latest.get(name, math.inf))[: MAX_POINTS // 4]
        buckets = MAX_POINTS // (2 * len(names)) - 1 if names else 0
        while names:
            packed = _packed({name: series[name].points(buckets) for name in names})
            if len(packed) <= room:
                return packed
            if buckets > 1:
                buckets = max(1, buckets * room // len(packed))
            else:
                names = names[: len(names) * room // len(packed)]
        return ""

    def warn(self, channel: str, error: object) -> None:
        if channel not in self._warned:
            self._warned.add(channel)
            try:
                sys.stderr.write(f"trainjob.progress: {channel} failed, the training continues: {error}\n")
            except (OSError, ValueError, AttributeError, RuntimeError):
                return  # stderr is closed, or None, or a signal handler has interrupted a write to it


class _Series:
    """The values of one metric so far, in bounded memory: the extremes of buckets of equal size."""

    def __init__(self) -> None:
        self._first: _Entry | None = None
        self._last: _Entry | None = None
        self._buckets: list[tuple[_Entry, _Entry]] = []  # the lowest and the highest of each
        self._size = 1  # values in each bucket
        self._filled = 0  # values in the last one
        self._count = 0

    def add(self, step: int, moment: float, value: float) -> None:
        """Add the latest value."""
        entry = self._last = (value, self._count, step, moment)
        self._first = self._first or entry
        self._count += 1
        if self._buckets and self._filled < self._size:
            low, high = self._buckets[-1]
            self._buckets[-1] = (min(low, entry), max(high, entry))
            self._filled += 1
            return
        if len(self._buckets) == _BUCKETS:
            self._buckets, self._size = self._grouped(2), 2 * self._size
        self._buckets.append((entry, entry))
        self._filled = 1

    def points(self, buckets: int) -> list[Point]:
        """The first, the last, and the extremes of at most `buckets` buckets: at most 2 x `buckets` + 2 points."""
        grouped = self._grouped(-(-len(self._buckets) // buckets))
        entries = {entry for entry in (self._first, self._last) if entry}.union(*grouped)
        return [(step, moment, value) for value, _, step, moment in sorted(entries, key=lambda entry: entry[1])]

    def _grouped(self, size: int) -> list[tuple[_Entry, _Entry]]:
        groups = [self._buckets[start : start + size] for start in range(0, len(self._buckets), size)]
        return [(min(low for low, _ in group), max(high for _, high in group)) for group in groups]


class _Speed:
    """The speed of the progress in the latest half of the time since the first report."""

    def __init__(self) -> None:
        self._began = 0.0
        self._latest = (0.0, 0.0)  # time and percentage
        self._samples: list[tuple[float, float]] = []  # the first is where that half begins

    def add(self, now: float, progress: float) -> None:
        """Add the progress at time `now` of a monotonic clock."""
        if progress < self._latest[1]:  # another part of the work starts
            self._samples.clear()
        if not self._samples:
            self._began = now
        self._latest = (now, progress)
        elapsed = now - self._began
        if not self._samples or now - self._samples[-1][0] > elapsed / _SAMPLES:
            self._samples.append(self._latest)
        del self._samples[: sum(then <= now - elapsed / 2 for then, _ in self._samples[1:])]

    def remaining(self, now: float) -> int | None:
        """Seconds to the end at the current speed; None if unknown."""
        if not self._samples:
            return None
        (then, before), (latest, done) = self._samples[0], self._latest
        if done >= 100:
            return 0
        if done <= before:
            return None
        left = (latest - then) * (100 - done) / (done - before) - (now - latest)
        return min(math.ceil(max(0.0, left)), MAX_SECONDS)


def _message(
    progress: float | None,
    remaining: int | None,
    metrics: list[tuple[str, Value]],
    outputs: Mapping[str, Value],
    returned: object = None,
    *,
    history: str = "",
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "trainjob": VERSION,
        "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if progress is not None:
        message["progressPercentage"] = int(progress)
    if remaining is not None:
        message["estimatedRemainingSeconds"] = remaining
    if metrics:
        message["metrics"] = [{"name": name, "value": text_of(value)} for name, value in metrics]
    if outputs:
        message["outputs"] = outputs
    if returned is not None:
        message["returned"] = returned
    if history:
        message["history"] = history
    return message


def _encode(message: object) -> bytes:
    import json  # noqa: PLC0415

    # ASCII, so that neither a cut nor a reader's encoding can damage a character.
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def _rank(*names: str) -> int:
    """The value of the first of these variables that is set; 0 if none is."""
    for name in names:
        if text := os.environ.get(name):
            return int(text) if text.isdecimal() else 0
    return 0


def termination_log() -> str | None:
    """Path of this process's termination message; None if this process must not write one."""
    if _rank("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") != 0:
        return None
    if path := os.environ.get("TRAINJOB_TERMINATION_LOG"):
        return path
    # Kubernetes sets the variable in every container, regardless of the pod's enableServiceLinks.
    if os.environ.get("KUBERNETES_SERVICE_HOST") and os.path.exists(_DEFAULT_LOG):  # noqa: PTH110
        return _DEFAULT_LOG
    return None


def _write(path: str, message: bytes) -> None:
    # In place: kubelet bind-mounts the file, and does not see a file renamed to that path.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, message, 0)
        os.ftruncate(descriptor, len(message))
    finally:
        os.close(descriptor)


# --- Trainer's status API ------------------------------------------------------------------------------------------

_API = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")


class _RejectedError(Exception):
    """The server rejected the request permanently; a retry would not help."""


class _Poster:
    """Posts the latest status from a thread, without blocking the training."""

    def __init__(self, warn: Callable[[str, object], None]) -> None:
        self._warn = warn
        self._changed = threading.Condition()
        self._pending: bytes | None = None
        self._posting = False
        self._urgent = 0  # number of tries without a long pause
        self._thread: threading.Thread | None = None

    def post(self, status: bytes) -> None:
        with self._changed:
            self._pending = status
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="trainjob-progress", daemon=True)
                # At interpreter shutdown no thread can be started anymore; then `flush` posts.
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread

    def _run(self) -> None:
        pause = _POST_INTERVAL
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None)
            began = time.monotonic()
            if self._send():
                pause = max(_POST_INTERVAL, _POST_SHARE * (time.monotonic() - began))
            else:
                pause = min(pause * 2, _MAX_BACKOFF)
            with self._changed:
                if self._urgent:
                    self._changed.wait(0.2)
                else:
                    self._changed.wait_for(lambda: self._urgent, pause)

    def _send(self) -> bool:
        """Post the pending status; False to retry."""
        with self._changed:
            status, self._pending = self._pending, None
            self._posting = True
        again = False
        try:
            if status is not None:
                _post(status)
        except _RejectedError as error:
            self._warn("status API", error)
        except Exception as error:  # noqa: BLE001 - no error of the status API may fail the training
            self._warn("status API", error)
            again = True
        with self._changed:
            if again:
                self._pending = self._pending or status
            self._posting = False
            self._urgent = max(0, self._urgent - 1)
            self._changed.notify_all()
        return not again

    def flush(self) -> None:
        if self._thread is None:
            if not self._send():
                self._send()
            return
        # By the thread, so that nothing, e.g. a name server that does not respond, delays the exit for longer.
        with self._changed:
            self._urgent = _FLUSH_TRIES + self._posting
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: not self._posting and (self._pending is None or not self._urgent), _FLUSH_TIMEOUT
            ):
                self._warn("status API", f"no response within {_FLUSH_TIMEOUT:g} s")
            self._urgent = 0


def _post(status: bytes) -> None:
    # 40 ms of imports, for a channel that few runs use.
    from http.client import HTTPSConnection  # noqa: PLC0415
    from ssl import VERIFY_X509_STRICT, create_default_context  # noqa: PLC0415
    from urllib.parse import urlsplit  # noqa: PLC0415

    url, ca_file, token_file = (os.environ[name] for name in _API)
    address = urlsplit(url)
    if address.scheme != "https" or not address.hostname:
        raise _RejectedError(f"{_API[0]} is not an https URL: {url}")
    # Both files are read each time: kubelet renews the token, and the controller the certificate.
    with open(token_file, encoding="utf-8") as file:  # noqa: PTH123
        token = file.read().strip()
    context = create_default_context(cafile=ca_file)
    context.verify_flags &= ~VERIFY_X509_STRICT  # cluster CAs often lack the key usage that Python 3.13 requires
    # http.client, not urllib.request: the token must not reach a proxy or a redirect.
    connection = HTTPSConnection(address.hostname, address.port, timeout=_POST_TIMEOUT, context=context)
    try:
        connection.request(
            "POST",
            address.path or "/",
            body=status,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        body = answer.read(500).decode(errors="replace").strip()
    finally:
        connection.close()
    if answer.status >= 300:
        # 401 and 403 are retried, since the token may just have been renewed; 429 and 5xx are temporary.
        error = _RejectedError if answer.status in {400, 404, 405, 413, 422} else ConnectionError
        raise error(f"HTTP {answer.status} from {url}: {body}")


# --- the watchdog --------------------------------------------------------------------------------------------------

_RANKS = ("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "DMLC_TASK_ID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
_WORLDS = ("WORLD_SIZE", "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "DMLC_NUM_WORKER", "PET_NNODES")


class _Counter:
    """The steps of this process. `step` runs in each step of a training, so it only adds to these."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # as in `_Reporter`
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


class _Watchdog:
    """Writes whether this rank makes progress, and its stacks when it does not."""

    def __init__(self, counter: _Counter, timeout: float) -> None:
        self._counter = counter
        self._timeout = timeout
        self._rank = _rank(*_RANKS)
        self._world = _rank(*_WORLDS)
        self._pid = os.getpid()
        self._seen = 0  # count at the latest look
        self._changed = time.monotonic()  # when it had changed
        self._written = 0  # count in the latest marker
        self._written_at = self._changed
        self._number: dict[str, int] = {}  # in the latest marker, of a step made at:
        self._number_at = self._changed
        self._stalled = False
        self._warned = False
        self._ended = False
        self._began: float | None = None  # when the first step was seen
        self._sampled = self._changed
        self._spent = {WAITING: 0.0, DEVICE: 0.0, LOADING: 0.0}
        self._phase = 0.0

    def start(self) -> None:
        """Start the thread. Without one, as at interpreter shutdown, nothing more is written."""
        self._mark()
        try:
            threading.Thread(target=self._run, name=_WATCHDOG, daemon=True).start()
        except RuntimeError:
            return
        atexit.register(self._end)

    def _run(self) -> None:
        places = _Places()
        main = threading.main_thread().ident
        while True:
            self._phase = (self._phase + _GOLDEN) % 1
            time.sleep(min(self._timeout / 16, _LONGEST_TICK) * (0.5 + self._phase))
            if self._ended:
                return
            now, count = time.monotonic(), self._counter.count
            if self._began is not None:
                if (place := places.of(sys._current_frames().get(main or 0))) in self._spent:
                    # The whole time since: code that holds the interpreter's lock delays this thread.
                    self._spent[place] += now - self._sampled
            elif count:
                self._began = now
            self._sampled = now
            if count != self._seen:
                if self._stalled:
                    self._warn(now - self._changed)
                self._seen, self._changed, self._stalled = count, now, False
            if count != self._written and (not self._written or now - self._written_at >= self._timeout / 4):
                self._mark()
            elif not self._stalled and now - self._changed >= self._timeout / (2 if count else 1):
                self._stalled = True
                self._mark(stalled_seconds=round(now - self._changed, 3))
                for stacks in (_stacks, _native_stacks):
                    _write_lines(f"{STACK_MARKER}{self._rank}| {line}" for line in stacks())

    def _mark(self, **more: object) -> None:
        """Write a marker of the latest look."""
        marker: dict[str, object] = {"rank": self._rank, **({"world": self._world} if self._world else {})}
        if self._seen:
            number = self._counter.number()
            marker |= {"count": self._seen, **number}
            for name, value in number.items():
                done = value - self._number.get(name, value)
                if done > 0:
                    marker["step_seconds"] = float(f"{(self._changed - self._number_at) / done:.4g}")
            self._number, self._number_at = number, self._changed
            if self._began is not None:
                spent = {"all": self._changed - self._began} | {k: v for k, v in self._spent.items() if v}
                marker["spent"] = {name: round(seconds, 3) for name, seconds in spent.items()}
        self._written, self._written_at = self._seen, time.monotonic()
        _write_lines([f"{RANK_MARKER}{_encode({**marker, **more, 'time': round(time.time(), 3)}).decode()}"])

    def _warn(self, seconds: float) -> None:
        if not self._warned:
            self._warned = True
            advice = f"raise stall_timeout ({self._timeout:g} s) to several times the longest pause of the training"
            _write_lines([f"trainjob.progress: a step came {seconds:.3g} s after the one before: {advice}"])

    def _end(self) -> None:
        if os.getpid() == self._pid:  # not in a child that inherited this handler
            self._ended = True
            if self._seen != self._counter.count:
                self._seen, self._changed = self._counter.count, time.monotonic()
            self._mark(ended=True)


class _Places:
    """Classifies what a thread does by the files of its frames."""

    def __init__(self) -> None:
        import re  # noqa: PLC0415 - only for ranks that are watched

        self._kinds: dict[str, str] = {}  # of a file
        self._patterns = [
            (LOADING, re.compile(_LOADING_FILES)),
            (WAITING, re.compile(BACKWARD_FILES)),
            (DEVICE, re.compile(DEVICE_FILES)),
            ("neutral", re.compile(NEUTRAL_FILES)),
            (WAITING, re.compile(COLLECTIVE_FILES)),
        ]

    def of(self, frame: FrameType | None) -> str:
        """`WAITING`, `DEVICE` or `LOADING`; other text for anything else."""
        found = ""  # by the innermost frame that decides
        device = False
        while frame is not None:
            kind = self._kind(frame.f_code.co_filename)
            if kind == LOADING:  # what it calls belongs to it
                return LOADING
            device = device or (not found and kind == DEVICE)
            if not found and kind not in ("neutral", DEVICE):
                found = DEVICE if device and kind != WAITING else kind
            frame = frame.f_back
        return found

    def _kind(self, file: str) -> str:
        if (kind := self._kinds.get(file)) is None:
            kind = next((kind for kind, pattern in self._patterns if pattern.search(file)), "own")
            self._kinds[file] = kind
        return kind


def _stacks() -> list[str]:
    """The Python stacks of all threads but this one, the main thread first, innermost frames first."""
    import faulthandler  # noqa: PLC0415 - only for ranks that hang
    import tempfile  # noqa: PLC0415 - as above

    # A file, since a pipe holds only 64 KB, and nothing reads it before the end. In memory where that is possible.
    try:
        if hasattr(os, "memfd_create"):
            file = open(os.memfd_create("trainjob-stacks"), "w+b")  # noqa: PTH123, SIM115 - closed below
        else:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    except OSError as error:
        return [f"the stacks cannot be read: {error}"]
    with file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode("utf-8", "replace")
    main = f"0x{threading.main_thread().ident or 0:016x}"
    threads = [block.splitlines() for block in text.strip().split("\n\n") if not block.startswith("Current thread")]
    threads.sort(key=lambda lines: main not in lines[0])
    found = [line for lines in threads for line in lines[: _FRAMES + 1]]
    return [line.replace(f"Thread {main}", "Main thread") for line in found[:_STACK_LINES]]


def _native_stacks() -> list[str]:
    """What py-spy shows of all threads, the main thread first; nothing without py-spy, or without its permission."""
    import subprocess  # noqa: PLC0415 - only for ranks that hang
    from shutil import which  # noqa: PLC0415 - as above

    program, limit = which("py-spy"), which("timeout")
    if program is None or limit is None:
        return []
    _allow_tracing(True)
    try:
        # py-spy stops this process meanwhile, so another process has to end it if it takes too long.
        command = [limit, "-s", "KILL", str(_NATIVE_SECONDS), program, "dump", "--native", "--pid", str(os.getpid())]
        text = subprocess.run(command, capture_output=True, check=False).stdout.decode("utf-8", "replace")
    except OSError:
        return []
    finally:
        _allow_tracing(False)
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("Thread "):
            blocks.append([])
        if blocks and line:  # before the first thread stands the command line, which may have secrets
            blocks[-1].append(line)
    blocks.sort(key=lambda lines: "MainThread" not in lines[0])
    found = [line for lines in blocks if _WATCHDOG not in lines[0] for line in lines[: _FRAMES + 1]]
    return [NATIVE_HEADING, *found[:_STACK_LINES]] if found else []


def _allow_tracing(allowed: bool) -> None:
    """Let a child of this process read it, which the kernel's module Yama forbids by default."""
    import ctypes  # noqa: PLC0415 - only for ranks that hang

    set_ptracer, anyone = 0x59616D61, -1  # PR_SET_PTRACER, PR_SET_PTRACER_ANY of linux/prctl.h
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(set_ptracer, ctypes.c_ulong(anyone if allowed else 0), 0, 0, 0)


def _write_lines(lines: Iterable[str]) -> None:
    """Write complete lines to stderr, also if the script has replaced `sys.stderr`."""
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    while text:
        cut = text.rfind(b"\n", 0, _ATOMIC) + 1 or len(text)
        try:
            os.write(2, text[:cut])
        except OSError:
            return
        text = text[cut:]


_reporter = _Reporter()
_counter = _Counter()


def _after_fork() -> None:
    # A lock held by another thread would stay locked in the child forever, and the parent posts the pending status.
    global _reporter, _counter  # noqa: PLW0603 - the state of the process
    _reporter = _Reporter()
    _counter = _Counter()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
