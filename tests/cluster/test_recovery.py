"""The resilient runtimes on real controllers, and trainings that resume from checkpoints, in real pods."""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.processes import wait_until
from tests.testcluster import build, kueue, nodes, step_image as steps
from tests.testcluster.access import JOBSET, TRAINER, Access, condition
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.manifests import load
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Observation, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._install import objects
from trainjob._jobs.following import follow
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
RUNTIMES = {name: each for each in objects("runtimes") if (name := each["metadata"]["name"]).endswith("-resilient")}


@pytest.fixture(scope="module")
def resilient(own_cluster: Cluster) -> Cluster:
    """The cluster with the shipped resilient runtimes."""
    for each in RUNTIMES.values():  # they do not depend on the step image
        own_cluster.add_runtime(each)
    return own_cluster


@pytest.fixture
async def backend(cluster: Access) -> AsyncIterator[KubernetesBackend]:
    opened = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    yield opened
    await opened.aclose()


def test_the_resilient_runtimes_are_trainers_with_a_failure_policy() -> None:
    shipped = {each["metadata"]["name"]: each for each in load(build.rendered("trainer"), "runtimes")}
    assert RUNTIMES.keys() == {"torch-resilient", "jax-resilient"}
    policies = []
    for name, runtime in RUNTIMES.items():
        own = copy.deepcopy(runtime)
        (job,) = own["spec"]["template"]["spec"]["replicatedJobs"]
        pods = job["template"]["spec"]
        policy = [own["spec"]["template"]["spec"].pop("failurePolicy")]
        policy += [
            pods.pop("podFailurePolicy"),
            pods.pop("backoffLimit"),
            pods["template"]["spec"].pop("restartPolicy"),
        ]
        # What the Pod Security Standard "restricted" requires, which tests/cluster/test_install.py checks.
        (node,) = pods["template"]["spec"]["containers"]
        restrictions = [pods["template"]["spec"].pop("securityContext"), node.pop("securityContext"), node.pop("env")]
        policy.append(restrictions)
        policies.append(policy)
        original = shipped[name.replace("resilient", "distributed")]
        assert own["spec"] == original["spec"]
        assert own["metadata"]["labels"] == original["metadata"]["labels"]
    assert policies[0] == policies[1]


