"""Gang scheduling, all pods of a job or none: coscheduling, the settings of Volcano, Kueue."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from tests.cluster.pods import pods_of, running
from tests.processes import wait_until
from tests.testcluster import nodes
from tests.testcluster.access import Access, condition, refused
from tests.testcluster.components import COSCHEDULER
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import GPU, simulate

from trainjob import JobRef, Observation, Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.following import follow
from trainjob._jobs.launching import launch

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "cluster"
COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
VOLCANO = "scheduling.volcano.sh/v1beta1"
QUEUE = "scheduling.volcano.sh/queue-name"
Object = dict[str, Any]


@pytest.fixture(scope="session")
def gangs() -> Iterator[Cluster]:
    """A cluster with definitions of PodGroups, which Trainer then creates, and with the coscheduling scheduler."""
    with Cluster() as started:
        started.start_gang_scheduling()
        yield started


@pytest.fixture(scope="session")
def cluster(gangs: Cluster) -> Cluster:
    return gangs


def spec(runtime: str, num_nodes: int, gpus: int, **fields: Any) -> TrainJobSpec:
    asked = {"runtime": runtime, "num_nodes": num_nodes, "resources_per_node": {"gpu": gpus}, **fields}
    return TrainJobSpec.parse(asked)


async def until(backend: KubernetesBackend, ref: JobRef, enough: Callable[[Observation], bool]) -> Observation:
    """The first observation for which `enough` is true."""
    with anyio.fail_after(240):
        async with aclosing(follow(backend, ref)) as changes:
            async for observation, _ in changes:
                if enough(observation):
                    return observation
    raise AssertionError("the job ended")


def refusals(cluster: Access, namespace: str) -> str:
    """All messages of schedulers about unscheduled pods; a pod has only the latest message."""
    events = cluster.api.find("v1", "Event", namespace, fields="reason=FailedScheduling")
    return "\n".join(str(event["message"]) for event in events)


@contextmanager
def machine(cluster: Access, gpus: int) -> Iterator[str]:
    """A namespace whose pods run on a simulated node that no other pods use."""
    mark = secrets.token_hex(4)
    key = "trainjob.test/only"
    node = nodes.node(0, gpus)
    node["metadata"] |= {"name": f"only-{mark}", "labels": {**node["metadata"]["labels"], key: mark}}
    node["spec"] = {"taints": [{"key": key, "value": mark, "effect": "NoSchedule"}]}
    cluster.api.create(node)

    def ready() -> bool:
        found = cluster.api.get("v1", "Node", "", f"only-{mark}")
        return condition(found, "Ready") is not None and len((found or {})["spec"]["taints"]) == 1

    wait_until("the node is ready", ready, 30)
    with cluster.namespace("gang") as namespace:
        prefix = "scheduler.alpha.kubernetes.io/"
        annotations = {
            f"{prefix}node-selector": f"{nodes.LABEL}=simulated,{key}={mark}",
            f"{prefix}defaultTolerations": f'[{{"key": "{key}", "operator": "Exists"}}]',
        }
        cluster.api.patch("v1", "Namespace", "", namespace, {"metadata": {"annotations": annotations}})
        yield namespace
    cluster.api.delete("v1", "Node", "", f"only-{mark}")


async def test_coscheduling_starts_all_pods_or_none(gangs: Cluster, backend: KubernetesBackend) -> None:
    """Three of four GPUs are free. Without coscheduling, three pods take them and wait for the fourth."""
    gangs.add_runtime(yaml.safe_load((EXAMPLES / "torch-coscheduled.yaml").read_text()))
    for_ever = simulate(run="never")
    with machine(gangs, 4) as namespace, machine(gangs, 4) as elsewhere:
        first = await launch(backend, spec("torch-distributed", 1, 1, env=for_ever), "first", namespace=namespace)
        other = await launch(backend, spec("torch-distributed", 1, 1, env=for_ever), "first", namespace=elsewhere)
        wait_until(
            "one GPU of each node is in use", lambda: all(running(pods_of(gangs, each)) for each in (first, other))
        )

        gang = await launch(backend, spec("torch-coscheduled", 4, 1, env=for_ever), "gang", namespace=namespace)
        # Before the JobSet controller counts the pods, the job has not started.
        seen = await until(backend, gang, lambda each: (each.phase, each.reason) == (Phase.STARTING, "Unschedulable"))
        assert "is not scheduled" in seen.message
        wait_until("all pods of the gang exist", lambda: len(pods_of(gangs, gang)) == 4)
        # The scheduler retries a gang when any pod is scheduled, including these.
        apart = await launch(backend, spec("torch-distributed", 4, 1, env=for_ever), "apart", namespace=elsewhere)
        wait_until("three pods run without coscheduling", lambda: running(pods_of(gangs, apart)) == 3)
        wait_until("a pod finds no GPU", lambda: "Insufficient nvidia.com/gpu" in refusals(gangs, namespace), 90)
        rejection = "optimistic rejection in PostFilter"
        wait_until("the other pods are rejected", lambda: rejection in refusals(gangs, namespace), 90)
        pods = pods_of(gangs, gang)
        assert not any(pod["spec"].get("nodeName") for pod in pods), "no pod of the gang has a node"
        assert {pod["spec"]["schedulerName"] for pod in pods} == {COSCHEDULER}
        assert {pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for pod in pods} == {gang.name}
        group = gangs.api.get(COSCHEDULING, "PodGroup", namespace, gang.name) or {}
        assert group["spec"] == {"minMember": 4, "minResources": {GPU: "4"}, "scheduleTimeoutSeconds": 120}
        assert group["metadata"]["ownerReferences"][0]["uid"] == gang.uid

        assert await cancel(backend, first)
        # Coscheduling is not notified of the freed GPU, but of the next pod that is scheduled.
        late = await launch(backend, TrainJobSpec.parse({"runtime": "torch-distributed"}), "late", namespace=elsewhere)
        wait_until("all pods of the gang run", lambda: running(pods_of(gangs, gang)) == 4, 90)
        assert running(pods_of(gangs, apart)) == 3
        for job in (gang, apart, other, late):
            await cancel(backend, job)


async def test_volcanos_settings_reach_its_pod_group(
    gangs: Cluster, backend: KubernetesBackend, namespace: str
) -> None:
    """A PodGroup of Volcano's Go types. No Volcano runs here, so its pods are not scheduled."""
    gangs.add_priority_class("training")
    gangs.add_runtime(yaml.safe_load((EXAMPLES / "torch-volcano.yaml").read_text()))
    theirs = {"training_runtime_spec": {"template": {"metadata": {"annotations": {QUEUE: "theirs"}}}}}
    for key, patches, queue in (("a", [], "research"), ("b", [theirs], "theirs")):
        ref = await launch(backend, spec("torch-volcano", 4, 2, runtime_patches=patches), key, namespace=namespace)
        pods = wait_until("the job has pods", partial(pods_of, gangs, ref))
        group = gangs.api.get(VOLCANO, "PodGroup", namespace, ref.name) or {}
        assert group["spec"] == {
            "minMember": 4,
            "minResources": {GPU: "8"},
            "queue": queue,
            "priorityClassName": "training",
            "networkTopology": {"mode": "hard", "highestTierAllowed": 2},
        }
        for pod in pods:
            assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == ref.name
            assert (pod["spec"]["schedulerName"], pod["spec"]["priority"]) == ("volcano", 1000)
        sideways = {
            "metadata": {"name": "x", "namespace": namespace},
            "spec": {"networkTopology": {"mode": "sideways"}},
        }
        bad = {"apiVersion": VOLCANO, "kind": "PodGroup", **sideways}
        assert "Unsupported value" in refused(partial(gangs.api.create, bad, dry_run=True))
        await cancel(backend, ref)
    gangs.api.delete("scheduling.k8s.io/v1", "PriorityClass", "", "training")
