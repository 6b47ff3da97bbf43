"""The termination message of a container: its format, and how it is written, read and merged.

The message is one JSON object of at most 4096 bytes. Unknown fields are left out. Other programs may write it, too::

    {"trainjob": 1, "lastUpdatedTime": "2026-01-31T12:00:00Z", "progressPercentage": 40,
     "estimatedRemainingSeconds": 90, "metrics": [{"name": "loss", "value": "0.31"}],
     "outputs": {"model": "s3://models/digits/7", "promoted": true},
     "history": {"loss": [[100, 1769860800.0, 0.9], [400, 1769860860.0, 0.31]]}}

``returned`` is the return value of a function trainer, any JSON value, and ``error`` the error of a program of this
package, see `trainjob._diagnosis.termination_messages`.

Trainer's API supports text only, so a metric is written as text there and in the message, and is converted back:
``true`` and ``false``, a number, or the text itself. Names that begin with ``trainjob.`` are no metrics: the latest
``step``, the step of the latest ``checkpoint``, and ``estimate``, ``speed`` if the remaining time was derived from the
progress (`Report.details`). A reader of both channels takes each metric from the message, which is always up to date,
and from the API only those that the message lacks: without space in it, or of other programs (Hugging Face's callback).

``history`` has the earlier values of each metric that is a finite number: step, Unix time in seconds, value. It uses
the bytes that the other fields leave free, for at most 256 points of all metrics together. More points are thinned by
min-max decimation: each of equal spans of time keeps its lowest and its highest value, and the first and the last value
stay. `report` writes it compressed, as text: base64 of zlib of ``{"loss": [steps, times in 0.1 s, values]}``, with
steps and times as differences to their predecessors. It is renewed once per second, and at interpreter exit.

The source of this file is sent with a function trainer into images without this package, whose Python may be older:
standard library only, and nothing that Python 3.8 does not know.
"""

from __future__ import annotations

import math
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeGuard

    Value = bool | int | float | str

VERSION = 1
MAX_BYTES = 4096  # kubelet: MaxContainerTerminationMessageLength; it cuts off the rest
MAX_METRICS = 256  # these three: validation of TrainJob.status.trainerStatus in Trainer's CRD
MAX_NAME = 64
MAX_VALUE = 64  # also digits of a whole number, which all stores, and a float, can hold
_LONG = 10**MAX_VALUE  # a minus counts as a digit: the text of a metric in Trainer's API has as many characters
MAX_SECONDS = 2**31 - 1  # int32 in Trainer's API
MAX_STEPS = 2**53  # exact in all JSON readers
MAX_POINTS = 256  # of the history, of all metrics together: 8 KB as JSON in a result
MAX_DEPTH = 20  # of a returned value: protobuf, in which KFP stores results, refuses 50
RESERVED = "trainjob."
"""Prefix of the names of `Report.details` among the metrics."""
RANKS = ("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "DMLC_TASK_ID", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
"""Environment variables of a rank, the most specific first."""
STALL_TIMEOUT = "TRAINJOB_STALL_TIMEOUT"
"""Environment variable: seconds without a step after which the waiter fails the job."""

_DEFAULT_LOG = "/dev/termination-log"
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # a FIFO without a reader would block for ever
_LONGEST = 16 * MAX_BYTES  # that is read of a message
_REPLACED = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)], "\ufffd")


