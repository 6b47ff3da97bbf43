"""The watch of TrainJobs: what waiters get of their jobs, and the blockers of jobs without progress.

Blockers are looked up beside the watch from time to time, for all jobs with waiters together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

from trainjob._backends.base import Snapshot, TrainJob
from trainjob._backends.kubernetes.blockers import PRIORITY_LABEL, RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.errors import Transient
from trainjob._backends.kubernetes.objects import collection
from trainjob._backends.kubernetes.shared_watch import SLICE, SharedWatch
from trainjob._diagnosis import ON_RETRY
from trainjob._manifest.attempts import LAUNCHED
from trainjob._manifest.retry_notice import RETRY_CHANGE
from trainjob._manifest.unattended import LABEL as UNATTENDED
from trainjob.errors import BackendUnavailable, TrainJobError
from trainjob.job import ATTEMPT, TRY, JobRef
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, STALL_TIMEOUT, Blocker, Phase, observe

_log = logging.getLogger(__name__)

_LABELS = (ATTEMPT, PRIORITY_LABEL, QUEUE_LABEL, UNATTENDED)
_ANNOTATIONS = (CANCELLED, GIVEN_UP, LAUNCHED, ON_RETRY, RETRY_CHANGE, STALL_TIMEOUT, TRY)  # read by waiters

# A look-up of blockers costs three lists of 250 objects a page. With a pause of 60 ms per waiter that is less than one
# request in 5 s for any number of waiters.
_BLOCKER_SECONDS = (3.0, 60.0)
_BLOCKER_SECONDS_PER_WAITER = 0.06

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


class JobWatch(SharedWatch):
    """All waiters of one namespace, or of one job. The key of a job is its UID.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        job: Name of the only job; all if empty. Jobs that other tools created can be waited for, too.
        confirm: Asks the server about one job: a DELETED event alone is not trusted.
    """

    def __init__(self, client: ApiClient, namespace: str, job: str, confirm: Confirm) -> None:
        selector = {"fieldSelector": f"metadata.name={job}"} if job else {}
        super().__init__(client, collection(namespace), selector, single=bool(job))
        self._namespace = namespace
        self._confirm = confirm
        self._blockers: dict[str, tuple[Phase, Blocker]] = {}

    def key_of(self, item: TrainJob) -> str:
        """The UID."""
        uid: str = item["metadata"]["uid"]
        return uid

    def kept_of(self, item: TrainJob) -> TrainJob:
        """The fields that a waiter needs."""
        return projection(item)

    async def snapshots(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """The job now and after each change, until it is gone.

        Raises:
            TrainJobError: Jobs may not be listed, an outage used up its retries, or the backend was closed.
        """
        latest: TrainJob | None = None
        with self.listen(ref.uid) as listener:
            while True:
                await listener.news()
                states, notice, gone = listener.take()
                # Its last state first: a job deleted as soon as it ended is reported as ended, not as missing.
                latest, changed = states.get(ref.uid, latest), bool(states or notice)
                del states  # 0.2 KB for as long as this generator waits
                if latest is not None and changed:
                    yield self._snapshot(latest, notice)
                if not gone:
                    continue
                try:
                    found = await self._confirm(ref)
                except BackendUnavailable:  # the watch meets the same outage: it fails for all, or lists again
                    continue
                if listener.has_news:  # newer than the reply
                    continue
                latest = projection(found) if found is not None else None
                yield Snapshot(latest)
                if latest is None:
                    return

    async def refs(self) -> list[JobRef]:
        """All jobs, as of the latest change received.

        Raises:
            TrainJobError: As `snapshots`.
        """
        with self.listen("") as listener:  # no job has this UID, which shows as soon as all are known
            while not self.synced:
                await listener.news()
                listener.take()
        return [JobRef.of(job) for jobs in self.known.values() for job in jobs.values()]

    def _snapshot(self, job: TrainJob, notice: str) -> Snapshot:
        phase, blocker = self._blockers.get(job["metadata"]["uid"], (None, None))
        return Snapshot(job, notice, blocker if phase is not None and phase is observe(job).phase else None)

    async def beside(self) -> None:
        """Look up the blockers of jobs without progress; less often while nothing changes."""
        related = RelatedObjects(self.client, self._namespace)
        least, most = _BLOCKER_SECONDS
        pause, before = least, dict[JobRef, Phase]()
        while True:
            await asyncio.sleep(max(pause, len(self.keys) * _BLOCKER_SECONDS_PER_WAITER))
            waiting = await self._waiting()
            phases = {ref: observe(job).phase for ref, job in waiting.items()}
            pause = min(most, pause * 1.5) if phases == before else least
            before = phases
            try:
                found = await related.blockers(waiting) if waiting else {}
            except Transient:  # the watch meets the same outage and reports it
                continue
            except TrainJobError as error:
                _log.warning("the blockers of waiting jobs in %s cannot be read: %s", self.path, error)
                return
            earlier = self._blockers
            self._blockers = {ref.uid: (phases[ref], found[ref.uid]) for ref in waiting if ref.uid in found}
            for ref in waiting:
                if self._blockers.get(ref.uid) != earlier.get(ref.uid):
                    self.refresh(ref.uid)

    async def _waiting(self) -> dict[JobRef, TrainJob]:
        """The jobs with waiters that make no progress."""
        found: dict[JobRef, TrainJob] = {}
        for i, uid in enumerate(self.keys, 1):
            job = self.known.get(uid, {}).get(uid)
            if job is not None and observe(job).phase.idle:
                found[JobRef.of(job)] = job
            if i % SLICE == 0:
                await asyncio.sleep(0)
        return found
