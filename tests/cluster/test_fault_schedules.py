"""Random faults before a real API server: no duplicate, orphan, wrong verdict or request storm, and nothing hangs.

A campaign (`tests.campaigns`): schedule n has seed + n, so ``TRAINJOB_RUNS=1`` with that seed repeats a single one.
"""

from __future__ import annotations

import gc
import ssl
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import anyio
import httpx
import pytest
from tests import campaigns
from tests.certificates import Authority
from tests.cluster.fault_schedules import RandomPlan, Run, Truth, draw
from tests.fakes.faults import FaultProxy, Kind
from tests.testcluster.access import Access

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._support.retrying import REQUEST
from trainjob.job import KEY, key_hash

RUNS = campaigns.runs(200, 24)
AT_ONCE = 12
TIMINGS = Timings(
    connect=3,
    # Above 3 s: for so long an API server itself blocks a LIST until its cache is fresh (`blockTimeout` of apiserver's
    # watch_cache.go), before it reads from etcd; on a busy machine all lists of a resource take that long for a while.
    read=8,
    watch_read=6,
    healthy_after=3,
    poll=(0.2, 0.5),
    watch_backoff=partial(REQUEST, failures=10, seconds=40),
    request_backoff=partial(REQUEST, failures=6, seconds=40),
)


@pytest.mark.anyio
@pytest.mark.timeout(1200)
# httpcore 1.0 leaves the socket of a cancelled TLS handshake to the garbage collector; launchers are cancelled here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_random_faults(
    cluster: Access, authority: Authority, token: str, record_property: campaigns.Record
) -> None:
    campaigns.begin(record_property, RUNS)
    pair = authority.issue("proxy", addresses=["127.0.0.1"])
    seeds = iter(range(campaigns.SEED, campaigns.SEED + RUNS))
    failures: dict[int, list[str]] = {}
    injected: Counter[Kind] = Counter()

    async def one(seed: int, namespace: str, truth: Truth, direct: httpx.AsyncClient) -> None:
        async with AsyncExitStack() as stack:
            proxy = FaultProxy(cluster.api.server, cluster.api.authority, pair, RandomPlan(seed))
            await stack.enter_async_context(proxy)
            credentials = Credentials(host=proxy.url, token=token, ca_file=str(authority.certificate))
            backends = [
                {shared: KubernetesBackend(credentials, shared=shared, timings=TIMINGS) for shared in (False, True)}
                for _ in range(2)
            ]
            for backend in (backend for each in backends for backend in each.values()):
                stack.push_async_callback(backend.aclose)
            run = Run(seed, proxy, backends, namespace, truth)
            if problems := await run():
                failures[seed] = problems
            injected.update(seen.fault.kind for seen in proxy.injected if seen.fault)
            faults = len(proxy.injected)
            campaigns.done(
                f"seed {seed}: {len(run.works)} works, {faults} faults, {run.seconds:.1f} s, {len(problems)} problems"
            )
        keys = ",".join(key_hash(work.key) for work in draw(seed))
        path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
        (await direct.delete(path, params={"labelSelector": f"{KEY} in ({keys})"})).raise_for_status()

    async def lane(number: int, namespace: str, truth: Truth, direct: httpx.AsyncClient) -> None:
        # The start of a schedule takes most CPU, and a busy event loop could hide a storm.
        await anyio.sleep(number * 0.5)
        for seed in seeds:
            await one(seed, namespace, truth, direct)

    with ExitStack() as namespaces:
        names = [namespaces.enter_context(cluster.namespace("faults")) for _ in range(min(AT_ONCE, RUNS))]
        headers = {"Authorization": f"Bearer {token}"}
        verify = ssl.create_default_context(cadata=cluster.api.authority.decode())
        async with (
            httpx.AsyncClient(base_url=cluster.api.server, verify=verify, headers=headers, trust_env=False) as direct,
            anyio.create_task_group() as listening,
        ):
            truth = Truth(direct)
            await listening.start(truth.run)
            async with anyio.create_task_group() as lanes:
                for number, name in enumerate(names):
                    lanes.start_soon(lane, number, name, truth, direct)
            listening.cancel_scope.cancel()
    gc.collect()
    print(f"{RUNS} schedules, {sum(injected.values())} faults: {dict(injected)}")
    report = "\n".join(
        f"TRAINJOB_SEED={seed} TRAINJOB_RUNS=1: {problem}" for seed, each in failures.items() for problem in each
    )
    assert not failures, f"{len(failures)} of {RUNS} schedules:\n{report}"
    assert RUNS < 200 or set(injected) == set(Kind), "every kind of fault was injected"
