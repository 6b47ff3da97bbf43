"""The launch protocol on the real API server with Trainer, JobSet and their webhooks: one key has one training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from tests.cluster.waits import until, until_phase
from tests.testcluster.access import JOBSET, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import REPLACES, work_of
from trainjob.job import labels_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

KEY = "nightly/train"
LONG = simulate(run="10m")


def spec(env: Sequence[dict[str, str]] = LONG, **fields: Any) -> TrainJobSpec:
    # Its runtime fails at the first exit code of a program.
    return TrainJobSpec.parse({"runtime": "torch-resilient", "num_nodes": 1, "env": list(env), **fields})


async def test_a_failed_attempt_whose_jobset_is_deleted_does_not_train_again(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    first = await launch(backend, spec(simulate(run="200ms", exit_code=3)), KEY, namespace=namespace)
    with anyio.fail_after(240), pytest.raises(TrainJobFailed):
        await wait(backend, first)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, second, Phase.RUNNING)
    cluster.api.delete(JOBSET, "JobSet", namespace, first.name)

    def recreated() -> bool:
        return cluster.api.get(JOBSET, "JobSet", namespace, first.name) is not None

    with suppress(TimeoutError):  # Trainer 2.3 creates it again
        await until(recreated, seconds=20)
    await anyio.sleep(2)  # a training would have pods by now
    assert await backend.remaining_pods(namespace, [first.name]) == []
    attempts = await backend.find(namespace, labels_of(KEY))
    assert [JobRef.of(each) for each in attempts if not each["spec"].get("suspend")] == [second]
    present = await backend.get(namespace, second.name)
    assert present is not None
    assert present["metadata"]["annotations"][REPLACES] == first.uid


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
