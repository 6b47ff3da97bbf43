"""Launches of one key for tests: attempts that other launchers have created, states of a key, and what runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

from tests.fakes.kube.direct import LOST, DirectBackend
from tests.fakes.kube.objects import Object
from tests.fakes.kube.server import Refused

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Snapshot
from trainjob._jobs import launching, records
from trainjob._jobs.cancellation import cancel_key, give_up
from trainjob._manifest.attempts import ADOPTED, LAUNCHED, REPLACES, Cancel, may_run
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.job import TRY, job_name, key_hash
from trainjob.status import QUEUE_LABEL, Blocker

LOOK = ["LIST leases", "LIST trainjobs"]
"""The requests of a look, side by side."""
FIRST = [*LOOK, "LIST pods", "GET jobsets"]
"""The first look of a launch whose caller counts no tries, or of a first try: side by side, too."""
WHY = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 3", advice="fix the code")
LIMITED = {"containers": [{"name": "node", "resources": {"limits": {"memory": "16Gi"}}}]}
"""The spec of a pod that fills its own memory limit, not that of its node."""
LONG_AGO, LATER = "2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


def spec(**fields: Any) -> TrainJobSpec:
    """A spec with these fields."""
    return TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], **fields})


async def launch(
    backend: DirectBackend, key: str = "key", fields: Mapping[str, Any] | None = None, **options: Any
) -> JobRef:
    """A launch of a spec with these fields."""
    return await launching.launch(backend, spec(**fields or {}), key, namespace="ns", **options)


def attempt(
    backend: DirectBackend,
    number: int = 1,
    key: str = "key",
    *,
    created: str = "",
    annotations: Mapping[str, str] | None = None,
    **fields: Any,
) -> JobRef:
    """An attempt that another launcher has just created, or at a time."""
    made = render(spec(**fields), key, number, "ns")
    made["metadata"]["annotations"] |= annotations or {}
    ref = JobRef.of(backend.store.create("trainjobs", made, who="another"))
    if created:
        backend.change(ref, {"metadata": {"creationTimestamp": created}})
    return ref


async def attempts(backend: DirectBackend, *states: str) -> list[JobRef]:
    """Attempts of one key in those states, as if several launchers had created them."""
    made: list[JobRef] = []
    for number, state in enumerate(states, 1):
        ref = attempt(backend, number, labels={QUEUE_LABEL: "main"} if state == "queued" else {})
        made.append(ref)
        if state == "given up":
            await give_up(backend, ref, WHY)
        elif state in ("failed", "complete"):
            backend.condition(ref, state.capitalize(), state)
        elif state == "deleting":
            backend.change(ref, {"metadata": {"deletionTimestamp": backend.ago(0)}})
        elif state == "suspended":
            await backend.patch(ref, {"spec": {"suspend": True}})
    backend.store.log.clear()
    backend.requests.clear()
    return made


def annotations_of(backend: DirectBackend, ref: JobRef) -> dict[str, str]:
    """The annotations of a job."""
    return dict(backend.job(ref)["metadata"]["annotations"])


def active(backend: DirectBackend) -> list[JobRef]:
    """The attempts that run or may run, also suspended ones."""
    return [JobRef.of(job) for job in backend.jobs.values() if may_run(job)]


def running(backend: DirectBackend) -> list[JobRef]:
    """The active attempts that are not suspended."""
    return [ref for ref in active(backend) if not backend.job(ref)["spec"].get("suspend")]


def without_launch(job: Object) -> Object:
    """A job without what each launch writes."""
    annotations = {
        name: value for name, value in job["metadata"]["annotations"].items() if name not in (LAUNCHED, TRY, ADOPTED)
    }
    return {**job, "metadata": {**job["metadata"], "annotations": annotations, "resourceVersion": None}}


async def cancels(backend: DirectBackend, key: str = "key") -> list[Cancel]:
    """The records of the cancels of a key."""
    return (await backend.all_cancels("ns")).get(key_hash(key), [])


def deleted(backend: DirectBackend) -> list[tuple[str, str]]:
    """Names and versions of the DELETEs of jobs that were sent; no version for one of any."""
    sent = [each for each in backend.store.log if (each.method, each.plural) == ("DELETE", "trainjobs")]
    return [(each.name, (each.body or {})["preconditions"].get("resourceVersion", "")) for each in sent]


def patches(backend: DirectBackend) -> list[tuple[str, Object]]:
    """Names and bodies of the PATCHes of jobs that were sent."""
    sent = [each for each in backend.store.log if (each.method, each.plural) == ("PATCH", "trainjobs")]
    return [(each.name, dict(each.body or {})) for each in sent]


def refuse(backend: DirectBackend, *requests: str, error: Exception | None = None) -> None:
    """Refuse requests of these names; by default as Trainer's webhook does for a job whose runtime is gone."""
    refused = error or Refused(403, "Forbidden", "its runtime is gone")

    def before(request: str) -> None:
        if request in requests:
            raise refused

    backend.before = before


