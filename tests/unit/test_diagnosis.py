from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob._diagnosis import TAIL_LINES, diagnosis_of
from trainjob._diagnosis.crashes import crashes_in
from trainjob._support.kube_objects import rank_of
from trainjob.status import Observation, Phase, observe
from trainjob.verdicts import Category, Diagnosis, Evidence, RetryVerdict


def trainjob(reason: str = "FailedJobs", message: str = "jobset failed", **status: Any) -> dict[str, Any]:
    failed = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    return {"metadata": {"namespace": "ns", "name": "x"}, "spec": {}, "status": {"conditions": [failed], **status}}


def pod(index: int, code: int | None, second: int = 0, role: str = "node", **ended: Any) -> dict[str, Any]:
    """A pod whose container terminated with `code`, or is still running; Kubernetes' times have whole seconds."""
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
    return diagnosis_of(Evidence(job or trainjob(), pods, **evidence))


def test_root_cause_is_the_rank_that_failed_by_itself() -> None:
    log = [f"line {i}" for i in range(50)]
    found = diagnosed(pod(0, None), pod(1, 3), logs={"x-node-0-1-abcde": log, "x-node-0-0-abcde": ["fine"]})
    assert (found.rank, found.exit_code) == ("node-1", 3)
    assert (found.category, found.retry) == (Category.USER_CODE, RetryVerdict.UNKNOWN)
    assert found.log == tuple(log[-TAIL_LINES:])
    assert found.summary == "node-1 exited with code 3"
    text = found.text()
    assert text.startswith("TrainJob ns/x failed: node-1 exited with code 3\nlast lines of node-1:\n  | line 30\n")
    assert "category: user code; can be retried: the failure may not repeat" in text


@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("code", [143, 137])
def test_terminated_ranks_are_not_the_root_cause(code: int, second: int) -> None:
    """Peers terminate later, in the same second, or, by another node's clock, earlier."""
    for pods in ([pod(0, code, second), pod(1, 3, 1)], [pod(1, 3, 1), pod(0, code, second)]):
        assert diagnosed(*pods).rank == "node-1"


@pytest.mark.parametrize("second", [1, 2])
def test_a_killed_rank_comes_before_terminated_ranks(second: int) -> None:
    for pods in ([pod(0, 143, second), pod(1, 137, 1)], [pod(1, 137, 1), pod(0, 143, second)]):
        found = diagnosed(*pods)
        assert (found.rank, found.exit_code) == ("node-1", 137)
        assert found.retry is RetryVerdict.INFRASTRUCTURE
        assert "signal 9 (SIGKILL)" in found.summary
        assert "memory" in found.advice


def test_a_rank_killed_after_its_grace_period_is_not_the_root_cause() -> None:
    assert diagnosed(pod(0, 143, 1), pod(1, 137, 31)).rank == "node-0"


def test_root_cause_is_the_first_rank_that_failed_by_itself() -> None:
    assert diagnosed(pod(0, 1, 5), pod(1, 3, 4), pod(2, 1, 6)).rank == "node-1"


@pytest.mark.parametrize(
    ("code", "ended", "category", "retry", "text"),
    [
        (137, {"reason": "OOMKilled"}, Category.OUT_OF_MEMORY, RetryVerdict.UNKNOWN, "OOMKilled"),
        (1, {"reason": "OOMKilled"}, Category.OUT_OF_MEMORY, RetryVerdict.UNKNOWN, "more memory"),
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
        (139, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "signal 11 (SIGSEGV)"),
        (134, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "signal 6 (SIGABRT)"),
        (143, {}, Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "signal 15 (SIGTERM)"),
        (255, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "exited with code 255"),
        (163, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "exited with code 163"),
        (127, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "exited with code 127"),
        (-1, {}, Category.USER_CODE, RetryVerdict.UNKNOWN, "exited with code -1"),
    ],
)
def test_terminations_have_category_and_verdict(
    code: int, ended: dict[str, Any], category: Category, retry: RetryVerdict, text: str
) -> None:
    found = diagnosed(pod(0, code, **ended))
    assert (found.category, found.retry, found.exit_code) == (category, retry, code)
    assert text in found.summary


def test_out_of_memory_comes_before_its_consequences() -> None:
    assert diagnosed(pod(0, 143, 1), pod(1, 137, 1, reason="OOMKilled")).category is Category.OUT_OF_MEMORY


