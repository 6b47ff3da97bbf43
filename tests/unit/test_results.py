"""Results of a completed job: its status and its termination messages, merged."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from trainjob import JobRef, Observation, Phase, TrainJobResult
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.results import conclude, result_of
from trainjob.verdicts import Evidence


def pod(message: object, *, rank: int = 0, job: str = "node", created: int = 10) -> dict[str, Any]:
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": job,
        "batch.kubernetes.io/job-completion-index": str(rank),
    }
    return {
        "metadata": {
            "name": f"{job}-{rank}-{created}",
            "labels": labels,
            "creationTimestamp": f"2026-11-21T10:00:{created}Z",
        },
        "status": {
            "containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 0, "message": message}}}]
        },
    }


def termination_message(outputs: dict[str, str] | None = None, **metrics: float) -> str:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainjob": 1, "metrics": listed, "outputs": outputs or {}})


def result(*pods: dict[str, Any], seen: MetricHistory | None = None, **status: float) -> TrainJobResult:
    """The result of a job with these pods, these metrics in its ``trainerStatus``, and what a waiter has `seen`."""
    listed = [{"name": name, "value": str(value)} for name, value in status.items()]
    trainjob = {
        "metadata": {"name": "job", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-11-21T10:00:00Z"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": "2026-11-21T10:01:00Z"}],
            **({"trainerStatus": {"metrics": listed, "lastUpdatedTime": "2026-11-21T10:00:59Z"}} if listed else {}),
        },
    }

    class FinishedBackend:
        async def evidence(self, ref: JobRef) -> Evidence:
            del ref
            return Evidence(trainjob, pods)

    return asyncio.run(conclude(FinishedBackend(), JobRef("ns", "job", "u"), history=seen))  # type: ignore[arg-type]


def test_metrics_come_from_the_message_or_the_status() -> None:
    assert result(pod(termination_message({"model": "s3://m"}, loss=0.5))).metrics == {"loss": 0.5}
    assert result(pod(""), loss=0.5).metrics == {"loss": 0.5}
    assert result(pod("")).metrics == {}


def test_the_message_has_priority_and_the_status_adds_missing_metrics() -> None:
    both = result(pod(termination_message({"model": "s3://m"}, loss=0.25, epoch=3)), loss=0.5, train_runtime=7)
    assert both.metrics == {"loss": 0.25, "epoch": 3.0, "train_runtime": 7.0}
    assert both.outputs == {"model": "s3://m"}


def test_outputs_on_a_pvc_become_pvc_locations() -> None:
    outputs = {"model": "/mnt/trainjob-claims/models/digits", "card": "s3://b/card", "epochs": 3}
    found = result(pod(json.dumps({"trainjob": 1, "outputs": outputs})))
    assert found.outputs == {"model": "pvc://models/digits", "card": "s3://b/card", "epochs": 3}


def test_result_has_queued_and_total_seconds() -> None:
    assert result(pod("")).seconds == {"queued": 0.0, "total": 60.0}


def test_the_latest_pod_of_rank_0_counts() -> None:
    pods = [pod(termination_message(loss=n), created=n) for n in (11, 13, 12)]
    assert result(*pods).metrics == {"loss": 13.0}
    assert result(pod("killed", created=20), *pods).metrics == {"loss": 13.0}, "the latest pod reported nothing"


def test_only_rank_0_counts_and_the_launcher_comes_first() -> None:
    assert result(pod(termination_message(loss=1), rank=1)).metrics == {}
    assert result(pod(termination_message(loss=1)), pod(termination_message(loss=2), job="launcher")).metrics == {
        "loss": 2.0
    }


@pytest.mark.parametrize("message", [None, 5, {}, "no object", '{"trainjob": true}'])
def test_messages_of_other_programs_are_ignored(message: object) -> None:
    assert replace(result(pod(message)), goodput={}) == replace(result(), goodput={})


def spent(found: TrainJobResult) -> dict[str, float]:
    return {name: seconds for name, seconds in found.goodput["seconds"].items() if seconds}


def ran(begin: int, end: int) -> dict[str, Any]:
    """A pod whose container ran from second `begin` to second `end` of the job."""
    made = pod("")
    times = {"startedAt": f"2026-11-21T10:00:{begin:02}Z", "finishedAt": f"2026-11-21T10:00:{end:02}Z"}
    made["status"]["containerStatuses"][0]["state"]["terminated"] |= times
    return made


def test_result_has_the_goodput_of_the_attempt() -> None:
    found = result(ran(15, 55))
    assert spent(found) == {"starting": 15.0, "training": 40.0, "stopped": 5.0}
    assert found.goodput["ratio"] == pytest.approx(40 / 60, abs=1e-6)
    assert "gpu_hours" not in found.goodput, "the job names no resources"
    assert found.as_dict()["goodput"] == found.goodput
    assert json.loads(json.dumps(found.as_dict()))["goodput"]["seconds"]["queued"] == 0.0


def test_phases_of_a_waiter_divide_the_time_of_a_job_without_pods() -> None:
    begin = datetime.fromisoformat("2026-11-21T10:00:00+00:00").timestamp()
    seen = MetricHistory()
    for second, phase in ((0, Phase.STARTING), (20, Phase.RUNNING), (40, Phase.RESTARTING), (45, Phase.RUNNING)):
        seen.observe(Observation(phase), begin + second)
    assert spent(result(seen=seen)) == {"starting": 20.0, "training": 35.0, "restarting": 5.0}


def test_a_result_without_known_times_has_no_goodput() -> None:
    ref, gone = JobRef("ns", "job", "u"), Evidence(None)
    deleted = result_of(ref, gone, Observation(Phase.COMPLETE))
    assert "goodput" not in deleted.as_dict()
    running = Evidence({"metadata": {"creationTimestamp": "2026-11-21T10:00:00Z"}})
    assert "goodput" not in result_of(ref, running, Observation(Phase.RUNNING)).as_dict()
