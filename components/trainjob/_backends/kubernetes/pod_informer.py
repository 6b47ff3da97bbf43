"""Pods of jobs and crashes of their containers, from one watch of pods for one job or a namespace."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from trainjob._backends.kubernetes.blockers import RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.errors import Transient
from trainjob._backends.kubernetes.pods import JOBSET_NAME, collection, crashes_of, gather, log_fields
from trainjob._backends.kubernetes.reflector import Change, Reflector, Synced
from trainjob._diagnosis.cluster import terminations_in
from trainjob._diagnosis.evidence import Evidence
from trainjob.errors import BackendUnavailable, TrainJobError
from trainjob.job import JobRef

_log = logging.getLogger(__name__)

# Ranks that lose their peer end within a fraction of a second of it, and a kubelet checks its containers once per
# second: the first crash reported need not be the root cause. Crashes within this time are reported together.
_GROUP_SECONDS = 0.8

_SLICE = 100  # pods handled in one turn of the event loop, at 0.1 ms each

Pod = Mapping[str, Any]


class Listener:
    """Collects the changes of a job's pods: the latest state of each that changed since the last `take`.

    Attributes:
        error: Why no more changes follow; None while they do.
    """

    __slots__ = ("_changed", "_crashed", "_reflector", "_wake", "error")

    def __init__(self, reflector: Reflector, wake: Callable[[], None], *, crashed: bool) -> None:
        self._reflector = reflector
        self._wake = wake
        self._crashed = crashed
        self._changed: dict[str, Pod] = {}
        self.error: TrainJobError | None = None

    def put(self, pod: Pod) -> None:
        """Add a pod that exists or has changed."""
        if not self._crashed or crashes_of(pod):
            self._changed[pod["metadata"]["uid"]] = pod
            self._wake()

    def fail(self, error: TrainJobError) -> None:
        """Report that no more changes follow."""
        self.error = error
        self._wake()

    @property
    def current(self) -> bool:
        """Whether a watch is open, so that the pods are newer than the latest list."""
        return self._reflector.watching

    def take(self) -> dict[str, Pod]:
        """Return the changed pods by UID, and forget them."""
        changed, self._changed = self._changed, {}
        return changed


class PodInformer:
    """One watch of pods shared by all listeners, open while there are any.

    It knows all pods of the namespace's JobSets, so that a further listener costs no request. Of a pod it keeps the
    fields that reading the log needs, 1.5 KB, and the complete pod if it crashed.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        job: Name of the only job to watch; all if empty.
    """

    def __init__(self, client: ApiClient, namespace: str, job: str = "") -> None:
        self._client = client
        self._path = collection(namespace, "pods")
        self._related = RelatedObjects(client, namespace)
        self._selector = {"labelSelector": f"{JOBSET_NAME}={job}" if job else JOBSET_NAME}
        self._listeners: defaultdict[str, list[Listener]] = defaultdict(list)
        self._known: defaultdict[str, dict[str, Pod]] = defaultdict(dict)
        self._reflector = Reflector(client, self._path, self._selector)
        self._task: asyncio.Task[None] | None = None

    async def subscribe(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """The crashes of a job, first those already recorded in its pods; crashes close in time come together.

        Raises:
            TrainJobError: Pods may not be listed, or an outage used up its retries.
        """
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()  # an asyncio.Event would cost 0.8 KB
        seen: set[tuple[str, str]] = set()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        async with self.listening(ref, wake, crashed=True) as listener:
            while listener.error is None:
                await woken
                woken = loop.create_future()
                found = listener.take()
                if any(crashes_of(pod) - seen for pod in found.values()):
                    await asyncio.sleep(_GROUP_SECONDS)
                    found |= listener.take()
                    fresh = {uid: crashes_of(pod) - seen for uid, pod in found.items()}
                    seen |= set().union(*fresh.values())
                    if any(fresh.values()):
                        yield await self._evidence(ref, [pod for uid, pod in found.items() if fresh[uid]])
            raise listener.error

    async def _evidence(self, ref: JobRef, crashed: Sequence[Pod]) -> Evidence:
        evidence = await gather(self._client, crashed, None)
        if not any(crash.killed for crash in terminations_in(crashed)):
            return evidence
        try:  # Only Events show that the kubelet killed a container after a failed probe or hook.
            events = await self._related.events(ref)
        except Transient as error:
            return replace(evidence, unseen=[*evidence.unseen, f"events: {error.message}"])
        hidden = [f"{what}: {message}" for what, message in self._related.hidden.items()]
        return replace(evidence, events=events, unseen=[*evidence.unseen, *hidden])

    @asynccontextmanager
    async def listening(
        self, ref: JobRef, wake: Callable[[], None], *, crashed: bool = False
    ) -> AsyncIterator[Listener]:
        """Listen to the job's pods: first those that exist, then each that changes.

        Args:
            ref: The job.
            wake: Called at each change.
            crashed: Listen only to pods with a crash. A pod that is deleted soon shows none any more.
        """
        if self._task is None or self._task.done():
            self._reflector = Reflector(self._client, self._path, self._selector)
            self._known.clear()
            self._task = asyncio.create_task(self._run())
        listener = Listener(self._reflector, wake, crashed=crashed)
        self._listeners[ref.name].append(listener)
        try:
            for pod in self._known.get(ref.name, {}).values():
                listener.put(pod)
            yield listener
        finally:
            self._listeners[ref.name].remove(listener)
            if not self._listeners[ref.name]:
                del self._listeners[ref.name]
            if not self._listeners:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the watch."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})  # it has a connection to close

    async def _run(self) -> None:
        try:
            async with aclosing(self._reflector.events()) as events:
                handled = 0
                async for event in events:
                    if isinstance(event, Change):
                        self._change(event.item, deleted=event.deleted)
                    elif isinstance(event, Synced):
                        for job, pods in list(self._known.items()):
                            self._known[job] = {uid: pod for uid, pod in pods.items() if uid in event.uids}
                    handled += 1
                    if handled % _SLICE == 0:
                        await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - after any error, no listener may wait for ever
            if not isinstance(error, TrainJobError):
                _log.exception("the watch of %s failed", self._path)
                error = BackendUnavailable(f"{type(error).__name__}: {error}")
            for listener in [each for listeners in self._listeners.values() for each in listeners]:
                listener.fail(error)

    def _change(self, pod: Pod, *, deleted: bool) -> None:
        job, uid = pod["metadata"]["labels"][JOBSET_NAME], pod["metadata"]["uid"]
        known = pod if crashes_of(pod) else log_fields(pod)
        for listener in self._listeners.get(job, ()):
            listener.put(known)
        self._known[job][uid] = known
        if deleted:
            del self._known[job][uid]
            if not self._known[job]:
                del self._known[job]
