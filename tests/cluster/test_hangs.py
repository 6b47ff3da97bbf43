"""Jobs that hang or have a slow rank on the real node: its network and its disk fail, and its kubelet serves the logs.

A campaign (`tests.campaigns`) of the plans and the script of `tests.local.test_hangs`.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests import campaigns
from tests.cluster import failing, lost_time
from tests.cluster.backends import backend_of
from tests.cluster.pods import pods_of
from tests.cluster.waits import until
from tests.local import hanging
from tests.processes import wait_until
from tests.testcluster import images
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import BLKIO, NAME, RealNode

from trainjob import JobRef, TrainJobFailed, TrainJobSpec, progress
from trainjob._jobs.cancellation import cancel, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import given_up
from trainjob._support.kube_objects import has_trained
from trainjob.errors import Category, JobHung, RetryVerdict
from trainjob.goodput import Activity

pytestmark = pytest.mark.anyio

TIMEOUT = 10.0 if campaigns.FULL else 5.0
AT_ONCE = 8 if campaigns.FULL else 6
SLACK = 60.0  # seconds that a loaded machine may add to the time until a hang is noticed
HANGS, HEALTHY, SLOW = campaigns.runs(200, 4), campaigns.runs(200, 2), campaigns.runs(30, 1)
SLOW_SECONDS = 6 * TIMEOUT  # ranks are compared once per timeout, and named after three comparisons
DISK = ("disk",) if (BLKIO / "blkio.throttle.read_bps_device").exists() else ()
OUTSIDE = ("stop", "network", *DISK)
"""Faults that the test causes from outside of the pods."""
FAULTS = (*OUTSIDE, *(fault for fault in hanging.FAULTS if fault not in OUTSIDE))
BYTES_PER_SECOND = 40  # a page then takes 100 s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory for pods, with the script, and the package of `trainjob` that the script needs."""
    (tmp_path / "trainjob").mkdir()
    (tmp_path / "trainjob" / "__init__.py").touch()
    shutil.copytree(
        Path(progress.__file__).parent, tmp_path / "trainjob" / "progress", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(hanging.__file__, tmp_path)
    return tmp_path


class Jobs:
    """Runs jobs on the real node, whose pods mount `folder`."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        assert cluster.real_node is not None
        self.node: RealNode = cluster.real_node
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.backend = backend_of(cluster.kubeconfig)
        self.right = 0
        self.seconds: list[float] = []
        self.problems: list[str] = []

    async def launch(self, name: str, plan: dict[str, Any]) -> JobRef:
        hanging.prepare(self.folder / name, plan, hanging.RING)
        pod = {
            "volumes": [{"name": "folder", "hostPath": {"path": str(self.folder)}}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "folder", "mountPath": str(self.folder)}]}],
            "terminationGracePeriodSeconds": 0,
        }
        fields = {
            "runtime": "torch-distributed",
            "image": images.PYTHON,
            "num_nodes": plan["world"],
            "command": ["python3", "-u", str(self.folder / "hanging.py"), str(self.folder / name)],
            "stall_timeout": TIMEOUT,
            **failing.patched(pod),
        }
        return await launch(self.backend, TrainJobSpec.parse(fields), name, namespace=self.namespace)

    async def cause(self, ref: JobRef, folder: Path, plan: dict[str, Any], faults: ExitStack) -> float:
        """Cause the fault of a plan when the rank has reached the step; return the Unix time of the fault."""
        reached = folder / f"at-{plan['culprit']}"
        await until(reached.exists, 180)
        if plan["outside"]:
            await anyio.to_thread.run_sync(self._cause, ref, folder, plan, faults)
            return time.time()
        return reached.stat().st_mtime

    def _cause(self, ref: JobRef, folder: Path, plan: dict[str, Any], faults: ExitStack) -> None:
        culprit = plan["culprit"]
        pod, peer = (self._pod(ref, rank) for rank in (culprit, (culprit + 1) % plan["world"]))
        container = pod["status"]["containerStatuses"][0]["containerID"]
        if plan["fault"] == "stop":
            self.node.kill_container(container, signal.SIGSTOP)
        elif plan["fault"] == "disk":
            faults.enter_context(self.node.slow_disk(container, folder / f"data-{culprit}", BYTES_PER_SECOND))
        else:
            self.node.drop_packets(container, peer["status"]["podIP"])
            self.node.drop_packets(peer["status"]["containerStatuses"][0]["containerID"], pod["status"]["podIP"])

    def _pod(self, ref: JobRef, rank: int) -> dict[str, Any]:
        """A pod, once its kubelet has reported its container: later than the container starts."""

        def started() -> dict[str, Any] | None:
            (pod,) = pods_of(self.cluster, ref, rank)
            return pod if has_trained(pod) and pod["status"].get("podIP") else None

        return wait_until(f"the container of rank {rank} has started", started, 60, poll=0.2)

    async def hang(self, run: int) -> None:
        chance = random.Random(f"hang/{campaigns.SEED}/{run}")
        fault = FAULTS[(run + campaigns.SEED) % len(FAULTS)]
        plan = hanging.planned(chance, fault=fault, outside=fault in OUTSIDE)
        description = f"run {run} of seed {campaigns.SEED}: {plan}"
        launched = [time.time()]
        ref = await self.launch(f"hang-{run}", plan)
        launched.append(time.time())
        began = 0.0
        faults = ExitStack()

        async def cause() -> None:
            nonlocal began
            began = await self.cause(ref, self.folder / f"hang-{run}", plan, faults)

        caught: list[JobHung] = []
        with faults:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cause)
                try:
                    await wait(self.backend, ref)
                except JobHung as hung:
                    caught.append(hung)
                tasks.cancel_scope.cancel()
        assert caught, f"{description} has completed"
        assert began, f"{description} hung before its fault: {caught[0].diagnosis.text()}"
        noticed = time.time()
        diagnosis = caught[0].diagnosis
        assert diagnosis.category is Category.HANG
        assert diagnosis.rank in (hanging.expected(plan), ""), f"{description}: {diagnosis.text()}"
        assert any("in _exchange" in line for line in diagnosis.log), f"{description}: the stack of a rank that waits"
        assert noticed - began < 2 * TIMEOUT + SLACK, description
        if plan["outside"] and fault != "disk":
            assert diagnosis.retry is RetryVerdict.INFRASTRUCTURE, f"{description}: {diagnosis.text()}"
        self.right += diagnosis.rank == hanging.expected(plan)
        self.seconds.append(noticed - began)
        campaigns.done(f"{fault} at {plan['world']}: {noticed - began:.1f} s: {diagnosis.summary}")
        spent = await lost_time.measured(self.backend, self.namespace, f"hang-{run}")
        lost_time.lasted(spent, noticed - launched[1], time.time() - launched[0], *lost_time.INTERRUPTED)
        # Only a rank 0 that has ended left its reports. They tell that nothing followed, if there are two of them.
        reported = fault == "end" and plan["culprit"] == 0 and plan["counts"] == "report"
        stalled = spent.seconds[Activity.STALLED]
        assert spent.seconds[Activity.TRAINING] + stalled > noticed - began - lost_time.SECONDS, (description, spent)
        assert reported or not stalled, (description, spent)
        in_error = caught[0].goodput["seconds"]["stalled"]
        assert in_error > TIMEOUT - 0.1, (description, caught[0].goodput)
        assert reported or in_error < TIMEOUT + 0.1, (description, caught[0].goodput)
        await give_up(self.backend, ref, diagnosis)
        stopped = await self.backend.get(ref.namespace, ref.name)
        assert stopped is not None
        assert given_up(stopped) == diagnosis
        await cancel(self.backend, ref)

    async def healthy(self, run: int) -> None:
        plan = hanging.healthy(random.Random(f"healthy/{campaigns.SEED}/{run}"), TIMEOUT)
        ref = await self.launch(f"healthy-{run}", plan)
        try:
            result = await wait(self.backend, ref)
        except TrainJobFailed as alarm:
            raise AssertionError(f"run {run} of seed {campaigns.SEED}: {plan}: {alarm}") from None
        pauses = f"{len(plan['pauses'])} pauses, {plan['steps']} steps"
        campaigns.done(f"healthy run {run}: first step after {plan['first']:.1f} s, {pauses}")
        assert not result.stragglers, f"run {run} of seed {campaigns.SEED}: {plan}: {result.stragglers}"
        await cancel(self.backend, ref)

    async def slow(self, run: int) -> None:
        plan = hanging.slow(random.Random(f"slow/{campaigns.SEED}/{run}"), SLOW_SECONDS)
        ref = await self.launch(f"slow-{run}", plan)
        notices: list[str] = []
        result = await wait(self.backend, ref, on_change=lambda _, notice: notices.append(notice))
        description = f"{plan['slower']:.1f} times slower, {plan['world']} ranks: {result.stragglers}"
        campaigns.done(description)
        slow = [f"node-{plan['culprit']}"] if plan["slower"] > 1 else []
        assert [each["rank"] for each in result.stragglers] == slow, f"run {run} of {campaigns.SEED}: {description}"
        for each in result.stragglers:
            assert each["node"] == NAME
            assert each["summary"] in notices
        await cancel(self.backend, ref)


@pytest.mark.timeout(3600)
async def test_hangs_are_noticed_and_healthy_jobs_raise_no_alarm(
    real_node: Access,
    own_cluster: Cluster,
    folder: Path,
    record_property: campaigns.Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainjob._jobs.stalls._COMPARED_PER_SECOND", 100.0)  # for short timeouts of several jobs
    campaigns.begin(record_property, HANGS + HEALTHY + SLOW)
    limiter = anyio.CapacityLimiter(AT_ONCE)
    with real_node.namespace("hangs", real=True) as namespace:
        jobs = Jobs(own_cluster, namespace, folder)

        async def one(kind: Callable[[int], Awaitable[None]], run: int) -> None:
            async with limiter:
                try:
                    await kind(run)
                except AssertionError as problem:
                    jobs.problems.append(str(problem))
                    campaigns.done(f"PROBLEM: {problem}")

        async with anyio.create_task_group() as tasks:
            for kind, runs in ((jobs.slow, SLOW), (jobs.hang, HANGS), (jobs.healthy, HEALTHY)):
                for run in range(runs):
                    tasks.start_soon(one, kind, run)
        await jobs.backend.aclose()
    result, in_time = hanging.result_of(jobs.right, jobs.seconds, TIMEOUT)
    record_property("result", result)
    campaigns.done(result)
    assert not jobs.problems, "\n".join(jobs.problems)
    assert jobs.right >= 0.95 * HANGS, result
    assert in_time >= 0.95 * HANGS or not campaigns.FULL, result  # other lanes load the machine
