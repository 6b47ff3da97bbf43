"""The launch protocol on the real API server with Trainer, JobSet and their webhooks: one key has one training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from tests.cluster.backends import opened
from tests.cluster.waits import until, until_phase
from tests.testcluster.access import JOBSET, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec, cancel_key
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import REPLACES, work_of
from trainjob._support.kube_objects import name_of
from trainjob.errors import RanksRemain
from trainjob.job import labels_of
from trainjob.status import observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

KEY = "nightly/train"
LONG = simulate(run="10m")


def spec(env: Sequence[dict[str, str]] = LONG, **fields: Any) -> TrainJobSpec:
    # Its runtime fails at the first exit code of a program.
    return TrainJobSpec.parse({"runtime": "torch-resilient", "num_nodes": 1, "env": list(env), **fields})


async def active(backend: KubernetesBackend, namespace: str) -> list[str]:
    """Names of the jobs of the key that run or are about to."""
    jobs = await backend.find(namespace, labels_of(KEY))
    running = [job for job in jobs if not job["spec"].get("suspend") and not observe(job).phase.terminal]
    return sorted(job["metadata"]["name"] for job in running if "deletionTimestamp" not in job["metadata"])


async def failed_attempt(backend: KubernetesBackend, namespace: str) -> JobRef:
    """Attempt 1, which has failed."""
    ref = await launch(backend, spec(simulate(run="200ms", exit_code=3)), KEY, namespace=namespace)
    with anyio.fail_after(240), pytest.raises(TrainJobFailed):
        await wait(backend, ref)
    return ref


async def test_a_deleted_attempt_is_not_created_again_beside_the_next_one(
    backend: KubernetesBackend, namespace: str
) -> None:
    first = await failed_attempt(backend, namespace)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, second, Phase.RUNNING)
    await backend.delete(first)
    assert await launch(backend, spec(), KEY, namespace=namespace) == second
    assert await active(backend, namespace) == [second.name]


async def test_a_failed_attempt_whose_jobset_is_deleted_does_not_train_again(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    first = await failed_attempt(backend, namespace)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, second, Phase.RUNNING)
    cluster.api.delete(JOBSET, "JobSet", namespace, first.name)

    def recreated() -> bool:
        return cluster.api.get(JOBSET, "JobSet", namespace, first.name) is not None

    with suppress(TimeoutError):  # Trainer 2.3 creates it again
        await until(recreated, seconds=20)
    await anyio.sleep(2)  # a training would have pods by now
    assert await backend.remaining_pods(namespace, [first.name]) == []
    assert await active(backend, namespace) == [second.name]
    present = await backend.get(namespace, second.name)
    assert present is not None
    assert present["metadata"]["annotations"][REPLACES] == first.uid


async def test_many_launches_of_a_key_at_once_are_one_job(cluster: Access, namespace: str) -> None:
    refs: list[JobRef] = []

    async def one() -> None:
        async with opened(cluster.kubeconfig) as own:
            refs.append(await launch(own, spec(), KEY, namespace=namespace))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(one)
    assert len({ref.uid for ref in refs}) == 1


async def test_the_next_attempt_of_a_cancelled_key_gets_its_own_jobset(
    backend: KubernetesBackend, namespace: str
) -> None:
    first = await launch(backend, spec(simulate(run="1s")), KEY, namespace=namespace)
    with anyio.fail_after(240):
        await wait(backend, first)
    await backend.delete(first)
    second = await launch(backend, spec(), KEY, namespace=namespace)  # while the JobSet is still there
    await until_phase(backend, second, Phase.RUNNING)
    assert work_of(second.name) == work_of(first.name)
    assert await backend.has_own_jobset(second)


async def test_the_next_attempt_waits_for_the_ranks_of_the_earlier_one(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    first = await launch(backend, spec(simulate(run="10m", stop="10m")), KEY, namespace=namespace)
    await until_phase(backend, first, Phase.RUNNING)
    (rank,) = await backend.remaining_pods(namespace, [first.name])
    await cancel_key(backend, KEY, namespace=namespace, timeout_seconds=0)
    with pytest.raises(RanksRemain):
        await launch(backend, spec(), KEY, namespace=namespace, wait_for_ranks=False)
    assert await active(backend, namespace) == []
    cluster.api.delete("v1", "Pod", namespace, name_of(rank), grace=0)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    assert second.uid != first.uid
    left = map(name_of, await backend.remaining_pods(namespace, [first.name]))
    assert name_of(rank) not in left
