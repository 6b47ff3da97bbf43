"""The examples of settings that have no field in the spec: the JobSets that they produce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.cluster.backends import backend_of
from tests.processes import wait_until
from tests.testcluster.access import Access

from trainjob import TrainJobClient
from trainjob._install import objects

EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "cluster"
Object = dict[str, Any]


def test_settings_of_the_examples_reach_the_jobset(cluster: Access, namespace: str) -> None:
    """Pod failure policy, failure policy of the JobSet, TTL, arguments of torchrun."""
    read = {name: yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) for name in ("torch-ttl", "torch-elastic")}
    resilient = next(each for each in objects("runtimes") if each["metadata"]["name"] == "torch-resilient")
    for runtime in (resilient, read["torch-ttl"]):
        cluster.add_runtime(runtime)
    elastic = read["torch-elastic"]
    asked: dict[str, Object] = {
        "resilient": {"runtime": "torch-resilient"},
        "ttl": {"runtime": "torch-ttl"},
        "elastic": elastic,
    }
    with TrainJobClient(backend_of(cluster.kubeconfig), namespace) as client:
        refs = {key: client.launch({**fields, "suspend": True}, key) for key, fields in asked.items()}

    def made(key: str) -> Object:
        find = lambda: cluster.api.get("jobset.x-k8s.io/v1alpha2", "JobSet", namespace, refs[key].name)  # noqa: E731
        return dict(wait_until(f"{key} has its JobSet", find)["spec"])

    theirs = resilient["spec"]["template"]["spec"]
    ours = made("resilient")
    assert ours["failurePolicy"] == {"restartStrategy": "Recreate", **theirs["failurePolicy"]}
    policy = _job(theirs)["podFailurePolicy"]
    assert _job(ours)["podFailurePolicy"] == policy
    assert (_job(ours)["backoffLimit"], _pod(ours)["restartPolicy"]) == (0, "Never")

    assert _job(made("ttl"))["ttlSecondsAfterFinished"] == 24 * 60 * 60

    job = made("elastic")
    (container,) = _pod(job)["containers"]
    assert (_job(job)["parallelism"], _job(job)["completions"]) == (2, 2)
    assert (container["command"], container["args"]) == (elastic["command"], elastic["args"])
    assert {"name": "PET_NNODES", "value": "2"} in container["env"], "--nnodes takes precedence over it"
    for ref in refs.values():
        cluster.api.delete("trainer.kubeflow.org/v1alpha1", "TrainJob", namespace, ref.name)


def _job(template: Object) -> Object:
    """The only Job of a JobSet or runtime."""
    (replicated,) = template["replicatedJobs"]
    return dict(replicated["template"]["spec"])


def _pod(template: Object) -> Object:
    return dict(_job(template)["template"]["spec"])
