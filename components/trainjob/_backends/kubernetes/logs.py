"""Logs of the ranks of a job."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any

import anyio

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import ApiError, Transient
from trainjob._backends.kubernetes.pod_informer import Listener, Pod
from trainjob._backends.kubernetes.pods import KubeletLines, collection, list_pods
from trainjob._support import retrying
from trainjob._support.kube_objects import name_of, rank_of, training_container
from trainjob._support.log_lines import LogLine, Splitter, latest
from trainjob._support.retrying import Backoff
from trainjob.job import JobRef

_log = logging.getLogger(__name__)

_LOG_READ_SECONDS = 300.0  # a rank may be silent; after so long the connection is taken for dead
_POLL_SECONDS = 2.0  # interval of looking for new pods, and pause before a log that has ended is requested again
_DRAIN_SECONDS = 5.0  # silence after the end of a job: all logs are complete by then, or a node is lost

Listening = AbstractAsyncContextManager[Listener]


class RankLogs:
    """Follows the logs of all pods of a job at the same time, including new and restarted ones.

    Args:
        client: The connection.
        ref: The job.
        ranks: Ranks to read; all if empty.
        since: Time of the last line that was read before.
        tail: Number of existing lines of each rank to begin with; all if None.
    """

    def __init__(self, client: ApiClient, ref: JobRef, ranks: Sequence[str], since: str, tail: int | None) -> None:
        self._client = client
        self._ref = ref
        self._ranks = ranks
        self._since = since
        self._tail = tail
        self._last: dict[str, str] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, str] = {}  # pod -> rank, of logs that were requested and have sent nothing
        # Bounded: readers wait for the consumer, so memory does not grow with the logs. None wakes the consumer to look
        # for pods. Created when the first rank runs, since it takes as much memory as the rest of a waiting job.
        self._queue: asyncio.Queue[LogLine | None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._woken = self._finished = False
        self._with_output: dict[str, Pod] = {}

    async def stored(self) -> list[LogLine]:
        """The existing lines, ordered by time; at most 4 MiB of each rank."""
        lines: list[LogLine] = []
        for pod in await self._pods():
            backoff = retrying.REQUEST(failures=3, seconds=0)  # the logs of the other pods wait
            async with aclosing(self._resumed(pod, backoff, follow=False)) as read:
                lines += latest([line async for line in read])
        return sorted(lines, key=lambda line: line.time)

    def finish(self) -> None:
        """Report that the job has ended: `follow` ends after the last line."""
        self._finished = True
        self._wake()

    async def follow(self, listen: Callable[[Callable[[], None]], Listening] | None = None) -> AsyncGenerator[LogLine]:
        """Lines as they are written, until `finish` was called and all lines were read.

        Args:
            listen: Registers a callback for changes of the job's pods (`PodInformer.listening`).
                Without it the pods are listed every 2 s, which is too often for many jobs.

        Raises:
            TrainJobError: The listener failed.
        """
        try:
            async with listen(self._wake) if listen else nullcontext() as listener:
                while True:
                    self._woken, over = False, self._finished
                    informed = listener if listener is not None and (listener.current or not over) else None
                    for pod in self._pods_with_output(informed) if informed is not None else await self._pods_or_none():
                        reader = self._readers.get(name_of(pod))
                        if _has_output(pod) and (reader is None or (reader.done() and _may_restart(pod))):
                            self._start_reader(pod)
                    seconds = _DRAIN_SECONDS if over else _POLL_SECONDS if listener is None else math.inf
                    async with aclosing(self._drain(seconds, over)) as lines:
                        async for line in lines:
                            yield line
                    if over:
                        if missing := self._missing():
                            yield LogLine("", "trainjob", f"the last lines of {missing} could not be read")
                        return
                    if listener is not None and listener.error is not None:
                        raise listener.error
        finally:
            for reader in self._readers.values():
                reader.cancel()

    def _missing(self) -> str:
        """The ranks whose log sent nothing, for a message; empty if there are none."""
        reading = [name for name, task in self._readers.items() if not task.done()]
        ranks = sorted({self._unanswered[name] for name in reading if name in self._unanswered})
        return ", ".join(ranks[:8]) + (" and more" if len(ranks) > 8 else "")

    def _pods_with_output(self, listener: Listener) -> list[Pod]:
        """All pods with output, after the changes that `listener` has received."""
        for uid, pod in listener.take().items():
            if _has_output(pod) and (not self._ranks or rank_of(pod) in self._ranks):
                self._with_output[uid] = pod
        return [*self._with_output.values()]

    def _start_reader(self, pod: Pod) -> None:
        loop = asyncio.get_running_loop()
        self._queue = self._queue or asyncio.Queue(maxsize=1000)
        reader = self._readers[name_of(pod)] = asyncio.create_task(self._read(pod, self._queue))
        # A restarted container has a new log. The end of a container may be reported after the end of its log.
        reader.add_done_callback(lambda _: loop.call_later(_POLL_SECONDS, self._wake))

    def _wake(self) -> None:
        self._woken = True
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if self._queue is not None:
            with suppress(asyncio.QueueFull):  # the consumer is awake already
                self._queue.put_nowait(None)

    async def _drain(self, seconds: float, over: bool) -> AsyncGenerator[LogLine]:
        """Lines until it is time to look for pods, for at most `seconds`; all that remain once the job is over."""
        loop = asyncio.get_running_loop()
        if self._queue is None:
            self._idle = loop.create_future()
            if not self._woken and not over:
                await asyncio.wait({self._idle}, timeout=None if seconds == math.inf else seconds)
            return
        end = loop.time() + seconds
        while True:
            while not self._queue.empty():  # without a timer per line, which takes as long as the rest
                if (line := self._queue.get_nowait()) is not None:
                    yield line
            reading = any(not reader.done() for reader in self._readers.values())
            left = end - loop.time()
            if (over and not reading) or left <= 0 or (self._woken and not over):
                return
            timeout = max(0.05, min(left, 0.25)) if over else None if left == math.inf else left
            try:
                line = await asyncio.wait_for(self._queue.get(), timeout)
            except TimeoutError:
                continue
            if line is None:
                continue
            yield line
            if over:
                end = loop.time() + seconds

    async def _pods(self) -> list[dict[str, Any]]:
        pods = await list_pods(self._client, self._ref)
        wanted = [pod for pod in pods if not self._ranks or rank_of(pod) in self._ranks]
        return sorted(wanted, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    async def _pods_or_none(self) -> list[dict[str, Any]]:
        try:
            return await self._pods()
        except ApiError:
            return []

    async def _read(self, pod: Pod, queue: asyncio.Queue[LogLine | None]) -> None:
        """Put one pod's lines into the queue."""
        async with aclosing(self._resumed(pod, retrying.REQUEST(), follow=True)) as lines:
            async for line in lines:
                await queue.put(line)

    async def _resumed(self, pod: Pod, backoff: Backoff, *, follow: bool) -> AsyncGenerator[LogLine]:
        """One pod's lines, resumed after the last one when a connection breaks."""
        while True:
            try:
                async with aclosing(self._stream(pod, follow=follow)) as lines:
                    async for line in lines:
                        backoff.success()
                        yield line
            except Transient as error:
                if backoff.failure():
                    _log.warning("the log of pod %s cannot be read completely: %s", name_of(pod), error)
                    return
                await anyio.sleep(backoff.pause(error.retry_after))
            except ApiError:  # pod gone, or container not started: decided when the pods are next looked at
                return
            else:
                return

    async def _stream(self, pod: Pod, *, follow: bool) -> AsyncGenerator[LogLine]:
        metadata = pod["metadata"]
        rank, uid = rank_of(pod), metadata["uid"]
        params = {"container": training_container(pod), "timestamps": "true"}
        last = max(self._last.get(uid, ""), self._since)
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
        self._unanswered[name_of(pod)] = rank
        kubelet = KubeletLines(Splitter(rank))
        async with aclosing(self._client.pieces(request)) as pieces:
            async for piece, ended in pieces:
                self._unanswered.pop(name_of(pod), None)
                for line in latest(kubelet.take(piece, ended=ended)):
                    if line.time > last:
                        if not line.transient:  # a line cut by a broken connection is requested again
                            self._last[uid] = line.time
                        yield line


def _has_output(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def _running(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _may_restart(pod: Pod) -> bool:
    """Whether a container of the pod that has ended may be restarted."""
    return _running(pod) and "deletionTimestamp" not in pod["metadata"]
