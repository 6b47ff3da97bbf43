"""Events, states and messages that change the meaning of a termination."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.objects import STEP, Object, condition, counts, ended, event, pod, trainjob, waiting

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.blockers import around, first
from trainjob._diagnosis.evidence import Evidence
from trainjob._support.kube_objects import has_trained
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import QUEUE_LABEL, Phase, observe

CONFIGURATION, INFRASTRUCTURE, UNKNOWN = RetryVerdict.CONFIGURATION, RetryVerdict.INFRASTRUCTURE, RetryVerdict.UNKNOWN

NODES = {"trainer": {"numNodes": 2}}
FAILED = trainjob(condition("Failed", "FailedJobs", message="jobset failed"), spec=NODES)
RUNNING = trainjob(spec=NODES, jobsStatus=[counts(active=1)])
KILLED = pod(last=ended(137))
OOM = ended(137, reason="OOMKilled")


def diagnosed(pods: list[Object], *events: Object, job: Object = FAILED, log: list[str] | None = None) -> Diagnosis:
    """The diagnosis of pods, which have all written the same log."""
    logs = {each["metadata"]["name"]: log for each in pods} if log else {}
    return diagnosis_of(Evidence(job, pods, logs, events))


def raised(*lines: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', *lines]


# ---------------------------------------------------------------- probes and hooks


def killing(message: str = "Container node failed liveness probe, will be restarted", **about: Any) -> Object:
    return event("Killing", message, **{"container": "node", **about})


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (event("FailedPostStartHook", "PostStartHook failed", container="node"), "postStart hook"),
        (killing(time="2026-11-21T10:01:00Z", last="2026-11-21T10:09:00Z"), "liveness probe"),  # repeated
        (killing("Stopping container node"), ""),
        (killing(container="proxy"), ""),
        (killing(about="x-node-0-1-fghij"), ""),
        (killing(time="2026-11-21T10:06:00Z"), ""),
        (killing(time="2026-11-21T10:01:00Z"), ""),
        (event("Unhealthy", "Readiness probe failed: no", container="node"), ""),
    ],
)
def test_only_an_event_about_the_container_at_its_end_explains_the_kill(other: Object, cause: str) -> None:
    by = f"the kubelet because its {cause} failed" if cause else "signal 9 (SIGKILL)"
    assert diagnosed([KILLED], other).summary == f"node-0 was killed by {by}"


# ---------------------------------------------------------------- memory


def limited(where: str) -> Object:
    made = pod(last=OOM)
    target = made["spec"]["containers"][0] if where == "container" else made["spec"]
    target["resources"] = {"limits": {"memory": "1Gi"}}
    return made


@pytest.mark.parametrize(
    ("killed", "retry", "text"),
    [
        (pod(last=OOM), INFRASTRUCTURE, "its node ran out of memory"),
        (pod(last=ended(1, reason="OOMKilled")), INFRASTRUCTURE, "its node ran out of memory"),
        (limited("container"), UNKNOWN, "more memory than its limit"),
        (limited("pod"), UNKNOWN, "more memory than its limit"),
        (pod(last=OOM, container="unpack", init=True), INFRASTRUCTURE, "container unpack"),
    ],
)
def test_out_of_memory_names_the_limit_or_the_node(killed: Object, retry: RetryVerdict, text: str) -> None:
    for events in ([], [killing()]):  # also if a probe failed
        found = diagnosed([killed], *events)
        assert (found.category, found.retry) == (Category.OUT_OF_MEMORY, retry)
        assert text in found.summary
        assert ("of this container" in found.advice) == ("unpack" in text)


@pytest.mark.parametrize(
    ("finished", "summary"),
    [("2026-11-21T10:05:00Z", "was killed by signal 9"), ("2026-11-21T10:20:10Z", "its pod was deleted")],
)
def test_a_kill_before_the_deletion_is_not_caused_by_it(finished: str, summary: str) -> None:
    gone = pod(0, ended(137, finishedAt=finished))
    gone["metadata"] |= {"deletionTimestamp": "2026-11-21T10:20:40Z", "deletionGracePeriodSeconds": 30}
    assert summary in diagnosed([gone]).summary


BARRIER = (
    "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. "
    "Id: [Init]Wait_for_all_tasks_to_register::0. # of tasks that reached the barrier: {}. "
    "The first task at the barrier: /job:jax_worker/replica:0/task:0."
)


@pytest.mark.parametrize(
    ("joined", "nodes", "text"),
    [
        ("2/3", 2, "correct num_nodes, or the number of processes"),
        ("1/2", 2, "the right number of processes (2 nodes), that no process failed earlier"),  # one is missing
        ("3/4", 2, "that no process failed earlier"),  # two processes per node, one is missing
        ("1/2", 1, "correct num_nodes, or the number of processes"),
    ],
)
def test_advice_for_a_barrier_depends_on_the_number_of_nodes(joined: str, nodes: int, text: str) -> None:
    job = FAILED | {"spec": {"trainer": {"numNodes": nodes}}}
    pods = [pod(rank, last=ended(1)) for rank in range(nodes)]
    found = diagnosed(pods, job=job, log=raised(BARRIER.format(joined)))
    assert found.retry is (CONFIGURATION if "correct" in text else UNKNOWN), found.text()
    assert text in found.advice


# ---------------------------------------------------------------- nodes


NOT_READY = event("NodeNotReady", "Node is not ready", time="2026-11-21T10:04:00Z")
UNREADY = pod(conditions=[condition("Ready", value="False")])
REPLACED = pod(phase="Pending", metadata={"name": "x-node-0-0-other", "creationTimestamp": "2026-11-21T10:04:30Z"})


def test_a_not_ready_node_of_a_running_rank_is_reported() -> None:
    found = diagnosed([UNREADY], NOT_READY, job=RUNNING)
    assert found.phase is Phase.STARTING
    assert "launch the job again" not in found.advice, "that would start a second training"
    finding = first(around([], [NOT_READY]))
    assert finding is not None, "a waiter lists pending pods only"
    seen = observe(RUNNING, observe(trainjob(jobsStatus=[counts(ready=1)])), finding.blocker)
    assert (seen.phase, seen.has_run, seen.stuck) == (Phase.RESTARTING, True, False)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(pod(conditions=[condition("Ready")]), id="ready again"),
        pytest.param(UNREADY | {"status": UNREADY["status"] | {"phase": "Succeeded"}}, id="ended"),
        pytest.param(REPLACED, id="replaced"),
    ],
)
def test_a_node_that_recovered_is_not_a_blocker(now: Object) -> None:
    assert first(around([now], [NOT_READY])) is None


# ---------------------------------------------------------------- advice for a job that still runs

PREEMPTED = "Preempted to accommodate"


def test_advice_for_a_preempted_job_in_the_queue_is_to_wait() -> None:
    queued = trainjob(spec={"suspend": True}, labels={QUEUE_LABEL: "q"})
    pending = condition("QuotaReserved", "Pending", value="False", message=PREEMPTED)
    workload = {"status": {"conditions": [pending, condition("Evicted", "Preempted", message=PREEMPTED)]}}
    found = diagnosis_of(Evidence(queued, workload=workload))
    assert (found.category, found.phase) == (Category.PREEMPTED, Phase.QUEUED)
    assert found.advice.startswith("wait: the cluster restarts it")


def test_advice_for_a_drained_node_depends_on_the_phase() -> None:
    drained = pod(phase="Failed", conditions=[condition("DisruptionTarget", "EvictionByEvictionAPI")])
    assert diagnosed([drained], job=RUNNING).advice.startswith("wait: the cluster restarts it")
    assert diagnosed([drained]).advice.startswith("launch the job again")


# ---------------------------------------------------------------- summaries and helpers


def test_exit_code_of_a_stopped_pod_is_that_of_the_training_container() -> None:
    evicted = pod(0, ended(143), reason="Evicted", message="The node was low on resource: memory.")
    evicted["status"]["containerStatuses"].insert(0, {"name": "proxy", "state": ended(9)})
    evicted["spec"]["containers"].insert(0, {"name": "proxy"})
    assert diagnosed([evicted]).exit_code == 143


@pytest.mark.parametrize("began", [pod(0, ended(0)), pod(0, {}, ended(0))], ids=["now", "before"])
def test_has_trained_requires_a_started_training_container(began: Object) -> None:
    assert has_trained(began)
    assert not has_trained(pod(0, waiting("ImagePullBackOff")))
    began["metadata"]["labels"][STEP] = "dataset-initializer"
    assert not has_trained(began)


@pytest.mark.parametrize("mounted", [False, True])
def test_a_failed_mount_is_outdated_once_an_init_container_runs(mounted: bool) -> None:
    state = {"running": {}} if mounted else waiting("PodInitializing")
    starting = pod(0, state, container="fetch", init=True, phase="Pending")
    failed = event("FailedMount", "failed to sync configmap cache: timed out waiting for the condition")
    assert (first(around([starting], [failed])) is None) is mounted


# ---------------------------------------------------------------- states are weighed


OWN_ERROR = raised("    raise ValueError('no label column')", "ValueError: no label column")


def test_an_own_exception_counts_although_a_child_was_killed_because_memory_ran_out() -> None:
    found = diagnosed(
        [limited("container") | {"status": pod(last=ended(1, reason="OOMKilled"))["status"]}], log=OWN_ERROR
    )
    assert found.summary == (
        "node-0 exited with code 1: ValueError: no label column; one of its processes was killed because memory ran out"
    )
    assert (found.category, found.retry) == (Category.USER_CODE, UNKNOWN)
    memory = diagnosed([pod(last=ended(1, reason="OOMKilled"))], log=raised("MemoryError"))
    assert memory.category is Category.OUT_OF_MEMORY


def test_a_command_that_cannot_be_run_needs_no_message() -> None:
    found = diagnosed([pod(last=ended(127, reason="ContainerCannotRun"))])
    assert (found.summary, found.retry) == ("node-0 could not be started: command not found", CONFIGURATION)


def test_a_code_above_128_with_a_normal_exit_is_no_signal() -> None:
    assert diagnosed([pod(last=ended(137, signal=0))]).summary == "node-0 exited with code 137"


def test_a_job_that_has_not_failed_has_no_retry_verdict() -> None:
    for job in (trainjob(condition("Complete", "JobsCompleted")), RUNNING):
        assert diagnosed([], job=job).as_dict()["retry"] is None


def test_a_failed_job_without_pods_names_what_keeps_them() -> None:
    found = diagnosed([])
    assert "jobset failed; its pods were deleted before the reason was read" in found.summary
    assert "ttlSecondsAfterFinished" in found.advice
    assert (found.category, found.retry) == (Category.UNKNOWN, UNKNOWN)


GLOO_LOST = raised("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711")


@pytest.mark.parametrize(
    ("steps", "culprit"), [((None, None), "node-1"), ((3, 9), "node-1"), ((9, 9), "node-0"), ((12, 9), "node-0")]
)
def test_a_rank_that_ended_before_the_others_lost_it_is_the_root_cause(
    steps: tuple[int | None, int | None], culprit: str
) -> None:
    pods = [pod(0, ended(1, finishedAt="2026-11-21T10:05:09Z")), pod(1, ended(0, finishedAt="2026-11-21T10:05:08Z"))]
    logs = {pods[0]["metadata"]["name"]: GLOO_LOST, pods[1]["metadata"]["name"]: ["iterator exhausted"]}
    for (name, log), rank, count in zip(list(logs.items()), (1, 0), (steps[1], steps[0]), strict=True):
        if count is not None:
            marker = {"rank": 1 - rank, "count": count, "step": count}
            logs[name] = [*log[:-1], f"trainjob.rank {json.dumps(marker)}", log[-1]]
    found = diagnosis_of(Evidence(FAILED, pods, logs))
    assert found.rank == culprit, found.text()
    if culprit == "node-1":
        at = " at step 3" if steps[0] else ""
        assert found.summary == (
            f"node-1 ended with code 0{at} (its last line: iterator exhausted) before the others, which then lost it"
        )
        assert (found.category, found.exit_code) == (Category.USER_CODE, 0)


HEARTBEAT = (
    "[rank0]:[E1127 10:00:00.1 ProcessGroupNCCL.cpp:1794] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump "
    "signal due to a collective timeout from rank 1 and we will try our best to dump the debug info."
)
WATCHDOG = (
    "[rank0]:[E1127 19:52:01.1 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=6000) ran for 6057 milliseconds"
)


@pytest.mark.parametrize(
    ("line", "nodes", "rank", "words", "advice"),
    [
        (HEARTBEAT, 2, "node-1", "did not end in time; rank 1 reported it first", "did not join"),
        (WATCHDOG, 1, "node-0", "ALLREDUCE (sequence number 2) did not end within 6 s", "cannot be the network"),
        (WATCHDOG, 2, "node-0", "ALLREDUCE (sequence number 2) did not end within 6 s", "did not join"),
    ],
)
def test_a_collective_that_timed_out_is_a_hang(line: str, nodes: int, rank: str, words: str, advice: str) -> None:
    pods = [pod(number, last=ended(134)) for number in range(nodes)]
    job = FAILED | {"spec": {"trainer": {"numNodes": nodes}}}
    found = diagnosed(pods, job=job, log=["step 1200", line])
    assert (found.category, found.rank) == (Category.HANG, rank), found.text()
    assert words in found.summary
    assert advice in found.advice
