from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainjob.diagnosis import TAIL_LINES, Category, Diagnosis, Evidence, diagnose, rank_of
from trainjob.errors import RetryVerdict
from trainjob.status import observe


def trainjob(reason: str = "FailedJobs", message: str = "jobset failed", **status: Any) -> dict[str, Any]:
    failed = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    return {"metadata": {"namespace": "ns", "name": "x"}, "spec": {}, "status": {"conditions": [failed], **status}}


def pod(index: int, code: int | None, second: int = 0, role: str = "node", **ended: Any) -> dict[str, Any]:
    """A pod whose container ended with `code`, or still runs; Kubernetes' times have whole seconds."""
    finished = {"exitCode": code, "reason": "Error", "finishedAt": f"2026-11-21T10:00:{second:02}Z", **ended}
    return {
        "metadata": {
            "name": f"x-{role}-0-{index}-abcde",
            "labels": {
                "jobset.sigs.k8s.io/replicatedjob-name": role,
                "batch.kubernetes.io/job-completion-index": str(index),
            },
        },
        "status": {
            "containerStatuses": [
                {"name": "node", "state": {"running": {}} if code is None else {"terminated": finished}}
            ]
        },
    }


def diagnosed(*pods: dict[str, Any], job: dict[str, Any] | None = None, **evidence: Any) -> Diagnosis:
    return diagnose(Evidence(job or trainjob(), pods, **evidence))


def test_the_rank_that_failed_by_itself_is_named() -> None:
    log = [f"line {i}" for i in range(50)]
    found = diagnosed(pod(0, None), pod(1, 3), logs={"x-node-0-1-abcde": log, "x-node-0-0-abcde": ["fine"]})
    assert (found.rank, found.exit_code) == ("node-1", 3)
    assert (found.category, found.retry) == (Category.USER_CODE, RetryVerdict.USER)
    assert found.log == tuple(log[-TAIL_LINES:])
    assert found.summary == "node-1 exited with code 3"
    text = found.text()
    assert text.startswith("TrainJob ns/x failed: node-1 exited with code 3\nlast lines of node-1:\n  | line 30\n")
    assert "category: user code; retry: user" in text


@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("told", [143, 137])
def test_ranks_that_were_told_to_stop_are_not_to_blame(told: int, second: int) -> None:
    """Peers end later, in the same second, or, by another node's clock, earlier."""
    for pods in ([pod(0, told, second), pod(1, 3, 1)], [pod(1, 3, 1), pod(0, told, second)]):
        assert diagnosed(*pods).rank == "node-1"


@pytest.mark.parametrize("second", [1, 2])
def test_a_rank_killed_from_outside_comes_before_those_told_to_stop(second: int) -> None:
    for pods in ([pod(0, 143, second), pod(1, 137, 1)], [pod(1, 137, 1), pod(0, 143, second)]):
        found = diagnosed(*pods)
        assert (found.rank, found.exit_code) == ("node-1", 137)
        assert found.retry is RetryVerdict.INFRASTRUCTURE
        assert "signal 9 (SIGKILL)" in found.summary
        assert "memory" in found.advice


def test_a_rank_that_had_to_be_killed_after_its_grace_period_is_not_the_first() -> None:
    assert diagnosed(pod(0, 143, 1), pod(1, 137, 31)).rank == "node-0"


def test_the_first_of_several_that_failed_by_themselves() -> None:
    assert diagnosed(pod(0, 1, 5), pod(1, 3, 4), pod(2, 1, 6)).rank == "node-1"


@pytest.mark.parametrize(
    ("code", "ended", "category", "retry", "says"),
    [
        (137, {"reason": "OOMKilled"}, Category.OUT_OF_MEMORY, RetryVerdict.USER, "OOMKilled"),
        (1, {"reason": "OOMKilled"}, Category.OUT_OF_MEMORY, RetryVerdict.USER, "more memory"),
        (
            128,
            {"reason": "StartError", "message": 'exec: "tran": not found'},
            Category.CONFIGURATION,
            RetryVerdict.CONFIGURATION,
            'exec: "tran"',
        ),
        (
            127,
            {"reason": "ContainerCannotRun"},
            Category.CONFIGURATION,
            RetryVerdict.CONFIGURATION,
            "command not found",
        ),
        (139, {}, Category.USER_CODE, RetryVerdict.USER, "signal 11 (SIGSEGV)"),
        (134, {}, Category.USER_CODE, RetryVerdict.USER, "signal 6 (SIGABRT)"),
        (143, {}, Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "signal 15 (SIGTERM)"),
        (255, {}, Category.USER_CODE, RetryVerdict.USER, "exited with code 255"),
        (163, {}, Category.USER_CODE, RetryVerdict.USER, "exited with code 163"),
        (127, {}, Category.USER_CODE, RetryVerdict.USER, "exited with code 127"),
        (-1, {}, Category.USER_CODE, RetryVerdict.USER, "exited with code -1"),
    ],
)
def test_ends(code: int, ended: dict[str, Any], category: Category, retry: RetryVerdict, says: str) -> None:
    found = diagnosed(pod(0, code, **ended))
    assert (found.category, found.retry, found.exit_code) == (category, retry, code)
    assert says in found.summary


