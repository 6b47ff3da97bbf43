"""The admission policy of `trainjob install --only policy`, in namespaces of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml
from tests.cluster.commands import applied, printed
from tests.processes import wait_until
from tests.testcluster import step_image as steps
from tests.testcluster.access import Access, refused, trainjob

from trainjob._install import objects

Object = dict[str, Any]

ALLOWED = {
    "runtimes": "ClusterTrainingRuntime/torch-resilient\n  ClusterTrainingRuntime/trainjob-step\n\n",
    "registries": "registry.example\nhub.example:5000/team/digits\n",
    "serviceAccounts": "trainer",
    "secrets": "trainjob-storage\npull\n",
}


@contextmanager
def protected(cluster: Access, namespace: str) -> Iterator[None]:
    """Apply the policy to a namespace; remove its binding and its lists afterwards."""
    for runtime in objects("runtimes", trainer="2.1", image=steps.IMAGE):
        cluster.add_runtime(runtime)
    lists, *others = printed("--only", "policy", "-n", namespace)
    edited = yaml.safe_dump({**yaml.safe_load(lists), "data": ALLOWED})
    found = applied(cluster, [edited, *others])
    # The API server learns of policies and of their lists by watches.
    unlisted = {"runtimeRef": {"name": "digits"}}
    wait_until("the policy is enforced", lambda: "digits is not allowed" in asked(cluster, namespace, **unlisted))
    try:
        yield
    finally:
        for each in found[:2]:  # the policy itself is the same for all namespaces
            metadata = each["metadata"]
            cluster.api.delete(each["apiVersion"], each["kind"], metadata.get("namespace", ""), metadata["name"])


def asked(cluster: Access, namespace: str, **spec: Any) -> str:
    """Why a TrainJob is refused; empty if it is accepted."""
    job = trainjob("asked", namespace, runtime="torch-resilient")
    job["spec"].update(spec)
    return refused(lambda: cluster.api.create(job, dry_run=True))


def patch(**pod: Any) -> Object:
    """The spec of a job that changes the pods of its nodes."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "runtimePatches": [
            {"manager": "test/other", "trainingRuntimeSpec": {"template": {"metadata": {"labels": {"a": "b"}}}}},
            {"manager": "test/author", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}},
        ]
    }


def key(secret: str) -> Object:
    return {"name": f"KEY_{secret}", "valueFrom": {"secretKeyRef": {"name": secret, "key": "key"}}}
