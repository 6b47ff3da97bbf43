"""The accumulated report, and its channels: the termination message and Trainer's status API."""

from __future__ import annotations

import math
import os
import threading
import time
from itertools import pairwise

from .message import (
    MAX_BYTES,
    MAX_METRICS,
    MAX_POINTS,
    MAX_SECONDS,
    RANKS,
    RESERVED,
    check_size,
    encode,
    fit,
    header,
    rank,
    termination_log,
    text_of,
    write,
)
from .trainer_api import VARIABLES, Poster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .calls import Call
    from .message import Value

    Point = tuple[int, float, float]

_INTERVAL = 1.0  # at which the history is renewed
_SLACK = 64  # bytes by which the other fields may grow until the history is renewed
_SAMPLES = 128  # of the progress, to estimate the remaining time


class Reporter:
    """The accumulated report, and its channels: the termination message and Trainer's status API."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        # A signal handler may call `report` or `flush` while its thread is in one of them: a plain lock would never be
        # released then. So nothing here iterates over what such a call changes.
        self._lock = threading.RLock()
        self._calls = 0
        self._sent = 0  # the calls of which the channels have the state
        self._progress: float | None = None
        self._remaining: int | None = None
        self._total_steps: int | None = None
        self._details: dict[str, int] = {}
        self._speed = Speed()
        self._history = History()
        # Name to (number of the call that set it, value), the oldest first.
        self._metrics: dict[str, tuple[int, Value]] = {}
        self._fields: dict[str, Any] = {}  # of the message, which are never dropped
        self.poster = Poster(self._failed)

    def report(self, call: Call) -> None:
        """Add what a call reports, and send it."""
        with self._lock:
            self._calls += 1
            self._total_steps = call.total_steps or self._total_steps
            if call.step is not None:
                self._details["step"] = call.step
            step = self._details.get("step")
            if call.checkpoint:
                self._details["checkpoint"] = step or 0
                self._history.add(RESERVED + "checkpoint", step or 0, step or 0)
            progress = call.progress
            if progress is None and call.step is not None and self._total_steps:
                progress = min(100.0, 100 * call.step / self._total_steps)
            if progress is not None:
                self._progress = progress
                self._speed.add(time.monotonic(), progress)
            if call.remaining is not None:
                self._remaining = math.ceil(min(call.remaining, MAX_SECONDS))
            for name, value in call.metrics.items():
                self._metrics.pop(name, None)
                self._metrics[name] = (self._calls, value)
                self._history.add(name, self._calls if step is None else step, value)
            for name in list(self._metrics)[:-MAX_METRICS]:
                self._metrics.pop(name, None)
                self._history.drop(name)
            for name, value in call.outputs.items():
                try:
                    self._set("outputs", {**self._fields.get("outputs", {}), name: value})
                except ValueError as error:
                    call.refuse("outputs", "does not fit: ", name, error)
            self._send()

    def merge(self, field: str, value: object) -> None:
        """Set a field of the message, and send it."""
        with self._lock:
            self._set(field, value)
            self._sent = -1
            self._send()

    def flush(self) -> None:
        """See `flush`."""
        with self._lock:
            self._send()  # if a signal handler has interrupted a report
            if self._history.outdated:
                self._write(renew=True)
        self.poster.flush()

    def _set(self, field: str, value: object) -> None:
        # With the longest header, so that a later call cannot exceed the limit either.
        longest = {**header(), "progressPercentage": 100, "estimatedRemainingSeconds": MAX_SECONDS}
        check_size({**longest, **self._fields}, field, value)
        self._fields = {**self._fields, field: value}

    def _send(self) -> None:
        # Under the lock, so that a slower thread does not overwrite a newer message with an older one.
        while self._sent != self._calls:  # again if a signal handler has reported something newer in between
            calls = self._calls
            self._write()
            if all(os.environ.get(name) for name in VARIABLES) and rank(*RANKS) == 0:
                self._post()
            self._sent = calls

    def _write(self, *, renew: bool = False) -> None:
        if path := termination_log():
            try:
                write(path, self._message(renew=renew))
            except OSError as error:
                self._failed("termination message", error)

    def _message(self, *, renew: bool) -> bytes:
        """The current message, without metrics that do not fit, and with as much history as fits."""
        metrics, details = dict(self._metrics), self._known_details()
        values = [(name, text_of(value)) for name, (_, value) in metrics.items()]
        calls = [number for number, _ in metrics.values()]
        size = [len(name) + len(text) for name, text in values]
        order = sorted(range(len(values)), key=lambda index: (-calls[index], size[index]))
        message = self._composed([*values, *details]) | self._fields
        text = fit(message, [*range(len(values), len(values) + len(details)), *order])
        history = self._history.text(MAX_BYTES - len(text) - len(',"history":""'), renew=renew)
        return text[:-1] + b',"history":"' + history.encode() + b'"}' if history else text

    def _post(self) -> None:
        latest = [(name, text_of(value)) for name, (_, value) in reversed(dict(self._metrics).items())]
        # Without those not updated for the longest time.
        status = self._composed([*self._known_details(), *latest][:MAX_METRICS])
        del status["trainjob"]
        self.poster.post(encode({"trainerStatus": status}))

    def _composed(self, metrics: list[tuple[str, str]]) -> dict[str, Any]:
        """A message with these metrics; what is unknown is left out."""
        message = header()
        if self._progress is not None:
            message["progressPercentage"] = int(self._progress)
        if (remaining := self._estimate()) is not None:
            message["estimatedRemainingSeconds"] = remaining
        if metrics:
            message["metrics"] = [{"name": name, "value": value} for name, value in metrics]
        return message

    def _estimate(self) -> int | None:
        """The script's estimate of the remaining seconds; without one, an estimate from its progress."""
        return self._speed.remaining(time.monotonic()) if self._remaining is None else self._remaining

    def _known_details(self) -> list[tuple[str, str]]:
        details = [(RESERVED + name, str(value)) for name, value in dict(self._details).items()]
        speed = self._remaining is None and self._estimate() is not None
        return [*details, (RESERVED + "estimate", "speed")] if speed else details

    def _failed(self, channel: str, error: object) -> None:
        self._warn(channel, f"{channel} failed, the training continues: {error}")


