"""Results of a completed job: its status and its termination messages, merged."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.objects import COMPLETE, Object, ended, pod, trainjob

from trainjob import JobRef, Observation, Phase, TrainJobResult
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.results import conclude, result_of


def reporting(message: object, *, rank: int = 0, step: str = "node", created: int = 10) -> Object:
    """A pod that has ended with a termination message."""
    made = pod(rank, ended(0, message=message, startedAt=None, finishedAt=None), step=step)
    made["metadata"] |= {"name": f"{step}-{rank}-{created}", "creationTimestamp": f"2026-11-21T10:00:{created}Z"}
    return made


def termination_message(outputs: dict[str, str] | None = None, **metrics: float) -> str:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainjob": 1, "metrics": listed, "outputs": outputs or {}})


def result(*pods: Object, seen: MetricHistory | None = None, **status: float) -> TrainJobResult:
    """The result of a job with these pods, these metrics in its ``trainerStatus``, and what a waiter has `seen`."""
    listed = [{"name": name, "value": str(value)} for name, value in status.items()]
    over = COMPLETE | {"lastTransitionTime": "2026-11-21T10:01:00Z"}
    reported = {"metrics": listed, "lastUpdatedTime": "2026-11-21T10:00:59Z"}
    job = trainjob(over, name="job", trainerStatus=reported if listed else {})

    class FinishedBackend:
        async def evidence(self, ref: JobRef) -> Evidence:
            del ref
            return Evidence(job, pods)

        def now(self) -> datetime:
            return datetime(2026, 11, 21, 10, 2, tzinfo=UTC)

    return asyncio.run(conclude(FinishedBackend(), JobRef("ns", "job", "u"), history=seen))  # type: ignore[arg-type]


def test_the_message_has_priority_and_the_status_adds_missing_metrics() -> None:
    both = result(reporting(termination_message({"model": "s3://m"}, loss=0.25, epoch=3)), loss=0.5, train_runtime=7)
    assert both.metrics == {"loss": 0.25, "epoch": 3.0, "train_runtime": 7.0}
    assert both.outputs == {"model": "s3://m"}
    assert result(reporting(""), loss=0.5).metrics == {"loss": 0.5}
    assert result(reporting("")).metrics == {}


def test_a_result_has_seconds_and_outputs_on_a_pvc_become_pvc_locations() -> None:
    outputs = {"model": "/mnt/trainjob-claims/models/digits", "card": "s3://b/card", "epochs": 3}
    found = result(reporting(json.dumps({"trainjob": 1, "outputs": outputs})))
    assert found.outputs == {"model": "pvc://models/digits", "card": "s3://b/card", "epochs": 3}
    assert found.seconds == {"queued": 0.0, "total": 60.0}


def test_the_latest_pod_of_rank_0_counts_and_the_launcher_comes_first() -> None:
    pods = [reporting(termination_message(loss=n), created=n) for n in (11, 13, 12)]
    assert result(*pods).metrics == {"loss": 13.0}
    assert result(reporting("killed", created=20), *pods).metrics == {"loss": 13.0}, "the latest pod reported nothing"
    assert result(reporting(termination_message(loss=1), rank=1)).metrics == {}
    assert result(*pods, reporting(termination_message(loss=2), step="launcher")).metrics == {"loss": 2.0}


@pytest.mark.parametrize("message", [None, 5, {}, "no object", '{"trainjob": true}'])
def test_messages_of_other_programs_are_ignored(message: object) -> None:
    assert replace(result(reporting(message)), goodput={}) == replace(result(), goodput={})


def spent(found: TrainJobResult) -> dict[str, float]:
    return {name: seconds for name, seconds in found.goodput["seconds"].items() if seconds}


def test_result_has_the_goodput_of_the_attempt() -> None:
    times = {"startedAt": "2026-11-21T10:00:15Z", "finishedAt": "2026-11-21T10:00:55Z"}
    found = result(pod(0, ended(0, **times), spec={"containers": [{"name": "node"}]}))
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
    deleted = result_of(ref, gone, Observation(Phase.COMPLETE), datetime.now(UTC))
    assert "goodput" not in deleted.as_dict()
    running = Evidence({"metadata": {"creationTimestamp": "2026-11-21T10:00:00Z"}})
    assert "goodput" not in result_of(ref, running, Observation(Phase.RUNNING), datetime.now(UTC)).as_dict()
