"""The objects that an administrator of Kueue creates."""

from __future__ import annotations

from typing import Any

from tests.testcluster.nodes import GPU

Object = dict[str, Any]

API = "kueue.x-k8s.io/v1beta2"
QUEUE = "gpus"
"""Name of the ClusterQueue, and of its LocalQueue in every namespace."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


def flavor() -> Object:
    """The only kind of machine."""
    return {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}, "spec": {}}


def cluster_queue(name: str = QUEUE, *, cpu: object = 256, memory: str = "2Ti", gpu: object = 16) -> Object:
    """A ClusterQueue open to all namespaces, in which a higher priority preempts a lower one."""
    quota = {"cpu": str(cpu), "memory": memory, GPU: str(gpu)}
    resources = [{"name": resource, "nominalQuota": amount} for resource, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": "default", "resources": resources}]}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}


def local_queue(namespace: str, name: str = QUEUE, cluster_queue: str = QUEUE) -> Object:
    """A LocalQueue. (One named `default` would also queue jobs without a label.)"""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API, "kind": "LocalQueue", "metadata": metadata, "spec": {"clusterQueue": cluster_queue}}


def priority_class(name: str, value: int) -> Object:
    """A WorkloadPriorityClass."""
    return {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
