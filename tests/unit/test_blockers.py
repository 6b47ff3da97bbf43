"""Blockers of a job in its related objects (shapes recorded from Kueue 0.18 and Trainer 2.3)."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob._diagnosis.blockers import event_time, first, in_events, in_workload, of_pods
from trainjob.status import Blocker, Phase, observe

NO_QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor default, 8 more"
)
TOO_MUCH = "insufficient quota for cpu in flavor default, … current podset request (60) > maximum capacity (8)"


def in_pods(pods: list[dict[str, Any]]) -> Blocker | None:
    found = first(of_pods(pods))
    return found.blocker if found else None


def workload(*conditions: tuple[str, str, str, str], **fields: Any) -> dict[str, Any]:
    named = [dict(zip(("type", "status", "reason", "message"), each, strict=True)) for each in conditions]
    return {"spec": {"active": fields.pop("active", True)}, "status": {"conditions": named, **fields}}


PREEMPTED = ("Evicted", "True", "Preempted", "Preempted to accommodate a workload")
RESERVED = ("QuotaReserved", "True", "QuotaReserved", "")


@pytest.mark.parametrize(
    ("resource", "blocker"),
    [
        (workload(), None),
        (workload(RESERVED), None),
        (workload(("QuotaReserved", "False", "Pending", NO_QUOTA)), Blocker("Pending", NO_QUOTA)),
        (workload(("QuotaReserved", "False", "Pending", TOO_MUCH)), Blocker("Pending", TOO_MUCH, permanent=True)),
        (
            workload(("QuotaReserved", "False", "Inadmissible", "LocalQueue nosuch doesn't exist")),
            Blocker("Inadmissible", "LocalQueue nosuch doesn't exist", permanent=True),
        ),
        (
            workload(("QuotaReserved", "False", "Pending", NO_QUOTA), PREEMPTED),
            Blocker("Pending", f"{NO_QUOTA} (before: Preempted to accommodate a workload)"),
        ),
        (
            workload(
                ("QuotaReserved", "False", "Pending", NO_QUOTA),
                admissionChecks=[{"name": "budget", "state": "Pending", "message": "asking"}],
            ),
            Blocker("Pending", NO_QUOTA),
        ),
        (
            workload(RESERVED, admissionChecks=[{"name": "budget", "state": "Pending", "message": "asking"}]),
            Blocker("AdmissionCheck", "admission check budget is Pending: asking"),
        ),
        (
            workload(RESERVED, admissionChecks=[{"name": "budget", "state": "Rejected", "message": ""}]),
            Blocker("AdmissionCheck", "admission check budget is Rejected: no message", permanent=True),
        ),
        (
            workload(
                ("Evicted", "True", "Deactivated", "exceeded the maximum number of re-queuing retries"), active=False
            ),
            Blocker(
                "Deactivated",
                "Kueue deactivated the job: exceeded the maximum number of re-queuing retries",
                permanent=True,
            ),
        ),
        (
            workload(RESERVED, ("Admitted", "True", "Admitted", ""), ("Finished", "True", "Failed", "jobset failed")),
            Blocker("WorkloadFinished", "Kueue has finished with the job: it does not admit it again", permanent=True),
        ),
    ],
)
def test_workload_conditions_become_blockers(resource: dict[str, Any], blocker: Blocker | None) -> None:
    assert in_workload(resource) == blocker


def test_an_admitted_but_suspended_job_is_blocked() -> None:
    found = in_workload(workload(RESERVED, ("Admitted", "True", "Admitted", "")))
    assert found is not None
    assert found.reason == "AdmittedButSuspended"
    assert not found.permanent, "every job has this state briefly"


def event(
    message: str, time: str = "2026-11-21T10:00:00Z", reason: str = "TrainJobResourcesCreationFailed"
) -> dict[str, Any]:
    return {"reason": reason, "message": f"TrainJob resources reconciliation failed: {message}", "eventTime": time}


def test_the_latest_event_is_the_blocker() -> None:
    refused = 'admission webhook "vjobset.kb.io" denied the request: too long'
    events = [
        event(refused, "2026-11-21T10:00:09.5Z"),
        event("the object has been modified"),
        event("later, of no interest", "2026-11-21T10:01:00Z", reason="Pulled"),
    ]
    assert in_events(events) == Blocker("TrainJobResourcesCreationFailed", refused, permanent=True)
    assert in_events(events[1:]) == Blocker("TrainJobResourcesCreationFailed", "the object has been modified")
    assert in_events(events[2:]) is None


def test_an_outdated_webhook_cache_is_not_permanent() -> None:
    """Recorded from JobSet with a busy Kueue 0.18."""
    message = (
        'job "a-node-0" creation failed with error: admission webhook "mjob.kb.io" denied the request: '
        'JobSet.jobset.x-k8s.io "a" not found'
    )
    found = in_events([{**event("", reason="JobCreationFailed"), "message": message}])
    assert found == Blocker("JobCreationFailed", message, permanent=False)


def test_event_time_prefers_the_latest_field() -> None:
    assert event_time({"eventTime": "b", "series": {"lastObservedTime": "c"}}) == "c"
    assert event_time({"firstTimestamp": None, "lastTimestamp": None, "eventTime": "b"}) == "b"
    assert event_time({"firstTimestamp": "a", "lastTimestamp": "b"}) == "b"
    assert event_time({}) == ""


def pod(reason: str, message: str = "m", kind: str = "containerStatuses") -> dict[str, Any]:
    return {
        "metadata": {"name": "p"},
        "status": {kind: [{"state": {"waiting": {"reason": reason, "message": message}}}]},
    }


@pytest.mark.parametrize(
    ("reason", "message", "permanent"),
    [
        ("ImagePullBackOff", "connection refused", False),
        ("ErrImagePull", "nosuch:1: not found", True),
        ("InvalidImageName", "", True),
        ("CreateContainerConfigError", 'secret "token" not found', True),
    ],
)
def test_waiting_containers_become_blockers(reason: str, message: str, permanent: bool) -> None:
    for kind in ("containerStatuses", "initContainerStatuses"):
        assert in_pods([pod(reason, message, kind)]) == Blocker(reason, f"pod p: {reason}: {message}", permanent)


def test_normal_waiting_states_are_not_blockers() -> None:
    assert in_pods([pod("ContainerCreating"), pod("PodInitializing"), pod("CrashLoopBackOff")]) is None


def test_permanent_blockers_come_first() -> None:
    scheduling = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pending = {"metadata": {"name": "q"}, "status": {"conditions": [scheduling]}}
    assert in_pods([pending]) == Blocker("Unschedulable", "pod q is not scheduled: 0/3 nodes")
    found = in_pods([pending, pod("InvalidImageName")])
    assert found is not None
    assert found.reason == "InvalidImageName"


# --- effect on the phase

BLOCKER = Blocker("Pending", "no GPUs", permanent=True, advice="ask for fewer GPUs")


def test_a_blocker_is_the_message_of_an_idle_phase() -> None:
    queued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": True}}
    seen = observe(queued, None, BLOCKER)
    assert (seen.phase, seen.reason, seen.stuck) == (Phase.QUEUED, "Pending", True)
    assert seen.message == "waiting for admission in queue q: no GPUs"
    assert seen.advice == "ask for fewer GPUs"
    starting = observe({"spec": {}, "status": {"jobsStatus": [{"name": "node", "active": 1}]}}, None, BLOCKER)
    assert (starting.phase, starting.message) == (Phase.STARTING, "no GPUs")


@pytest.mark.parametrize(
    "trainjob",
    [
        {"spec": {}, "status": {"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}},
        {"spec": {}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        None,
    ],
)
def test_a_blocker_does_not_change_other_phases(trainjob: dict[str, Any] | None) -> None:
    assert observe(trainjob, None, BLOCKER) == observe(trainjob)
