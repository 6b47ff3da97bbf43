"""The termination message of the container: how `report` writes it, and `read` parses it.

The message is one JSON object of at most 4096 bytes. Unknown fields are left out. Other programs may write it, too::

    {"trainjob": 1, "lastUpdatedTime": "2026-01-31T12:00:00Z", "progressPercentage": 40,
     "estimatedRemainingSeconds": 90, "metrics": [{"name": "loss", "value": "0.31"}],
     "outputs": {"model": "s3://models/digits/7", "promoted": true},
     "history": {"loss": [[100, 1769860800.0, 0.9], [400, 1769860860.0, 0.31]]}}

``returned`` is the return value of a function trainer, any JSON value, see `trainjob.progress.return_value`.

Trainer's API supports text only, so a metric is written as text there and in the message, and `read` converts it back:
``true`` and ``false``, a number, or the text itself.

Three facts that are no metrics travel as metrics, whose names begin with the reserved prefix ``trainjob.``:
``trainjob.step``, the latest step; ``trainjob.checkpoint``, the step of the latest checkpoint; ``trainjob.estimate``,
``speed`` if the remaining time was derived from the progress. `read` returns them as `Report.details`.

A reader of both channels takes each metric from the message, which is always up to date. From the API it takes only
metrics that the message lacks: those without space in it, and those of other programs (Hugging Face's callback).

``history`` has the earlier values of each metric that is a finite number: step, Unix time in seconds, value. It uses
the bytes that the other fields leave free, for at most 256 points of all metrics together. More points are thinned by
min-max decimation: consecutive reports form buckets of equal size, and each bucket keeps its lowest and its highest
value; the first and the last value stay. `report` writes it compressed, as text: base64 of zlib of ``{"loss": [steps,
times in 0.1 s, values]}``, with steps and times as differences to their predecessors. It is renewed once per second,
and at interpreter exit.
"""

from __future__ import annotations

import math
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Value = bool | int | float | str
    Point = tuple[int, float, float]

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

    def __init__(
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


def read(text: str) -> Report | None:
    """Parse a termination message; None if it has another format or is incomplete.

    Text after the object is ignored, since the writer truncates the file after writing and may be killed in between.
    Unknown keys are ignored; known keys with a wrong type count as absent.
    """
    message = _decoded(text)
    if _number(message) != VERSION:  # a later version may use the same keys for other values
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
        outputs={k: v for k, v in outputs.items() if is_output(v)} if isinstance(outputs, dict) else {},
        updated=updated if isinstance(updated, str) else "",
        returned=_strict(message.get("returned")),
        history=history_of(message.get("history")),
        details=details,
    )


def newer_version(text: str) -> int | None:
    """The version of a termination message that `read` does not support, because a newer trainjob wrote it."""
    number = _number(_decoded(text))
    return number if number is not None and number > VERSION else None


def _decoded(text: str) -> dict[str, Any]:
    """The first JSON object in a text; an empty one without any."""
    import json

    try:
        message, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _number(message: dict[str, Any]) -> int | None:
    number = message.get("trainjob")
    return number if type(number) is int else None  # `True == 1`


def _named(entry: object) -> tuple[str, Value]:
    """Name and value of one metric; an empty name if it is malformed."""
    if not isinstance(entry, dict):
        return "", ""
    name, value = entry.get("name"), entry.get("value")
    if not isinstance(name, str) or not isinstance(value, _TYPES):
        return "", ""
    return name, value_of(value) if isinstance(value, str) else value


def _whole(value: object, top: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= top:
        return None
    return int(value)


def _strict(value: object) -> object:
    """The value; None if it contains a NaN or an infinity, which other JSON parsers reject."""
    import json

    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value


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


def is_output(value: object) -> bool:
    """Whether a value may be an output: a bool, text or finite number."""
    return isinstance(value, _TYPES) and not (isinstance(value, float) and not math.isfinite(value))


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
    known = [float(each) for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(known) < len(numbers):
        raise TypeError(f"not a number among {numbers!r}")
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
        times = [moment / 10 for moment in _sums(moments)]
        history[name] = list(zip(_sums(steps), times, values, strict=True))
    return history


def _sums(differences: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for difference in differences:
        total += difference
        sums.append(total)
    return sums


def history_text(history: Mapping[str, list[Point]]) -> str:
    """The history, compressed as text; the inverse of `history_of`."""
    import binascii
    import zlib

    columns = {}
    for name, points in history.items():
        steps = [step for step, _, _ in points]
        moments = [round(10 * moment) for _, moment, _ in points]
        values = [float(f"{value:.6g}") for _, _, value in points]
        columns[name] = (_differences(steps), _differences(moments), values)
    return binascii.b2a_base64(zlib.compress(encode(columns), 9), newline=False).decode()


def _differences(values: Sequence[int]) -> list[int]:
    return [value - before for before, value in zip([0, *values[:-1]], values, strict=True)]


def composed(
    progress: float | None,
    remaining: int | None,
    metrics: list[tuple[str, Value]],
    outputs: Mapping[str, Value],
    returned: object = None,
    *,
    history: str = "",
) -> dict[str, Any]:
    """A message; what is unknown or empty is left out."""
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


def encode(message: object) -> bytes:
    """A message, or a part of one, as JSON."""
    import json

    # ASCII, so that neither a cut nor a reader's encoding can damage a character.
    return json.dumps(message, separators=(",", ":")).encode("ascii")


def termination_log() -> str | None:
    """Path of this process's termination message; None if this process must not write one."""
    if rank("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") != 0:
        return None
    if path := os.environ.get("TRAINJOB_TERMINATION_LOG"):
        return path
    # Kubernetes sets the variable in every container, regardless of the pod's enableServiceLinks.
    if os.environ.get("KUBERNETES_SERVICE_HOST") and os.path.exists(_DEFAULT_LOG):
        return _DEFAULT_LOG
    return None


def rank(*names: str) -> int:
    """The value of the first of these variables that is set; 0 if none is."""
    for name in names:
        if text := os.environ.get(name):
            return int(text) if text.isdecimal() else 0
    return 0


def write(path: str, message: bytes) -> None:
    """Replace the message in the file."""
    # In place: kubelet bind-mounts the file, and does not see a file renamed to that path.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, message, 0)
        os.ftruncate(descriptor, len(message))
    finally:
        os.close(descriptor)
