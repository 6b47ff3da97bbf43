"""Backends behind proxies that inject faults between them and the API server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from tests.certificates import Authority
from tests.fakes.faults import Fault, FaultProxy
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._support.retrying import REQUEST
from trainjob.job import KEY, key_hash

LONG = TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never")})
FAST = Timings(
    connect=2,
    read=2,
    watch_read=3,
    healthy_after=1,
    poll=(0.2, 0.5),
    watch_backoff=partial(REQUEST, failures=20, seconds=60),
    request_backoff=partial(REQUEST, failures=20, seconds=60),
)


@dataclass
class Wires:
    """Creates backends behind proxies."""

    cluster: Access
    authority: Authority
    token: str
    namespace: str

    @asynccontextmanager
    async def open(
        self, timings: Timings = FAST, *, shared: bool = False
    ) -> AsyncIterator[tuple[KubernetesBackend, FaultProxy]]:
        pair = self.authority.issue("proxy", addresses=["127.0.0.1"])
        async with FaultProxy(self.cluster.api.server, self.cluster.api.authority, pair) as proxy:
            credentials = Credentials(host=proxy.url, token=self.token, ca_file=str(self.authority.certificate))
            backend = KubernetesBackend(credentials, shared=shared, timings=timings)
            yield backend, proxy
            await backend.aclose()

    async def each(
        self,
        faults: Mapping[str, Fault],
        check: Callable[[KubernetesBackend, FaultProxy, str, Fault], Awaitable[None]],
        timings: Timings = FAST,
        *,
        shared: bool = False,
    ) -> None:
        """Check all faults in parallel, each with a separate connection and key: most of the time is spent waiting."""

        async def one(name: str, fault: Fault) -> None:
            async with self.open(timings, shared=shared) as (backend, proxy):
                try:
                    await check(backend, proxy, name, fault)
                except Exception as error:
                    error.add_note(f"fault: {name}")
                    raise

        async with anyio.create_task_group() as tasks:
            for name, fault in faults.items():
                tasks.start_soon(one, name, fault)

    def jobs(self, key: str) -> list[dict[str, Any]]:
        return self.cluster.api.find(TRAINER, "TrainJob", self.namespace, labels=f"{KEY}={key_hash(key)}")


def busiest(proxy: FaultProxy) -> dict[tuple[str, str], int]:
    """Method and path -> most requests within any one second."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seen in proxy.requests:
        times[seen.method, seen.path].append(seen.at)
    return {
        what: max(sum(1 for other in each[i:] if other < at + 1) for i, at in enumerate(each))
        for what, each in times.items()
    }