def test_the_last_state_of_a_restarted_container_is_used() -> None:
    restarted = pod(0, None)
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "finishedAt": "2026-11-21T10:00:00Z"}}
    restarted["status"]["containerStatuses"][0]["lastState"] = ended
    assert diagnosed(restarted).exit_code == 3


def test_summary_has_the_latest_restart_count() -> None:
    def crashed(second: int, restarts: int) -> dict[str, Any]:
        made = pod(0, 3, second)
        made["status"]["containerStatuses"][0]["restartCount"] = restarts
        return made

    found = diagnosed(crashed(40, 2), crashed(0, 0), crashed(11, 1))
    assert found.summary == "node-0 exited with code 3 (restarted 2 times)"


@pytest.mark.parametrize(
    ("job", "category", "retry", "text"),
    [
        (
            trainjob("DeadlineExceeded", "TrainJob exceeded its active deadline"),
            "deadline",
            "unknown",
            "its active deadline",
        ),
        (trainjob("SupervisorLost", "the local supervisor was killed"), "node lost", "infrastructure", "was killed"),
        (
            trainjob("ReachedMaxRestarts", "jobset failed due to …"),
            "unknown",
            "infrastructure",
            "jobset failed due to …",
        ),
        (trainjob(message=""), "unknown", "infrastructure", "no evidence of the reason is left"),
    ],
)
def test_condition_reasons_have_category_and_verdict(job: dict[str, Any], category: str, retry: str, text: str) -> None:
    found = diagnosed(job=job)
    assert (found.category, found.retry) == (category, retry)
    assert text in found.summary
    assert found.rank == ""


def test_a_deadline_names_no_rank() -> None:
    found = diagnosed(pod(0, 143), job=trainjob("DeadlineExceeded"), logs={"x-node-0-0-abcde": ["epoch 3"]})
    assert found.category is Category.DEADLINE
    assert found.log == ("epoch 3",)
    assert diagnosed(job=trainjob("DeadlineExceeded"), logs={"other": ["x"]}).log == ("x",)


def test_deleted_jobs_are_diagnosed() -> None:
    found = diagnosis_of(Evidence(None))
    assert (found.category, found.job) == (Category.DELETED, "?/?")
    assert found.advice == "find out who deletes TrainJobs in this namespace, then launch the job again"
    cancelled = diagnosis_of(Evidence(None), Observation(Phase.DELETED, cancelled=True))
    assert (cancelled.category, cancelled.retry) == (Category.DELETED, RetryVerdict.CONFIGURATION)
    assert cancelled.summary == "the job was cancelled with trainjob, by its task or `trainjob cancel`"


