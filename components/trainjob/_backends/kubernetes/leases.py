"""Which process waits for which jobs: the Leases of each process that waits, and the reading of Leases by a reaper.

A Lease names the jobs, and the jobs do not name Leases. A waiter therefore changes no job, which Trainer's webhook
refuses if the job's runtime is gone, and two processes that wait for the same job do not interfere. All times are by
the API server's clock, so the clocks of waiters and reapers do not matter.

A process has one Lease for each `LARGEST` jobs, since an object has room for the names of about 5,900.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import anyio

from trainjob._backends.base import Waiter
from trainjob._backends.kubernetes.client import MERGE_PATCH, ApiClient, Request
from trainjob._backends.kubernetes.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    ObjectNotFound,
    TooLarge,
    Transient,
)
from trainjob._support.display import iso
from trainjob._support.foreign import Unreadable, mapping_of
from trainjob._support.formats import wrong_format
from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob._support.numbers import count_of
from trainjob.errors import ConfigurationError, TrainJobError
from trainjob.job import API_VERSION, KIND, LONGEST_UNATTENDED, MANAGED_BY, RESERVED_PREFIX, JobRef

_log = logging.getLogger(__name__)

JOBS = RESERVED_PREFIX + "jobs"
"""Annotation of a Lease, as JSON: UID -> time at which the process stopped waiting for the job, null while it waits."""

FORMAT = RESERVED_PREFIX + "format"
"""Annotation of a Lease: number of the format of `JOBS`."""
_FORMAT = 1

LARGEST = 2000
"""Most jobs of a Lease. Kubernetes allows 256 KiB for all annotations of an object; a job takes 44 or 69 bytes."""

_SETTLE = 1.0  # seconds to collect further changes before the list of jobs is written
_REFUSED = 10  # renewal intervals between two attempts while Leases are refused
_REFUSALS = (BadRequest, Forbidden, Invalid, TooLarge)  # replies that the same request gets again
_CLOSING = 2.0  # seconds for the request that deletes a Lease
_REFUSED_TEXT = "permission for Leases is missing, so unattended jobs are kept: a Lease in namespace %s was refused: %s"
_FAILED_TEXT = (
    "a Lease in namespace %s cannot be written: %s; the jobs that this process waits for count as unattended, and the"
    " reaper may end them"
)
_LONGEST = 2**31 - 1  # seconds of a Lease: its API has 32 bits
_AHEAD = timedelta(minutes=1)  # API servers and replies that are underway differ by less


class Attendance:
    """The Leases of this process in one namespace. Belongs to one event loop.

    Each job stays in one Lease, so that the end of a job changes that Lease only. A new job is added to the first Lease
    with room.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        opt_out: Called with each job that this process waits for if Leases are refused: excludes the job from the
            removal of unattended jobs.
    """

    def __init__(self, client: ApiClient, namespace: str, opt_out: Callable[[JobRef], Awaitable[None]]) -> None:
        self._client = client
        self._namespace = namespace
        self._opt_out = opt_out
        self._leases: list[_Lease] = []
        self._warned: set[str] = set()

    def attend(self, ref: JobRef) -> None:
        """Record that this process waits for the job, until `leave`."""
        lease = self._lease_of(ref) or next((each for each in self._leases if each.has_room), None)
        if lease is None:
            lease = _Lease(self._client, self._namespace, self._opt_out, self._warn_once)
            self._leases.append(lease)
        lease.attend(ref)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back; with `ended`, because the job has ended."""
        if (lease := self._lease_of(ref)) is not None:
            lease.leave(ref, ended=ended)

    async def aclose(self) -> None:
        """Stop renewing. A Lease remains while a job that it names may still run: it records the end of the wait."""
        await asyncio.gather(*(lease.aclose() for lease in self._leases))

    def stop(self) -> None:
        """Stop renewing at once, and leave all Leases as they are, as a process that is killed does."""
        for lease in self._leases:
            lease.stop()

    @property
    def names(self) -> set[str]:
        """Names of the Leases of this process that have been written."""
        return {lease.name for lease in self._leases if lease.name}

    def _lease_of(self, ref: JobRef) -> _Lease | None:
        return next((lease for lease in self._leases if ref in lease), None)

    def _warn_once(self, text: str, error: TrainJobError) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, self._namespace, error)


