"""The accumulated report, and its channels: the termination message and Trainer's status API."""

from __future__ import annotations

import math
import os
import sys
import threading
import time

from .message import (
    MAX_BYTES,
    MAX_METRICS,
    MAX_POINTS,
    MAX_SECONDS,
    RESERVED,
    composed,
    encode,
    history_text,
    rank,
    termination_log,
    text_of,
    write,
)
from .trainer_api import VARIABLES, Poster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .message import Point, Report, Value

    _Entry = tuple[float, int, int, float]  # of a series: value, number, step, time

_BUCKETS = MAX_POINTS // 2  # of one metric, in memory
_HISTORY_INTERVAL = 1.0
_HISTORY_SLACK = 64  # bytes by which the other fields may grow until the history is renewed
_SAMPLES = 64  # of the progress, to estimate the remaining time


class Reporter:
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
        self.poster = Poster(self.warn)

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
                size = len(encode(composed(100, MAX_SECONDS, [], outputs, self._returned)))
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
        """Set the value that a function trainer returned, and send it."""
        from .return_value import too_large

        with self._lock:
            size = len(encode(composed(100, MAX_SECONDS, [], self._outputs, value)))
            if size > MAX_BYTES:
                raise ValueError(too_large(len(encode(value)), size))
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
                write(path, self._fitting())
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
            if all(os.environ.get(name) for name in VARIABLES):
                self._post()
            self._sent = calls

    def _post(self) -> None:
        latest = [(name, value) for name, (_, value) in reversed(list(self._metrics.items()))]
        metrics = [*self._details(), *latest][:MAX_METRICS]  # without those not updated for the longest time
        status = composed(self._progress, self._estimate(), metrics, {})
        del status["trainjob"]
        if rank("RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK") == 0:
            self.poster.post(encode({"trainerStatus": status}))

    def _fitting(self) -> bytes:
        """The current message, without metrics that do not fit, and with as much history as fits."""
        details = self._details()
        bare = encode(composed(self._progress, self._estimate(), details, self._outputs, self._returned))
        if len(bare) > MAX_BYTES:
            details = []
            bare = encode(composed(self._progress, self._estimate(), [], self._outputs, self._returned))
        room = MAX_BYTES - len(bare) - len('"metrics":[],')
        kept = dict(self._metrics)
        size = {name: len(encode({"name": name, "value": text_of(value)})) + 1 for name, (_, value) in kept.items()}
        total = sum(size.values())
        for name in sorted(kept, key=lambda name: (kept[name][0], -size[name])):
            if total <= room:
                break
            del kept[name]
            total -= size[name]
        metrics = [*details, *((name, value) for name, (_, value) in kept.items())]
        history = self._history(room - total - len('"history":"",'))
        return encode(
            composed(self._progress, self._estimate(), metrics, self._outputs, self._returned, history=history)
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
            packed = history_text({name: series[name].points(buckets) for name in names})
            if len(packed) <= room:
                return packed
            if buckets > 1:
                buckets = max(1, buckets * room // len(packed))
            else:
                names = names[: len(names) * room // len(packed)]
        return ""

    def warn(self, channel: str, error: object) -> None:
        """Write the first failure of a channel to stderr."""
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
        return math.ceil(min(max(0.0, left), MAX_SECONDS))  # `left` may be infinite
