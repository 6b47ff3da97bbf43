"""Specs of jobs that fail, and what they need in a cluster; `changes` has what only `failures` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.cluster.pods import pods_of
from tests.processes import ComponentError, wait_until
from tests.testcluster import images, kueue, nodes
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import RealNode

from trainjob.job import JobRef

Object = dict[str, Any]

REGISTRY = "127.0.0.1:5000"
"""Address of the registry on the real node, which has no image and never completes ``/slow``; see `corpus.registry`."""


def python(script: str, nodes: int = 1, **fields: Any) -> Object:
    return {"runtime": "torch-distributed", "num_nodes": nodes, "command": ["python3", "-c", script], **fields}


def one_of(nodes: int, script: str, **fields: Any) -> Object:
    """Rank 1 runs `script`; the others sleep."""
    lines = ["import os, sys, time", "if os.environ['PET_NODE_RANK'] != '1': time.sleep(600)"]
    return python("\n".join([*lines, script]), nodes, **fields)


def simulated(nodes: int = 1, gpus: int = 0, **fields: Any) -> Object:
    resources = {"resources_per_node": {"gpu": gpus}} if gpus else {}
    return {"runtime": "torch-distributed", "num_nodes": nodes, **resources, **fields}


def patched(pod: Mapping[str, Any]) -> Object:
    """A change to the pods of the nodes."""
    node = {"name": "node", "template": {"spec": {"template": {"spec": dict(pod)}}}}
    return {"runtime_patches": [{"training_runtime_spec": {"template": {"spec": {"replicated_jobs": [node]}}}}]}


def mounted(volume: Object, path: str = "/mnt/volume", **options: Any) -> Object:
    mount = {"name": volume["name"], "mountPath": path, **options}
    return patched({"volumes": [volume], "containers": [{"name": "node", "volumeMounts": [mount]}]})


def stages(
    *steps: str,
    job: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
    beside: Sequence[Object] = (),
) -> Object:
    """Spec of a runtime whose replicated jobs run one after the other and whose pods are not restarted.

    Args:
        steps: Names of the replicated jobs.
        job: Additional fields of the spec of each Job.
        pod: Additional fields of the spec of each pod.
        node: Additional fields of the container of the last step.
        beside: Additional containers of each pod.
    """
    jobs: list[Object] = []
    for step in steps:
        container: Object = {"name": step, "image": images.PYTHON, **((node or {}) if step == steps[-1] else {})}
        if step.endswith("-initializer"):
            container["volumeMounts"] = [{"name": "initializer", "mountPath": "/workspace"}]
            container["command"] = ["sh", "-c", "echo no such dataset >&2; exit 4"]
        template: Object = {"restartPolicy": "Never", "containers": [container, *beside], **(pod or {})}
        template["volumes"] = [{"name": "initializer", "emptyDir": {}}, *template.get("volumes", [])]
        label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer" if step == "node" else step}
        spec = {"backoffLimit": 0, **(job or {}), "template": {"spec": template}}
        depends = {"dependsOn": [{"name": jobs[-1]["name"], "status": "Complete"}]} if jobs else {}
        jobs.append({"name": step, "template": {"metadata": {"labels": label}, "spec": spec}, **depends})
    return {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": jobs}}}


NODE = stages("node")
OWN: Object = {"runtime": {"name": "own", "kind": "TrainingRuntime"}}


def own(spec: Object, *others: Object) -> Callable[[Access, str], AbstractContextManager[None]]:
    """Create a runtime `own`, and other objects, in the job's namespace."""
    metadata = {"name": "own", "labels": {"trainer.kubeflow.org/framework": "torch"}}
    runtime = {"apiVersion": TRAINER, "kind": "TrainingRuntime", "metadata": metadata, "spec": spec}

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        with applied(*others)(cluster, where):
            cluster.add_runtime({**runtime, "metadata": {**metadata, "namespace": where}})
            yield

    return made


