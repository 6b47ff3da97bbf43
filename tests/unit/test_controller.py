"""What the controller of a namespace ends, and what it leaves alone: with the real backend on the fake API server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from tests.fakes.kube.http import FakeKube
from tests.fakes.kube.objects import Object
from tests.fakes.kube.server import Refused
from tests.processes import free_port

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._install import objects
from trainjob._jobs import controller
from trainjob._jobs.controller import Controller, Counters
from trainjob._jobs.launching import launch
from trainjob._manifest.unattended import AFTER, LABEL, ON_KILL
from trainjob._manifest.workflow_labels import KFP_RUN
from trainjob.cli.probes import metrics, served
from trainjob.status import Phase, observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

RUN = "run-1"
TERMINATED: dict[str, Any] = {"spec": {"activeDeadlineSeconds": 0}}


@dataclass
class World:
    """A namespace, and the controllers that run in it."""

    kube: FakeKube
    backend: KubernetesBackend
    done: list[str] = field(default_factory=list)

    async def job(
        self, key: str = f"kfp/{RUN}/train", run: str = RUN, action: str | None = "suspend", **labels: str
    ) -> JobRef:
        spec = TrainJobSpec.parse({"runtime": "trainjob-step", "labels": labels})
        ref = await launch(self.backend, spec, key, namespace="ns", origin={KFP_RUN: run})
        if action is not None:
            await self.backend.patch(ref, {"metadata": {"annotations": {ON_KILL: action}}})
        return ref

    def workflow(self, changes: dict[str, Any] | None = None, kind: str = "MODIFIED", run: str = RUN) -> None:
        name = f"pipe-{run}"
        metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": {KFP_RUN: run}}
        self.kube.cluster.put("workflows", {"metadata": metadata, "spec": {}, "status": {}, **(changes or {})}, kind)

    def lease(self, ref: JobRef, holder: str, *, lasts: int = 600) -> None:
        now = self.kube.cluster.timestamp()
        metadata = {
            "name": f"trainjob-{holder}",
            "namespace": "ns",
            "uid": f"uid-{holder}",
            "labels": {"app.kubernetes.io/managed-by": "trainjob"},
            "annotations": {"trainjob.dev/jobs": f'{{"{ref.uid}":null}}'},
        }
        spec = {"holderIdentity": holder, "leaseDurationSeconds": lasts, "renewTime": now}
        self.kube.cluster.put("leases", {"metadata": metadata, "spec": spec})

    def state(self, ref: JobRef) -> str:
        """``running``, ``suspended`` or ``deleted``."""
        found: Object | None = self.kube.cluster.get("trainjobs", ref.name, "ns")
        if found is None or "deletionTimestamp" in found["metadata"]:
            return "deleted"
        return "suspended" if observe(found).phase is Phase.SUSPENDED else "running"

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.done
            await anyio.sleep(0.02)

    @asynccontextmanager
    async def controller(self, **options: Any) -> AsyncIterator[Controller]:
        """A controller that has seen the namespace."""
        made = Controller(self.backend, "ns", on_done=lambda each: self.done.append(str(each)), **options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await self.until(lambda: made.counters.decided is not None)
            yield made
            tasks.cancel_scope.cancel()

    async def settled(self, made: Controller) -> None:
        """Wait until the controller has decided about everything that has happened until now."""
        for _ in range(2):
            decided = made.counters.decided
            self.workflow({"status": {"phase": "Running", "message": str(decided)}}, run="another")
            await self.until(partial(self._has_decided, made, decided))

    @staticmethod
    def _has_decided(made: Controller, before: float | None) -> bool:
        """Whether a controller has decided since the time `before`."""
        return made.counters.decided != before


@pytest.fixture
def kube() -> Iterator[FakeKube]:
    with FakeKube() as server:
        yield server


@pytest.fixture
async def world(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(controller, "_COLLECT", 0.01)
    backend = KubernetesBackend(Credentials(host=kube.url), shared=True, timings=Timings(settle=0.1))
    (role,) = [each for each in objects("controller", namespace="ns") if each["kind"] == "Role"]
    allowed = {resource for rule in role["rules"] for resource in rule["resources"]}
    kube.cluster.forbidden = (frozenset({"pods", "jobsets", "workloads", "trainjobs", "leases"} - allowed), frozenset())
    yield World(kube, backend)
    await backend.aclose()


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "Terminate of KFP": (TERMINATED, "MODIFIED"),
    "argo terminate": ({"spec": {"shutdown": "Terminate"}}, "MODIFIED"),
    "argo stop": ({"spec": {"shutdown": "Stop"}}, "MODIFIED"),
    "the deletion of the run": ({"status": {"phase": "Running"}}, "DELETED"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("action", "left"), [("suspend", "suspended"), ("cancel", "deleted")])
async def test_jobs_end_with_their_run(world: World, end: str, action: str, left: str) -> None:
    world.workflow({"status": {"phase": "Running"}})
    mine, other = await world.job(action=action), await world.job("kfp/run-2/train", "run-2")
    kept = await world.job(f"kfp/{RUN}/kept", action="keep")
    async with world.controller() as made:
        assert world.state(mine) == "running"
        world.workflow(*ENDS[end])
        await world.until(lambda: world.state(mine) == left)
        await world.settled(made)
        assert (world.state(kept), world.state(other)) == ("running", "running")
        assert made.counters.ended == {"suspended": 0, "deleted": 0, left: 1}
    state = "deleted" if end.startswith("the deletion") else "terminated"
    assert world.done == [f"TrainJob {mine} was {left}: its run {RUN} was {state} (Workflow pipe-{RUN})"]
    (event,) = world.kube.cluster.items("events")
    assert event["involvedObject"]["uid"] == mine.uid
    assert event["message"] == f"its run {RUN} was {state} (Workflow pipe-{RUN})"


async def test_a_job_that_is_created_after_the_end_of_its_run_ends(world: World) -> None:
    world.workflow(TERMINATED)
    async with world.controller():
        mine = await world.job()
        await world.until(lambda: world.state(mine) == "suspended")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        ({"status": {"phase": "Running"}}, None),
        ({"status": {"phase": "Failed"}}, "DELETED"),
        ({"status": {"phase": "Succeeded"}}, "DELETED"),
    ],
    ids=["no Workflow", "a run that keeps running", "a failed run that is removed", "a complete run that is removed"],
)
async def test_other_runs_end_nothing(world: World, before: dict[str, Any] | None, after: str | None) -> None:
    mine = await world.job()
    if before is not None:
        world.workflow(before)
    async with world.controller() as made:
        if after is not None:
            world.workflow(before, after)
        await world.settled(made)
        assert world.state(mine) == "running"


@pytest.mark.parametrize(
    ("holder", "lasts", "left"),
    [("pipe-run-2-impl-1", 600, "running"), (f"pipe-{RUN}-impl-1", 600, "suspended"), ("pipe-run-2-x", 0, "suspended")],
    ids=["another run waits", "only this run waits", "another run has ended"],
)
async def test_who_waits_decides_about_a_shared_key(world: World, holder: str, lasts: int, left: str) -> None:
    mine = await world.job("study/digits/0")
    world.lease(mine, holder, lasts=lasts)
    world.workflow({"status": {"phase": "Running"}})
    async with world.controller() as made:
        world.workflow(TERMINATED)
        await world.settled(made)
        await world.until(lambda: world.state(mine) == left)


async def test_retry_of_a_run_continues_it(world: World) -> None:
    world.workflow(TERMINATED)
    async with world.controller() as made:
        world.workflow({"status": {"phase": "Running"}})
        await world.settled(made)
        mine = await world.job()
        await world.settled(made)
        assert world.state(mine) == "running"


async def test_a_job_of_another_cluster_is_left_alone(world: World) -> None:
    """Its run, its waiters and the other attempts of its key are there."""
    world.workflow(TERMINATED)
    mine = await world.job(**{"kueue.x-k8s.io/multikueue-origin": "manager"})
    overdue = {"metadata": {"labels": {LABEL: "cancel"}, "annotations": {AFTER: "0"}}}
    await world.backend.patch(mine, overdue)
    async with world.controller(grace=0) as made:
        await world.settled(made)
        assert world.state(mine) == "running"


async def test_a_job_that_nobody_waits_for_ends(world: World) -> None:
    world.workflow({"status": {"phase": "Running"}})
    mine, waited = await world.job(), await world.job(f"kfp/{RUN}/waited")
    world.lease(waited, f"pipe-{RUN}-impl-1")
    for ref in (mine, waited):
        await world.backend.patch(ref, {"metadata": {"labels": {LABEL: "suspend"}, "annotations": {AFTER: "3600"}}})
        with world.kube.cluster.lock:
            job = world.kube.cluster.find("trainjobs", ref.name, "ns")
            old = {**job["metadata"], "creationTimestamp": "2026-11-21T10:00:00Z"}
            world.kube.cluster.put("trainjobs", {**job, "metadata": old})
    async with world.controller(grace=0) as made:
        await world.until(lambda: world.state(mine) == "suspended")
        await world.settled(made)
        assert world.state(waited) == "running"


async def test_two_controllers_and_one_that_is_late(world: World) -> None:
    world.workflow({"status": {"phase": "Running"}})
    jobs = [await world.job(f"kfp/{RUN}/{number}") for number in range(8)]
    world.workflow(TERMINATED)
    async with world.controller() as first, world.controller() as second:
        await world.until(lambda: {world.state(job) for job in jobs} == {"suspended"})
        await world.settled(first)
        await world.settled(second)
        assert first.counters.failed == second.counters.failed == 0


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "NotFound"), (403, "Forbidden")], ids=["there is no Argo", "they may not be read"]
)
async def test_without_workflows_the_rest_is_done(world: World, kube: FakeKube, status: int, reason: str) -> None:
    def refuse(request: str) -> None:
        if "workflows" in request:
            raise Refused(status, reason, reason)

    kube.before = refuse
    first = await world.job(f"kfp/{RUN}/one")
    async with world.controller() as made:
        second = {**kube.cluster.find("trainjobs", first.name, "ns")}
        metadata = {**second["metadata"], "name": f"{first.name[:-1]}2", "uid": "uid-second"}
        metadata["labels"] = {**metadata["labels"], "trainjob.dev/attempt": "2"}
        kube.cluster.put("trainjobs", {**second, "metadata": metadata}, "ADDED")
        await world.until(lambda: any("another attempt of its key counts" in each for each in world.done))
        assert made.counters.ended["deleted"] == 1


async def test_renewals_of_leases_cause_no_decision(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "INTERVAL", 600.0)
    mine = await world.job()
    async with world.controller() as made:
        await world.settled(made)
        decided = made.counters.decided
        for _ in range(20):
            world.lease(mine, f"pipe-{RUN}-impl-1")
            await anyio.sleep(0.02)
        assert made.counters.decided == decided
        world.workflow(TERMINATED)
        await world.until(lambda: world.state(mine) == "suspended")


async def test_health_and_metrics() -> None:
    counters = Counters(failed=2, jobs=3)
    counters.ended["deleted"] = 4
    port = free_port()
    async with served(counters, port), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/healthz")).status_code == 503
        counters.decided = time.monotonic()
        assert (await client.get("/healthz")).status_code == 200
        counters.decided -= 90
        assert (await client.get("/healthz")).status_code == 503
        assert (await client.get("/metrics")).text == metrics(counters)
        assert (await client.get("/")).status_code == 404
    assert 'trainjob_controller_jobs_ended_total{action="deleted"} 4' in metrics(counters).splitlines()
    assert "trainjob_controller_failures_total 2" in metrics(counters).splitlines()
