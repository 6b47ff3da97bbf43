"""The projection that the informer keeps of each job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.objects import COMPLETE, SUSPENDED, counts

from trainjob._backends.kubernetes.job_informer import projection
from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec
from trainjob.job import JobRef
from trainjob.status import QUEUE_LABEL, observe

RUNNING = {"jobsStatus": [counts(ready=1, active=1)]}
REPORTED = {"progressPercentage": 42, "metrics": [{"name": "loss", "value": "0.3"}]}


def stored(key: str, status: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A job as parsed from a separate reply of an API server."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], **fields})
    trainjob = render(spec, key, 3, "team")
    trainjob["metadata"] |= {"uid": f"uid of {key}", "creationTimestamp": "2026-11-21T10:00:00Z", "managedFields": [{}]}
    found: dict[str, Any] = json.loads(json.dumps(trainjob | ({} if status is None else {"status": status})))
    return found


@pytest.mark.parametrize(
    "trainjob",
    [
        stored("new"),
        stored("running", RUNNING),
        stored("reporting", {**RUNNING, "trainerStatus": REPORTED}),
        stored("queued", {"conditions": [SUSPENDED]}, labels={QUEUE_LABEL: "gpus"}, suspend=True),
        stored("suspended", {"conditions": [SUSPENDED]}, suspend=True),
        stored("complete", {**RUNNING, "conditions": [COMPLETE]}),
    ],
    ids=lambda trainjob: trainjob["metadata"]["uid"],
)
def test_projection_has_the_same_observation(trainjob: dict[str, Any]) -> None:
    assert observe(projection(trainjob)) == observe(trainjob)
    assert JobRef.of(projection(trainjob)) == JobRef.of(trainjob)


def test_equal_parts_of_projections_are_shared() -> None:
    one, other = projection(stored("one", RUNNING)), projection(stored("other", RUNNING))
    assert one["status"] is other["status"]
    assert one["metadata"]["labels"] is other["metadata"]["labels"]
    assert projection(stored("third", {"conditions": [COMPLETE]}))["status"] != one["status"]


def test_projection_omits_a_large_spec() -> None:
    trainjob = stored("large", RUNNING, env={"BLOB": "x" * 100_000})
    assert len(json.dumps(projection(trainjob))) < 1000
