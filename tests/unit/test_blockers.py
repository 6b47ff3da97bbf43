"""Blockers of a job in its related objects (shapes recorded from Kueue 0.18 and Trainer 2.3)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.objects import COMPLETE, Object, condition, counts, event, pod, trainjob, waiting

from trainjob._diagnosis.blockers import event_time, first, in_events, in_workload, of_pods
from trainjob.status import QUEUE_LABEL, Blocker, Phase, observe

NO_QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor default, 8 more"
)
TOO_MUCH = "insufficient quota for cpu in flavor default, … current podset request (60) > maximum capacity (8)"


def workload(*conditions: Object, active: bool = True, **status: Any) -> Object:
    return {"spec": {"active": active}, "status": {"conditions": list(conditions), **status}}


def pending(message: str, reason: str = "Pending") -> Object:
    return condition("QuotaReserved", reason, value="False", message=message)


def checked(*conditions: Object, state: str, message: str) -> Object:
    """A Workload with an admission check."""
    return workload(*conditions, admissionChecks=[{"name": "budget", "state": state, "message": message}])


RESERVED, ADMITTED = condition("QuotaReserved"), condition("Admitted")
PREEMPTED = condition("Evicted", "Preempted", message="Preempted to accommodate a workload")
RETRIES = "exceeded the maximum number of re-queuing retries"


@pytest.mark.parametrize(
    ("resource", "reason", "message", "permanent"),
    [
        (workload(pending(NO_QUOTA)), "Pending", NO_QUOTA, False),
        (workload(pending(TOO_MUCH)), "Pending", TOO_MUCH, True),
        (workload(pending("LocalQueue nosuch doesn't exist", "Inadmissible")), "Inadmissible",
         "LocalQueue nosuch doesn't exist", True),
        (workload(pending(NO_QUOTA), PREEMPTED), "Pending", f"{NO_QUOTA} (before: {PREEMPTED['message']})", False),
        (checked(pending(NO_QUOTA), state="Pending", message="asking"), "Pending", NO_QUOTA, False),
        (checked(RESERVED, state="Pending", message="asking"), "AdmissionCheck",
         "admission check budget is Pending: asking", False),
        (checked(RESERVED, state="Rejected", message=""), "AdmissionCheck",
         "admission check budget is Rejected: no message", True),
        (workload(condition("Evicted", "Deactivated", message=RETRIES), active=False), "Deactivated",
         f"Kueue deactivated the job: {RETRIES}", True),
        (workload(RESERVED, ADMITTED, condition("Finished", "Failed", message="jobset failed")), "WorkloadFinished",
         "Kueue has finished with the job: it does not admit it again", True),
    ],
)  # fmt: skip
def test_workload_conditions_become_blockers(resource: Object, reason: str, message: str, permanent: bool) -> None:
    assert in_workload(resource) == Blocker(reason, message, permanent=permanent)


def test_a_workload_with_quota_is_no_blocker_unless_its_job_stays_suspended() -> None:
    assert in_workload(workload()) is None
    assert in_workload(workload(RESERVED)) is None
    found = in_workload(workload(RESERVED, ADMITTED))
    assert found is not None
    assert found.reason == "AdmittedButSuspended"
    assert not found.permanent, "every job has this state briefly"


# ---------------------------------------------------------------- Events


def creation_failed(message: str, time: str = "2026-11-21T10:00:00Z") -> Object:
    prefix = "TrainJob resources reconciliation failed: "
    return event("TrainJobResourcesCreationFailed", prefix + message, time=time, kind="TrainJob")


def test_the_latest_event_is_the_blocker() -> None:
    refused = 'admission webhook "vjobset.kb.io" denied the request: too long'
    events = [
        creation_failed(refused, "2026-11-21T10:00:09.5Z"),
        creation_failed("the object has been modified"),
        event("Pulled", "later, of no interest", time="2026-11-21T10:01:00Z", kind="TrainJob"),
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
    assert in_events([event("JobCreationFailed", message, kind="", about={})]) == Blocker(
        "JobCreationFailed", message, permanent=False
    )


@pytest.mark.parametrize(
    ("times", "latest"),
    [
        ({"eventTime": "b", "series": {"lastObservedTime": "c"}}, "c"),
        ({"firstTimestamp": None, "lastTimestamp": None, "eventTime": "b"}, "b"),
        ({"firstTimestamp": "a", "lastTimestamp": "b"}, "b"),
        ({}, ""),
    ],
)
def test_event_time_prefers_the_latest_field(times: Object, latest: str) -> None:
    assert event_time(times) == latest


# ---------------------------------------------------------------- pods


def in_pods(*pods: Object) -> Blocker | None:
    found = first(of_pods(pods))
    return found.blocker if found else None


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize(
    ("reason", "message", "permanent"),
    [
        ("ImagePullBackOff", "connection refused", False),
        ("ErrImagePull", "nosuch:1: not found", True),
        ("InvalidImageName", "", True),
        ("CreateContainerConfigError", 'secret "token" not found', True),
    ],
)
def test_waiting_containers_become_blockers(reason: str, message: str, permanent: bool, init: bool) -> None:
    found = in_pods(pod(0, waiting(reason, message), init=init))
    assert found == Blocker(reason, f"pod x-node-0-0-abcde: {reason}: {message}", permanent)


def test_normal_waiting_states_are_not_blockers() -> None:
    normal = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")
    assert in_pods(*(pod(0, waiting(reason)) for reason in normal)) is None


def test_permanent_blockers_come_first() -> None:
    unscheduled = condition("PodScheduled", "Unschedulable", value="False", message="0/3 nodes")
    unplaced = pod(0, {}, conditions=[unscheduled])
    assert in_pods(unplaced) == Blocker("Unschedulable", "pod x-node-0-0-abcde is not scheduled: 0/3 nodes")
    found = in_pods(unplaced, pod(1, waiting("InvalidImageName")))
    assert found is not None
    assert found.reason == "InvalidImageName"


# ---------------------------------------------------------------- effect on the phase

BLOCKER = Blocker("Pending", "no GPUs", permanent=True, advice="ask for fewer GPUs")


def test_a_blocker_is_the_message_of_an_idle_phase() -> None:
    seen = observe(trainjob(labels={QUEUE_LABEL: "q"}, spec={"suspend": True}), None, BLOCKER)
    assert (seen.phase, seen.reason, seen.stuck) == (Phase.QUEUED, "Pending", True)
    assert seen.message == "waiting for admission in queue q: no GPUs"
    assert seen.advice == "ask for fewer GPUs"
    starting = observe(trainjob(jobsStatus=[counts(active=1)]), None, BLOCKER)
    assert (starting.phase, starting.message) == (Phase.STARTING, "no GPUs")


@pytest.mark.parametrize("job", [trainjob(jobsStatus=[counts(active=1, ready=1)]), trainjob(COMPLETE), None])
def test_a_blocker_does_not_change_other_phases(job: Object | None) -> None:
    assert observe(job, None, BLOCKER) == observe(job)
