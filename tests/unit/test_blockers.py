"""Blockers of a job in its related objects (shapes recorded from Kueue 0.18 and Trainer 2.3), and which are read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.objects import COMPLETE, Object, condition, counts, ended, event, pod, trainjob, waiting

from trainjob import JobRef, TrainJobSpec
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.blockers import event_time, first, in_events, in_workload, of_events, of_flavors, of_pods
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import QUEUE_LABEL, Blocker, Phase, observe

pytestmark = pytest.mark.anyio

NO_QUOTA = (
    "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu in flavor default, 8 more"
)


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
REJECTED = "The workload is deactivated due to Admission check(s): [budget], were rejected"


@pytest.mark.parametrize(
    ("resource", "reason", "message", "permanent"),
    [
        (workload(pending(NO_QUOTA), PREEMPTED), "Pending", f"{NO_QUOTA} (before: {PREEMPTED['message']})", False),
        (checked(pending(NO_QUOTA), state="Pending", message="asking"), "Pending", NO_QUOTA, False),
        (checked(RESERVED, state="Pending", message="asking"), "AdmissionCheck",
         "admission check budget is Pending: asking", False),
        (checked(RESERVED, state="Rejected", message=""), "AdmissionCheck",
         "admission check budget is Rejected: no message", True),
        (workload(condition("Evicted", "Deactivated", message=RETRIES), active=False), "Deactivated",
         f"Kueue deactivated the job: {RETRIES}", True),
        (workload(condition("Evicted", "Deactivated", message=REJECTED), active=False,
                  admissionChecks=[{"state": "Ready"}, {"state": "Rejected", "message": "no capacity"}]), "Deactivated",
         f"Kueue deactivated the job: {REJECTED}: no capacity", True),
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


INACTIVE = pending("ClusterQueue gpus is inactive", "Inadmissible")


def queue(kind: str, reason: str, message: str = "Can't admit new workloads: …") -> Object:
    active = condition("Active", reason, value="False", message=message)
    return {"kind": kind, "metadata": {"name": "gpus"}, "status": {"conditions": [active]}}


@pytest.mark.parametrize(
    ("related", "reason", "permanent"),
    [
        ([], "Inadmissible", False),  # it may not be read
        ([queue("LocalQueue", "ClusterQueueIsInactive"), queue("ClusterQueue", "Stopped")], "QueueStopped", False),
        ([queue("ClusterQueue", "FlavorNotFound")], "QueueIncomplete", True),
        ([{"kind": "ClusterQueue", "metadata": {"name": "gpus"}}], "Inadmissible", False),
    ],
)
def test_a_queue_that_admits_nothing_reports_whether_that_is_permanent(
    related: list[Object], reason: str, permanent: bool
) -> None:
    found = in_workload(workload(INACTIVE), related)
    assert found is not None
    assert (found.reason, found.permanent) == (reason, permanent)


@pytest.mark.parametrize(("node", "named"), [("", True), ("gpu-7", False)])
def test_a_flavor_whose_labels_no_node_has_is_named(node: str, named: bool) -> None:
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": "h100"}, "spec": {"nodeLabels": {"gpu": "h100"}}}
    found = of_flavors([flavor, {"kind": "Node", "metadata": {"name": node}}])
    assert (found is not None) is named
    if found is not None:
        assert found.message == "no node has the labels of flavor h100: gpu=h100"


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
def test_a_waiting_container_becomes_a_blocker(init: bool) -> None:
    found = in_pods(pod(0, waiting("ErrImagePull", "nosuch:1: not found"), init=init))
    assert found == Blocker("ErrImagePull", "pod x-node-0-0-abcde: ErrImagePull: nosuch:1: not found", permanent=True)


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


def running(*containers: Object, **spec: Any) -> Object:
    """A pod that runs, or is to run, with these containers besides the training container."""
    made = pod(0, ended(0), phase="Running")
    made["status"]["containerStatuses"] += containers
    made["spec"] |= {"containers": [{"name": "node"}, *({"name": each["name"]} for each in containers)], **spec}
    return made


PROXY: Object = {"name": "istio-proxy", "state": {"running": {}}}


def test_a_sidecar_that_keeps_the_pod_of_an_ended_rank_is_named() -> None:
    found = in_pods(running(PROXY))
    assert found is not None
    kept = "pod x-node-0-0-abcde has ended with code 0; its container istio-proxy keeps its pod running"
    assert (found.message, found.permanent) == (kept, False)
    assert "sidecar.istio.io/inject" in found.advice
    assert in_pods(running(), pod(0, {"running": {}}, phase="Running")) is None
    native = pod(0, ended(0), phase="Running") | {
        "spec": {"initContainers": [{"name": "p", "restartPolicy": "Always"}]}
    }
    native["status"]["initContainerStatuses"] = [{"name": "p", "state": {"running": {}}}]
    assert in_pods(native) is None, "Kubernetes stops it with the training container"


def test_a_scheduler_that_is_not_installed_is_named() -> None:
    unseen = pod(0, {}, phase="Pending", conditions=[]) | {"spec": {"schedulerName": "volcano"}}
    found = in_pods(unseen)
    assert found is not None
    assert (found.reason, found.permanent) == ("NoScheduler", False)
    assert "no scheduler named volcano has looked at the pod" in found.message
    assert in_pods(unseen | {"spec": {}}) is None


REFUSED = 'pods "x" is forbidden: exceeded quota: {}, requested: {}=1, used: {}=1, limited: {}=1'


@pytest.mark.parametrize(
    ("counted", "own"), [("pods", True), ("requests.nvidia.com/gpu", True), ("requests.cpu", False)]
)
def test_a_quota_that_the_job_itself_uses_up_is_permanent(counted: str, own: bool) -> None:
    resources = {"requests": {"nvidia.com/gpu": "1", "cpu": "500m"}}
    first_one = pod(0, {"running": {}}) | {"spec": {"containers": [{"name": "node", "resources": resources}]}}
    message = REFUSED.format("q", counted, counted, counted)
    events = [event("FailedCreate", message, kind="Job", about="x-node-0", time="2026-11-21T11:00:00Z")]
    found = in_events(events, [first_one])
    assert found is not None
    assert found.permanent is own, found
    others = in_events(events, [])
    assert others is not None
    assert not others.permanent, "another job may end"


@pytest.mark.parametrize(("minutes", "permanent"), [(9, False), (11, True)])
def test_a_pull_that_fails_for_an_unknown_reason_is_permanent_after_ten_minutes(minutes: int, permanent: bool) -> None:
    pulling = pod(0, waiting("ImagePullBackOff", "something new"), startTime="2026-11-21T10:00:00Z", phase="Pending")
    events = [event("BackOff", 'Back-off pulling image "a"', time=f"2026-11-21T10:{minutes:02}:00Z")]
    found = first(of_pods([pulling], events))
    assert found is not None
    assert found.meaning.permanent is permanent


# ---------------------------------------------------------------- effect on the phase

BLOCKER = Blocker("Pending", "no GPUs", permanent=True, advice="ask for fewer GPUs")


def test_between_two_pulls_the_latest_error_of_the_image_counts() -> None:
    waits = pod(state=waiting("ImagePullBackOff", 'Back-off pulling image "a:1"'), phase="Pending")
    events = [event("Failed", 'Failed to pull image "a:1": a:1: not found'), event("Failed", "Error: ImagePullBackOff")]
    (found,) = of_pods([waits], events)
    assert found.meaning.permanent
    assert found.text == 'ImagePullBackOff: Failed to pull image "a:1": a:1: not found'


@pytest.mark.parametrize(("holder", "permanent"), [("x-node-0-1-abcde", True), ("another-node-0-0-abcde", False)])
def test_a_volume_that_another_rank_of_the_job_holds_is_permanent(holder: str, permanent: bool) -> None:
    pods = [pod(0, waiting("ContainerCreating"), phase="Pending"), pod(1)]
    message = f'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) {holder}'
    (found,) = of_events([event("FailedAttachVolume", message)], pods)
    assert found.meaning.permanent == permanent
    assert message in found.text


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


# ---------------------------------------------------------------- which objects are read, over the fake server


QUEUED: dict[str, Any] = {"runtime": "r", "command": ["train"], "labels": {QUEUE_LABEL: "gpus"}}
EXPLAINED = ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses", "nodes")
NO_FLAVOR = condition("QuotaReserved", "Inadmissible", value="False", message="ClusterQueue gpus is inactive")
LOCAL: Object = {"metadata": {"name": "gpus"}, "spec": {"clusterQueue": "gpus"}}
LACKS = condition("Active", "FlavorNotFound", value="False", message="references missing ResourceFlavor(s): h100.")
MISSING: Object = {"metadata": {"name": "gpus"}, "status": {"conditions": [LACKS]}}


class Cluster(DirectBackend):
    """A cluster with one job in the queue ``gpus``."""

    async def launch(self, *conditions: Object, **more: Any) -> JobRef:
        ref = JobRef.of(await self.create(render(TrainJobSpec.parse(QUEUED | more), "key", 1, "default")))
        await self.patch(ref, {"spec": {"suspend": True}})
        if conditions:
            status = {"conditions": list(conditions)}
            labels = {"kueue.x-k8s.io/job-uid": ref.uid}
            self.put(
                "workloads",
                {"metadata": {"name": "w", "labels": labels}, "spec": {"queueName": "gpus"}, "status": status},
            )
        return ref

    def put(self, plural: str, item: Object, namespace: str = "default") -> None:
        self.store.put(plural, item | {"metadata": {"namespace": namespace, **item["metadata"]}})

    async def diagnose(self, ref: JobRef) -> Diagnosis:
        return diagnosis_of(await self.evidence(ref))


@pytest.fixture
def cluster() -> Cluster:
    backend = Cluster()
    backend.store.put("clustertrainingruntimes", {"metadata": {"name": "r"}})
    return backend


async def test_a_queue_that_admits_nothing_is_explained_by_its_cluster_queue(cluster: Cluster) -> None:
    ref = await cluster.launch(NO_FLAVOR)
    cluster.put("localqueues", LOCAL)
    cluster.put("clusterqueues", MISSING, namespace="")
    found = await cluster.diagnose(ref)
    assert (found.category, found.retry) == (Category.CONFIGURATION, RetryVerdict.CONFIGURATION)
    assert found.summary == "ClusterQueue gpus is FlavorNotFound: references missing ResourceFlavor(s): h100."


async def test_without_the_permission_nothing_is_permanent_and_the_kind_is_unseen(cluster: Cluster) -> None:
    ref = await cluster.launch(NO_FLAVOR)
    cluster.put("localqueues", LOCAL)
    cluster.put("clusterqueues", MISSING, namespace="")
    cluster.store.forbidden = (frozenset(EXPLAINED), frozenset())
    found = await cluster.diagnose(ref)
    assert (found.category, found.retry) == (Category.QUOTA, RetryVerdict.QUOTA)
    assert [each.partition(":")[0] for each in found.unseen] == ["localqueues"]


async def test_a_missing_priority_class_is_named(cluster: Cluster) -> None:
    ref = await cluster.launch(labels=QUEUED["labels"] | {"kueue.x-k8s.io/priority-class": "urgent"})
    found = await cluster.diagnose(ref)
    assert found.summary == "the job is not queued: its WorkloadPriorityClass urgent does not exist"
    assert found.retry is RetryVerdict.CONFIGURATION
    cluster.put("workloadpriorityclasses", {"metadata": {"name": "urgent"}}, namespace="")
    assert (await cluster.diagnose(ref)).category is Category.NONE


async def test_a_job_that_does_not_wait_costs_no_further_request(cluster: Cluster) -> None:
    ref = await cluster.launch(condition("QuotaReserved"), condition("Admitted"))
    await cluster.evidence(ref)
    assert not {f"GET {each}" for each in EXPLAINED} & set(cluster.requests)


@pytest.mark.parametrize("allowed", [True, False])
async def test_pods_that_may_not_be_listed_are_distinguished_from_no_pods(cluster: Cluster, allowed: bool) -> None:
    """By a field of the evidence, not by the text of `unseen`."""
    ref = await cluster.launch()
    cluster.store.forbidden = (frozenset() if allowed else frozenset({"pods"}), frozenset())
    evidence = await cluster.evidence(ref)
    assert (evidence.pods, evidence.logs, evidence.pods_visible) == ([], {}, allowed)
    assert [text.partition(":")[0] for text in evidence.unseen] == ([] if allowed else ["pods"])
