"""Detects that no rank of a running job makes progress, for a waiter. `trainjob._diagnosis.hangs` finds the culprit.

Progress is, in order of trust: the progress that the TrainJob reports, which the waiter's watch brings anyway; the step
counters that the watchdogs of `trainjob.progress` write to the ranks' logs; and only if no rank has ever counted a
step, any log line. Logs are read when the watch has brought no progress for three quarters of the timeout, and once per
timeout to compare the ranks (`trainjob._diagnosis.stragglers`). So a healthy job costs at most two reads of the end of
each rank's log in that time.

Readings are compared with each other, never with a clock: the clocks of nodes disagree.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from anyio.lowlevel import RunVar

from trainjob._backends.base import Backend
from trainjob._diagnosis import hangs, ranks, with_change, with_node
from trainjob._diagnosis.output import of_training
from trainjob._diagnosis.ranks import Process, Rank
from trainjob._diagnosis.stragglers import Stragglers, annotation, stragglers_of
from trainjob._jobs import telemetry
from trainjob._support.kube_objects import INITIALIZERS, mapping, rank_of
from trainjob.errors import Diagnosis, JobHung, TrainJobError
from trainjob.job import JobRef
from trainjob.status import Observation, Phase

_log = logging.getLogger(__name__)

_TAIL_LINES = 2000  # of each rank: its stacks have up to 300, other processes and chatty ranks add theirs
_SHORTEST_PAUSE = 0.05
_PAUSE = 0.75  # timeouts until the next reading. A hang that begins just after one is found one timeout after the next.
_COMPARED_PER_SECOND = 2.0  # logs that all waits of this process read to compare ranks
_STRAGGLERS_SHOWN = 3  # in a notice each, of those found at once
_COMPILER_SECONDS, _COMPILER_TIMEOUTS = 900.0, 4  # limit of a compiler: the longer of both; max-autotune takes minutes
_OFTEN, _RARELY = 8, 16  # readings without steps of two ranks before the pauses double, up to so many timeouts
_MAX_READERS = 16  # jobs of one event loop
_READERS: RunVar[anyio.CapacityLimiter] = RunVar("trainjob_stall_readers")

_BY_WATCH = "the progress that the job reports"
_BY_STEPS = "the steps that the ranks count"
_BY_LINES = "log lines, since no rank counts steps (call trainjob.progress.step() on every rank)"


@dataclass
class Reading:
    """What the ends of all logs show at one moment.

    Attributes:
        ranks: State of each process with a marker.
        lines: Pod -> time of its last line that is not of a watchdog; empty text if there is none.
        pods: Pod -> the object.
    """

    ranks: dict[Process, Rank] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    pods: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def starting(self) -> bool:
        """Whether a pod has not started, for example because its image is pulled: the other ranks wait for it."""
        return any(mapping(pod, "status").get("phase") == "Pending" for pod in self.pods.values())

    @property
    def ending(self) -> bool:
        """Whether the known processes of all pods have ended; they may still upload outputs."""
        pods = {pod for pod, _ in self.ranks}
        return bool(pods) and pods == {*self.pods} and all(rank.ended for rank in self.ranks.values())

    @property
    def stepped(self) -> bool:
        """Whether a rank has counted a step in its present run."""
        return any(rank.marker.count for rank in self.ranks.values())

    @property
    def paced(self) -> bool:
        """Whether a rank has counted two: until then it may load, or compile in its first step."""
        return any(rank.marker.count > 1 for rank in self.ranks.values())

    @property
    def compiling(self) -> list[Rank]:
        """The ranks that stall inside a compiler; the others may wait for them."""
        return [rank for rank in self.ranks.values() if rank.stalled and not rank.ended and rank.compiles]

    def quiet_since(self, before: Reading | None) -> bool:
        """Whether no rank has counted a step for half of the timeout.

        A rank that counts steps reports a stall then, or it has ended. One that does not respond reports nothing: its
        state is that of an earlier reading, which was taken at least half of the timeout before.
        """
        earlier = before.ranks if before is not None else {}
        counting = {process: rank for process, rank in self.ranks.items() if rank.marker.count}
        return any(rank.stalled for rank in counting.values()) and all(
            rank.stalled or rank.ended or (process in earlier and _steps(earlier[process]) == _steps(rank))
            for process, rank in counting.items()
        )

    def without_log(self, known: set[str]) -> set[str]:
        """The pods among `known` of whose log nothing was read."""
        read = {pod for pod, _ in self.ranks} | {pod for pod, at in self.lines.items() if at}
        return known - read

    def progressed(self, before: Reading, known: set[str], *, stepped: bool) -> bool:
        """Whether a rank has made progress since an earlier reading. A log that is missing in one of both shows none.

        Args:
            before: The earlier reading.
            known: Pods whose processes have written markers. If the end of such a log shows none, its other lines have
                displaced them, and count.
            stepped: A rank has ever counted a step: other lines do not count.
        """
        if any(process not in before.ranks for process in self.ranks):
            return True
        if any(_steps(rank) != _steps(before.ranks[process]) for process, rank in self.ranks.items()):
            return True
        displaced = known - {pod for pod, _ in self.ranks}
        return any(
            at and before.lines.get(pod, at) != at for pod, at in self.lines.items() if not stepped or pod in displaced
        )


def _steps(rank: Rank) -> tuple[object, ...]:
    return rank.marker.count, rank.marker.step, rank.ended


def _reported(observation: Observation) -> str:
    """The progress in an observation, as text: NaN differs from itself."""
    return repr((observation.step, observation.progress, sorted(observation.metrics.items())))


_NOTHING = _reported(Observation(Phase.NOT_STARTED))


class _Limit:
    """Limits the logs that are read to compare ranks, for all jobs of this process."""

    def __init__(self) -> None:
        self._free = 0.0

    def allows(self, logs: int) -> bool:
        """Whether so many logs may be read now. If so, others wait for the time that they take."""
        now = time.monotonic()
        if now < self._free:
            return False
        self._free = now + logs / _COMPARED_PER_SECOND
        return True


_limit = _Limit()


def _readers() -> anyio.CapacityLimiter:
    """Limits the jobs whose logs are read at once: many waits that begin together are due together."""
    try:
        return _READERS.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_MAX_READERS)
        _READERS.set(limiter)
        return limiter


class StallWatch:
    """Watches one job for its `stall_timeout`, and warns about ranks that are slower than the others.

    With `schedule` and `within`, a hang ends the wait of its waiter as a timeout does.

    Args:
        backend: Backend that runs the job; may be replaced by another one of the same kind.
        ref: The job.
        notify: Called with each notice for people, and the latest observation.
        compares: Whether to compare the ranks, also of a job that makes progress.
    """

    def __init__(
        self, backend: Backend, ref: JobRef, notify: Callable[[Observation, str], None], *, compares: bool = True
    ) -> None:
        self.backend = backend
        self._ref = ref
        self._notify = notify
        self._latest = Observation(Phase.NOT_STARTED)
        self._reported = _NOTHING  # progress that the watch has brought
        self._shown = ""  # what measures progress, as the latest notice has it
        self._warned = False
        self._known: set[str] = set()  # pods whose processes have written markers
        self._ranks: dict[Process, Rank] = {}  # in the latest reading
        self._stepped = False
        self._reports = 0  # changes of the progress that the watch has brought
        self._compiles = False  # whether a notice has named ranks that compile
        self._compares = compares
        self._stragglers = Stragglers()
        self._uncounted = 0  # readings in a row that could not compare ranks
        self._compared = math.inf  # when the ranks are compared next
        self._logs = 1  # number of logs in the latest reading
        self._checking: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._wait: asyncio.Timeout | None = None
        self._restart()

    def _restart(self) -> None:
        """Forget all readings: the job makes progress, starts or ends."""
        self._first: Reading | None = None  # of the readings without a change between them
        self._quiet = False  # no step in half of the timeout before that reading
        self._since = self._due = time.monotonic()
        self._due += _PAUSE * (self._latest.stall_timeout or 0)

    def observe(self, observation: Observation) -> None:
        """Take the next observation of the job."""
        before, self._latest = self._latest, observation
        reported = _reported(observation)
        progressed, self._reported = reported != self._reported, reported
        if observation.phase is not before.phase or observation.stall_timeout != before.stall_timeout:
            self._stepped = self._stepped and observation.phase is Phase.RUNNING
            if self._compares:
                self._compared = time.monotonic() + (observation.stall_timeout or 0)
            self._restart()
        elif progressed:
            self._stepped, self._reports = True, self._reports + 1
            self._show(_BY_WATCH)
            self._restart()

    def schedule(self) -> None:
        """Check in a task as long as the job runs, by the latest observation."""
        if self._latest.phase is not Phase.RUNNING or self._latest.stall_timeout is None:
            self._end()
        elif self._checking is None:
            self._checking = asyncio.create_task(self._run())

    @contextmanager
    def within(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Let `wait` expire at once if the job hangs in this context.

        Raises:
            JobHung: The job has been found to hang before.
        """
        self._wait = wait
        try:
            self.raise_failure()
            yield
        finally:
            self._wait = None

    def raise_failure(self) -> None:
        """Raise what the checks have found.

        Raises:
            JobHung: No rank has made progress for the timeout; before the second step, for twice the timeout.
        """
        if self._failure is not None:
            raise self._failure

    async def aclose(self) -> None:
        """End the checks."""
        if (checking := self._end()) is not None:
            await asyncio.wait({checking})

    def _end(self) -> asyncio.Task[None] | None:
        checking, self._checking = self._checking, None
        if checking is not None:
            checking.cancel()
        return checking

    async def _run(self) -> None:
        try:
            while True:
                await anyio.sleep(await self.check())
        except Exception as failure:  # noqa: BLE001 - the waiter raises it
            self._failure = failure
            if self._wait is not None:
                self._wait.reschedule(asyncio.get_running_loop().time())

    async def check(self) -> float:
        """Check once, if a check is due; returns the seconds until the next one is.

        Raises:
            JobHung: No rank has made progress for the timeout.
        """
        timeout = self._latest.stall_timeout
        if timeout is None or self._latest.phase is not Phase.RUNNING:
            return 1.0 if timeout is None else max(_SHORTEST_PAUSE, min(1.0, timeout / 8))
        near = timeout / 4  # one reading serves both purposes if they are so near
        wakes = self._due if self._compared > self._due - near else self._compared
        if (left := wakes - time.monotonic()) > 0:
            return left
        began, due = self._since, self._due <= time.monotonic()
        if not due and not _limit.allows(self._logs):
            self._compared = time.monotonic() + near
            return 0.0
        async with _readers():
            reading = await self._read()
        if reading is None:
            self._due = time.monotonic() + timeout
            self._compared = max(self._compared, self._due)
            return 0.0
        if self._compared <= time.monotonic() + near:
            await self._compare(reading, timeout)
        if not due or began != self._since:  # progress was observed in the meantime
            return 0.0
        if reading.starting or reading.ending:
            self._restart()
        elif (diagnosis := self._judge(reading, timeout)) is not None:
            raise JobHung(await self._with_change(diagnosis))
        return 0.0

    async def _with_change(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add the node of the rank that hangs, and what `on_retry` changes, as far as they can be read."""
        with suppress(TrainJobError):
            evidence = await self.backend.state(self._ref)
            return with_change(with_node(diagnosis, evidence), evidence.trainjob)
        return diagnosis

    async def _compare(self, reading: Reading, seconds: float) -> None:
        """Warn about stragglers, and record them on the job. The next comparison is after so many seconds."""
        counting = [rank for rank in reading.ranks.values() if rank.marker.count]
        self._uncounted = 0 if len(counting) > 1 else min(self._uncounted + 1, _OFTEN + _RARELY)
        pause = seconds * min(2 ** max(0, self._uncounted - _OFTEN), _RARELY)
        self._compared, self._logs = time.monotonic() + pause, len(reading.pods)
        nodes = {rank: str(mapping(pod, "spec").get("nodeName") or "") for rank, pod in reading.pods.items()}
        if not (new := self._stragglers.take(reading.ranks, nodes)):
            return
        telemetry.record_stragglers(self._ref, new)
        for straggler in new[:_STRAGGLERS_SHOWN]:
            self._notify(self._latest, str(straggler))
        if len(new) > _STRAGGLERS_SHOWN:
            self._notify(self._latest, f"{len(new) - _STRAGGLERS_SHOWN} more ranks are stragglers")
        with suppress(TrainJobError):  # without the permission, the notices are all there is
            known = stragglers_of(await self.backend.get(self._ref.namespace, self._ref.name))
            await self.backend.patch(self._ref, {"metadata": {"annotations": annotation(known, new)}})

    def _judge(self, reading: Reading, timeout: float) -> Diagnosis | None:
        """The diagnosis of a job that hangs; None if it does not, or not long enough."""
        now = time.monotonic()
        unread = reading.without_log(self._known)
        if 2 * len(unread) > len(self._known):  # an outage of the logs, not of ranks
            self._due = now + timeout
            self._warn(f"the logs of {len(unread)} pods cannot be read any more")
            return None
        for process, state in self._ranks.items():
            if process[0] in unread:  # the node may be lost: what is known of its ranks stays
                latest = ranks.with_pod(state, reading.pods.get(process[0], {}))
                reading.ranks[process] = replace(latest, lost=latest.lost or "its log cannot be read any more")
        self._ranks = reading.ranks
        self._known |= {pod for pod, _ in reading.ranks}
        self._stepped = self._stepped or reading.stepped
        self._show(_BY_STEPS if reading.stepped else "" if self._stepped else _BY_LINES)
        stalled = any(rank.stalled and rank.marker.count for rank in reading.ranks.values())
        # A second reading soon after: ranks that have stalled for half of the timeout need half of it more.
        self._due = now + timeout * (0.5 if stalled else _PAUSE)
        if self._first is None or reading.progressed(self._first, self._known, stepped=self._stepped):
            self._quiet = reading.quiet_since(self._first)
            self._first, self._since = reading, now
            return None
        # Ranks that start, or start again, have not counted two steps.
        paced = reading.paced if reading.ranks else self._reports > 1
        limit = timeout if paced else 2 * timeout
        if compiling := reading.compiling:
            limit = max(_COMPILER_TIMEOUTS * timeout, _COMPILER_SECONDS)
            self._show_compiling(compiling, limit)
        lasted = now - self._since + (timeout / 2 if self._quiet else 0)
        self._due = min(self._due, max(now + timeout / 8, now + limit - lasted))
        if lasted >= limit:
            if not reading.ranks and not any(reading.lines.values()) and not self._stepped:
                self._warn("no rank has written a line, reported progress or counted a step")
                return None
            hang = hangs.judge([*reading.ranks.values()], len(reading.lines))
            return hangs.hang_of(hang, limit, str(self._ref))
        return None

    async def _read(self) -> Reading | None:
        """The ends of all logs now; None if they cannot be read."""
        reading = Reading()
        try:
            async with aclosing(self.backend.tails(self._ref, _TAIL_LINES)) as tails:
                async for pod, lines in tails:
                    rank = rank_of(pod)
                    if rank.startswith(INITIALIZERS):
                        continue
                    found = ranks.ranks_in(rank, (line.text for line in lines))
                    reading.pods[rank] = pod
                    reading.ranks |= {name: ranks.with_pod(state, pod) for name, state in found.items()}
                    other = {*of_training([line.text for line in lines])}
                    reading.lines[rank] = next((line.time for line in reversed(lines) if line.text in other), "")
                    await anyio.lowlevel.checkpoint()  # a long tail must not delay other waiters
        except TrainJobError as error:
            self._warn(str(error))
            return None
        return reading

    def _show(self, source: str) -> None:
        """Report once what measures progress, and again when it is something better."""
        if source and source != self._shown and self._latest.stall_timeout is not None:
            self._shown = source
            self._notify(self._latest, f"stall_timeout {self._latest.stall_timeout:g} s: measured by {source}")

    def _show_compiling(self, ranks_: list[Rank], limit: float) -> None:
        """Report once that ranks compile, which counts as a hang only after `limit` seconds."""
        if not self._compiles:
            self._compiles = True
            names = ", ".join(rank.name for rank in ranks_[:_STRAGGLERS_SHOWN])
            where = f"{names} and {len(ranks_) - _STRAGGLERS_SHOWN} more" if len(ranks_) > _STRAGGLERS_SHOWN else names
            self._notify(self._latest, f"compiling on {where}: counts as a hang after {limit:g} s without a step")

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._notify(self._latest, f"stall_timeout cannot be checked: {reason}")