def once(backend: DirectBackend, request: str | int, action: Callable[[], object], *, skip: int = 0) -> None:
    """Run `action` before a request of that name, or of that number from 0, is served: its process is frozen meanwhile.

    Args:
        backend: The backend.
        request: Name or number of the request.
        action: What other processes do meanwhile, with requests or by a change of objects.
        skip: How many requests of that name are served before.
    """
    seen, awaited = -1, request if isinstance(request, int) else skip

    async def turn(name: str) -> None:
        nonlocal seen
        counts = isinstance(request, int) or name == request
        seen += counts
        if counts and seen == awaited:
            backend.turn = None
            done = action()
            if isawaitable(done):
                await done

    backend.turn = turn


def block(backend: DirectBackend, blocker: Blocker) -> None:
    """Every job is blocked, without a search for the reason among other objects."""
    watch = backend.watch

    async def watched(ref: JobRef) -> AsyncGenerator[Snapshot]:
        async with aclosing(watch(ref)) as snapshots:
            async for snapshot in snapshots:
                yield Snapshot(snapshot.trainjob, blocker=blocker)

    backend.watch = watched  # type: ignore[method-assign]  # for every wait of the test


STATES = {
    "nothing": 1,
    "deleted, with pods on a lost node": 2,
    "a JobSet is left": 2,
    "failed": 2,
    "given up": 2,
    "delivered": 2,
    "runs": 1,
    "suspended by a cancel": 1,
    "undelivered": 1,
    "two run": 1,
    "came back": 2,
}
"""States of a key -> number of the attempt that counts after the next launch."""


async def bring(backend: DirectBackend, state: str) -> None:
    """Bring the key into a state."""
    match state:
        case "deleted, with pods on a lost node":
            ref = attempt(backend)
            await backend.delete(ref)
            backend.pod(ref, conditions=[LOST])
        case "a JobSet is left":
            backend.jobset(job_name("key", 1), "ns")
        case "failed":
            backend.end(await launch(backend), 3)
        case "given up":
            await give_up(backend, await launch(backend), WHY)
        case "delivered":
            await finish(backend, await launch(backend))
        case "runs":
            backend.running(await launch(backend))
        case "suspended by a cancel":
            await launch(backend)
            await cancel_key(backend, "key", namespace="ns", action="suspend", timeout_seconds=0)
        case "undelivered":
            backend.end(await launch(backend))
        case "two run":  # two launchers were killed after their creates
            attempt(backend, 1)
            attempt(backend, 2)
        case "came back":  # Trainer has taken Failed back, or a person has resumed it
            first = attempt(backend, 1, created=LONG_AGO)
            attempt(backend, 2, annotations={REPLACES: first.uid})


async def finish(backend: DirectBackend, ref: JobRef) -> None:
    """A job completes, and its result is delivered."""
    backend.end(ref)
    await records.mark_delivered(backend, ref)


class Clock:
    """A clock that only sleeping advances: for `time` of a module, and `anyio.sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Killing:
    """Kills the process at its request of that number, from 0, before or after it is served.

    With None, after it has created a job.
    """

    def __init__(self, backend: DirectBackend, number: int | None, when: str = "before") -> None:
        self._left = number
        self.killed = False
        setattr(backend, "after" if number is None else when, self)

    def __call__(self, request: str) -> None:
        if self._left is None:
            self.killed = self.killed or request == "POST trainjobs"
        else:
            self._left -= 1
            self.killed = self._left < 0
        if self.killed:
            raise asyncio.CancelledError
