"""A waiter that starts after its job, whose node no longer responds."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from tests.cluster import failing as make
from tests.cluster.waits import until_phase
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import Observation, Phase, TrainJobSpec, WaitOptions
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.errors import RunTimeout

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_a_new_waiter_knows_that_the_job_has_run(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    fields = json.dumps(make.simulated(env=simulate(run="never")) | make.ON_OWN_NODE)
    asked = json.loads(fields.replace("$NAMESPACE", namespace))
    with make.own_node(cluster, namespace):
        began = datetime.now(UTC)
        ref = await launch(backend, TrainJobSpec.parse(asked), "a", namespace=namespace)
        await until_phase(backend, ref, Phase.RUNNING)
        make.silence_node(cluster, ref)
        with anyio.fail_after(240):
            while any(job.get("ready") for job in _jobs(cluster, namespace, ref.name)):
                await anyio.sleep(1)
        seen: list[tuple[Observation, str]] = []
        run = datetime.now(UTC) - began + timedelta(seconds=8)
        with pytest.raises(RunTimeout, match="NodeNotReady: Node is not ready"):
            await wait(
                backend,
                ref,
                WaitOptions(start_timeout=timedelta(seconds=1), run_timeout=run),
                on_change=lambda observation, notice: seen.append((observation, notice)),
            )
        assert [observation.has_run for observation, _ in seen[:2]] == [False, True]
        assert seen[1][1] == "a rank has been running before, so start_timeout does not apply"
        await backend.delete(ref)


def _jobs(cluster: Access, namespace: str, name: str) -> list[dict[str, int]]:
    found = cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}
    jobs: list[dict[str, int]] = found["status"]["jobsStatus"]
    return jobs