# ---------------------------------------------------------------- restarts of simulated pods


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
        pods = self.cluster.api.find("v1", "Pod", self.ref.namespace, labels=f"{OF_JOBSET}={self.ref.name}")
        states = [(pod["metadata"]["name"], pod["status"]) for pod in pods]
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
        labels = f"{OF_JOBSET}={self.ref.name},batch.kubernetes.io/job-completion-index={rank}"
        found = self.cluster.api.find("v1", "Pod", self.ref.namespace, labels=labels)
        return max(found, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def log(self, rank: int) -> str:
        return self.cluster.pod_log(self.ref.namespace, self.pod(rank)["metadata"]["name"])


async def begin(cluster: Cluster, backend: KubernetesBackend, namespace: str, key: str, **fields: Any) -> Work:
    spec = TrainJobSpec.parse({"runtime": "jax-resilient", "num_nodes": 2, **fields})
    return Work(cluster, await launch(backend, spec, key, namespace=namespace))


def spare(cluster: Cluster, pool: str, *numbers: int) -> None:
    """Create simulated nodes for a single test."""
    for number in numbers:
        node = nodes.node(number, gpus=8)
        node["metadata"]["labels"]["trainjob.test/pool"] = pool
        cluster.api.create({**node, "spec": {"taints": [nodes.RESERVED]}})


def on(pool: str) -> dict[str, Any]:
    """A runtime patch: pods run only on the nodes of that pool."""
    pod = {"nodeSelector": {"trainjob.test/pool": pool}, "tolerations": [nodes.ADMITTED]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"training_runtime_spec": {"template": {"spec": {"replicatedJobs": [job]}}}}


@dataclass
class Lost:
    """A job that loses a node; Kubernetes (PodGC) reacts only after a minute or more."""

    work: Work
    node: str


@pytest.fixture(scope="module")
def lost(resilient: Cluster) -> Iterator[Lost]:
    """Started before the first test of this module, checked by the last one."""
    spare(resilient, "lost", 90, 91)
    with resilient.namespace("lost") as namespace:

        async def started() -> Work:
            backend = KubernetesBackend(Credentials(kubeconfig=str(resilient.kubeconfig)))
            work = await begin(
                resilient, backend, namespace, "lost", env=simulate(run="never"), runtime_patches=[on("lost")]
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work.follow, backend)
                await work.until(Phase.RUNNING)
                tasks.cancel_scope.cancel()
            await backend.aclose()
            return work

        work = anyio.run(started)
        node = str(work.pod(0)["spec"]["nodeName"])
        resilient.api.delete("v1", "Node", "", node)
        yield Lost(work, node)
        for each in resilient.api.find("v1", "Node", labels="trainjob.test/pool"):
            resilient.api.delete("v1", "Node", "", each["metadata"]["name"])


@pytest.mark.usefixtures("lost")
async def test_disruptions_and_failures_are_distinguished(
    resilient: Cluster, backend: KubernetesBackend, namespace: str
) -> None:
    spare(resilient, "tainted", 92, 93)
    spare(resilient, "preempted", 94)
    api = resilient.api
    for_ever: dict[str, Any] = {"env": simulate(run="never", start="6s")}
    killed = simulate(run="300ms", exit_code=137, reason="OOMKilled", ranks="1")
    failed = simulate(run="300ms", exit_code=1, ranks="1")
    works = {
        "evicted": await begin(resilient, backend, namespace, "evicted", **for_ever),
        "tainted": await begin(resilient, backend, namespace, "tainted", **for_ever, runtime_patches=[on("tainted")]),
        "preempted": await begin(
            resilient,
            backend,
            namespace,
            "preempted",
            **for_ever,
            runtime_patches=[on("preempted")],
            resources_per_node={"gpu": 4},
        ),
        "deleted": await begin(resilient, backend, namespace, "deleted", **for_ever),
        "killed": await begin(resilient, backend, namespace, "killed", env=killed),
        "failed": await begin(resilient, backend, namespace, "failed", env=failed),
    }

    def disrupt() -> None:
        metadata = {"name": works["evicted"].pod(1)["metadata"]["name"], "namespace": namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        api.request("POST", f"{api.path('v1', 'Pod', namespace, metadata['name'])}/eviction", eviction)
        node = str(works["tainted"].pod(0)["spec"]["nodeName"])
        taint = {"key": "trainjob.test/unreachable", "effect": "NoExecute"}
        api.patch("v1", "Node", "", node, {"spec": {"taints": [taint]}})
        resilient.add_priority_class(namespace)
        container = {
            "name": "node",
            "image": "none",
            "env": simulate(run="never"),
            "resources": {"limits": {nodes.GPU: "8"}},
        }
        urgent = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "urgent", "namespace": namespace},
            "spec": {
                "priorityClassName": namespace,
                "nodeSelector": {"trainjob.test/pool": "preempted"},
                "tolerations": [nodes.ADMITTED],
                "containers": [container],
            },
        }
        api.create(urgent)
        api.delete("v1", "Pod", namespace, works["deleted"].pod(0)["metadata"]["name"])

    async with anyio.create_task_group() as tasks:
        for work in works.values():
            tasks.start_soon(work.follow, backend)

        await works["failed"].until(Phase.FAILED)
        assert works["failed"].restarts == (0, 0)
        final = works["failed"].seen[-1]
        assert final.reason == "FailJobSetFailurePolicyAction"
        assert final.finished is not None
        assert final.created is not None
        assert (final.finished - final.created).total_seconds() < 30
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


# ---------------------------------------------------------------- trainings that resume, in real pods

EPOCHS = 80
NOTICED_AFTER = 3.0
"""Seconds after which a busy node notices the end of a process. The other rank has failed by then."""