class History:
    """The history of all metrics, in bounded memory.

    Attributes:
        outdated: Whether the latest text lacks points, or did not fit.
    """

    def __init__(self) -> None:
        self.outdated = False
        self._points: dict[str, list[Point]] = {}  # the metric updated last is the last
        self._text = ""
        self._renewed = -math.inf

    def add(self, name: str, step: int, value: object) -> None:
        """Add the latest value of a metric, if it is a finite number."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            points = self._points.pop(name, [])
            points.append((step, time.time(), float(value)))
            self._points[name] = points if len(points) <= 2 * MAX_POINTS else thinned(points, MAX_POINTS // 2)
            self.outdated = True

    def drop(self, name: str) -> None:
        """Forget a metric."""
        self._points.pop(name, None)

    def text(self, room: int, *, renew: bool = False) -> str:
        """The history as text of at most `room` bytes; renewed once per second, since renewing takes milliseconds."""
        if self.outdated and (renew or time.monotonic() - self._renewed >= _INTERVAL):
            self._text, self.outdated = self._fitting(room - _SLACK), False
            self._renewed = time.monotonic()
        if len(self._text) <= room:
            return self._text
        self.outdated = True  # the next renewal, or the flush at exit, makes it fit
        return ""

    def _fitting(self, room: int) -> str:
        # Of too many metrics, those not updated for the longest time are dropped first.
        known = dict(self._points)
        names = [*known][::-1]
        names.sort(key=lambda name: not name.startswith(RESERVED))
        names = names[: MAX_POINTS // 4]
        buckets = MAX_POINTS // (2 * len(names)) - 1 if names else 0
        while names:
            text = packed({name: thinned(known[name], buckets) for name in names[::-1]})
            if len(text) <= room:
                return text
            if buckets > 1:
                buckets = max(1, buckets * room // len(text))
            else:
                names = names[: len(names) * room // len(text)]
        return ""


def thinned(points: list[Point], buckets: int) -> list[Point]:
    """The first and the last, the lowest and the highest of `buckets` equal spans of time; no extreme is ever lost."""
    start, end = points[0][1], points[-1][1]
    spans: list[list[Point]] = [[] for _ in range(buckets)]
    for point in points:
        share = (point[1] - start) / (end - start) if start < end else 0  # a clock may have been set back
        spans[min(max(int(share * buckets), 0), buckets - 1)].append(point)
    ends = [(min(span, key=_value), max(span, key=_value)) for span in spans if span]
    kept = {id(point) for point in (points[0], points[-1], *(point for pair in ends for point in pair))}
    return [point for point in points if id(point) in kept]


def _value(point: Point) -> float:
    return point[2]


def packed(history: Mapping[str, list[Point]]) -> str:
    """A history, compressed as text; the inverse of `trainjob.progress.reading.history_of`."""
    import binascii
    import zlib

    columns = {}
    for name, points in history.items():
        steps, moments, values = zip(*points, strict=True)
        times = [round(10 * moment) for moment in moments]
        columns[name] = [
            *([after - before for before, after in pairwise([0, *each])] for each in (steps, times)),
            [float(f"{value:.6g}") for value in values],
        ]
    return binascii.b2a_base64(zlib.compress(encode(columns), 9), newline=False).decode()


class Speed:
    """The speed of the progress in the latest half of the time since the first report."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # time and percentage

    def add(self, now: float, progress: float) -> None:
        """Add the progress at time `now` of a monotonic clock."""
        if self._samples and progress < self._samples[-1][1]:  # another part of the work starts
            self._samples.clear()
        self._samples.append((now, progress))
        if len(self._samples) > _SAMPLES:
            del self._samples[1:-1:2]

    def remaining(self, now: float) -> int | None:
        """Seconds to the end at the current speed; None if unknown."""
        if not self._samples:
            return None
        latest, done = self._samples[-1]
        middle = (self._samples[0][0] + latest) / 2
        then, before = max(sample for sample in self._samples if sample[0] <= middle)
        if done >= 100:
            return 0
        if done <= before:
            return None
        left = (latest - then) * (100 - done) / (done - before) - (now - latest)
        return math.ceil(min(max(0.0, left), MAX_SECONDS))  # `left` may be infinite