@pytest.mark.parametrize(("code", "deleted", "crashes"), [(143, False, 1), (137, True, 1), (1, True, 1), (1, False, 2)])
def test_terminations_by_kubernetes_are_not_crashes(code: int, deleted: bool, crashes: int) -> None:
    """Its termination is a consequence if it was killed, or terminated after the pod was deleted."""
    stopped = pod(0, code, second=9)
    stopped["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    if deleted:
        stopped["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:05Z", "deletionGracePeriodSeconds": 0}
    assert len(crashes_in([stopped])) == crashes


def test_a_final_observation_is_kept_if_the_object_is_gone_or_runs_again() -> None:
    final = observe(trainjob("DeadlineExceeded"))
    again = {**trainjob(), "status": {"jobsStatus": [{"name": "node", "active": 1}]}}
    for left in (None, again):
        assert diagnosis_of(Evidence(left), final).category is Category.DEADLINE


def test_missing_evidence_is_reported() -> None:
    found = diagnosed(pod(0, 3), unseen=["pods: no right to list"])
    assert "not seen: pods: no right to list" in found.text()


def test_a_diagnosis_is_json() -> None:
    written = json.loads(json.dumps(diagnosed(pod(0, 3)).as_dict()))
    assert written["category"] == "user code"
    assert written["exit_code"] == 3


def test_rank_of_pods_without_labels() -> None:
    assert rank_of({}) == "pod-0"
    assert rank_of(pod(3, None, role="launcher")) == "launcher-3"


# ---------------------------------------------------------------- root cause among several ranks

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711"


def logs(*tails: list[str]) -> dict[str, list[str]]:
    return {f"x-node-0-{index}-abcde": tail for index, tail in enumerate(tails)}


@pytest.mark.parametrize("clock", [0, 5, 59])
def test_a_lost_peer_is_no_root_cause_despite_clock_skew(clock: int) -> None:
    """The node of rank 1 is ahead of the others, by up to a minute."""
    raised = ["Traceback (most recent call last):", '  File "t.py", line 1', "ValueError: no labels"]
    lost = ["Traceback (most recent call last):", '  File "t.py", line 9', GLOO]
    pods = [pod(0, 1, 0), pod(1, 1, clock), pod(2, 134, 0)]
    found = diagnosed(*pods, logs=logs(lost, raised, ["NCCL watchdog: Watchdog caught collective operation timeout"]))
    assert (found.rank, found.category, found.retry) == ("node-1", Category.USER_CODE, RetryVerdict.UNKNOWN)
    assert found.summary == "node-1 exited with code 1: ValueError: no labels"


def test_a_rank_killed_by_the_kernel_comes_before_those_that_lost_it() -> None:
    found = diagnosed(pod(0, 1, 3), pod(1, 137, 4), logs=logs([GLOO], ["epoch 3"]))
    assert (found.rank, found.exit_code) == ("node-1", 137)
    late = diagnosed(pod(0, 1, 3), pod(1, 137, 34), logs=logs([GLOO], ["epoch 3"]))
    assert late.rank == "node-0", "killed after its grace period"


def test_a_rank_that_lost_the_store_is_the_root_cause() -> None:
    """Its connection broke first; then the other ranks lost it."""
    lost_store = [
        "Traceback (most recent call last):",
        "  x",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
    ]
    assert diagnosed(pod(0, 1, 3), pod(1, 1, 3), logs=logs([GLOO], lost_store)).rank == "node-1"
    assert diagnosed(pod(0, 143, 3), pod(1, 1, 3), logs=logs([], lost_store)).rank == "node-1"


def test_if_all_ranks_lost_a_peer_the_advice_names_no_rank() -> None:
    found = diagnosed(pod(0, 1, 3), pod(1, 1, 4), logs=logs([GLOO], [GLOO]))
    assert (found.rank, found.category, found.retry) == ("node-0", Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE)
    assert "no rank failed by itself, as far as known" in found.advice


def test_a_terminated_torchrun_is_not_the_root_cause() -> None:
    lines = ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"]
    assert diagnosed(pod(0, 1, 3), pod(1, 3, 4), logs=logs(lines, ["x"])).rank == "node-1"


# ---------------------------------------------------------------- pods that were stopped


def stopped(cause: str, text: str = "", code: int | None = 143, **status: Any) -> dict[str, Any]:
    """A pod that Kubernetes stopped, with a ``DisruptionTarget`` condition."""
    made = pod(0, code, 9)
    time = "2026-11-21T10:00:05Z"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": cause, "message": text}
    made["status"] |= {"conditions": [condition | {"lastTransitionTime": time}], **status}
    made["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:35Z", "deletionGracePeriodSeconds": 30}
    return made


@pytest.mark.parametrize(
    ("gone", "category", "retry", "text"),
    [
        (stopped("PreemptionByScheduler"), "preempted", "preempted", "was preempted"),
        (stopped("DeletionByTaintManager"), "node lost", "infrastructure", "lost its node"),
        (stopped("DeletionByPodGC", code=None), "node lost", "infrastructure", "the node was removed"),
        (stopped("EvictionByEvictionAPI"), "node lost", "infrastructure", "drained"),
        (
            stopped(
                "PreemptionByScheduler",
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: memory.",
            ),
            "preempted",
            "preempted",
            "was preempted",
        ),
        (stopped("NewInKubernetes9"), "unknown", "infrastructure", "was stopped: NewInKubernetes9"),
        (
            stopped(
                "TerminationByKubelet",
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: memory. Threshold quantity: 100Mi",
            ),
            "out of memory",
            "infrastructure",
            "low on resource: memory",
        ),
        (
            stopped(
                "TerminationByKubelet",
                phase="Failed",
                reason="Evicted",
                message="Pod was rejected: The node had condition: [MemoryPressure]. ",
            ),
            "out of memory",
            "infrastructure",
            "MemoryPressure",
        ),
        (
            {**pod(0, None), "status": {"phase": "Failed", "reason": "NodeLost", "message": "gone"}},
            "node lost",
            "infrastructure",
            "lost its node",
        ),
        (
            {**pod(0, None), "status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPU"}},
            "scheduling",
            "infrastructure",
            "no GPU",
        ),
    ],
)
def test_stopped_pods_have_category_and_verdict(gone: dict[str, Any], category: str, retry: str, text: str) -> None:
    found = diagnosed(gone, pod(1, 1, 12), logs=logs([], [GLOO]))
    assert (found.rank, found.category, found.retry) == ("node-0", category, retry)
    assert text in found.summary


