"""Logs of the ranks of a job."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import anyio

from trainjob._backends.base import Snapshot
from trainjob._backends.kubernetes.client import Request
from trainjob._backends.kubernetes.errors import ApiError, Transient
from trainjob._backends.kubernetes.pod_watch import Pod, PodWatch
from trainjob._backends.kubernetes.pods import KubeletLines, collection, list_pods
from trainjob._backends.kubernetes.shared_watch import Listener
from trainjob._support import retrying
from trainjob._support.kube_objects import name_of, rank_of, training_container
from trainjob._support.log_lines import LogLine, Splitter, latest
from trainjob._support.retrying import Backoff
from trainjob.job import JobRef
from trainjob.status import observe

_log = logging.getLogger(__name__)

_LOG_READ_SECONDS = 300.0  # a rank may be silent; after so long the connection is taken for dead
_RESTART_SECONDS = 2.0  # pause before a log that has ended is requested again: its container may be restarted
_DRAIN_SECONDS = 5.0  # silence after the end of a job: all logs are complete by then, or a node is lost
_LINES = 1000  # of followed logs that wait for their consumer
_STORED_LINES = 200  # of each stored log that wait for those of the others


@dataclass(eq=False)
class _Log:
    """The log of one pod.

    Attributes:
        pod: The pod's latest state.
        reader: Reads the log, if it is followed.
        last: Time of the last line that was read.
        answered: Whether the latest request has brought anything.
    """

    pod: Pod
    reader: asyncio.Task[None] | None = None
    last: str = ""
    answered: bool = True


class RankLogs:
    """The logs of all pods of a job.

    Args:
        watch: The watch of the job's pods; only `follow` opens it.
        ref: The job.
        ranks: Ranks to read; all if empty.
        since: Time of the last line that was read before.
        tail: Number of existing lines of each rank to begin with; all if None.
    """

    def __init__(self, watch: PodWatch, ref: JobRef, ranks: Sequence[str], since: str, tail: int | None) -> None:
        self._watch = watch
        self._ref = ref
        self._ranks = ranks
        self._since = since
        self._tail = tail
        self._logs: dict[str, _Log] = {}  # by the UID of the pod
        # Bounded: readers wait for the consumer, so memory does not grow with the logs. None is the end. Created when
        # the first rank runs, since it takes as much memory as the rest of a waiting job.
        self._queue: asyncio.Future[asyncio.Queue[LogLine | None]] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None
        self._heard = 0.0  # when the latest line came, or the job ended
        self._over = False  # the consumer has left

    async def stored(self, pods: Sequence[Pod]) -> AsyncGenerator[LogLine]:
        """The existing lines of the pods by time; at most the first 4 MiB of each rank.

        Each log is read further when its lines in memory are used up: at most `_STORED_LINES` and what TCP buffers.
        """
        readers = [self._stored(_Log(pod)) for pod in pods if self._is_wanted(pod)]
        held: list[tuple[str, int, deque[LogLine]]] = []
        try:
            for number, reader in enumerate(readers):
                lines: deque[LogLine] = await anext(reader, deque())
                if lines:
                    heapq.heappush(held, (lines[0].time, number, lines))
            while held:
                _, number, lines = held[0]
                yield lines.popleft()
                lines = lines or await anext(readers[number], deque())
                if lines:
                    heapq.heapreplace(held, (lines[0].time, number, lines))
                else:
                    heapq.heappop(held)
        finally:
            for reader in readers:
                await reader.aclose()

    async def _stored(self, log: _Log) -> AsyncGenerator[deque[LogLine]]:
        """The existing lines of one pod, some at a time, without the states that a later line replaces."""
        held: deque[LogLine] = deque()
        backoff = retrying.REQUEST(failures=3, seconds=0)  # the logs of the other pods wait
        async with aclosing(self._resumed(log, backoff, follow=False)) as lines:
            async for line in lines:
                if held and held[-1].transient:
                    held.pop()
                elif len(held) >= _STORED_LINES:
                    yield held
                    held = deque()
                held.append(line)
        if held:  # the connection is closed: most logs are short, and a job may have more ranks than a process files
            yield held

    async def follow(self, job: AsyncGenerator[Snapshot]) -> AsyncGenerator[LogLine]:
        """Lines of all pods as they are written, including new and restarted ones, until the last line of the `job`.

        Raises:
            TrainJobError: Jobs or pods may not be listed, or an outage used up the retries of a watch.
        """
        # No task group: a consumer that stops early would get an ExceptionGroup of GeneratorExit.
        with self._watch.listen(self._ref.name) as listener:
            ending = asyncio.create_task(self._end(job))
            try:
                self._look(listener)
                queue = await self._queue
                while (self._error is None or not queue.empty()) and (line := await queue.get()) is not None:
                    yield line
                if self._error is not None:
                    raise self._error
            finally:
                self._over = True
                tasks = [ending, *(log.reader for log in self._logs.values() if log.reader is not None)]
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    def _lines(self) -> asyncio.Queue[LogLine | None]:
        if not self._queue.done():
            self._queue.set_result(asyncio.Queue(_LINES))
        return self._queue.result()

    def _look(self, listener: Listener) -> None:
        """Start readers, now and after each change of the pods."""
        if self._over:
            return
        if listener.error is not None:
            self._fail(listener.error)
            return
        changed, _, _ = listener.take()
        for uid, pod in changed.items():
            self._add(uid, pod)
        self._logs = {uid: log for uid, log in self._logs.items() if _is_read(log) or self._exists(uid)}
        listener.news().add_done_callback(lambda _: self._look(listener))

    def _exists(self, uid: str) -> bool:
        return uid in self._watch.known.get(self._ref.name, {})

    def _add(self, uid: str, pod: Pod) -> None:
        """Read the log of a pod that is new or has changed."""
        if self._is_wanted(pod) and _has_output(pod):
            log = self._logs.setdefault(uid, _Log(pod))
            log.pod = pod
            self._read_on(uid, log)

    def _read_on(self, uid: str, log: _Log) -> None:
        """Read a log, unless it is being read, or was read and its container is not restarted any more."""
        restarts = not _is_read(log) and _may_restart(log.pod) and self._exists(uid)
        if (log.reader is None or restarts) and not self._over:
            loop = asyncio.get_running_loop()
            log.reader = asyncio.create_task(self._read(log))
            # A restarted container has a new log. The end of a container may be reported after the end of its log.
            log.reader.add_done_callback(lambda _: loop.call_later(_RESTART_SECONDS, self._read_on, uid, log))

    async def _read(self, log: _Log) -> None:
        queue = self._lines()
        async with aclosing(self._resumed(log, retrying.REQUEST(), follow=True)) as lines:
            async for line in lines:
                await queue.put(line)
                self._heard = asyncio.get_running_loop().time()

    def _fail(self, error: Exception) -> None:
        """End the lines with an error."""
        self._error = error
        with suppress(asyncio.QueueFull):  # the consumer is awake then
            self._lines().put_nowait(None)

    async def _end(self, job: AsyncGenerator[Snapshot]) -> None:
        """Wait for the end of the job and for its last lines, and end the lines."""
        try:
            async with aclosing(job) as snapshots:
                async for snapshot in snapshots:
                    if observe(snapshot.trainjob).phase.terminal:
                        break
            if self._watch.current:
                # Also of pods whose change came with the end of the job: `_look` is still to be called.
                for uid, pod in self._watch.known.get(self._ref.name, {}).items():
                    self._add(uid, pod)
            else:
                with suppress(ApiError):
                    for pod in await list_pods(self._watch.client, self._ref):
                        self._add(pod["metadata"]["uid"], pod)
            for uid, log in self._logs.items():
                self._read_on(uid, log)
            await self._drain(self._lines())
        except Exception as error:  # noqa: BLE001 - after any error, no consumer may wait for ever
            self._fail(error)

    async def _drain(self, queue: asyncio.Queue[LogLine | None]) -> None:
        """Wait until all logs are read, or silent."""
        loop = asyncio.get_running_loop()
        self._heard = loop.time()
        while reading := {log.reader: log for log in self._logs.values() if log.reader and _is_read(log)}:
            left = self._heard + _DRAIN_SECONDS - loop.time()
            if left <= 0 and not queue.full():
                break
            await asyncio.wait(reading, timeout=max(left, 0.25))
        if ranks := sorted({rank_of(log.pod) for log in reading.values() if not log.answered}):
            missing = ", ".join(ranks[:8]) + (" and more" if len(ranks) > 8 else "")
            await queue.put(LogLine("", "trainjob", f"the last lines of {missing} could not be read"))
        await queue.put(None)

    def _is_wanted(self, pod: Pod) -> bool:
        return not self._ranks or rank_of(pod) in self._ranks

    async def _resumed(self, log: _Log, backoff: Backoff, *, follow: bool) -> AsyncGenerator[LogLine]:
        """One pod's lines, resumed after the last one when a connection breaks."""
        while True:
            try:
                async with aclosing(self._stream(log, follow=follow)) as lines:
                    async for line in lines:
                        backoff.success()
                        yield line
            except Transient as error:
                if backoff.failure():
                    _log.warning("the log of pod %s cannot be read completely: %s", name_of(log.pod), error)
                    return
                await anyio.sleep(backoff.pause(error.retry_after))
            except ApiError:  # pod gone, or container not started: decided when the pods are next looked at
                return
            else:
                return

    async def _stream(self, log: _Log, *, follow: bool) -> AsyncGenerator[LogLine]:
        pod, metadata = log.pod, log.pod["metadata"]
        params = {"container": training_container(pod), "timestamps": "true"}
        last = max(log.last, self._since)
        if last:  # whole seconds only; duplicates are dropped below
            params["sinceTime"] = last[:19] + "Z"
        elif self._tail is not None:
            params["tailLines"] = str(self._tail)
        if not follow:
            params["limitBytes"] = str(4 << 20)
        elif _running(pod):  # a followed log arrives line by line, which costs ten times the CPU
            params["follow"] = "true"
        path = f"{collection(metadata['namespace'], 'pods')}/{metadata['name']}/log"
        request = Request("GET", path, params, read_seconds=_LOG_READ_SECONDS)
        log.answered = False
        kubelet = KubeletLines(Splitter(rank_of(pod)))
        async with aclosing(self._watch.client.pieces(request)) as pieces:
            async for piece, ended in pieces:
                log.answered = True
                for line in latest(kubelet.take(piece, ended=ended)):
                    if line.time > last:
                        if not line.transient:  # a line cut by a broken connection is requested again
                            log.last = line.time
                        yield line


def _is_read(log: _Log) -> bool:
    return log.reader is not None and not log.reader.done()


def _has_output(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def _running(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _may_restart(pod: Pod) -> bool:
    """Whether a container of the pod that has ended may be restarted."""
    return _running(pod) and "deletionTimestamp" not in pod["metadata"]
