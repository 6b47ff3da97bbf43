"""Restarts of control plane components: the effects on the cluster, on waiters and on watches."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from tests.cluster.backends import both_watches
from tests.cluster.waits import until, until_phase
from tests.cluster.wires import Wires
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, condition, trainjob
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.errors import StartTimeout
from trainjob.status import observe
from trainjob.wait_options import WaitOptions

pytestmark = pytest.mark.timeout(400)


def job_of(cluster: Cluster, namespace: str, name: str = "job") -> dict[str, Any]:
    return cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}


def until_complete(cluster: Cluster, namespace: str, name: str = "job") -> None:
    wait_until(f"{name} is complete", lambda: condition(job_of(cluster, namespace, name), "Complete"), 60)


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, **fields})


def test_the_api_server_restarts_without_old_revisions(own_cluster: Cluster, namespace: str) -> None:
    own_cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": simulate(run="1s")}))
    job = job_of(own_cluster, namespace)
    accounts = own_cluster.api.path("v1", "ServiceAccount")
    list_token = own_cluster.api.request("GET", accounts, params={"limit": "1"})["metadata"]["continue"]
    until_complete(own_cluster, namespace)
    own_cluster.kill("kube-apiserver")
    with pytest.raises(httpx.TransportError):
        job_of(own_cluster, namespace)
    own_cluster.compact()
    own_cluster.start_component("kube-apiserver")
    assert job_of(own_cluster, namespace)["metadata"]["uid"] == job["metadata"]["uid"]
    with pytest.raises(ApiError) as gone:
        own_cluster.api.request("GET", accounts, params={"limit": "1", "continue": list_token})
    assert gone.value.status == 410
    watch = {"watch": "true", "resourceVersion": job["metadata"]["resourceVersion"], "timeoutSeconds": "5"}
    path = own_cluster.api.path(TRAINER, "TrainJob", namespace)
    served = partial(own_cluster.watch, TRAINER, "TrainJob", namespace)
    wait_until("TrainJobs can be watched", served, ignore=ApiError)  # 429 until it has read them
    [event] = own_cluster.api.request("GET", path, params=watch).splitlines()
    assert json.loads(event)["object"]["code"] == 410
    own_cluster.api.create(trainjob("next", namespace, trainer={"numNodes": 1}))
    until_complete(own_cluster, namespace, "next")  # the controllers have reconnected to the API server


@pytest.mark.parametrize("program", ["trainer", "etcd", "kueue"])
def test_components_restart(own_cluster: Cluster, namespace: str, program: str) -> None:
    own_cluster.restart(program)
    own_cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1}))
    until_complete(own_cluster, namespace)


@pytest.mark.anyio
async def test_a_webhook_that_hangs_is_waited_for_as_long_as_the_timeouts_allow(
    backend: KubernetesBackend, own_cluster: Cluster, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_cluster.pause("trainer")
    try:
        with pytest.raises(StartTimeout, match="start_timeout of 15s, and it does not exist"):
            await launch(backend, spec(), "key", namespace=namespace, timeouts=WaitOptions.parse({"start_timeout": 15}))
        assert "is not created yet" in caplog.text
    finally:
        own_cluster.resume("trainer")
    job = await launch(backend, spec(), "key", namespace=namespace)
    assert job.attempt == 1
    assert [each["metadata"]["name"] for each in await backend.find(namespace, {})] == [job.name], "one job"


@pytest.mark.anyio
@both_watches
async def test_a_waiter_survives_a_restart_of_the_api_server(
    backend: KubernetesBackend, own_cluster: Cluster, namespace: str
) -> None:
    ref = await launch(backend, spec(env=simulate(run="20s")), "a", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    notices: list[str] = []
    result: list[Any] = []

    async def waiting() -> None:
        result.append(await wait(backend, ref, on_change=lambda _, notice: notices.append(notice)))

    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting)
            await until(lambda: bool(notices))
            own_cluster.kill("kube-apiserver")
            await until(lambda: any("API server unavailable" in notice for notice in notices))
            await anyio.to_thread.run_sync(own_cluster.start_component, "kube-apiserver")
    assert result[0].uid == ref.uid


@pytest.mark.anyio
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