def test_a_crash_before_its_pod_was_stopped_is_a_crash() -> None:
    crashed = stopped("DeletionByTaintManager")
    crashed["status"]["containerStatuses"][0]["lastState"] = {
        "terminated": {"exitCode": 3, "finishedAt": "2026-11-21T10:00:01Z"}
    }
    assert diagnosed(crashed).exit_code == 3


def test_pods_of_a_suspended_job_did_not_crash() -> None:
    suspended = pod(0, 143, 9)
    suspended["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:39Z", "deletionGracePeriodSeconds": 30}
    waits = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": True}}
    found = diagnosed(suspended, job=waits)
    assert (found.category, found.phase, found.failed) == (Category.NONE, Phase.QUEUED, False)
    assert found.text().startswith("TrainJob ?/? is Queued: waiting for admission in queue q")
    assert "category" not in found.text()
    deleted = diagnosed(suspended)
    assert (deleted.category, deleted.retry) == (Category.DELETED, RetryVerdict.INFRASTRUCTURE)
    assert "its pod was deleted" in deleted.summary


# ---------------------------------------------------------------- more than one container


def test_the_training_container_comes_before_sidecars() -> None:
    several = pod(0, 3, 9)
    proxy = {"name": "proxy", "state": {"terminated": {"exitCode": 1, "finishedAt": "2026-11-21T10:00:01Z"}}}
    several["status"]["containerStatuses"].insert(0, proxy)
    several["status"]["initContainerStatuses"] = [{**proxy, "name": "restartable"}]
    several["spec"] = {
        "containers": [{"name": "proxy"}, {"name": "node"}],
        "initContainers": [{"name": "restartable", "restartPolicy": "Always"}],
    }
    assert diagnosed(several).summary == "node-0 exited with code 3"
    several["status"]["containerStatuses"][1]["state"] = {"running": {}}
    assert diagnosed(several).summary == "node-0's container restartable exited with code 1"


def test_a_failed_init_container_is_named() -> None:
    waiting = pod(0, None)
    ended = {"exitCode": 9, "finishedAt": "2026-11-21T10:00:01Z", "reason": "Error"}
    waiting["status"]["initContainerStatuses"] = [{"name": "fetch", "lastState": {"terminated": ended}}]
    found = diagnosed(waiting, pod(1, 1, 30), logs=logs(["Traceback (most recent call last):", "ValueError: not ours"]))
    assert found.summary == "node-0's container fetch exited with code 9"
    assert "not from the training code" in found.advice
    ended["exitCode"] = 139
    of_training = [
        "Traceback (most recent call last):",
        "ValueError: x",
        "terminate called without an active exception",
    ]
    found = diagnosed(waiting, logs=logs(of_training))
    assert found.summary == "node-0's container fetch was killed by signal 11 (SIGSEGV)"
    assert "driver" in found.advice, "the log is that of another container"


@pytest.mark.parametrize(("role", "text"), [("dataset-initializer", "URI of the dataset"), ("node", "training code")])
def test_advice_is_about_the_step_that_failed(role: str, text: str) -> None:
    assert text in diagnosed(pod(0, 4, role=role)).advice


def test_ranks_of_unusual_runtimes() -> None:
    several = pod(3, None)
    several["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"] = "2"
    assert rank_of(several) == "node-2-3"
    assert rank_of({"metadata": {"labels": {"jobset.sigs.k8s.io/job-index": 0}}}) == "pod-0"


# ---------------------------------------------------------------- unfinished jobs


def starting(**status: Any) -> dict[str, Any]:
    made = pod(0, None)
    made["spec"] = {"nodeName": "n1"}
    made["metadata"]["creationTimestamp"] = "2026-11-21T10:00:30Z"
    made["status"] = {"phase": "Pending", "startTime": "2026-11-21T10:00:31Z", **status}
    return made