def reserved_node(*taints: Object, **spec: Any) -> Callable[[Access, str], AbstractContextManager[None]]:
    """A simulated node only for pods that select it by the name of their namespace."""

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        node = nodes.node(0, 8)
        node["metadata"] |= {"name": where, "labels": {**node["metadata"]["labels"], "trainjob.test/own": where}}
        cluster.api.create({**node, "spec": {"taints": [nodes.RESERVED, *taints], **spec}})
        try:
            yield
        finally:
            cluster.api.delete("v1", "Node", "", where)

    return made


own_node = reserved_node()
ON_OWN_NODE = patched({"nodeSelector": {"trainjob.test/own": "$NAMESPACE"}, "tolerations": [nodes.ADMITTED]})
"""``$NAMESPACE`` in a spec is the namespace of the job, ``$API_SERVER`` the API server's address for the real node."""


def silence_node(cluster: Access, ref: JobRef) -> None:
    """Stop the heartbeats of a node, as after a kill of its kubelet: kwok ignores nodes with another label."""
    cluster.api.patch("v1", "Node", "", ref.namespace, {"metadata": {"labels": {nodes.LABEL: "silent"}}})


def node_of(cluster: Access) -> RealNode:
    if not isinstance(cluster, Cluster) or cluster.real_node is None:
        raise ComponentError("only the kubelet of a node that these tests started can be reconfigured")
    return cluster.real_node


def container_of_rank_1(cluster: Access, ref: JobRef) -> str:
    """Reference of the container of rank 1, once it runs."""

    def running() -> list[str]:
        statuses = [each for pod in pods_of(cluster, ref, 1) for each in pod["status"].get("containerStatuses") or []]
        return [status["containerID"] for status in statuses if "running" in status["state"]]

    wait_until("rank 1 runs", running, 60)
    (container,) = running()
    return container


def applied(*objects: Object) -> Callable[[Access, str], AbstractContextManager[None]]:
    """Create these objects in the job's namespace."""

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        for each in objects:
            cluster.api.create({**each, "metadata": {**each["metadata"], "namespace": where}})
        yield

    return made


def quota(name: str, **hard: str) -> Object:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


PROBE: Object = {
    "exec": {"command": ["cat", "/tmp/healthy"]},
    "periodSeconds": 1,
    "failureThreshold": 1,
    "timeoutSeconds": 30,
}
RESTARTS: Object = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 1}
SLEEP = "import time; time.sleep(600)"


@contextmanager
def queue(
    cluster: Access, where: str, name: str = "small", fields: Mapping[str, Any] | None = None, gpu: int = 8
) -> Iterator[None]:
    """A LocalQueue whose ClusterQueue has the name of the namespace; with room for so many GPUs.

    Args:
        cluster: The cluster.
        where: Namespace.
        name: Name of the LocalQueue.
        fields: More fields of the ClusterQueue.
        gpu: Number of GPUs.
    """
    made = kueue.cluster_queue(where, gpu=gpu)
    cluster.api.apply({**made, "spec": {**made["spec"], **(fields or {})}})
    cluster.api.create(kueue.local_queue(where, name, where))
    try:
        yield
    finally:
        cluster.api.delete(kueue.API, "ClusterQueue", "", where)


def outrank(cluster: Access, namespace: str, selector: Mapping[str, str]) -> None:
    """Create a pod of higher priority, of the class of the namespace's name, that needs 8 GPUs of a reserved node."""
    gpus = {"requests": {nodes.GPU: "8"}, "limits": {nodes.GPU: "8"}}
    container = {"name": "x", "image": images.PYTHON, "resources": gpus, "env": simulate(run="never")}
    priority = {"priorityClassName": namespace, "nodeSelector": dict(selector), "tolerations": [nodes.ADMITTED]}
    pod = {"metadata": {"name": "urgent", "namespace": namespace}, "spec": {**priority, "containers": [container]}}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", **pod})
