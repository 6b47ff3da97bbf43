"""The contract tests of every backend, with the Kubernetes backend on a real cluster.

Jobs that the test ends run on simulated nodes; jobs with scripts, which have logs, run on the real node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.cluster.backends import backend_of
from tests.cluster.pods import RANK, pods_of
from tests.contract.contract import contract
from tests.contract.harness import Harness, sent_by
from tests.testcluster.access import RULES, Access, Object
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef
from trainjob._backends.kubernetes.backend import KubernetesBackend

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ABSENT = {
    "test_runtimes_are_listed": "the role for users may not list runtimes (test_an_administrator_lists_runtimes)",
    "test_evidence_has_exit_codes_and_logs_of_all_ranks": (
        "the Job controller deletes the running ranks, with their exit codes and logs; the failed rank is left "
        "(test_evidence_of_the_rank_that_failed)"
    ),
}
globals().update(contract(ABSENT))


@pytest.fixture(scope="module")
def kubeconfig(cluster: Access) -> Path:
    """Kubeconfig of a user with Trainer's role for users, and what `trainjob install` adds to it, in all namespaces."""
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "list", "patch"]}
    jobsets = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get"]}
    return cluster.kubeconfig_for([*RULES, leases, jobsets], cluster_wide=True)


@pytest.fixture(scope="module")
def other(cluster: Access) -> Iterator[str]:
    with cluster.namespace("other") as name:
        yield name


@contextmanager
def opened(cluster: Access, kubeconfig: Path, other: str, *, real: bool, shared: bool) -> Iterator[Harness]:
    backend = backend_of(kubeconfig, shared=shared)

    async def end(ref: JobRef, code: int) -> None:
        """End the job's only pod, as the kubelet of its node does."""
        with anyio.fail_after(240):
            while not (pods := running(cluster, ref)):
                await anyio.sleep(0.05)
        name = pods[0]["metadata"]["name"]
        path = f"{cluster.api.path('v1', 'Pod', ref.namespace, name)}/status"
        container = pods[0]["status"]["containerStatuses"][0]
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed"}
        ended = {**container, "ready": False, "state": {"terminated": terminated}}
        status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]}
        cluster.api.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")

    refused = {"initializer": {"dataset": {"storage_uri": "hf://a/b"}}}  # the runtime has no job for it
    until_ended: dict[str, Any] = {"command": ["sleep"], "env": simulate(run="never")}
    host = cluster.layout.gateway if isinstance(cluster, Cluster) else ""
    with cluster.namespace("contract", real=real) as namespace:
        where: dict[str, Any] = {"host": host, "other": other, "namespace": namespace}
        yield Harness(backend, end, until_ended, shell=False, refused=refused, requests=sent_by(backend), **where)


def running(cluster: Access, ref: JobRef) -> list[Object]:
    pods = pods_of(cluster, ref)
    return [pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
async def harness(
    request: pytest.FixtureRequest, cluster: Access, kubeconfig: Path, other: str
) -> AsyncIterator[Harness]:
    with opened(cluster, kubeconfig, other, real=False, shared=request.param) as given:
        yield given
        await leave_empty(given)


@pytest.fixture
async def shell(real_node: Access, step_image: str, kubeconfig: Path, other: str) -> AsyncIterator[Harness]:
    with opened(real_node, kubeconfig, other, real=True, shared=False) as given:
        yield given
        await leave_empty(given)


async def leave_empty(given: Harness) -> None:
    for job in await given.backend.find(given.other, {}):
        await given.backend.delete(JobRef.of(job))
        await given.is_gone(JobRef.of(job))
    await given.backend.aclose()


async def test_evidence_of_the_rank_that_failed(shell: Harness) -> None:
    # Without a handler, the first process of a container ignores SIGTERM, and it and the job run 30 s longer.
    sleeper = "trap 'exit 143' TERM; sleep 60 & wait"
    script = f'echo "rank $JOB_COMPLETION_INDEX"; [ $JOB_COMPLETION_INDEX = 1 ] && exit 3; {sleeper}'
    ref = await shell.run(script, num_nodes=2)
    await shell.ended(ref)
    evidence = await shell.backend.evidence(ref)
    codes = {
        pod["metadata"]["labels"][RANK]: status["state"]["terminated"]["exitCode"]
        for pod in evidence.pods
        for status in pod["status"]["containerStatuses"]
        if "terminated" in status["state"]
    }
    assert codes["1"] == 3
    assert ["rank 1"] in evidence.logs.values()


async def test_an_administrator_lists_runtimes(backend: KubernetesBackend) -> None:
    assert "torch-distributed" in await backend.runtimes()