UNFINISHED = {"metadata": {}, "spec": {}, "status": {"jobsStatus": [{"name": "node", "active": 1}]}}


def event_of(reason: str, message: str, time: str, kind: str = "Pod", name: str = "x-node-0-0-abcde") -> dict[str, Any]:
    return {"reason": reason, "message": message, "eventTime": time, "involvedObject": {"kind": kind, "name": name}}


def test_summary_of_a_slow_start_has_the_reason() -> None:
    pulling = event_of("Pulling", 'Pulling image "big:1"', "2026-11-21T10:00:32Z")
    found = diagnosed(starting(), job=UNFINISHED, events=[pulling])
    assert found.summary == 'node-0 waits for its image: Pulling image "big:1" since 2026-11-21T10:00:31Z'
    assert (found.category, found.phase) == (Category.NONE, Phase.STARTING)
    pulled = event_of("Pulled", "Successfully pulled", "2026-11-21T10:00:40Z")
    found = diagnosed(starting(), starting(), job=UNFINISHED, events=[pulled, pulling])
    assert found.summary == "node-0 is starting on n1 since 2026-11-21T10:00:31Z (and 1 more)"
    busy = starting(initContainerStatuses=[{"name": "fetch", "state": {"running": {}}}])
    assert diagnosed(busy, job=UNFINISHED).summary == "node-0 waits for its init container fetch"
    sidecar = {**busy, "spec": {"nodeName": "n1", "initContainers": [{"name": "fetch", "restartPolicy": "Always"}]}}
    assert diagnosed(sidecar, job=UNFINISHED).summary.startswith("node-0 is starting on n1")
    assert diagnosed({**starting(), "spec": {}}, job=UNFINISHED).summary == "node-0 waits to be scheduled"
    assert diagnosed(job=UNFINISHED).summary == "nothing blocks the job"


def test_a_missing_runtime_is_a_configuration_error() -> None:
    gone = ["ClusterTrainingRuntime own"]
    found = diagnosed(job={"spec": {"suspend": True}}, missing=gone)
    assert (found.category, found.summary) == (
        Category.CONFIGURATION,
        "the job cannot start: its ClusterTrainingRuntime own does not exist anymore",
    )
    assert diagnosed(missing=gone).category is Category.UNKNOWN, "the job failed before"


def test_a_complete_job_has_no_category() -> None:
    complete = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    found = diagnosed(pod(0, 3), job=complete)
    assert (found.category, found.summary) == (Category.NONE, "the job is complete")


QUOTA = 'pods "x" is forbidden: exceeded quota: gpus'


def test_an_event_older_than_the_pods_is_outdated() -> None:
    before, same, after = (
        event_of("FailedCreate", QUOTA, f"2026-11-21T10:00:{second}Z", "Job", "x-node-0")
        for second in (29.9, 30.9, 31.1)
    )
    assert diagnosed(starting(), job=UNFINISHED, events=[before]).category is Category.NONE
    assert diagnosed(starting(), job=UNFINISHED, events=[same]).category is Category.NONE, (
        "a later refusal would have a later event"
    )
    assert diagnosed(starting(), job=UNFINISHED, events=[after, same]).category is Category.QUOTA
    assert diagnosed(job=UNFINISHED, events=[before]).summary == f"job x-node-0: FailedCreate: {QUOTA}"


def test_an_event_about_a_pod_counts_while_that_pod_starts() -> None:
    mount = event_of("FailedMount", 'configmap "nosuch" not found', "2026-11-21T10:00:31Z")
    found = diagnosed(starting(), job=UNFINISHED, events=[mount])
    assert (found.rank, found.category) == ("node-0", Category.CONFIGURATION)
    assert diagnosed(starting(phase="Running"), job=UNFINISHED, events=[mount]).category is Category.NONE


@pytest.mark.parametrize(
    ("event", "category"),
    [
        (event_of("FailedScheduling", "0/3 nodes: 3 Insufficient nvidia.com/gpu.", ""), "scheduling"),
        (event_of("Failed", 'Failed to pull image "nosuch:1": not found', ""), "image"),
        (event_of("BackOff", 'Back-off pulling image "nosuch:1"', ""), "image"),
        (event_of("Failed", 'Error: secret "nosuch" not found', ""), "configuration"),
        (event_of("BackOff", "Back-off restarting failed container node in pod x", ""), "user code"),
        (event_of("Preempted", "Preempted by pod 7 on node n1", ""), "preempted"),
        (event_of("TaintManagerEviction", "Marking for deletion Pod ns/x", ""), "node lost"),
    ],
)
def test_without_permission_to_list_pods_events_are_used(event: dict[str, Any], category: str) -> None:
    assert diagnosed(job=UNFINISHED, events=[event], pods_visible=False).category == category
    assert diagnosed(job=UNFINISHED, events=[event]).category is Category.NONE, "the list of pods is empty"


