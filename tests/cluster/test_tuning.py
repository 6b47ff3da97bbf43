"""A hyperparameter search on real controllers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.cluster.waits import until
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import run_until_finished

from trainjob import TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob.tuning import Study, StudyResult, tune
from trainjob.tuning.journal import open_journal
from trainjob.tuning.trial_jobs import TRIAL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

STUDY = Study.read(
    {
        "space": {"x": {"type": "int", "low": 1, "high": 5}},
        "metric": "loss",
        "direction": "minimize",
        "sampler": {"name": "grid"},
        "pruner": {"name": "threshold", "options": {"upper": 4.5}},
        "max_trials": 5,
        "parallel": 5,
    }
)


def jobs_of(cluster: Access, namespace: str) -> dict[int, dict[str, Any]]:
    """Number of a trial -> its job."""
    found = cluster.api.find(TRAINER, "TrainJob", namespace)
    return {int(job["metadata"]["labels"][TRIAL]): job for job in found}


def report(cluster: Access, job: dict[str, Any]) -> int:
    """Report the loss of a trial, as its script would do; returns its x."""
    values = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
    x = values["KUBEFLOW_TRAINER_OPT_X"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    metrics = [{"name": "loss", "value": x}, {"name": "trainjob.step", "value": "1"}]
    status = {"trainerStatus": {"lastUpdatedTime": now, "metrics": metrics}}
    path = f"{cluster.api.path(TRAINER, 'TrainJob', job['metadata']['namespace'], job['metadata']['name'])}/status"
    cluster.api.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")
    return int(x)


async def test_a_study_runs_prunes_and_outlives_its_jobs(
    cluster: Access, backend: KubernetesBackend, namespace: str, needs: Callable[[str], None], tmp_path: Path
) -> None:
    needs("simulated-nodes")
    template = TrainJobSpec.parse({"runtime": "torch-distributed", "runtime_patches": [run_until_finished()]})

    async def run() -> StudyResult:
        with open_journal(tmp_path.as_uri()) as journal:
            return await tune(backend, STUDY, template, "study", journal, namespace=namespace)

    study = asyncio.create_task(run())
    await until(lambda: study.done() or len(jobs_of(cluster, namespace)) == 5)
    losses = {number: report(cluster, job) for number, job in jobs_of(cluster, namespace).items()}
    (bad,) = [number for number, x in losses.items() if x == 5]
    await until(lambda: study.done() or bad not in jobs_of(cluster, namespace))
    assert not study.done(), "the other trials run on"
    while not study.done():
        await anyio.to_thread.run_sync(cluster.finish, namespace)
        await anyio.sleep(0.3)
    result = await study
    assert sorted(trial.state for trial in result.trials) == ["complete"] * 4 + ["pruned"]
    assert result.trials[bad].value == 5
    assert (result.best.value, result.best.parameters) == (1, {"x": 1})

    for job in jobs_of(cluster, namespace).values():  # as after a TTL
        cluster.api.delete(TRAINER, "TrainJob", namespace, job["metadata"]["name"])
    await until(lambda: not jobs_of(cluster, namespace))
    assert await run() == result
    assert jobs_of(cluster, namespace) == {}
