"""Pods of jobs on the cluster."""

from __future__ import annotations

from typing import Any

from tests.testcluster.access import Access

from trainjob.job import JobRef

Object = dict[str, Any]

JOBSET = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
RANK = "batch.kubernetes.io/job-completion-index"


def pods_of(cluster: Access, ref: JobRef, rank: int | None = None) -> list[Object]:
    """The pods of a job, or those of one rank."""
    labels = f"{JOBSET}={ref.name}" + ("" if rank is None else f",{RANK}={rank}")
    return cluster.api.find("v1", "Pod", ref.namespace, labels=labels)


def running(pods: list[Object]) -> int:
    """How many of the pods run."""
    return sum(pod["status"]["phase"] == "Running" for pod in pods)


def evict(cluster: Access, namespace: str, pod: str) -> None:
    """Evict a pod, as ``kubectl drain`` does."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    cluster.api.request("POST", f"{cluster.api.path('v1', 'Pod', namespace, pod)}/eviction", eviction)
