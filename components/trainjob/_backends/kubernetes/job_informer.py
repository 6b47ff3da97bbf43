"""One watch of TrainJobs shared by any number of waiters: one connection per cluster and namespace.

A waiter costs one entry in a dictionary. Only the fields that a waiter needs are kept of a job, and a waiter wakes only
when they change. Level-triggered: a late or slow waiter gets the current state and no history.

Beside the watch, the blockers of jobs without progress are looked up from time to time, for all of them together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from trainjob._backends.base import Snapshot, TrainJob
from trainjob._backends.kubernetes.blockers import PRIORITY_LABEL, RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, Transient
from trainjob._backends.kubernetes.reflector import Change, Outage, Reflector, Synced
from trainjob._diagnosis import ON_RETRY
from trainjob._manifest.attempts import LAUNCHED
from trainjob._manifest.retry_notice import RETRY_CHANGE
from trainjob._manifest.unattended import LABEL as UNATTENDED
from trainjob.errors import BackendUnavailable, ConfigurationError, TrainJobError
from trainjob.job import ATTEMPT, TRY, JobRef
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, STALL_TIMEOUT, Blocker, Phase, observe

_log = logging.getLogger(__name__)

_LABELS = (ATTEMPT, PRIORITY_LABEL, QUEUE_LABEL, UNATTENDED)
_ANNOTATIONS = (CANCELLED, GIVEN_UP, LAUNCHED, ON_RETRY, RETRY_CHANGE, STALL_TIMEOUT, TRY)  # read by waiters

_LINGER_SECONDS = 30.0  # the watch stays open for so long without waiters, since the next one often follows soon
_SLICE = 100  # events handled and waiters woken in one turn of the event loop, at 0.1 ms each

# A look-up of blockers costs three lists of 250 objects a page. With a pause of 60 ms per waiter that is less than one
# request in 5 s for any number of waiters.
_BLOCKER_SECONDS = (3.0, 60.0)
_BLOCKER_SECONDS_PER_WAITER = 0.06
_BLOCKER_SECONDS_AT_TERMINAL = 8.0

_POLL_SECONDS = (2.0, 30.0)

Confirm = Callable[[JobRef], Awaitable[TrainJob | None]]
"""GET by name: the job, or None if no job of this name and UID exists."""


def projection(item: Mapping[str, Any]) -> TrainJob:
    """The fields that a waiter needs, 0.7 KB: a function embedded in a spec can have 100 KB. Equal parts are shared."""
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    kept = {
        "name": metadata["name"],
        "namespace": sys.intern(metadata["namespace"]),
        "uid": metadata["uid"],
        "creationTimestamp": sys.intern(metadata["creationTimestamp"]),
        "labels": _labels(*map(labels.get, _LABELS)),
    }
    given = metadata.get("annotations") or {}
    if annotations := {name: given[name] for name in _ANNOTATIONS if name in given}:
        kept["annotations"] = annotations
    if "deletionTimestamp" in metadata:
        kept["deletionTimestamp"] = metadata["deletionTimestamp"]
    runtime = item["spec"].get("runtimeRef") or {}
    spec = _spec(bool(item["spec"].get("suspend")), runtime.get("kind"), runtime.get("name"))
    return {"metadata": kept, "spec": spec, "status": _shared(json.dumps(item.get("status") or {}))}


_shared = lru_cache(maxsize=1000)(json.loads)


@lru_cache(maxsize=1000)
def _spec(suspend: bool, kind: str | None, name: str | None) -> dict[str, Any]:
    return {"suspend": suspend, "runtimeRef": {"kind": kind, "name": name}}


@lru_cache(maxsize=1000)
def _labels(*values: str | None) -> dict[str, str]:
    return {name: value for name, value in zip(_LABELS, values, strict=True) if value is not None}


class _Waiter:
    """One waiter of a job: the latest snapshot, and whether it is unread."""

    __slots__ = ("_woken", "ref", "snapshot", "unread")

    def __init__(self, ref: JobRef) -> None:
        self.ref = ref
        self.snapshot: Snapshot | TrainJobError | None = None
        self.unread = False
        self._woken: asyncio.Future[None] | None = None  # an asyncio.Event would cost 0.8 KB

    def put(self, snapshot: Snapshot | TrainJobError) -> None:
        self.snapshot = snapshot
        self.unread = True
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def changed(self) -> asyncio.Future[None]:
        """Done at the next `put`."""
        self._woken = asyncio.get_running_loop().create_future()
        return self._woken


class JobInformer:
    """All waiters of one namespace, or of one job, on one event loop.

    Args:
        client: The connection.
        path: Path of the namespace's TrainJobs.
        selector: ``fieldSelector`` of a single job, or empty: jobs that other tools created can be waited for, too.
        confirm: Asks the server about one job: a DELETED event alone is not trusted.
        related: Looks up the blockers of jobs.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        selector: Mapping[str, str],
        confirm: Confirm,
        related: RelatedObjects,
    ) -> None:
        self._client = client
        self._path = path
        self._selector = selector
        self._confirm = confirm
        self._related = related
        self._waiters: dict[str, list[_Waiter]] = {}
        self._known: dict[str, TrainJob] = {}
        self._blockers: dict[str, tuple[Phase, Blocker]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._reflector = Reflector(client, path, selector)
        self._synced = asyncio.Event()
        self._error: TrainJobError | None = None
        self._confirming: set[asyncio.Task[None]] = set()

    async def subscribe(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """The job now and after each change, until it is gone."""
        waiter = _Waiter(ref)
        self._waiters.setdefault(ref.uid, []).append(waiter)
        try:
            self._ensure_running()
            if ref.uid in self._known:
                waiter.put(self._snapshot(self._known[ref.uid]))
            elif self._synced.is_set():  # created after the list, or deleted before it
                self._start_confirming(waiter)
            while True:
                while not waiter.unread:
                    await waiter.changed()
                waiter.unread, snapshot = False, waiter.snapshot
                if isinstance(snapshot, Forbidden):  # a Role with resourceNames does not permit LIST
                    async with aclosing(self._poll(ref)) as snapshots:
                        async for found in snapshots:
                            yield found
                    return
                if isinstance(snapshot, TrainJobError):
                    raise snapshot
                if snapshot is not None:
                    yield snapshot
                    if snapshot.trainjob is None:
                        return
        finally:
            self._waiters[ref.uid].remove(waiter)
            if not self._waiters[ref.uid]:
                del self._waiters[ref.uid]

    async def refs(self) -> list[JobRef]:
        """All jobs, as of the latest change received."""
        task = self._ensure_running()
        synced = asyncio.create_task(self._synced.wait())
        await asyncio.wait({task, synced}, return_when=asyncio.FIRST_COMPLETED)
        synced.cancel()
        if self._error is not None:
            raise self._error
        return [JobRef.of(trainjob) for trainjob in self._known.values()]

    def _ensure_running(self) -> asyncio.Task[None]:
        if not self._tasks or self._tasks[0].done():
            self._synced.clear()
            self._error = None
            self._reflector = Reflector(self._client, self._path, self._selector)
            work = [self._run(), self._look_up_blockers(), *([self._probe()] if self._client.timings.probe else [])]
            self._tasks = [asyncio.create_task(each) for each in work]
        return self._tasks[0]

    async def aclose(self) -> None:
        """Close the watch."""
        tasks = (*self._tasks, *self._confirming)
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)  # each has a connection to close

    async def _run(self) -> None:
        idle_since, handled = 0.0, 0
        loop = asyncio.get_running_loop()
        try:
            idle = False
            while not idle:
                async with aclosing(self._reflector.events()) as events:
                    async for event in events:
                        await self._handle(event)
                        handled += 1
                        if handled % _SLICE == 0:
                            await asyncio.sleep(0)
                        if self._waiters:
                            idle_since = 0.0
                        elif not idle_since:
                            idle_since = loop.time()
                        elif loop.time() - idle_since > _LINGER_SECONDS:
                            break
                idle = not self._waiters  # one may have subscribed while the connection was closing
        except Exception as error:  # noqa: BLE001 - after any error, no waiter may wait for ever
            if not isinstance(error, TrainJobError):
                _log.exception("the watch of %s failed", self._path)
            if isinstance(error, BackendUnavailable | ConfigurationError | Forbidden):
                self._error = error
            else:
                self._error = BackendUnavailable(f"{type(error).__name__}: {error}")
            for waiter in self._all_waiters():
                waiter.put(self._error)
        finally:
            self._known.clear()
            self._synced.clear()
            _cancel(self._tasks[1:])

    def _all_waiters(self) -> list[_Waiter]:
        return [waiter for waiters in self._waiters.values() for waiter in waiters]

    async def _handle(self, event: Change | Synced | Outage) -> None:
        if isinstance(event, Change):
            self._change(event)
        elif isinstance(event, Outage):
            for i, waiter in enumerate(self._all_waiters(), 1):
                latest = waiter.snapshot.trainjob if isinstance(waiter.snapshot, Snapshot) else None
                if latest is not None:
                    waiter.put(self._snapshot(latest, event.notice))
                elif i == 1:  # no snapshot yet that could carry the notice
                    _log.warning("%s", event.notice)
                if i % _SLICE == 0:
                    await asyncio.sleep(0)
        else:
            for uid in self._known.keys() - event.uids:
                del self._known[uid]
            self._synced.set()
            for waiter in self._all_waiters():
                if waiter.ref.uid not in event.uids:
                    self._start_confirming(waiter)

    def _change(self, change: Change) -> None:
        uid = change.item["metadata"]["uid"]
        waiters = self._waiters.get(uid, ())
        if change.deleted:
            self._known.pop(uid, None)
            self._blockers.pop(uid, None)
            for waiter in waiters:
                # Its last state first: a job deleted as soon as it ended is reported as ended, not as missing.
                waiter.put(Snapshot(projection(change.item)))
                self._start_confirming(waiter)
            return
        latest = projection(change.item)
        if self._known.get(uid) != latest:
            self._known[uid] = latest
            if uid in self._blockers and self._blockers[uid][0] is not observe(latest).phase:
                del self._blockers[uid]
            for waiter in waiters:
                waiter.put(self._snapshot(latest))

    def _snapshot(self, trainjob: TrainJob, notice: str = "") -> Snapshot:
        _, blocker = self._blockers.get(trainjob["metadata"]["uid"], (None, None))
        return Snapshot(trainjob, notice, blocker)

    def _start_confirming(self, waiter: _Waiter) -> None:
        task = asyncio.create_task(self._confirmed(waiter))
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    async def _confirmed(self, waiter: _Waiter) -> None:
        # The waiter reads the previous snapshot first.
        while waiter.unread:
            await asyncio.sleep(0.01)
        try:
            found = await self._confirm(waiter.ref)
        except BackendUnavailable:  # the watch meets the same outage: it fails for all, or lists and confirms again
            return
        except TrainJobError as error:
            waiter.put(error)
            return
        known = self._known.get(waiter.ref.uid)
        if known is not None:  # the watch has received it meanwhile, so the reply is older
            waiter.put(self._snapshot(known))
        else:
            waiter.put(Snapshot(projection(found) if found is not None else None))

    async def _look_up_blockers(self) -> None:
        """Look up the blockers of jobs without progress; less often while nothing changes."""
        least, most = _BLOCKER_SECONDS
        if self._client.timings.probe:
            most = _BLOCKER_SECONDS_AT_TERMINAL
        pause, before = least, dict[JobRef, Phase]()
        while True:
            await asyncio.sleep(max(pause, len(self._waiters) * _BLOCKER_SECONDS_PER_WAITER))
            phases = await self._idle()
            pause = min(most, pause * 1.5) if phases == before else least
            before = phases
            waiting = {ref: self._known[ref.uid] for ref in phases if ref.uid in self._known}
            if not waiting:
                continue
            try:
                found = await self._related.blockers(waiting)
            except Transient:  # the watch meets the same outage and reports it
                continue
            except TrainJobError as error:
                _log.warning("the blockers of waiting jobs in %s cannot be read: %s", self._path, error)
                return
            for ref in waiting:
                phase = phases[ref]
                now = (phase, found[ref.uid]) if ref.uid in found else None
                if now != self._blockers.get(ref.uid) and ref.uid in self._known:
                    self._blockers.pop(ref.uid, None)
                    if now is not None:
                        self._blockers[ref.uid] = now
                    for waiter in self._waiters.get(ref.uid, ()):
                        waiter.put(self._snapshot(self._known[ref.uid]))

    async def _probe(self) -> None:
        """Report an unresponsive server within seconds: the watch of a quiet job is silent for a minute."""
        seconds, silent = self._client.timings.probe, False
        while True:
            await asyncio.sleep(seconds / 2)
            if not silent and time.monotonic() - self._reflector.last_reply < seconds / 2:
                continue
            error: Exception | None = None
            try:
                async with asyncio.timeout(seconds / 2):
                    await self._client.send(Request("GET", "/version"))
            except (TimeoutError, Transient) as failure:
                error = failure
            except TrainJobError:  # an error reply is a reply
                pass
            if (error is not None) is not silent:
                silent = error is not None
                what = f": {error}" if str(error or "") else ""
                notice = (
                    f"the API server does not answer; still waiting{what}" if silent else "the API server answers again"
                )
                await self._handle(Outage(notice))

    async def _idle(self) -> dict[JobRef, Phase]:
        """The jobs with waiters that make no progress."""
        found = {}
        for i, waiter in enumerate(self._all_waiters(), 1):
            trainjob = self._known.get(waiter.ref.uid)
            if trainjob is not None and (phase := observe(trainjob).phase).idle:
                found[waiter.ref] = phase
            if i % _SLICE == 0:
                await asyncio.sleep(0)
        return found

    async def _poll(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """GET with growing pauses, where LIST is forbidden."""
        backoff = self._client.timings.watch_backoff()
        pause, longest = _POLL_SECONDS
        while True:
            try:
                latest = await self._confirm(ref)
            except BackendUnavailable as error:
                if backoff.failure():
                    raise
                _log.warning("%s", error)
            else:
                backoff.success()
                yield Snapshot(latest)
                if latest is None:
                    return
            await asyncio.sleep(pause)
            pause = min(longest, pause * 1.2)


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