def clean(value: Any, depth: int = 0) -> Any:
    """A JSON value as every store can hold it: XComs in PostgreSQL, KFP's metadata, annotations, registries.

    U+FFFD replaces control characters, except tabs and line breaks, and halves of surrogate pairs: PostgreSQL has no
    NUL, and UTF-8 no half of a pair.

    Raises:
        ValueError: NaN, infinity, a whole number of more than 64 digits, or lists and dicts in more than 20 levels.
    """
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else value.translate(_REPLACED)
    if depth > MAX_DEPTH:
        raise ValueError(f"it has more than {MAX_DEPTH} levels of lists and dicts")
    if isinstance(value, dict):
        return {key(name): clean(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [clean(part, depth + 1) for part in value]
    if value is not None and not is_output(value):
        raise ValueError(f"it has NaN, an infinity or a whole number of more than {MAX_VALUE} digits")
    return value


def key(name: str) -> str:
    """A name as a key that every store can hold: Airflow refuses, or takes for its own, XComs with a few of them."""
    name = clean(name)
    return f"{name}_" if name in ("__classname__", "__id__", "__type") else name


def is_output(value: object) -> TypeGuard[Value]:
    """Whether a value may be an output: a bool, text or a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (bool, str)) or (isinstance(value, int) and -_LONG // 10 < value < _LONG)


def scalar(value: Any) -> Value:
    """A bool, number or text as Python's; also a scalar, or an array of one element, of NumPy, JAX or PyTorch.

    Raises:
        Exception: The value is something else. It is of any class, since the value's own methods raise it.
    """
    if isinstance(value, str):
        return str(clean(str.__str__(value)))
    if hasattr(value, "item") and not isinstance(value, (bool, int, float)):
        value = value.item()
    if isinstance(value, (bool, str)):
        return value
    try:
        return int(value.__index__())  # ints of any library
    except (AttributeError, TypeError):
        return float(value)


def text_of(value: Value) -> str:
    """A metric as text for Trainer's API; the inverse of `trainjob.progress.reading.value_of`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def encode(message: object) -> bytes:
    """A message, or a part of one, as JSON."""
    import json

    # ASCII, so that neither a cut nor a reader's encoding can damage a character.
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def decoded(text: str) -> dict[str, Any]:
    """The first JSON object in a text; an empty one without any.

    Text after it is ignored, since a writer truncates the file after writing and may be killed in between.
    """
    import json

    try:
        message, _ = json.JSONDecoder().raw_decode(text[:_LONGEST].lstrip())
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def header() -> dict[str, Any]:
    """A message without values."""
    return {"trainjob": VERSION, "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def fit(message: dict[str, Any], order: Sequence[int]) -> bytes:
    """The message as JSON of at most 4096 bytes: without its history, then without metrics, if it is too long.

    Args:
        message: The message, which fits without both, see `check_size`.
        order: Indexes of its metrics; the last is dropped first.
    """
    text = encode(message)
    if len(text) <= MAX_BYTES:
        return text
    parts = {name: part for name, part in message.items() if name not in ("history", "metrics")}
    fewest, most, text = 0, len(order), encode(parts)
    while fewest < most:  # bisection: how many metrics fit
        number = (fewest + most + 1) // 2
        kept = set(order[:number])
        metrics = [entry for index, entry in enumerate(message["metrics"]) if index in kept]
        longer = encode({**parts, "metrics": metrics})
        if len(longer) <= MAX_BYTES:
            fewest, text = number, longer
        else:
            most = number - 1
    return text


def check_size(message: dict[str, Any], field: str, value: object) -> None:
    """Check that a value fits into a message that has no space for metrics and history.

    Raises:
        ValueError: It does not fit.
    """
    parts = {name: part for name, part in message.items() if name not in ("history", "metrics")}
    size, needed = len(encode({**parts, field: value})), len(encode(value))
    if size > MAX_BYTES:
        free = max(0, MAX_BYTES - size + needed)
        raise ValueError(
            f"it has {needed} bytes of JSON; {free} of {MAX_BYTES} bytes are free in the termination message of "
            "rank 0; write it to a file and report the URI of that file"
        )


def merge(field: str, value: object) -> None:
    """Set one field of this container's message, which keeps the others. Where space is short, the history is dropped.

    After the history, the oldest metrics are dropped. Nothing is written where `termination_log` is None.

    Raises:
        OSError: The file cannot be read or written.
        ValueError: The value does not fit. Nothing was changed.
    """
    path = termination_log()
    if path is None:
        return
    found = decoded(written(path))
    known = found if found.get("trainjob") == VERSION else {}
    message = {**header(), **known, **header(), field: value}  # which begins with the version
    if not isinstance(message.get("metrics"), list):
        message.pop("metrics", None)
    check_size(message, field, value)
    write(path, fit(message, range(len(message.get("metrics", ())))[::-1]))


def termination_log() -> str | None:
    """Path of this process's termination message; None if this process must not write one."""
    if rank("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") != 0:
        return None
    path = os.environ.get("TRAINJOB_TERMINATION_LOG")
    if path:
        return path
    # Kubernetes sets the variable in every container, regardless of the pod's enableServiceLinks.
    if os.environ.get("KUBERNETES_SERVICE_HOST") and os.path.exists(_DEFAULT_LOG):
        return _DEFAULT_LOG
    return None


def rank(*names: str) -> int:
    """The value of the first of these variables that is set; 0 if none is."""
    text = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    return int(text) if text.isdecimal() else 0


def written(path: str) -> str:
    """The text in the file; empty if it does not exist.

    Raises:
        OSError: It cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return ""
    try:
        return os.pread(descriptor, _LONGEST, 0).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def write(path: str, message: bytes) -> None:
    """Replace the message in the file.

    Raises:
        OSError: It cannot be written, or is not a regular file.
    """
    # In place: kubelet bind-mounts the file, and does not see a file renamed to that path.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o644)
    try:
        if os.pwrite(descriptor, message, 0) < len(message):
            raise OSError(f"no space for {len(message)} bytes in {path}")
        os.ftruncate(descriptor, len(message))
    finally:
        os.close(descriptor)


def warn(text: str) -> None:
    """Write a line to stderr, whatever has become of it."""
    stderr, line = sys.stderr, f"trainjob.progress: {text}\n"
    if stderr is None:
        return  # print would write to stdout
    try:
        if sys.__stderr__ is not None and stderr is sys.__stderr__:
            # Not through its buffer: Python 3.13 exits with code 120 if the buffer has a line that cannot be written.
            os.write(stderr.fileno(), line.encode("utf-8", "backslashreplace"))
        else:
            print(line, end="", file=stderr, flush=True)
    except Exception:  # noqa: BLE001 - it is closed, or the script's own
        return


def watch() -> None:
    """Start the watchdog of this rank, if the job has a ``stall_timeout`` and the image has the package."""
    if os.environ.get(STALL_TIMEOUT):
        from importlib import import_module

        try:
            import_module("trainjob.progress").watch()  # by name, since that package imports this module
        except ImportError:
            return


def report_returned(function: str, value: Any) -> None:
    """Report the value that a function returned, on rank 0 only; None is not reported.

    A value that is not JSON, or is too large, is logged and does not fail a finished training.
    """
    if value is None or rank(*RANKS) != 0:
        return
    import json

    try:
        value = clean(json.loads(json.dumps(value, allow_nan=False, default=_as_scalar)))
        # If the function has imported that package, a thread of it may write the message again later.
        getattr(sys.modules.get("trainjob.progress"), "merge", merge)("returned", value)
    except Exception as error:  # noqa: BLE001 - of any class, since methods of the value are called
        advice = "return finite numbers, text, bools, or lists and dicts of them; write other values to a file"
        warn(f"the return value of {function}() is lost: {described(error)}; {advice}")


def _as_scalar(value: Any) -> Value:
    if getattr(value, "ndim", None) == 0:
        return scalar(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def described(error: Exception) -> str:
    """Class and message of an error, also if its message cannot be read."""
    try:
        return f"{type(error).__name__}: {clean(str(error))[:500]}"
    except Exception:  # noqa: BLE001 - of any class: of the object whose method failed
        return type(error).__name__
