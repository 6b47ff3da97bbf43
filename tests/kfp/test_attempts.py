"""Several tries of a step and several attempts of its key: what a step launches, and what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.contract.memory import now
from tests.kfp.memory_cluster import MemoryCluster
from tests.kfp.test_first_crash import EXECUTION, PARAMETERS, SPEC

from trainjob import JobRef, Phase, TrainJobClient, TrainJobFailed, TrainJobSpec
from trainjob._manifest.attempts import REPLACES
from trainjob._manifest.render import render
from trainjob.errors import RankCrashed
from trainjob.job import TRY
from trainjob.status import QUEUE_LABEL, observe
from trainjob.verdicts import Evidence
from trainjob_kfp import jobs
from trainjob_kfp.execution import Execution

CRASHED = {
    "metadata": {"name": "p", "labels": {"batch.kubernetes.io/job-completion-index": "0"}},
    "status": {"containerStatuses": [{"name": "node", "lastState": {"terminated": {"exitCode": 1}}}]},
}
MISSING = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'lightning'"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    made = MemoryCluster()
    monkeypatch.setattr(jobs, "TrainJobClient", lambda _, namespace: TrainJobClient(made, namespace))
    return made


def created(cluster: MemoryCluster) -> list[JobRef]:
    """The attempts that exist; the record of a failed one is none."""
    return [JobRef.of(job) for job in cluster.jobs.values() if "trainjob.dev/key" in job["metadata"]["labels"]]


@pytest.mark.parametrize("queue", [False, True])
def test_a_failure_that_is_certain_to_repeat_is_not_retried(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    """Case 14: in a queue the crashed job is deleted, since Kueue would start it again; its verdict outlives it."""

    def crash(request: str) -> None:
        if request == "create" and (refs := created(cluster)):
            cluster.running(refs[-1])
            cluster.crashed[refs[-1].uid] = [Evidence(None, [CRASHED], {"p": MISSING})]

    cluster.after = crash
    labels = {"labels": {QUEUE_LABEL: "main"}} if queue else {}
    spec = TrainJobSpec.parse({**SPEC.model_dump(exclude_unset=True), **labels})
    monkeypatch.setenv("KFP_RETRY_INDEX", "0")
    with pytest.raises(RankCrashed, match="the module is missing in the image"):
        jobs.run_job(EXECUTION, spec, PARAMETERS)
    assert (created(cluster) == []) is queue
    cluster.requests.clear()

    monkeypatch.setenv("KFP_RETRY_INDEX", "1")
    with pytest.raises(TrainJobFailed, match="the module is missing in the image"):
        jobs.run_job(EXECUTION, spec, PARAMETERS)
    assert "create" not in cluster.requests

    monkeypatch.setenv("KFP_RETRY_INDEX", "0")  # "Retry run": a person has changed something
    with pytest.raises(RankCrashed):
        jobs.run_job(EXECUTION, spec, PARAMETERS)
    assert "create" in cluster.requests


@pytest.mark.parametrize(("index", "tried"), [("", None), ("0", 1), ("2", 3), ("x", None)])
def test_the_try_of_a_step_is_that_of_its_job(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, index: str, tried: int | None
) -> None:
    monkeypatch.setenv("KFP_RETRY_INDEX", index)
    assert EXECUTION.tried == tried
    if index == "x":
        return
    cluster.after = lambda request: cluster.end(created(cluster)[0]) if request == "create" else None
    jobs.run_job(EXECUTION, SPEC, PARAMETERS)
    (job,) = cluster.jobs.values()
    assert job["metadata"]["annotations"][TRY] == str(tried or 1)


def test_a_step_follows_the_attempt_that_replaces_its_job(
    cluster: MemoryCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looks = iter(range(10**6))

    def change(request: str) -> None:
        if request != "look":
            return
        number, first = next(looks), cluster.jobs.get(("ns", _name(1)))
        if number == 3 and first is not None:  # another launcher has decided that its attempt counts
            second = render(SPEC, EXECUTION.key, 2, "ns")
            second["metadata"]["annotations"][REPLACES] = first["metadata"]["uid"]
            made = {"uid": "second", "creationTimestamp": now(), "resourceVersion": "1000"}
            cluster.jobs["ns", _name(2)] = {**second, "metadata": {**second["metadata"], **made}, "status": {}}
            del cluster.jobs["ns", _name(1)]
        if number > 10 and observe(cluster.jobs["ns", _name(2)]).phase is not Phase.COMPLETE:
            cluster.end(JobRef.of(cluster.jobs["ns", _name(2)]))

    cluster.before = change
    report = tmp_path / "report.html"
    result = jobs.run_job(EXECUTION, SPEC, {**PARAMETERS, "fail_on_first_crash": False}, report)
    assert (result.name, result.attempt) == (_name(2), 2)
    out = capsys.readouterr().out
    assert f"TrainJob ns/{_name(1)} was replaced by ns/{_name(2)}, which is waited for from now on" in out
    assert f"TrainJob ns/{_name(2)} is Complete" in out
    assert _name(2) in report.read_text()


def _name(attempt: int) -> str:
    return str(render(SPEC, EXECUTION.key, attempt, "ns")["metadata"]["name"])


def test_the_key_of_an_execution_has_its_run() -> None:
    """`SharedJobs` recognizes by it the jobs that no other run has."""
    assert Execution("kfp/run/uuid/train", "run", "train").key.startswith("kfp/run/")


@pytest.mark.parametrize("crash_action", ["suspend", "cancel"])
def test_the_attempt_that_crashed_is_given_up_after_a_replacement(cluster: MemoryCluster, crash_action: str) -> None:
    looks = iter(range(10**6))

    def change(request: str) -> None:
        if request == "look" and next(looks) == 3:
            first = cluster.jobs.pop(("ns", _name(1)))
            second = render(SPEC, EXECUTION.key, 2, "ns")
            made: dict[str, Any] = {"uid": "second", "creationTimestamp": now()}
            second["metadata"] |= {**made, "resourceVersion": "1000"}
            second["metadata"]["annotations"][REPLACES] = first["metadata"]["uid"]
            cluster.jobs["ns", _name(2)] = {**second, "status": {}}
            cluster.running(JobRef.of(second))
            cluster.crashed["second"] = [Evidence(None, [CRASHED], {"p": ["ValueError: no"]})]

    cluster.before = change
    with pytest.raises(RankCrashed):
        jobs.run_job(EXECUTION, SPEC, {**PARAMETERS, "on_crash_action": crash_action})
    found = [observe(job).phase for (_, name), job in cluster.jobs.items() if name == _name(2)]
    assert found == ([Phase.SUSPENDED] if crash_action == "suspend" else [])