class _Lease:
    """One Lease, and the jobs that it names. Renewed by a separate task while this process waits for one of them.

    Args:
        client: As for `Attendance`.
        namespace: As for `Attendance`.
        opt_out: As for `Attendance`.
        warn_once: Logs a text with two placeholders, the namespace and the error, once for all Leases.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        opt_out: Callable[[JobRef], Awaitable[None]],
        warn_once: Callable[[str, TrainJobError], None],
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._opt_out = opt_out
        self._warn_once = warn_once
        self._waiters: Counter[JobRef] = Counter()
        self._left: dict[str, datetime] = {}
        self._opted_out: set[JobRef] = set()
        self._name = ""
        self._written = ""
        self._conflicts = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __contains__(self, ref: JobRef) -> bool:
        return ref in self._waiters or ref.uid in self._left

    @property
    def name(self) -> str:
        """Name of the Lease; empty before it is written."""
        return self._name

    @property
    def has_room(self) -> bool:
        """Whether the Lease can name another job."""
        return len(self._waiters) + len(self._left) < LARGEST

    def attend(self, ref: JobRef) -> None:
        """Name the job, until `leave`."""
        self._waiters[ref] += 1
        self._left.pop(ref.uid, None)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back; with `ended` the Lease does not name the job any longer, else it has the time."""
        self._waiters[ref] -= 1
        if not self._waiters[ref]:
            del self._waiters[ref]
            self._opted_out.discard(ref)
            if not ended:
                self._left[ref.uid] = self._client.now()
            self._changed.set()

    def stop(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stop renewing, and delete the Lease if it names no job."""
        self.stop()
        if self._task is not None:
            await asyncio.wait({self._task})
        if not self._waiters and not self._left:
            await self._remove()

    async def _run(self) -> None:
        renew = self._client.timings.renew
        while self._waiters or self._left or self._name:
            if not self._waiters and not self._left:  # another job may be added while the Lease is deleted
                await self._remove()
                continue
            self._changed.clear()
            pause = renew if self._waiters else None  # the time of `leave` is written once
            try:
                await self._write()
                self._conflicts = 0
            except TrainJobError as error:
                pause = renew / 3
                self._report(error)
                if isinstance(error, _REFUSALS):
                    await self._opt_out_all()
                    pause = _REFUSED * renew
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    await asyncio.sleep(min(_SETTLE, renew / 3))

    def _report(self, error: TrainJobError) -> None:
        """Log why the Lease is not written. An outage is reported by the watch of the jobs."""
        self._conflicts = self._conflicts + 1 if isinstance(error, Conflict) else 0
        if isinstance(error, Transient) or self._conflicts == 1:  # that of a ResourceQuota passes
            _log.debug("the Lease is not written: %s", error)
        elif isinstance(error, _REFUSALS):
            self._warn_once(_REFUSED_TEXT, error)
        else:
            self._warn_once(_FAILED_TEXT, error)

    async def _remove(self) -> None:
        if self._name:
            with suppress(ApiError), anyio.move_on_after(_CLOSING):
                await self._client.send(deletion(self._namespace, self._name))
            self._name = ""  # not reached if cancelled: `aclose` then deletes the Lease

    async def _write(self) -> None:
        now = self._client.now()
        self._left = {uid: at for uid, at in self._left.items() if now - at < LONGEST_UNATTENDED}
        left = {uid: iso(min(at, now), "microseconds") for uid, at in self._left.items()}
        jobs = {ref.uid: None for ref in self._waiters} | left
        text = json.dumps(jobs, separators=(",", ":"))
        renewed: dict[str, Any] = {"spec": {"renewTime": iso(now, "microseconds")}}
        if self._name:
            # Only the time, for any number of jobs.
            changed = (
                {"annotations": {JOBS: text}, "ownerReferences": self._owners()} if text != self._written else None
            )
            body = {**renewed, "metadata": changed} if changed else renewed
            path = f"{_path(self._namespace)}/{self._name}"
            request = Request("PATCH", path, body=body, content_type=MERGE_PATCH)
            try:
                await self._client.send(request)
            except ObjectNotFound:  # deleted with its only job, or by a person
                self._name = ""
        if not self._name:
            name = f"trainjob-{secrets.token_hex(5)}"
            await self._client.send(Request("POST", _path(self._namespace), body=self._lease(name, text, now)))
            self._name = name
        self._written = text

    def _lease(self, name: str, text: str, now: datetime) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "labels": {MANAGED_BY: "trainjob"},
                "annotations": {JOBS: text, FORMAT: str(_FORMAT)},
                "ownerReferences": self._owners(),
            },
            "spec": {
                "holderIdentity": socket.gethostname(),
                "leaseDurationSeconds": max(1, round(3 * self._client.timings.renew)),
                "acquireTime": iso(now, "microseconds"),
                "renewTime": iso(now, "microseconds"),
            },
        }

    def _owners(self) -> list[dict[str, Any]]:
        """A single job, with which Kubernetes deletes the Lease; with several jobs the process deletes it."""
        if len(self._waiters) != 1 or self._left:
            return []
        (ref,) = self._waiters
        return [{"apiVersion": API_VERSION, "kind": KIND, "name": ref.name, "uid": ref.uid}]

    async def _opt_out_all(self) -> None:
        for ref in list(self._waiters):
            if ref in self._opted_out:
                continue
            try:
                await self._opt_out(ref)
            except TrainJobError as error:
                _log.warning("TrainJob %s may be treated as unattended: %s", ref, error)
            self._opted_out.add(ref)


async def waiters(client: ApiClient, namespace: str) -> list[Waiter]:
    """The processes that wait or waited for jobs, according to their Leases. A malformed Lease names no job.

    No time is in the future: a renewal that a writer with a wrong clock has dated ahead counts as its time of arrival.

    Raises:
        ApiError: The Leases cannot be listed.
        ConfigurationError: A newer trainjob wrote one of them: its jobs must not count as unattended.
    """
    listed = await client.items(_path(namespace), {"labelSelector": f"{MANAGED_BY}=trainjob"})
    now = client.now()
    found = (waiter(lease, now) for lease in listed)
    return [each for each in found if each is not None]


def _arrival(lease: Mapping[str, Any], now: datetime) -> datetime:
    """When the API server received the latest change of a Lease; `now` if it does not tell."""
    times = [parse_time(each.get("time")) for each in mappings(lease, "metadata", "managedFields")]
    return min(now, max((each for each in times if each is not None), default=now))


def waiter(lease: Mapping[str, Any], now: datetime) -> Waiter | None:
    """The process of a Lease; None if the Lease was never renewed.

    Raises:
        ConfigurationError: A newer trainjob wrote it.
    """
    renewed, metadata = parse_time(mapping(lease, "spec").get("renewTime")), mapping(lease, "metadata")
    name = str(metadata.get("name"))
    where = f"Lease {metadata.get('namespace', '')}/{name}"
    if renewed is not None and renewed > now:
        renewed = _arrival(lease, now) if renewed - now > _AHEAD else now
    annotations = mapping(metadata, "annotations")
    written = str(annotations.get(FORMAT, _FORMAT))
    # One that nobody has renewed for so long attends no job, whatever it says.
    latest = renewed or parse_time(metadata.get("creationTimestamp")) or now
    if written != str(_FORMAT) and now - latest < LONGEST_UNATTENDED:
        problem = wrong_format(where, count_of(written), _FORMAT)
        raise ConfigurationError(f"{problem}; or delete the Lease, if its process has ended")
    if renewed is None:
        return None
    try:
        jobs = mapping_of(annotations.get(JOBS, "{}"), f"{where}: {JOBS}")
    except Unreadable as error:
        _warn(f"{error}; the Lease names no job")
        jobs = {}
    waiting = frozenset(uid for uid, at in jobs.items() if at is None)
    times = {uid: renewed if at is None else parse_time(at) for uid, at in jobs.items()}
    left = {uid: min(at, renewed) for uid, at in times.items() if at is not None}
    spec = mapping(lease, "spec")
    seconds = spec.get("leaseDurationSeconds")
    lasts = timedelta(seconds=max(0, min(seconds, _LONGEST)) if isinstance(seconds, int) else 0)
    return Waiter(name, renewed, left, waiting, str(spec.get("holderIdentity") or ""), lasts)


@lru_cache(maxsize=1000)
def _warn(problem: str) -> None:
    """Log a problem, once in this process: a reaper reads all Leases every few seconds."""
    _log.warning("%s", problem)


def deletion(namespace: str, lease: str) -> Request:
    """The request that deletes a Lease."""
    return Request("DELETE", f"{_path(namespace)}/{lease}")


def _path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
