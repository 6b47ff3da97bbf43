"""Jobs whose restarts are observed."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from tests.cluster.pods import pods_of
from tests.testcluster.access import JOBSET
from tests.testcluster.control_plane import Cluster

from trainjob import JobRef, Observation, Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.following import follow
from trainjob._jobs.launching import launch


@dataclass
class Work:
    """A job that is waited for."""

    cluster: Cluster
    ref: JobRef
    seen: list[Observation] = field(default_factory=list)

    async def follow(self, backend: KubernetesBackend) -> None:
        async with aclosing(follow(backend, self.ref)) as changes:
            async for observation, _ in changes:
                self.seen.append(observation)

    async def until(self, phase: Phase, times: int = 1) -> None:
        """Wait until the waiter has seen that phase begin `times` times."""
        with anyio.move_on_after(150):
            while self.phases.count(phase) < times:
                await anyio.sleep(0.05)
            return
        job = self.cluster.api.get(JOBSET, "JobSet", self.ref.namespace, self.ref.name) or {}
        states = [(pod["metadata"]["name"], pod["status"]) for pod in pods_of(self.cluster, self.ref)]
        pytest.fail(f"{self.ref}: not {phase} {times} times: {self.seen}, {job.get('status')}, {states}")

    @property
    def phases(self) -> list[Phase]:
        """The observed phases without repetitions."""
        phases = [observation.phase for observation in self.seen]
        return [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] is not phase]

    @property
    def restarts(self) -> tuple[int, int]:
        """The number of restarts, and of those that count towards the limit of three."""
        jobset = self.cluster.api.get(JOBSET, "JobSet", self.ref.namespace, self.ref.name) or {}
        return jobset["status"]["restarts"], jobset["status"].get("restartsCountTowardsMax", 0)

    def pod(self, rank: int) -> dict[str, Any]:
        """The latest pod of a rank."""
        found = pods_of(self.cluster, self.ref, rank)
        return max(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


async def begin(cluster: Cluster, backend: KubernetesBackend, namespace: str, key: str, **fields: Any) -> Work:
    spec = TrainJobSpec.parse({"runtime": "jax-resilient", "num_nodes": 2, **fields})
    return Work(cluster, await launch(backend, spec, key, namespace=namespace))