def test_a_failed_job_is_diagnosed_from_events_alone() -> None:
    found = diagnosed(events=[event_of("FailedCreate", QUOTA, "", "Job", "x-node-0")])
    assert (found.category, found.retry) == (Category.QUOTA, RetryVerdict.QUOTA)
    assert found.summary == f"jobset failed; job x-node-0: FailedCreate: {QUOTA}"


def test_a_deadline_names_the_blocker() -> None:
    pulls = starting(containerStatuses=[{"name": "node", "state": {"waiting": {"reason": "ImagePullBackOff"}}}])
    found = diagnosed(pulls, job=trainjob("DeadlineExceeded", "over"))
    assert found.summary == ("the job exceeded its deadline (over); pod x-node-0-0-abcde: ImagePullBackOff: ")
    assert found.advice == "raise active_deadline_seconds, or shorten the training"
    crashed = diagnosed(pod(0, 3), job=trainjob("DeadlineExceeded", "over"))
    assert crashed.summary.endswith("; before that, node-0 exited with code 3")


# ---------------------------------------------------------------- evidence


def test_earlier_evidence_is_added() -> None:
    now = Evidence(trainjob(), [], {"a": ["now"], "b": []}, unseen=["x"])
    first = Evidence(None, [pod(1, 3)], {"a": ["before"], "b": ["first"]})
    second = Evidence(None, [pod(0, 1)], {"b": ["second"], "c": ["c"]})
    every = now.with_earlier(first, second)
    assert [rank_of(each) for each in every.pods] == ["node-1", "node-0"]
    assert every.logs == {"a": ["now"], "b": ["first"], "c": ["c"]}
    assert (every.trainjob, every.unseen) == (trainjob(), ["x"])


def test_excerpt_includes_an_early_error() -> None:
    lines = ["epoch 1", "Traceback (most recent call last):", "  x", "ValueError: no", *["wandb: line"] * 40]
    found = diagnosed(pod(0, 1), logs=logs(lines))
    assert found.log == (*lines[:4], "[… 33 lines …]", *lines[-7:])
    assert diagnosed(pod(0, 1), logs=logs(["x" * 5000])).log == ("x" * 1900 + " … (3100 characters more)",)
    assert diagnosed(pod(0, 1), logs=logs(["x" * 50_000])).log == ("x" * 1900 + " … (48100 characters more)",)
    secrets = f"TOKEN={'s' * 1000} " * 6
    cut = (
        secrets + "-" * (2000 + 4096 - len(secrets) - 6) + "ghp_" + "q" * 36
    )  # in the last characters that are searched
    (line,) = diagnosed(pod(0, 1), logs=logs([cut])).log
    assert not {"s", "q"} & {*line.partition(" … ")[0]}, line
    assert diagnosed(pod(0, 1), logs=logs(["x" * 2000])).log == ("x" * 2000,)


def test_a_termination_message_replaces_a_missing_log() -> None:
    assert diagnosed(pod(0, 1, message="a\nValueError: no\n")).log == ("a", "ValueError: no")
    assert diagnosed(pod(0, 1, message='{"trainjob": 1}')).log == ()


def test_a_custom_exit_code_outweighs_a_caught_exception() -> None:
    raised = ["Traceback (most recent call last):", "  x", "ValueError: no"]
    assert diagnosed(pod(0, 3), logs=logs(raised)).summary == "node-0 exited with code 3"
    lines = ["mpirun noticed that process rank 1 with PID 7 on node x exited on signal 9 (Killed)."]
    assert diagnosed(pod(0, 137), logs=logs(lines)).summary.endswith("(SIGKILL): worker 1 was killed by signal 9")


