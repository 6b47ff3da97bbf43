"""`stall_timeout`: from the spec to the ranks, which read a variable, and to waiters, which read an annotation."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from trainjob._backends.kubernetes.job_watch import projection
from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec
from trainjob.errors import InvalidSpec
from trainjob.job import spec_hash
from trainjob.status import STALL_TIMEOUT, observe

MANIFEST = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": {"runtimeRef": {"name": "x"}}}


def rendered(**fields: Any) -> dict[str, Any]:
    return render(TrainJobSpec.parse({"runtime": "torch-distributed", **fields}), "a", 1, "ns")


def variables(trainjob: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in trainjob["spec"].get("trainer", {}).get("env", ())}


@pytest.mark.parametrize("given", [900, "900", "15m", "PT15M", timedelta(minutes=15)])
def test_every_rank_and_every_waiter_gets_the_timeout(given: object) -> None:
    trainjob = rendered(stall_timeout=given, env={"A": "1"})
    assert variables(trainjob) == {"TRAINJOB_STALL_TIMEOUT": "900", "A": "1"}
    assert observe(trainjob).stall_timeout == 900


def test_a_shared_watch_keeps_the_annotation() -> None:
    trainjob = rendered(stall_timeout="1.5s")
    trainjob["metadata"] |= {"uid": "u", "creationTimestamp": "2026-11-26T12:00:00Z"}
    assert observe(projection(trainjob)).stall_timeout == 1.5


def test_a_whole_manifest_can_have_the_timeout() -> None:
    spec = TrainJobSpec.parse({"manifest": MANIFEST, "stall_timeout": "2h"})
    trainjob = render(spec, "a", 1, "ns")
    assert variables(trainjob) == {"TRAINJOB_STALL_TIMEOUT": "7200"}
    assert trainjob["metadata"]["annotations"][STALL_TIMEOUT] == "7200"
    assert "trainer" not in MANIFEST["spec"], "the author's manifest was changed"


def test_jobs_without_the_timeout_do_not_change() -> None:
    trainjob = rendered()
    assert variables(trainjob) == {}
    assert STALL_TIMEOUT not in trainjob["metadata"]["annotations"]
    assert observe(trainjob).stall_timeout is None
    # Hash of the same spec before the field existed: running jobs are adopted after an upgrade.
    assert spec_hash(trainjob) == "605c7ad0fbbe5731c17fffe808ac95173848ba7af2f29f85ca70a5738f612e20"


@pytest.mark.parametrize("given", [0, "0.5s", "8d", "soon", -1, [3]])
def test_invalid_timeouts_are_rejected(given: object) -> None:
    with pytest.raises(InvalidSpec) as refused:
        rendered(stall_timeout=given)
    assert [problem.path for problem in refused.value.problems] == ["stall_timeout"]


def test_the_variable_cannot_be_set_otherwise() -> None:
    with pytest.raises(InvalidSpec, match="set from stall_timeout"):
        rendered(env={"TRAINJOB_STALL_TIMEOUT": "3"})


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "inf", "nan", None])
def test_an_annotation_that_is_no_duration_counts_as_none(text: str | None) -> None:
    trainjob = rendered(stall_timeout=3)
    trainjob["metadata"]["annotations"][STALL_TIMEOUT] = text
    assert observe(trainjob).stall_timeout is None
