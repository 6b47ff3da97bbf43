"""The resilient runtimes on real controllers; test_preemptions.py has trainings that resume from checkpoints."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.cluster import failing as make
from tests.cluster.pods import evict
from tests.cluster.work import Work, begin
from tests.processes import wait_until
from tests.testcluster import build, nodes, step_image as steps
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.manifests import load
from tests.testcluster.nodes import simulate

from trainjob import Phase
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._install import objects
from trainjob._jobs.waiting import wait

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

RUNTIMES = {name: each for each in objects("runtimes") if (name := each["metadata"]["name"]).endswith("-resilient")}


@pytest.fixture(scope="module")
def resilient(own_cluster: Cluster) -> Cluster:
    """The cluster with the shipped resilient runtimes."""
    for each in RUNTIMES.values():  # they do not depend on the step image
        own_cluster.add_runtime(each)
    return own_cluster


def test_the_resilient_runtimes_are_trainers_with_a_failure_policy() -> None:
    shipped = {each["metadata"]["name"]: each for each in load(build.rendered("trainer"), "runtimes")}
    assert RUNTIMES.keys() == {"torch-resilient", "jax-resilient"}
    policies = []
    for name, runtime in RUNTIMES.items():
        own = copy.deepcopy(runtime)
        jobset = own["spec"]["template"]["spec"]
        (job,) = jobset["replicatedJobs"]
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        (node,) = pod["containers"]
        policy = [jobset.pop("failurePolicy"), spec.pop("podFailurePolicy"), spec.pop("backoffLimit")]
        # What the Pod Security Standard "restricted" requires, which tests/cluster/test_install.py checks.
        restrictions = [pod.pop("securityContext"), node.pop("securityContext"), node.pop("env")]
        policies.append([*policy, pod.pop("restartPolicy"), *restrictions])
        original = shipped[name.replace("resilient", "distributed")]
        assert own["spec"] == original["spec"]
        assert own["metadata"]["labels"] == original["metadata"]["labels"]
    assert policies[0] == policies[1]


# ---------------------------------------------------------------- restarts of simulated pods


@pytest.fixture
def pools(resilient: Cluster) -> Iterator[None]:
    """Simulated nodes for a single test, in two pools."""
    for number, pool in ((92, "tainted"), (93, "tainted"), (94, "preempted")):
        node = nodes.node(number, gpus=8)
        node["metadata"]["labels"]["trainjob.test/pool"] = pool
        resilient.api.create({**node, "spec": {"taints": [nodes.RESERVED]}})
    yield
    for each in resilient.api.find("v1", "Node", labels="trainjob.test/pool"):
        resilient.api.delete("v1", "Node", "", each["metadata"]["name"])


def on(pool: str) -> dict[str, Any]:
    """A runtime patch: pods run only on the nodes of that pool."""
    pod = {"nodeSelector": {"trainjob.test/pool": pool}, "tolerations": [nodes.ADMITTED]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"training_runtime_spec": {"template": {"spec": {"replicatedJobs": [job]}}}}


async def test_disruptions_and_failures_are_distinguished(
    resilient: Cluster, pools: None, backend: KubernetesBackend, namespace: str
) -> None:
    api = resilient.api
    for_ever: dict[str, Any] = {"env": simulate(run="never", start="6s")}
    killed = simulate(run="300ms", exit_code=137, reason="OOMKilled", ranks="1")
    failed = simulate(run="300ms", exit_code=1, ranks="1")
    of_pool = {"runtime_patches": [on("preempted")], "resources_per_node": {"gpu": 4}}
    works = {
        "evicted": await begin(resilient, backend, namespace, "evicted", **for_ever),
        "tainted": await begin(resilient, backend, namespace, "tainted", **for_ever, runtime_patches=[on("tainted")]),
        "preempted": await begin(resilient, backend, namespace, "preempted", **for_ever, **of_pool),
        "deleted": await begin(resilient, backend, namespace, "deleted", **for_ever),
        "killed": await begin(resilient, backend, namespace, "killed", env=killed),
        "failed": await begin(resilient, backend, namespace, "failed", env=failed),
    }

    def disrupt() -> None:
        evict(resilient, namespace, works["evicted"].pod(1)["metadata"]["name"])
        node = str(works["tainted"].pod(0)["spec"]["nodeName"])
        taint = {"key": "trainjob.test/unreachable", "effect": "NoExecute"}
        api.patch("v1", "Node", "", node, {"spec": {"taints": [taint]}})
        resilient.add_priority_class(namespace)
        make.outrank(resilient, namespace, {"trainjob.test/pool": "preempted"})
        api.delete("v1", "Pod", namespace, works["deleted"].pod(0)["metadata"]["name"])

    async with anyio.create_task_group() as tasks:
        for work in works.values():
            tasks.start_soon(work.follow, backend)

        await works["failed"].until(Phase.FAILED)
        assert works["failed"].restarts == (0, 0)
        final = works["failed"].seen[-1]
        assert final.reason == "FailJobSetFailurePolicyAction"
        pod = works["failed"].pod(1)
        assert pod["status"]["phase"] == "Failed", "the failed pod stays, with its log"

        for name in ("evicted", "tainted", "preempted", "deleted"):
            await works[name].until(Phase.RUNNING)
        # Not in this thread: the waiter has to see each phase, and a busy API server may take seconds for a request.
        await anyio.to_thread.run_sync(disrupt)
        await works["preempted"].until(Phase.RESTARTING)
        api.delete("v1", "Pod", namespace, "urgent")
        for name in ("evicted", "tainted", "preempted", "deleted"):
            await works[name].until(Phase.RUNNING, times=2)
            assert works[name].restarts == (1, 0), name
            assert works[name].phases[-3:] == [Phase.RUNNING, Phase.RESTARTING, Phase.RUNNING]
            both = [works[name].pod(rank)["metadata"]["labels"] for rank in (0, 1)]
            assert {labels["jobset.sigs.k8s.io/restart-attempt"] for labels in both} == {"1"}, "all ranks"

        await works["killed"].until(Phase.FAILED)
        assert works["killed"].restarts == (3, 3)
        assert works["killed"].seen[-1].reason == "ReachedMaxRestarts"
        tasks.cancel_scope.cancel()
    api.delete("scheduling.k8s.io/v1", "PriorityClass", "", namespace)


# ---------------------------------------------------------------- a training that resumes, in real pods


async def reaches(work: Work, epoch: int) -> None:
    """Wait until rank 0 has completed that epoch."""

    def done() -> bool:
        return f"epoch {epoch}/" in work.cluster.pod_log(work.ref.namespace, work.pod(0)["metadata"]["name"])

    not_yet = (ApiError, ValueError)  # the pod or its log does not exist
    what = f"epoch {epoch} is done"
    await anyio.to_thread.run_sync(lambda: wait_until(what, done, 150, ignore=not_yet, poll=0.2))


@pytest.fixture
def checkpoints(resilient: Cluster, real_namespace: str, tmp_path: Path) -> Iterator[str]:
    """A location on a PVC."""
    tmp_path.chmod(0o775)  # a volume of type hostPath does not get the pods' `fsGroup`
    with resilient.volume(real_namespace, "checkpoints", tmp_path):
        yield "pvc://checkpoints/digits"


async def test_a_training_resumes_after_a_killed_rank(
    resilient: Cluster, backend: KubernetesBackend, real_namespace: str, step_image: str, checkpoints: str
) -> None:
    """Its busy node notices that end after 3 s: the other rank, which has lost its peer, has failed by then."""
    script = ["python", f"{steps.EXAMPLES}/training/digits_jax.py", f"--dataset={steps.EXAMPLES}/data"]
    command = [*script, "--output=/tmp/model", "--epochs=40", "--epoch-seconds=0.3"]
    fields = {"image": step_image, "command": command, "checkpoints": checkpoints}
    assert resilient.real_node is not None
    training = await begin(resilient, backend, real_namespace, "training", **fields)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(training.follow, backend)
        await reaches(training, 5)
        container = training.pod(1)["status"]["containerStatuses"][0]["containerID"]
        await anyio.to_thread.run_sync(resilient.real_node.kill_unnoticed, container, 3.0)
    log = resilient.pod_log(real_namespace, training.pod(0)["metadata"]["name"])
    result = await wait(backend, training.ref)
    resumed = re.search(r"^rank 0 resumes after epoch ([0-9]+)$", log, re.MULTILINE)
    assert resumed, log
    assert 4 <= int(resumed[1]) < 40
    assert (result.metrics["epoch"], result.metrics["resumed_after_epoch"]) == (40, int(resumed[1]))
    assert training.restarts[1] == 1, "it counts towards the limit of restarts"