def test_native_code_that_crashes_after_an_exception() -> None:
    trace = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "/tmp/train.py", line 8, in <module>']
    raised = [*trace, "[rank1]: ValueError: step 3 has no labels"]
    torn_down = "terminate called without an active exception"
    found = diagnosed(pod(0, 139), logs=logs([*raised, torn_down, "step 2"]))
    assert found.summary == "node-0 was killed by signal 11 (SIGSEGV): ValueError: step 3 has no labels"
    assert (found.exit_code, found.advice) == (139, diagnosed(pod(0, 1)).advice), (
        "the code has to be fixed, not a driver"
    )
    for log in ([*raised, "tried again"], [torn_down, *raised, "went on"], [torn_down]):
        other = diagnosed(pod(0, 139), logs=logs(log))
        assert other.summary == "node-0 was killed by signal 11 (SIGSEGV)", (
            "an exception that was caught explains nothing"
        )
        assert "driver" in other.advice
    killed = diagnosed(pod(0, 137), logs=logs([*raised, torn_down]))
    assert killed.summary == "node-0 was killed by signal 9 (SIGKILL)", "the signal came from outside the process"


def test_a_summary_is_one_line() -> None:
    waiting = {"reason": "CreateContainerError", "message": "x\n\n" + "y" * 5000}
    summary = diagnosed(starting(containerStatuses=[{"state": {"waiting": waiting}}]), job=UNFINISHED).summary
    assert "\n" not in summary
    assert len(summary) == 400


def test_diagnosis_handles_5000_events_and_1000_pods() -> None:
    events = [event_of("FailedMount", "x", f"2026-11-21T10:00:{n % 60:02}Z", name=f"p{n}") for n in range(5000)]
    pods = [pod(n, 1, n % 60) for n in range(1000)]
    found = diagnosed(*pods, events=events, logs={f"x-node-0-{n}-abcde": [GLOO] * 300 for n in range(64)})
    assert found.rank == "node-120", "the first rank without a log of a lost peer"


# ---------------------------------------------------------------- arbitrary evidence


def one_of_words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


NAMES = one_of_words(
    """metadata status spec labels name namespace phase reason message startTime creationTimestamp deletionTimestamp
    deletionGracePeriodSeconds containerStatuses initContainerStatuses initContainers containers restartPolicy state
    lastState waiting running terminated exitCode finishedAt restartCount conditions type lastTransitionTime podIP
    volumes persistentVolumeClaim claimName involvedObject kind series lastObservedTime eventTime lastTimestamp active
    admissionChecks suspend jobset.sigs.k8s.io/replicatedjob-name jobset.sigs.k8s.io/job-index"""
)
WORDS = one_of_words(
    """Error OOMKilled x Pod Job True False Pending Failed Evicted DisruptionTarget PodScheduled Unschedulable
    FailedMount DeletionByPodGC QuotaReserved Preempted Always TrainJobResourcesCreationFailed ImagePullBackOff
    StartError 2026-11-21T10:00:00Z 2026-11-21 9999-12-31T23:59:59Z"""
)
LEAVES = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | WORDS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=30)
OBJECTS = st.dictionaries(NAMES, JSON)
PODS = st.builds(pod, st.integers(0, 3), JSON, st.integers(0, 59), reason=JSON, message=JSON, finishedAt=JSON)
STOPPED = st.builds(stopped, JSON, JSON, JSON, phase=JSON, reason=JSON, podIP=JSON)
EVENTS = st.builds(event_of, JSON, JSON, JSON, JSON, JSON)
LINES = st.lists(
    st.text() | st.sampled_from(["Traceback (most recent call last):", GLOO, "ValueError: x", "[rank1]: ", "  | x"]),
    max_size=9,
)


@given(
    st.builds(
        Evidence,
        st.none() | OBJECTS | st.builds(trainjob, JSON, JSON, jobsStatus=JSON),
        st.lists(OBJECTS | PODS | STOPPED | st.builds(starting, containerStatuses=JSON, conditions=JSON), max_size=4),
        st.dictionaries(st.sampled_from(["x-node-0-0-abcde", "x"]), LINES),
        st.lists(OBJECTS | EVENTS, max_size=3),
        st.none() | OBJECTS,
        st.sampled_from([(), ("pods: forbidden",)]),
    )
)
def test_diagnose_never_raises(evidence: Evidence) -> None:
    found = diagnosis_of(evidence)
    assert found.category in Category
    assert "\n" not in found.summary
    assert found.text()
    json.dumps(found.as_dict())
