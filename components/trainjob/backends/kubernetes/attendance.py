"""Which process waits for which jobs: one Lease per process that waits, and the reading of Leases by a reaper.

The Lease names the jobs, and the jobs do not name Leases. A waiter therefore changes no job, which Trainer's webhook
refuses if the job's runtime is gone, and two processes that wait for the same job do not interfere. All times are by
the API server's clock, so the clocks of waiters and reapers do not matter.
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
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import anyio

from trainjob.backends.kubernetes.client import MERGE_PATCH, ApiClient, Request
from trainjob.backends.kubernetes.errors import ApiError, Forbidden, ObjectNotFound
from trainjob.errors import TrainJobError
from trainjob.kube_objects import mapping, parse_time
from trainjob.manifest import MANAGED_BY, JobRef
from trainjob.spec import API_VERSION, KIND
from trainjob.spec.checks import RESERVED_PREFIX
from trainjob.spec.trainjob import LONGEST_UNATTENDED

_log = logging.getLogger(__name__)

JOBS = RESERVED_PREFIX + "jobs"
"""Annotation of a Lease, as JSON: UID -> time at which the process stopped waiting for the job, null while it waits."""

_SETTLE = 1.0  # seconds to collect further changes before the list of jobs is written
_FORBIDDEN = 10  # renewal intervals between two attempts while Leases are forbidden
_CLOSING = 2.0  # seconds for the request that deletes a Lease


class Attendance:
    """The Lease of this process in one namespace. Belongs to one event loop.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        opt_out: Called with each job that this process waits for if Leases are forbidden: excludes the job from the
            removal of unattended jobs.
    """

    def __init__(self, client: ApiClient, namespace: str, opt_out: Callable[[JobRef], Awaitable[None]]) -> None:
        self._client = client
        self._namespace = namespace
        self._opt_out = opt_out
        self._waiters: Counter[JobRef] = Counter()
        self._left: dict[str, datetime] = {}
        self._opted_out: set[JobRef] = set()
        self._name = ""
        self._written = ""
        self._forbidden = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def attend(self, ref: JobRef) -> None:
        """Record that this process waits for the job, until `leave`."""
        self._waiters[ref] += 1
        self._left.pop(ref.uid, None)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back; with `ended`, because the job has ended."""
        self._waiters[ref] -= 1
        if not self._waiters[ref]:
            del self._waiters[ref]
            self._opted_out.discard(ref)
            if not ended:
                self._left[ref.uid] = self._client.now()
            self._changed.set()

    async def aclose(self) -> None:
        """Stop renewing. The Lease remains while a job that it names may still run: it records the end of the wait."""
        if self._task is not None:
            self._task.cancel()
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
            except Forbidden as error:
                if not self._forbidden:
                    _log.warning("permission for Leases is missing, so unattended jobs are kept: %s", error)
                self._forbidden = True
                await self._opt_out_all()
                pause = _FORBIDDEN * renew
            except TrainJobError as error:  # an outage is reported by the watch of the jobs
                _log.debug("the Lease is not renewed: %s", error)
                pause = renew / 3
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    await asyncio.sleep(min(_SETTLE, renew / 3))

    async def _remove(self) -> None:
        if self._name:
            with suppress(ApiError), anyio.move_on_after(_CLOSING):
                await self._client.send(deletion(self._namespace, self._name))
            self._name = ""  # not reached if cancelled: `aclose` then deletes the Lease

    async def _write(self) -> None:
        now = self._client.now()
        self._left = {uid: at for uid, at in self._left.items() if now - at < LONGEST_UNATTENDED}
        jobs = {ref.uid: None for ref in self._waiters} | {uid: _text(at) for uid, at in self._left.items()}
        text = json.dumps(jobs, separators=(",", ":"))
        renewed: dict[str, Any] = {"spec": {"renewTime": _text(now)}}
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
                "annotations": {JOBS: text},
                "ownerReferences": self._owners(),
            },
            "spec": {
                "holderIdentity": socket.gethostname(),
                "leaseDurationSeconds": max(1, round(3 * self._client.timings.renew)),
                "acquireTime": _text(now),
                "renewTime": _text(now),
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


@dataclass(frozen=True)
class Waiter:
    """A process that waits or waited for jobs.

    Attributes:
        lease: Name of its Lease.
        renewed: Latest renewal of the Lease, by the API server's clock.
        jobs: UID of a job -> time until which the process is known to have waited for it.
    """

    lease: str
    renewed: datetime
    jobs: Mapping[str, datetime]


async def waiters(client: ApiClient, namespace: str) -> list[Waiter]:
    """The processes that wait or waited for jobs, according to their Leases. A malformed Lease names no job.

    Raises:
        ApiError: The Leases cannot be listed.
    """
    listed = await client.items(_path(namespace), {"labelSelector": f"{MANAGED_BY}=trainjob"})
    return [waiter for waiter in map(_waiter, listed) if waiter is not None]


def _waiter(lease: Mapping[str, Any]) -> Waiter | None:
    renewed = parse_time(mapping(lease, "spec").get("renewTime"))
    if renewed is None:
        return None
    try:
        jobs = json.loads(mapping(lease, "metadata", "annotations").get(JOBS) or "{}")
    except ValueError:
        jobs = {}
    times = {uid: renewed if at is None else parse_time(at) for uid, at in mapping(jobs).items()}
    return Waiter(lease["metadata"]["name"], renewed, {uid: at for uid, at in times.items() if at is not None})


def deletion(namespace: str, lease: str) -> Request:
    """The request that deletes a Lease."""
    return Request("DELETE", f"{_path(namespace)}/{lease}")


def _path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
