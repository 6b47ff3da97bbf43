"""Following what the ranks of a job write."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any

import anyio

from trainjob import retrying
from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.errors import ApiError, Transient
from trainjob.backends.kubernetes.pod_informer import Listener, Pod
from trainjob.backends.kubernetes.pods import KubeletLines, collection, list_pods
from trainjob.kube_objects import name_of, rank_of, training_container
from trainjob.logs import LogLine, Splitter, latest
from trainjob.manifest import JobRef
from trainjob.retrying import Backoff

_log = logging.getLogger(__name__)

_LOG_READ_SECONDS = 300.0  # a rank may be silent; a dead connection is noticed by then
_LOOK_SECONDS = 2.0  # for pods that are new, and before a log that has ended is asked for again
_SILENCE_SECONDS = 5.0  # after the end of a job: then a log has been read to its end, or its node is lost

Listening = AbstractAsyncContextManager[Listener]


class RankLogs:
    """Follows the logs of all pods of a job at once, new ones and restarted ones included.

    Args:
        client: The connection.
        ref: The job.
        ranks: Ranks to read; all if empty.
        since: Time of the last line that was read before.
        tail: Lines of each rank to begin with; all if None.
    """

    def __init__(self, client: ApiClient, ref: JobRef, ranks: Sequence[str], since: str, tail: int | None) -> None:
        self._client = client
        self._ref = ref
        self._ranks = ranks
        self._since = since
        self._tail = tail
        self._last: dict[str, str] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, str] = {}  # pod -> rank, of logs that were asked for and of which nothing has come
        # Bounded: a reader waits for its consumer, so memory does not grow with what the ranks write. None: look again.
        # There is none before the first rank runs: it takes as much memory as all the rest of a job that waits.
        self._queue: asyncio.Queue[LogLine | None] | None = None
        self._idle: asyncio.Future[None] | None = None
        self._woken = self._finished = False
        self._heard: dict[str, Pod] = {}

    async def stored(self) -> list[LogLine]:
        """What is there now, in the order of time; of each rank at most 4 MiB."""
        lines: list[LogLine] = []
        for pod in await self._pods():
            async with aclosing(self._insistently(pod, retrying.KUBERNETES_LOG(), follow=False)) as read:
                lines += latest([line async for line in read])
        return sorted(lines, key=lambda line: line.time)

    def finish(self) -> None:
        """The job has ended: `follow` ends, too, once everything was read."""
        self._finished = True
        self._wake()

    async def follow(self, listen: Callable[[Callable[[], None]], Listening] | None = None) -> AsyncGenerator[LogLine]:
        """Lines as they are written, until `finish` is called and everything was read.

        Args:
            listen: Takes a callback for changes of the job's pods (`PodInformer.listening`).
                Without it they are listed every 2 s, which is too much for many jobs.

        Raises:
            TrainJobError: That of the listener.
        """
        try:
            async with listen(self._wake) if listen else nullcontext() as listener:
                while True:
                    self._woken, over = False, self._finished
                    told = listener if listener is not None and (listener.current or not over) else None
                    for pod in self._told(told) if told is not None else await self._pods_or_none():
                        reader = self._readers.get(name_of(pod))
                        if _has_output(pod) and (reader is None or (reader.done() and _goes_on(pod))):
                            self._start_reader(pod)
                    seconds = _SILENCE_SECONDS if over else _LOOK_SECONDS if listener is None else math.inf
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
        """The ranks whose log was not answered; empty if there are none."""
        reading = [name for name, task in self._readers.items() if not task.done()]
        ranks = sorted({self._unanswered[name] for name in reading if name in self._unanswered})
        return ", ".join(ranks[:8]) + (" and more" if len(ranks) > 8 else "")

    def _told(self, listener: Listener) -> list[Pod]:
        """The pods that have been heard of."""
        for uid, pod in listener.take().items():
            if _has_output(pod) and (not self._ranks or rank_of(pod) in self._ranks):
                self._heard[uid] = pod
        return [*self._heard.values()]

    def _start_reader(self, pod: Pod) -> None:
        loop = asyncio.get_running_loop()
        self._queue = self._queue or asyncio.Queue(maxsize=1000)
        reader = self._readers[name_of(pod)] = asyncio.create_task(self._read(pod, self._queue))
        # A container that is started again has a new log, and that it has ended may be told after its log's end.
        reader.add_done_callback(lambda _: loop.call_later(_LOOK_SECONDS, self._wake))

    def _wake(self) -> None:
        self._woken = True
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if self._queue is not None:
            with suppress(asyncio.QueueFull):  # it is being read
                self._queue.put_nowait(None)

    async def _drain(self, seconds: float, over: bool) -> AsyncGenerator[LogLine]:
        """Lines until there is reason to look again, at most for so long; to the last one once the job is over."""
        loop = asyncio.get_running_loop()
        if self._queue is None:
            self._idle = loop.create_future()
            if not self._woken and not over:
                await asyncio.wait({self._idle}, timeout=None if seconds == math.inf else seconds)
            return
        end = loop.time() + seconds
        while True:
            while not self._queue.empty():  # without a timer for each line, which takes as long as all the rest
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
        """Move one pod's lines into the queue."""
        async with aclosing(self._insistently(pod, retrying.KUBERNETES_REQUEST(), follow=True)) as lines:
            async for line in lines:
                await queue.put(line)

    async def _insistently(self, pod: Pod, backoff: Backoff, *, follow: bool) -> AsyncGenerator[LogLine]:
        """One pod's lines, resuming where a connection broke."""
        while True:
            try:
                async with aclosing(self._stream(pod, follow=follow)) as lines:
                    async for line in lines:
                        backoff.success()
                        yield line
            except Transient as error:
                if backoff.failure():
                    _log.warning("the log of %s cannot be read to its end: %s", name_of(pod), error)
                    return
                await anyio.sleep(backoff.pause(error.retry_after))
            except ApiError:  # gone, or not begun: the next look at the pods decides
                return
            else:
                return

    async def _stream(self, pod: Pod, *, follow: bool) -> AsyncGenerator[LogLine]:
        metadata = pod["metadata"]
        rank, uid = rank_of(pod), metadata["uid"]
        params = {"container": training_container(pod), "timestamps": "true"}
        last = max(self._last.get(uid, ""), self._since)
        if last:  # whole seconds only; what comes twice is left out below
            params["sinceTime"] = last[:19] + "Z"
        elif self._tail is not None:
            params["tailLines"] = str(self._tail)
        if not follow:
            params["limitBytes"] = str(4 << 20)
        elif _running(pod):  # a kubelet sends what it follows line by line, at ten times the work for us
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
                        if not line.transient:  # where the connection breaks, the line is asked for again
                            self._last[uid] = line.time
                        yield line


def _has_output(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed")


def _running(pod: Pod) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _goes_on(pod: Pod) -> bool:
    """Whether a container of it that has ended is started again."""
    return _running(pod) and "deletionTimestamp" not in pod["metadata"]
