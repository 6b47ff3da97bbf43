"""What rows of failures.yaml do before their jobs are launched, and to the jobs that run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml
from tests.cluster.failing import Object, applied, container_of_rank_1, node_of, outrank, own_node, quota, reserved_node
from tests.cluster.pods import evict, pods_of
from tests.processes import wait_until
from tests.testcluster import kueue, nodes
from tests.testcluster.access import TRAINER, Access, condition
from tests.testcluster.api import ApiError
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import NAME, RealNode

from trainjob.job import JobRef

# ---------------------------------------------------------------- before the launch

tainted_node = reserved_node({"key": "reserved", "value": "others", "effect": "NoSchedule"})
cordoned_node = reserved_node(unschedulable=True)


def _wait_for(cluster: Access, kind: tuple[str, str], where: str, name: str, test: Callable[[Any], object]) -> None:
    """Wait until the test is true for an object."""

    def passes() -> bool:
        found = cluster.api.get(*kind, where, name)
        return found is not None and bool(test(found))

    wait_until(f"{kind[1]} {name} is as expected", passes)


@contextmanager
def own_node_and_priority(cluster: Access, where: str) -> Iterator[None]:
    """A simulated node, and a priority class of pods that preempt others."""
    with own_node(cluster, where):
        cluster.add_priority_class(where)
        try:
            yield
        finally:
            cluster.api.delete("scheduling.k8s.io/v1", "PriorityClass", "", where)


@contextmanager
def restored_kubelet(cluster: Access, _where: str) -> Iterator[None]:
    """Undo `press_memory`."""
    node = node_of(cluster)
    file = node.directory / "kubelet.yaml"
    text = file.read_text()
    try:
        yield
    finally:
        file.write_text(text)
        _restart_kubelet(node)
        kubelet = node.components["kubelet"]
        wait_until("the node has no memory pressure", lambda: not _pressed(cluster), 60, poll=0.5, among=[kubelet])


@contextmanager
def restricted(cluster: Access, where: str) -> Iterator[None]:
    """Enforce the Pod Security Standard ``restricted`` in the namespace."""
    cluster.restrict(where)
    yield


@contextmanager
def volume_elsewhere(cluster: Access, where: str) -> Iterator[None]:
    """A PersistentVolumeClaim that is bound to a volume of a node that does not exist."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}]}
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/data"},
        "claimRef": {"namespace": where, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    claim = {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": where}
    cluster.api.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": where}, "spec": volume})
    try:
        made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": claim}
        with applied(made)(cluster, where):
            bound = ("v1", "PersistentVolumeClaim")
            _wait_for(cluster, bound, where, "data", lambda found: found.get("status", {}).get("phase") == "Bound")
            yield
    finally:
        cluster.api.delete("v1", "PersistentVolume", "", where)


def job(where: str, name: str, gpus: int, **metadata: Any) -> Object:
    """Another job, which uses the resources that a failure needs."""
    asked = {nodes.GPU: str(gpus)}
    trainer = {"numNodes": 1, "resourcesPerNode": {"requests": asked, "limits": asked}, "env": simulate(run="never")}
    return {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": where, **metadata},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }


@contextmanager
def full_gpu_quota(cluster: Access, where: str) -> Iterator[None]:
    """A quota that a pod uses up. The quota controller counted that pod itself.

    Admission counts a pod before it exists. If the controller counts again before it has seen the pod, the quota is
    free for the 5 s until it counts once more. So the pod is there before the quota.
    """
    gpus = f"requests.{nodes.GPU}"
    cluster.api.create(job(where, "first", 4))
    wait_until("the pod of the first job exists", lambda: cluster.api.find("v1", "Pod", where), 60)
    with applied(quota("gpus", **{gpus: "4"}))(cluster, where):
        used = ("v1", "ResourceQuota")
        _wait_for(cluster, used, where, "gpus", lambda found: found.get("status", {}).get("used", {}).get(gpus) == "4")
        yield


@contextmanager
def full_queue(cluster: Access, where: str) -> Iterator[None]:
    """Another job that holds the quota of the queue."""
    cluster.api.create(job(where, "first", 8, labels={kueue.QUEUE_LABEL: "small"}))
    _wait_for(cluster, (TRAINER, "TrainJob"), where, "first", lambda found: found["spec"].get("suspend") is False)
    yield


# ---------------------------------------------------------------- to a job that runs


def remove_node(cluster: Access, ref: JobRef) -> None:
    cluster.api.delete("v1", "Node", "", ref.namespace)


def taint_node(cluster: Access, ref: JobRef) -> None:
    taints = [{"key": "out-of-order", "effect": "NoExecute"}]
    cluster.api.patch("v1", "Node", "", ref.namespace, {"spec": {"taints": taints}})


def press_memory(cluster: Access, _ref: JobRef) -> None:
    """Let the kubelet report memory pressure, by a threshold of 99 % free memory."""
    node = node_of(cluster)
    file = node.directory / "kubelet.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**config, "evictionHard": {"memory.available": "99%"}}))
    _restart_kubelet(node)


def _restart_kubelet(node: RealNode) -> None:
    kubelet = node.components["kubelet"]
    group = kubelet.pid

    def ended() -> bool:
        try:
            os.killpg(group or 0, 0)
        except ProcessLookupError:
            return True
        return False

    kubelet.kill()
    # It ends a little later than nsenter, which started it in the node's namespaces, and keeps its port until then.
    wait_until("the kubelet has ended", ended, 60)
    kubelet.start()


def _pressed(cluster: Access) -> bool:
    found = cluster.api.get("v1", "Node", "", NAME) or {}
    taints = [each["key"] for each in found["spec"].get("taints") or []]
    return taints != [nodes.LABEL] or condition(found, "Ready") is None


def kill_rank_1(cluster: Access, ref: JobRef) -> None:
    """Kill the container of rank 1 by SIGKILL, as the kernel does when memory runs out."""
    node_of(cluster).kill_container(container_of_rank_1(cluster, ref))


def evict_all(cluster: Access, ref: JobRef) -> None:
    """Evict the pods, as ``kubectl drain`` does."""
    for pod in pods_of(cluster, ref):
        evict(cluster, ref.namespace, pod["metadata"]["name"])


def delete(cluster: Access, ref: JobRef) -> None:
    cluster.api.delete(TRAINER, "TrainJob", ref.namespace, ref.name)


def outrank_in_queue(cluster: Access, ref: JobRef) -> None:
    cluster.api.apply(kueue.priority_class("urgent", 1000))
    labels = {kueue.QUEUE_LABEL: "small", kueue.PRIORITY_LABEL: "urgent"}
    cluster.api.create(job(ref.namespace, "urgent", 8, labels=labels))


def outrank_on_node(cluster: Access, ref: JobRef) -> None:
    """Create a pod of higher priority for the node that the job fills."""
    outrank(cluster, ref.namespace, {"trainjob.test/own": ref.namespace})


def remove_runtime(cluster: Access, ref: JobRef) -> None:
    """Delete the runtime, then resume the suspended job."""
    cluster.api.delete(TRAINER, "TrainingRuntime", ref.namespace, "own")
    with suppress(ApiError):  # Trainer's webhook refuses every change to a job whose runtime is gone
        cluster.api.patch(TRAINER, "TrainJob", ref.namespace, ref.name, {"spec": {"suspend": False}})
