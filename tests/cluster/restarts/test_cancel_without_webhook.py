"""A cancel while Trainer's process does not answer: its webhook hangs, as it does while its pod restarts."""

from __future__ import annotations

import pytest
from tests.cluster.waits import until_phase
from tests.cluster.wires import Wires
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import Phase, TrainJobSpec, cancel, cancel_key
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.launching import launch

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


@pytest.mark.parametrize("by", ["name", "key"])
async def test_a_cancel_needs_no_webhook(by: str, own_cluster: Cluster, wires: Wires) -> None:
    """A PATCH would wait for the webhook."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="10m")})
    async with wires.open(Timings()) as (backend, proxy):
        ref = await launch(backend, spec, "nightly/train", namespace=wires.namespace)
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
