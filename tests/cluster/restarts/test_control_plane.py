"""Restarts of control plane components: the effects on the cluster, on waiters and on watches."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
from tests.cluster.waits import until, until_phase
from tests.cluster.wires import Wires
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec, cancel, cancel_key
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.status import observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, **fields})


# httpcore 1.0 leaves the socket of a cancelled TLS handshake to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_waiters_survive_a_compaction_and_a_restart(wires: Wires, own_cluster: Cluster) -> None:
    """The watches' last revision is compacted, so the server answers 410; jobs that ended meanwhile are noticed."""
    long_reads = Timings(watch_read=120)
    outcomes: list[str] = []

    async def waited(backend: KubernetesBackend, ref: JobRef) -> None:
        try:
            outcomes.append(f"{(await wait(backend, ref)).name} complete")
        except TrainJobFailed as error:
            outcomes.append(f"{ref.name} {error.diagnosis.category}")

    async with (
        wires.open(long_reads) as (alone, one),
        wires.open(long_reads, shared=True) as (shared, other),
        anyio.create_task_group() as tasks,
    ):
        ending = await launch(alone, spec(env=simulate(run="15s")), "ends", namespace=wires.namespace)
        deleted = await launch(alone, spec(env=simulate(run="never")), "deleted", namespace=wires.namespace)
        for backend in (alone, shared):
            for ref in (ending, deleted):
                tasks.start_soon(waited, backend, ref)
        await until(lambda: len(one.seen("WATCH", "/trainjobs")) >= 2 and other.seen("WATCH", "/trainjobs"))
        one.freeze()
        other.freeze()
        wires.cluster.api.delete(TRAINER, "TrainJob", wires.namespace, deleted.name)
        await until(lambda: observe(wires.jobs("ends")[0]).phase is Phase.COMPLETE)
        await anyio.to_thread.run_sync(own_cluster.compact)
        await anyio.to_thread.run_sync(own_cluster.restart, "kube-apiserver")
        # Until the API server has read the objects it answers 429 to watches. After two of them a client lists again
        # and would never get the 410.
        watch = partial(wires.cluster.watch, TRAINER, "TrainJob", wires.namespace)
        await anyio.to_thread.run_sync(partial(wait_until, "TrainJobs can be watched", watch, ignore=ApiError))
        one.thaw()
        other.thaw()
    expected = [f"{ending.name} complete"] * 2 + [f"{deleted.name} deleted"] * 2
    assert sorted(outcomes) == sorted(expected)
    for proxy in (one, other):
        assert any(b'"code":410' in seen.reply for seen in proxy.seen("WATCH", "/trainjobs"))


# ---------------------------------------------------------------- cancels


@pytest.mark.parametrize("by", ["name", "key"])
async def test_a_cancel_needs_no_webhook(by: str, own_cluster: Cluster, wires: Wires) -> None:
    """It hangs, as it does while Trainer's pod restarts, and a PATCH would wait for it."""
    async with wires.open(Timings()) as (backend, proxy):
        ref = await launch(backend, spec(env=simulate(run="10m")), "nightly/train", namespace=wires.namespace)
        await until_phase(backend, ref, Phase.RUNNING)
        own_cluster.pause("trainer")
        try:
            if by == "name":
                await cancel(backend, ref, timeout_seconds=0)
            else:
                stopped = await cancel_key(backend, "nightly/train", namespace=wires.namespace, timeout_seconds=0)
                assert [job.uid for job in stopped.jobs] == [ref.uid]
            assert await backend.get(ref.namespace, ref.name) is None
        finally:
            own_cluster.resume("trainer")
        assert proxy.seen("PATCH", f"/trainjobs/{ref.name}") == []
