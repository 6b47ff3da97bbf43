"""Who waits for which jobs: one Lease for each process that waits, and what a reaper reads of them.

The Lease names the jobs, and not each job its Lease: then a waiter changes no job, which Trainer's webhook refuses
where the job's runtime is gone, and two processes that wait for the same job do not disturb each other. All times are
by the clock of the API server: what the clocks of waiters and reapers say does not matter.
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
"""Annotation of a Lease: UID -> when this process left the job, null while it waits for it; as JSON."""

_SETTLE = 1.0  # seconds in which more jobs may come or go before the list of them is written
_FORBIDDEN = 10  # times as rarely as Leases are renewed, they are tried again where they are not allowed
_CLOSING = 2.0  # seconds for the request that removes a Lease


class Attendance:
    """The Lease of this process in one namespace. Belongs to one event loop.

    Args:
        client: The connection.
        namespace: Of the jobs.
        keep: Called with each job for which this process waits, if it may have no Lease: it must not be taken for
            unattended.
    """

    def __init__(self, client: ApiClient, namespace: str, keep: Callable[[JobRef], Awaitable[None]]) -> None:
        self._client = client
        self._namespace = namespace
        self._keep = keep
        self._waiters: Counter[JobRef] = Counter()
        self._left: dict[str, datetime] = {}
        self._kept: set[JobRef] = set()
        self._name = ""
        self._written = ""
        self._forbidden = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def attend(self, ref: JobRef) -> None:
        """See `Backend.attend`."""
        self._waiters[ref] += 1
        self._left.pop(ref.uid, None)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """See `Backend.leave`."""
        self._waiters[ref] -= 1
        if not self._waiters[ref]:
            del self._waiters[ref]
            self._kept.discard(ref)
            if not ended:
                self._left[ref.uid] = self._client.now()
            self._changed.set()

    async def aclose(self) -> None:
        """Stop renewing. The Lease stays as it is while a job that it names may still run: it says until when."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if not self._waiters and not self._left:
            await self._remove()

    async def _run(self) -> None:
        renew = self._client.timings.renew
        while self._waiters or self._left or self._name:
            if not self._waiters and not self._left:  # another may come while the Lease is removed
                await self._remove()
                continue
            self._changed.clear()
            pause = renew if self._waiters else None  # the time at which it left a job is written once
            try:
                await self._write()
            except Forbidden as error:
                if not self._forbidden:
                    _log.warning("Leases are not allowed, so jobs that nobody waits for are kept: %s", error)
                self._forbidden = True
                await self._keep_all()
                pause = _FORBIDDEN * renew
            except TrainJobError as error:  # an outage: the watch of the jobs tells
                _log.debug("the Lease is not renewed: %s", error)
                pause = renew / 3
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    await asyncio.sleep(min(_SETTLE, renew / 3))

    async def _remove(self) -> None:
        if self._name:
            with suppress(ApiError), anyio.move_on_after(_CLOSING):
                await self._client.send(removing(self._namespace, self._name))
            self._name = ""  # not if this was cancelled: `aclose` then removes it

    async def _write(self) -> None:
        now = self._client.now()
        self._left = {uid: at for uid, at in self._left.items() if now - at < LONGEST_UNATTENDED}
        jobs = {ref.uid: None for ref in self._waiters} | {uid: _text(at) for uid, at in self._left.items()}
        text = json.dumps(jobs, separators=(",", ":"))
        renewed: dict[str, Any] = {"spec": {"renewTime": _text(now)}}
        if self._name:
            # Nothing but the time, however many jobs there are.
            changed = (
                {"annotations": {JOBS: text}, "ownerReferences": self._owners()} if text != self._written else None
            )
            body = {**renewed, "metadata": changed} if changed else renewed
            path = f"{_path(self._namespace)}/{self._name}"
            request = Request("PATCH", path, body=body, content_type=MERGE_PATCH)
            try:
                await self._client.send(request)
            except ObjectNotFound:  # removed with the one job that it had, or by somebody
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
        """The one job, with which Kubernetes removes the Lease; the Lease of a process with more is removed by it."""
        if len(self._waiters) != 1 or self._left:
            return []
        (ref,) = self._waiters
        return [{"apiVersion": API_VERSION, "kind": KIND, "name": ref.name, "uid": ref.uid}]

    async def _keep_all(self) -> None:
        for ref in list(self._waiters):
            if ref in self._kept:
                continue
            try:
                await self._keep(ref)
            except TrainJobError as error:
                _log.warning("TrainJob %s may be taken for unattended: %s", ref, error)
            self._kept.add(ref)


@dataclass(frozen=True)
class Waiter:
    """A process that waits for jobs, or did.

    Attributes:
        lease: Name of its Lease.
        renewed: When it last wrote that it does, by the clock of the API server.
        jobs: UID of a job -> when it last waited for it.
    """

    lease: str
    renewed: datetime
    jobs: Mapping[str, datetime]


async def waiters(client: ApiClient, namespace: str) -> list[Waiter]:
    """See `KubernetesBackend.waiters`. A Lease that cannot be read names no job.

    Raises:
        ApiError: the Leases cannot be listed.
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


def removing(namespace: str, lease: str) -> Request:
    """The request that removes a Lease."""
    return Request("DELETE", f"{_path(namespace)}/{lease}")


def _path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
