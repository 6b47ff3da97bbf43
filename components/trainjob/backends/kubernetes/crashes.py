"""Crashes of containers, as soon as they are known: by one watch of pods, for one job or for all of a namespace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from trainjob.backends.kubernetes.client import ApiClient, Patience
from trainjob.backends.kubernetes.errors import Expired, Transient
from trainjob.backends.kubernetes.mirror import Change, Mirror
from trainjob.backends.kubernetes.pods import JOBSET_NAME, collection, crashes_of, gather, list_pods
from trainjob.diagnosis import Evidence
from trainjob.errors import BackendUnavailable, TrainJobError
from trainjob.manifest import JobRef

_log = logging.getLogger(__name__)

# Ranks that lose their peer end within a fraction of a second of it, and a kubelet looks at its containers once in a
# second: the first to be told of may be a victim. So long is waited for the others before one is called the first.
_TOGETHER_SECONDS = 0.8

Pod = Mapping[str, Any]


class CrashHub:
    """One watch of pods for all who listen, open while somebody does. It keeps no pods.

    Args:
        client: The connection.
        namespace: Of the jobs.
        job: The only job to be listened to; any if empty.
    """

    def __init__(self, client: ApiClient, namespace: str, job: str = "") -> None:
        self._client = client
        self._path = collection(namespace, "pods")
        self._selector = {"labelSelector": f"{JOBSET_NAME}={job}" if job else JOBSET_NAME}
        self._listeners: dict[str, list[asyncio.Queue[Pod | TrainJobError]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._heard = False  # since the watch was opened: who comes later has missed what was listed

    async def subscribe(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """The crashes of a job, those that its pods still tell of first; what happens together comes together.

        Raises:
            TrainJobError: pods may not be seen, or an outage outlasted its budgets.
        """
        heard: asyncio.Queue[Pod | TrainJobError] = asyncio.Queue()
        self._listeners.setdefault(ref.name, []).append(heard)
        try:
            if self._task is None or self._task.done():
                self._heard = False
                self._task = asyncio.create_task(self._run())
            elif self._heard:
                for pod in await self._present(ref):
                    heard.put_nowait(pod)
            seen: set[tuple[str, str]] = set()
            while True:
                found = [await heard.get()]
                if isinstance(found[0], TrainJobError) or not crashes_of(found[0]) - seen:
                    _raise_error_in(found)
                    continue
                await asyncio.sleep(_TOGETHER_SECONDS)
                while not heard.empty():
                    found.append(heard.get_nowait())
                latest = {pod["metadata"]["uid"]: pod for pod in found if not isinstance(pod, TrainJobError)}
                fresh = {uid: crashes_of(pod) - seen for uid, pod in latest.items()}
                seen |= set().union(*fresh.values())
                yield await gather(self._client, [pod for uid, pod in latest.items() if fresh[uid]], None)
                _raise_error_in(found)
        finally:
            self._listeners[ref.name].remove(heard)
            if not self._listeners[ref.name]:
                del self._listeners[ref.name]
            if not self._listeners:
                await self.aclose()

    async def aclose(self) -> None:
        """End the watch."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})  # it has a connection to let go of

    async def _run(self) -> None:
        try:
            async with aclosing(Mirror(self._client, self._path, self._selector).events()) as events:
                async for event in events:
                    self._heard = True
                    if isinstance(event, Change) and crashes_of(event.item):
                        for heard in self._listeners.get(event.item["metadata"]["labels"].get(JOBSET_NAME, ""), ()):
                            heard.put_nowait(event.item)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody must listen to nothing for ever
            if not isinstance(error, TrainJobError):
                _log.exception("the watch of %s has ended", self._path)
                error = BackendUnavailable(f"{type(error).__name__}: {error}")
            for heard in [each for listeners in self._listeners.values() for each in listeners]:
                heard.put_nowait(error)

    async def _present(self, ref: JobRef) -> list[dict[str, Any]]:
        patience = Patience(*self._client.timings.waiting)
        while True:
            try:
                return await list_pods(self._client, ref)
            except (Expired, Transient) as error:
                if patience.failed():
                    raise BackendUnavailable(f"the pods of {ref} could not be listed: {error}") from error
                await asyncio.sleep(patience.pause(error))


def _raise_error_in(found: list[Pod | TrainJobError]) -> None:
    for each in found:
        if isinstance(each, TrainJobError):
            raise each
