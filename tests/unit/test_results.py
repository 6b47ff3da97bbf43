"""Results of a completed job: its status and its termination messages, merged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trainjob import JobRef, TrainJobResult
from trainjob.diagnosis import Evidence
from trainjob.waiting import conclude


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


def said(outputs: dict[str, str] | None = None, **metrics: float) -> str:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps({"trainjob": 1, "metrics": listed, "outputs": outputs or {}})


def result(*pods: dict[str, Any], **status: float) -> TrainJobResult:
    """The result of a job with these pods, and with these metrics in its ``trainerStatus``."""
    listed = [{"name": name, "value": str(value)} for name, value in status.items()]
    trainjob = {
        "metadata": {"name": "job", "namespace": "ns", "uid": "u", "creationTimestamp": "2026-11-21T10:00:00Z"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": "2026-11-21T10:01:00Z"}],
            **({"trainerStatus": {"metrics": listed, "lastUpdatedTime": "2026-11-21T10:00:59Z"}} if listed else {}),
        },
    }

    class Left:
        async def evidence(self, ref: JobRef) -> Evidence:
            del ref
            return Evidence(trainjob, pods)

    return asyncio.run(conclude(Left(), JobRef("ns", "job", "u")))  # type: ignore[arg-type]


def test_each_channel_alone() -> None:
    assert result(pod(said({"model": "s3://m"}, loss=0.5))).metrics == {"loss": 0.5}
    assert result(pod(""), loss=0.5).metrics == {"loss": 0.5}
    assert result(pod("")).metrics == {}


def test_the_message_has_priority_and_the_status_adds_missing_metrics() -> None:
    both = result(pod(said({"model": "s3://m"}, loss=0.25, epoch=3)), loss=0.5, train_runtime=7)
    assert both.metrics == {"loss": 0.25, "epoch": 3.0, "train_runtime": 7.0}
    assert both.outputs == {"model": "s3://m"}


def test_outputs_on_a_volume_claim_are_named_as_outside_the_pod() -> None:
    outputs = {"model": "/mnt/trainjob-claims/models/digits", "card": "s3://b/card", "epochs": 3}
    left = result(pod(json.dumps({"trainjob": 1, "outputs": outputs})))
    assert left.outputs == {"model": "pvc://models/digits", "card": "s3://b/card", "epochs": 3}


def test_times_of_the_result() -> None:
    assert result(pod("")).seconds == {"queued": 0.0, "total": 60.0}


def test_of_several_pods_of_rank_0_the_latest_counts() -> None:
    pods = [pod(said(loss=n), created=n) for n in (11, 13, 12)]
    assert result(*pods).metrics == {"loss": 13.0}
    assert result(pod("killed", created=20), *pods).metrics == {"loss": 13.0}, "it reported nothing"


def test_other_ranks_do_not_count_and_the_launcher_comes_first() -> None:
    assert result(pod(said(loss=1), rank=1)).metrics == {}
    assert result(pod(said(loss=1)), pod(said(loss=2), job="launcher")).metrics == {"loss": 2.0}


@pytest.mark.parametrize("message", [None, 5, {}, "no object", '{"trainjob": 2}'])
def test_a_message_of_another_program(message: object) -> None:
    assert result(pod(message)) == result()
