"""Runtimes of the table that Trainer does not provide."""

from __future__ import annotations

import copy
from typing import Any

from tests.testcluster.access import TRAINER, Access

Object = dict[str, Any]


def install(cluster: Access, namespace: str) -> None:
    """Create all of them; ``conformance-own`` in `namespace`."""
    own = _two_nodes("conformance-own") | {"kind": "TrainingRuntime"}
    own["metadata"] |= {"namespace": namespace}
    shipped = {
        name: cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", name) or {}
        for name in ("torchtune-llama3.2-1b", "torch-distributed-with-cache")
    }
    large = _copy(shipped["torchtune-llama3.2-1b"], "torchtune-llama3.3-70b")
    cache = _copy(shipped["torch-distributed-with-cache"], "conformance-cache")
    # Trainer 2.3 requires the mount, but its own runtime lacks it.
    pod = cache["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "initializer", "emptyDir": {}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "initializer", "mountPath": "/workspace"}]
    for runtime in (_two_nodes("conformance-two-nodes"), own, large, cache):
        cluster.add_runtime(runtime)


def _copy(runtime: Object, name: str) -> Object:
    metadata = {"name": name, "labels": runtime["metadata"]["labels"]}
    kind = {"apiVersion": TRAINER, "kind": "ClusterTrainingRuntime"}
    return {**kind, "metadata": metadata, "spec": copy.deepcopy(runtime["spec"])}


def _two_nodes(name: str) -> Object:
    """A torch runtime of two nodes, with a sidecar and an init container."""
    containers = [{"name": "node", "image": "train"}, {"name": "shipper", "image": "shipper"}]
    pod = {"initContainers": [{"name": "prepare", "image": "prepare"}], "containers": containers}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": TRAINER,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 2, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
    }