def test_oom_comes_before_what_it_brought_down() -> None:
    assert diagnosed(pod(0, 143, 1), pod(1, 137, 1, reason="OOMKilled")).category is Category.OUT_OF_MEMORY


def test_a_container_that_was_restarted_in_place() -> None:
    restarted = pod(0, None)
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "finishedAt": "2026-11-21T10:00:00Z"}}
    restarted["status"]["containerStatuses"][0]["lastState"] = ended
    assert diagnosed(restarted).exit_code == 3


@pytest.mark.parametrize(
    ("job", "category", "retry", "says"),
    [
        (
            trainjob("DeadlineExceeded", "TrainJob exceeded its active deadline"),
            "deadline",
            "user",
            "its active deadline",
        ),
        (trainjob("SupervisorLost", "the local supervisor was killed"), "node lost", "infrastructure", "was killed"),
        (
            trainjob("ReachedMaxRestarts", "jobset failed due to …"),
            "unknown",
            "infrastructure",
            "jobset failed due to …",
        ),
        (trainjob(message=""), "unknown", "infrastructure", "nothing is left that says why"),
    ],
)
def test_what_conditions_say(job: dict[str, Any], category: str, retry: str, says: str) -> None:
    found = diagnosed(job=job)
    assert (found.category, found.retry) == (category, retry)
    assert says in found.summary
    assert found.rank == ""


def test_a_deadline_is_none_of_the_ranks_it_stopped() -> None:
    found = diagnosed(pod(0, 143), job=trainjob("DeadlineExceeded"), logs={"x-node-0-0-abcde": ["epoch 3"]})
    assert found.category is Category.DEADLINE
    assert found.log == ("epoch 3",)
    assert diagnosed(job=trainjob("DeadlineExceeded"), logs={"other": ["x"]}).log == ("x",)


def test_deleted() -> None:
    found = diagnose(Evidence(None))
    assert (found.category, found.job) == (Category.DELETED, "?/?")


def test_a_final_observation_stands_though_the_object_is_gone_or_runs_again() -> None:
    final = observe(trainjob("DeadlineExceeded"))
    again = {**trainjob(), "status": {"jobsStatus": [{"name": "node", "active": 1}]}}
    for left in (None, again):
        assert diagnose(Evidence(left), final).category is Category.DEADLINE


def test_what_could_not_be_seen_is_said() -> None:
    found = diagnosed(pod(0, 3), unseen=["pods: no right to list"])
    assert "not seen: pods: no right to list" in found.text()


def test_it_can_be_written_as_json() -> None:
    written = json.loads(json.dumps(diagnosed(pod(0, 3)).as_dict()))
    assert written["category"] == "user code"
    assert written["exit_code"] == 3


def test_rank_of_pods_without_labels() -> None:
    assert rank_of({}) == "pod-0"
    assert rank_of(pod(3, None, role="launcher")) == "launcher-3"


# ---------------------------------------------------------------- whatever is left

NAMES = st.sampled_from(
    [
        "metadata",
        "status",
        "labels",
        "name",
        "containerStatuses",
        "state",
        "lastState",
        "terminated",
        "exitCode",
        "reason",
        "message",
        "finishedAt",
        "conditions",
        "type",
        "jobset.sigs.k8s.io/replicatedjob-name",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-300, 300) | st.floats() | st.sampled_from(["Error", "OOMKilled", "x"])
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=20)
PODS = st.builds(pod, st.integers(0, 3), JSON, st.integers(0, 59), reason=JSON, message=JSON, finishedAt=JSON)


@given(
    st.none() | st.dictionaries(NAMES, JSON) | st.builds(trainjob, JSON, JSON, jobsStatus=JSON),
    st.lists(st.dictionaries(NAMES, JSON) | PODS, max_size=4),
    st.dictionaries(st.sampled_from(["x-node-0-0-abcde", "x"]), st.lists(st.text(), max_size=3)),
)
def test_it_never_raises(job: dict[str, Any] | None, pods: list[dict[str, Any]], logs: dict[str, list[str]]) -> None:
    found = diagnose(Evidence(job, pods, logs))
    assert found.category in Category
    assert found.text()
    json.dumps(found.as_dict())
