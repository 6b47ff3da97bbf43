"""The deletion of the objects of a finished job."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from tests.cluster.pods import JOBSET, pods_of
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access, condition
from tests.testcluster.nodes import simulate

from trainjob import JobRef, TrainJobFailed, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "dags_examples" / "cluster" / "torch-ttl.yaml"
Object = dict[str, Any]


def runtimes() -> tuple[Object, Object]:
    """The example with a TTL of two seconds instead of a day, on the job or on the JobSet."""
    of_jobs = yaml.safe_load(EXAMPLE.read_text())
    (job,) = of_jobs["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["ttlSecondsAfterFinished"] == 24 * 60 * 60
    job["template"]["spec"]["ttlSecondsAfterFinished"] = 2
    of_jobs["metadata"]["name"] = "torch-ttl-of-the-jobs"
    of_jobset = copy.deepcopy(of_jobs)
    of_jobset["metadata"]["name"] = "torch-ttl-of-the-jobset"
    template = of_jobset["spec"]["template"]["spec"]
    del template["replicatedJobs"][0]["template"]["spec"]["ttlSecondsAfterFinished"]
    template["ttlSecondsAfterFinished"] = 2
    return of_jobs, of_jobset


async def test_a_ttl_of_the_jobs_keeps_the_result_and_one_of_the_jobset_does_not(
    cluster: Access, backend: KubernetesBackend, namespace: str, needs: Callable[[str], None]
) -> None:
    needs("simulated-nodes")
    names = []
    for runtime in runtimes():
        cluster.add_runtime(runtime)
        names.append(runtime["metadata"]["name"])
    refs: dict[tuple[str, int], JobRef] = {}
    sets: dict[tuple[str, int], str] = {}
    for name in names:
        for code in (0, 3):
            fields = {"env": simulate(run="300ms", exit_code=code), "runtime": name}
            refs[name, code] = await launch(backend, TrainJobSpec.parse(fields), f"{name}-{code}", namespace=namespace)
            there = partial(_jobset, cluster, refs[name, code])
            sets[name, code] = wait_until("the JobSet exists", there, 60)
    with anyio.fail_after(240):
        for (_, code), ref in refs.items():
            if code == 0:
                await wait(backend, ref)
                continue
            with pytest.raises(TrainJobFailed):  # the pods with the reason can be deleted
                await wait(backend, ref)

    for code, result in ((0, "Complete"), (3, "Failed")):
        ref = refs[names[0], code]
        wait_until("no Job and no pod is left", partial(_nothing_left, cluster, ref), 30)
        assert condition(cluster.api.get(TRAINER, "TrainJob", namespace, ref.name), result)
        assert _jobset(cluster, ref) == sets[names[0], code]

    good, bad = refs[names[1], 0], refs[names[1], 3]
    # Trainer recreates the JobSet, and the failed job trains again.
    again = lambda: _jobset(cluster, bad) not in ("", sets[names[1], 3])  # noqa: E731
    wait_until("the failed job has another JobSet", again, 30)
    wait_until("the complete job has no JobSet", lambda: not _jobset(cluster, good), 30)
    assert condition(cluster.api.get(TRAINER, "TrainJob", namespace, good.name), "Complete")


def _nothing_left(cluster: Access, ref: JobRef) -> bool:
    jobs = cluster.api.find("batch/v1", "Job", ref.namespace, labels=f"{JOBSET}={ref.name}")
    return not jobs and not pods_of(cluster, ref)


def _jobset(cluster: Access, ref: JobRef) -> str:
    """UID of the job's JobSet; empty if it does not exist."""
    found = cluster.api.get("jobset.x-k8s.io/v1alpha2", "JobSet", ref.namespace, ref.name)
    return str(found["metadata"]["uid"]) if found else ""