@pytest.fixture(scope="module")
def checkpoints(
    real_node: Access, resilient: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A namespace on the real node with a PVC ``checkpoints``, and the directory of its volume."""
    del real_node
    directory = tmp_path_factory.mktemp("checkpoints")
    directory.chmod(0o775)  # a volume of type hostPath does not get the pods' `fsGroup`
    with (
        resilient.namespace("training", real=True) as namespace,
        resilient.volume(namespace, "checkpoints", directory),
    ):
        yield namespace, directory


def digits(image: str) -> dict[str, Any]:
    command = ["python", f"{steps.EXAMPLES}/training/digits_jax.py", f"--dataset={steps.EXAMPLES}/data"]
    return {
        "image": image,
        "command": [*command, "--output=/tmp/model", f"--epochs={EPOCHS}", "--epoch-seconds=0.3"],
        "checkpoints": "pvc://checkpoints/digits",
        # A quantity that the API server would normalize, and an empty variable: Kueue must still start the job.
        "resources_per_node": {"requests": {"cpu": "0.3", "memory": "300Mi"}},
        "env": {"EMPTY": ""},
    }


async def reaches(work: Work, epoch: int) -> None:
    """Wait until rank 0 has completed that epoch."""

    def done() -> bool:
        return f"epoch {epoch}/" in work.log(0)

    not_yet = (ApiError, ValueError)  # the pod or its log does not exist
    what = f"epoch {epoch} is done"
    await anyio.to_thread.run_sync(lambda: wait_until(what, done, 150, ignore=not_yet, poll=0.2))


async def restarts_once(work: Work) -> None:
    """Wait until one restart of the job counts towards its limit; say what was seen instead."""

    def done() -> bool:
        if work.restarts[1] != 1:
            raise ValueError(f"restarts {work.restarts}, phases {work.phases}")
        return True

    not_yet = (KeyError, ValueError)
    await anyio.to_thread.run_sync(lambda: wait_until("the job has restarted", done, 150, ignore=not_yet, poll=0.2))


@pytest.mark.timeout(400)
async def test_a_training_resumes_after_a_killed_rank_and_after_a_preemption(
    resilient: Cluster, backend: KubernetesBackend, checkpoints: tuple[str, Path], step_image: str
) -> None:
    namespace, directory = checkpoints
    api, node = resilient.api, resilient.real_node
    assert node is not None
    api.apply(kueue.cluster_queue(namespace, cpu=1))
    api.create(kueue.local_queue(namespace, "narrow", namespace))
    api.create(kueue.priority_class(namespace, 1000))
    narrow = {kueue.QUEUE_LABEL: "narrow"}
    script = "if [ $JOB_COMPLETION_INDEX = 1 ]; then echo no such column; exit 7; fi; sleep 600"
    training = await begin(resilient, backend, namespace, "training", **digits(step_image), labels=narrow)
    failing = await begin(resilient, backend, namespace, "failing", image=step_image, command=["sh", "-c", script])
    async with anyio.create_task_group() as tasks:
        for work in (training, failing):
            tasks.start_soon(work.follow, backend)

        await reaches(training, 5)
        container = training.pod(1)["status"]["containerStatuses"][0]["containerID"]
        await anyio.to_thread.run_sync(node.kill_unnoticed, container, NOTICED_AFTER)
        await restarts_once(training)
        await reaches(training, 20)
        (place,) = (directory / "digits" / namespace).iterdir()
        assert [path.name for path in place.iterdir() if not path.name.startswith(".")] == ["checkpoint.safetensors"]
        first = training.log(0)
        urgent = {
            "image": step_image,
            "command": ["true"],
            "num_nodes": 1,
            "labels": {**narrow, kueue.PRIORITY_LABEL: namespace},
            "resources_per_node": {"requests": {"cpu": "600m", "memory": "300Mi"}},
        }
        await begin(resilient, backend, namespace, "urgent", **urgent)

    assert re.search(r"^rank 0 resumes after epoch ([4-9]|1[0-9])$", first, re.MULTILINE)
    second = training.log(0)
    resumed = re.search(r"^rank 0 resumes after epoch ([0-9]+)$", second, re.MULTILINE)
    assert resumed, f"{training.phases}\n{first}\n---\n{second}"
    assert 19 <= int(resumed[1]) < EPOCHS
    assert re.findall(r"^epoch ([0-9]+)/", second, re.MULTILINE)[0] == str(int(resumed[1]) + 1)
    result = await wait(backend, training.ref)
    assert result.metrics["resumed_after_epoch"] == int(resumed[1])
    assert (result.metrics["epoch"], result.metrics["accuracy"]) > (EPOCHS - 1, 0.95)
    begun = training.phases.index(Phase.RUNNING)
    # Trainer's counters are zero for a moment while all ranks restart, and a busy Trainer does not record each change:
    # then the restart cannot be observed. The simulated jobs above prove that it normally is.
    phases = [phase for phase in training.phases[begun:] if phase is not Phase.RESTARTING]
    parts = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] is not phase]
    assert parts == [Phase.RUNNING, Phase.QUEUED, Phase.RUNNING, Phase.COMPLETE]
    assert training.restarts[1] == 1, "a preemption does not count towards the limit of restarts"
    assert len(api.find(TRAINER, "TrainJob", namespace)) == 3
    assert not list(place.iterdir()), "the checkpoint is deleted after the end"

    assert failing.phases[-1] is Phase.FAILED
    with pytest.raises(TrainJobFailed) as caught:
        await wait(backend, failing.ref)
    assert (caught.value.diagnosis.rank, caught.value.diagnosis.exit_code) == ("node-1", 7)
    assert caught.value.diagnosis.log == ("no such column",)
    assert failing.restarts == (0, 0)
    api.delete(kueue.API, "ClusterQueue", "", namespace)


# ---------------------------------------------------------------- the loss of a node


async def test_a_job_restarts_after_the_loss_of_its_node(lost: Lost) -> None:
    def on_other_nodes() -> bool:
        pods = [lost.work.pod(rank) for rank in (0, 1)]
        places = [pod["spec"].get("nodeName") for pod in pods]
        return all(pod["status"]["phase"] == "Running" for pod in pods) and lost.node not in places

    await anyio.to_thread.run_sync(
        lambda: wait_until("the job runs on other nodes", on_other_nodes, 150, ignore=ValueError, poll=0.5)
    )
    assert lost.work.restarts == (1, 0)
    job = lost.work.cluster.api.get(TRAINER, "TrainJob", lost.work.ref.namespace, lost.work.ref.name)
    assert condition(job, "Failed") is None
