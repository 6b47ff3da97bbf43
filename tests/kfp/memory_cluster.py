"""A cluster in memory, for tests of what a step does before it ends: prepared requests, Leases, JobSets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.contract.memory import MemoryBackend

from trainjob import JobRef
from trainjob._backends.base import Waiter
from trainjob.errors import TrainJobError


class MemoryRequest:
    """A prepared request."""

    forbidden = False

    def __init__(self, cluster: MemoryCluster, ref: JobRef, patch: Mapping[str, Any] | None) -> None:
        self.cluster, self.ref, self.patch = cluster, ref, patch

    async def warm(self) -> None:
        pass

    def close(self) -> None:
        self.cluster.prepared.remove(self)

    def send(self) -> bool:
        self.cluster.sent.append((self.ref.name, "delete" if self.patch is None else "suspend"))
        return not self.cluster.refuses

    def send_or(self, other: MemoryRequest, seconds: float) -> MemoryRequest | None:
        del seconds
        return self if self.send() else other if other.send() else None


class MemoryCluster(MemoryBackend):
    """`MemoryBackend` with what only a cluster has."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[MemoryRequest] = []
        self.sent: list[tuple[str, str]] = []
        self.refuses = False
        self.leases: list[Waiter] | TrainJobError = []
        self.owners: list[Mapping[str, Any]] = []

    @property
    def cluster(self) -> Any:  # type: ignore[override]
        return self

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def has_own_jobset(self, ref: JobRef) -> bool | None:
        del ref
        return True

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> MemoryRequest:
        self.prepared.append(MemoryRequest(self, ref, patch))
        return self.prepared[-1]

    async def prepared_pod_request(self, namespace: str, name: str) -> None:
        pass

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        return self.owners

    async def waiters(self, namespace: str) -> list[Waiter]:
        await self._request("waiters")
        if isinstance(self.leases, TrainJobError):
            raise self.leases
        return self.leases

    def waits(self, *refs: JobRef, holder: str = "another-pod", age: float = 1, own: bool = False) -> None:
        """A process waits for jobs; its Lease was renewed `age` seconds ago."""
        assert isinstance(self.leases, list)
        uids = frozenset(ref.uid for ref in refs)
        renewed = self.now() - timedelta(seconds=age)
        lasts = timedelta(seconds=90)
        self.leases.append(Waiter("lease", renewed, dict.fromkeys(uids, renewed), uids, holder, lasts, own))
