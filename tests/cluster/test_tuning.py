"""A hyperparameter search on real controllers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
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
GONE_SECONDS = 20.0  # on a machine that runs other tests


class Trials:
    """The trials of the study in a namespace, as the cluster has them."""

    def __init__(self, cluster: Access, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def jobs(self) -> dict[int, dict[str, Any]]:
        found = self._cluster.api.find(TRAINER, "TrainJob", self._namespace)
        return {int(job["metadata"]["labels"][TRIAL]): job for job in found}

    def report(self, job: dict[str, Any]) -> int:
        """Report the loss of a trial, as its script would do; returns its x."""
        values = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
        x = values["KUBEFLOW_TRAINER_OPT_X"]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metrics = [{"name": "loss", "value": x}, {"name": "trainjob.step", "value": "1"}]
        status = {"trainerStatus": {"lastUpdatedTime": now, "metrics": metrics}}
        api = self._cluster.api
        path = api.path(TRAINER, "TrainJob", self._namespace, job["metadata"]["name"])
        api.request("PATCH", f"{path}/status", {"status": status}, content_type="application/merge-patch+json")
        return int(x)


async def test_a_study_runs_prunes_and_outlives_its_jobs(
    cluster: Access, backend: KubernetesBackend, namespace: str, needs: Callable[[str], None], tmp_path: Path
) -> None:
    needs("simulated-nodes")
    template = TrainJobSpec.parse({"runtime": "torch-distributed", "runtime_patches": [run_until_finished()]})
    trials = Trials(cluster, namespace)

    async def run() -> StudyResult:
        with open_journal(tmp_path.as_uri()) as journal:
            return await tune(backend, STUDY, template, "study", journal, namespace=namespace)

    study = asyncio.create_task(run())
    with anyio.fail_after(240):
        while len(jobs := await anyio.to_thread.run_sync(trials.jobs)) < 5:
            assert not study.done(), study.result()
            await anyio.sleep(0.1)
        began = time.monotonic()
        bad = 0
        for number, job in jobs.items():
            if await anyio.to_thread.run_sync(trials.report, job) == 5:
                bad = number
        while bad in await anyio.to_thread.run_sync(trials.jobs):
            assert not study.done(), study.result()
            await anyio.sleep(0.1)
        seconds = time.monotonic() - began
        print(f"the pruned trial was gone after {seconds:.1f} s")
        assert seconds < GONE_SECONDS
        while not study.done():
            await anyio.to_thread.run_sync(cluster.finish, namespace)
            await anyio.sleep(0.3)
    result = await study
    assert sorted(trial.state for trial in result.trials) == ["complete"] * 4 + ["pruned"]
    assert result.trials[bad].value == 5
    assert (result.best.value, result.best.parameters) == (1, {"x": 1})

    for job in trials.jobs().values():  # as after a TTL
        cluster.api.delete(TRAINER, "TrainJob", namespace, job["metadata"]["name"])
    with anyio.fail_after(240):
        while await anyio.to_thread.run_sync(trials.jobs):
            await anyio.sleep(0.1)
        assert await run() == result
    assert trials.jobs() == {}
