"""A cancel while Trainer's process does not answer: its webhook hangs, as it does while its pod restarts."""

from __future__ import annotations

import time

import pytest
from tests.cluster.waits import until_phase
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import Phase, TrainJobSpec, cancel_key
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


async def test_a_cancel_needs_no_webhook(own_cluster: Cluster, backend: KubernetesBackend, namespace: str) -> None:
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="10m")})
    ref = await launch(backend, spec, "nightly/train", namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    own_cluster.pause("trainer")
    try:
        began = time.monotonic()
        stopped = await cancel_key(backend, "nightly/train", namespace=namespace, timeout_seconds=0)
        assert [job.uid for job in stopped.jobs] == [ref.uid]
        assert await backend.get(namespace, ref.name) is None
        assert time.monotonic() - began < 10, "a PATCH waits for the webhook"
    finally:
        own_cluster.resume("trainer")
