"""The diagnosis of a job from its pods, logs and Events: the rank that is the root cause, its category and verdict."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.objects import RUNNING, Object, condition, counts, ended, event, pod, trainjob, waiting
from tests.unit.odd_objects import JSON, OBJECTS

from trainjob._diagnosis import TAIL_LINES, diagnosis_of
from trainjob._diagnosis.cluster import terminations_in
from trainjob._diagnosis.evidence import Evidence
from trainjob._support.kube_objects import rank_of
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import QUEUE_LABEL, Observation, Phase, observe

TRACE = "Traceback (most recent call last):"
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711"
UNFINISHED = trainjob(jobsStatus=[counts(active=1)])
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus'


def failed(reason: Any = "FailedJobs", message: Any = "jobset failed", **status: Any) -> Object:
    return trainjob(condition("Failed", reason) | {"message": message}, **status)


def crash(rank: int, code: Any, second: int = 0, *, step: str = "node", **terminated: Any) -> Object:
    """A pod whose container terminated with `code`, or is still running; Kubernetes' times have whole seconds."""
    times = {"finishedAt": f"2026-11-21T10:05:{second:02}Z"}
    return pod(rank, RUNNING if code is None else ended(code, **{**times, **terminated}), step=step)


def logs(*tails: list[str]) -> dict[str, list[str]]:
    return {f"x-node-0-{index}-abcde": tail for index, tail in enumerate(tails)}


def diagnosed(*pods: Object, job: Object | None = None, **evidence: Any) -> Diagnosis:
    return diagnosis_of(Evidence(job or failed(), pods, **evidence))


def test_a_diagnosis_has_the_rank_its_log_and_a_verdict() -> None:
    log = [f"line {i}" for i in range(50)]
    found = diagnosed(crash(0, None), crash(1, 3), logs=logs(["fine"], log))
    assert (found.rank, found.exit_code) == ("node-1", 3)
    assert (found.category, found.retry) == (Category.USER_CODE, RetryVerdict.UNKNOWN)
    assert found.log == tuple(log[-TAIL_LINES:])
    assert found.summary == "node-1 exited with code 3; last log line: line 49"
    text = found.text()
    assert text.startswith(
        "TrainJob ns/x failed: node-1 exited with code 3; last log line: line 49\nlast lines of node-1:\n  | line 30\n"
    )
    assert "category: user code; can be retried: the failure may not repeat" in text
    written = json.loads(json.dumps(found.as_dict()))
    assert (written["category"], written["exit_code"]) == ("user code", 3)


# ---------------------------------------------------------------- the root cause among several ranks


@pytest.mark.parametrize(
    ("pods", "rank"),
    [
        *(([crash(0, code, second), crash(1, 3, 1)], 1) for code in (143, 137) for second in (0, 1, 2)),
        *(([crash(0, 143, second), crash(1, 137, 1)], 1) for second in (1, 2)),
        ([crash(0, 143, 1), crash(1, 137, 31)], 0),  # killed after its grace period
        ([crash(0, 1, 5), crash(1, 3, 4), crash(2, 1, 6)], 1),
        ([crash(0, 143, 1), crash(1, 137, 1, reason="OOMKilled")], 1),
    ],
)
def test_a_rank_that_was_terminated_is_not_the_root_cause(pods: list[Object], rank: int) -> None:
    """Peers terminate later, in the same second, or, by another node's clock, earlier."""
    for order in itertools.permutations(pods):
        assert diagnosed(*order).rank == f"node-{rank}"


RAISED = [TRACE, '  File "t.py", line 1', "ValueError: no labels"]
WATCHDOG = ["[rank2]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: WorkN"]
LOST_STORE = [TRACE, "  x", "ConnectionResetError: [Errno 104] Connection reset by peer"]
SIGNALED = ["torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"]


@pytest.mark.parametrize(
    ("pods", "tails", "rank"),
    [
        # The node of rank 1 is ahead of the others, by up to a minute.
        *(
            ([crash(0, 1, 0), crash(1, 1, clock), crash(2, 134, 0)], [[*RAISED[:2], GLOO], RAISED, WATCHDOG], 1)
            for clock in (0, 5, 59)
        ),
        ([crash(0, 1, 3), crash(1, 137, 4)], [[GLOO], ["epoch 3"]], 1),
        ([crash(0, 1, 3), crash(1, 137, 34)], [[GLOO], ["epoch 3"]], 0),  # killed after its grace period
        # A rank lost the store; then the other ranks lost that rank.
        ([crash(0, 1, 3), crash(1, 1, 3)], [[GLOO], LOST_STORE], 1),
        ([crash(0, 143, 3), crash(1, 1, 3)], [[], LOST_STORE], 1),
        ([crash(0, 1, 3), crash(1, 3, 4)], [SIGNALED, ["x"]], 1),  # torchrun, terminated
    ],
)
def test_a_rank_that_lost_a_peer_is_not_the_root_cause(pods: list[Object], tails: list[list[str]], rank: int) -> None:
    assert diagnosed(*pods, logs=logs(*tails)).rank == f"node-{rank}"


def test_if_all_ranks_lost_a_peer_the_advice_names_no_rank() -> None:
    found = diagnosed(crash(0, 1, 3), crash(1, 1, 4), logs=logs([GLOO], [GLOO]))
    assert (found.rank, found.category, found.retry) == ("node-0", Category.UNKNOWN, RetryVerdict.UNKNOWN)
    assert "no rank failed by itself, as far as known" in found.advice


# ---------------------------------------------------------------- terminations


@pytest.mark.parametrize("code", [127, 163, -1])
def test_an_exit_code_without_a_signal_is_left_to_the_orchestrator(code: int) -> None:
    found = diagnosed(crash(0, code))
    assert (found.category, found.retry) == (Category.USER_CODE, RetryVerdict.UNKNOWN)
    assert (found.exit_code, found.summary) == (code, f"node-0 exited with code {code}")
    assert "memory" not in found.advice


def test_summary_has_the_latest_restart_count() -> None:
    crashes = [crash(0, 3, second) for second in (40, 0, 11)]
    for each, restarts in zip(crashes, (2, 0, 1), strict=True):
        each["status"]["containerStatuses"][0]["restartCount"] = restarts
    assert diagnosed(*crashes).summary == "node-0 exited with code 3 (restarted 2 times)"
    assert diagnosed(pod(0, RUNNING, ended(3))).exit_code == 3, "of the last state"


def test_a_reason_of_the_condition_that_is_unknown_is_no_verdict() -> None:
    found = diagnosed(job=failed("ReachedMaxRestarts", "jobset failed due to …"))
    assert (found.category, found.retry, found.rank) == (Category.UNKNOWN, RetryVerdict.UNKNOWN, "")
    assert "jobset failed due to …" in found.summary


def test_a_deadline_names_no_rank_but_what_came_before() -> None:
    over = failed("DeadlineExceeded", "over")
    found = diagnosed(crash(0, 143), job=over, logs=logs(["epoch 3"]))
    assert (found.category, found.log) == (Category.DEADLINE, ("epoch 3",))
    assert diagnosed(job=over, logs={"other": ["x"]}).log == ("x",)
    found = diagnosed(starting(waiting("ImagePullBackOff")), job=over)
    assert found.summary == "the job exceeded its deadline (over); pod x-node-0-0-abcde: ImagePullBackOff: "
    assert found.advice == "raise active_deadline_seconds, or shorten the training"
    assert diagnosed(crash(0, 3), job=over).summary.endswith("; before that, node-0 exited with code 3")


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
    evicted = crash(0, code, second=9)
    evicted["status"] |= {"reason": "Evicted", "message": "The node was low on resource: memory."}
    if deleted:
        evicted["metadata"] |= {"deletionTimestamp": DELETED, "deletionGracePeriodSeconds": 0}
    assert len(terminations_in([evicted])) == crashes


def test_a_final_observation_is_kept_if_the_object_is_gone_or_runs_again() -> None:
    final = observe(failed("DeadlineExceeded"))
    for left in (None, UNFINISHED):
        assert diagnosis_of(Evidence(left), final).category is Category.DEADLINE


# ---------------------------------------------------------------- pods that were stopped


DELETED = "2026-11-21T10:05:05Z"


def stopped(cause: Any, text: Any = "", code: Any = 143, **status: Any) -> Object:
    """A pod that Kubernetes stopped, with a ``DisruptionTarget`` condition."""
    made = crash(0, code, 9)
    made["status"] |= {"conditions": [condition("DisruptionTarget", cause, message=text, time=DELETED)], **status}
    made["metadata"] |= {"deletionTimestamp": "2026-11-21T10:05:35Z", "deletionGracePeriodSeconds": 30}
    return made


LOW = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. Threshold: 100Mi"}
PRESSURE = LOW | {"message": "Pod was rejected: The node had condition: [MemoryPressure]. "}


@pytest.mark.parametrize(
    ("gone", "category", "retry", "text"),
    [
        (stopped("PreemptionByScheduler", **LOW), "preempted", "preempted", "was preempted"),
        (stopped("DeletionByPodGC", code=None), "node lost", "infrastructure", "the node was removed"),
        (stopped("NewInKubernetes9", "no slot"), "unknown", "unknown", "was stopped: NewInKubernetes9: no slot"),
        (stopped("TerminationByKubelet", **PRESSURE), "scheduling", "infrastructure", "MemoryPressure"),
        (pod(phase="Failed", reason="NodeLost", message="gone"), "node lost", "infrastructure", "lost its node"),
    ],
)
def test_stopped_pods_have_category_and_verdict(gone: Object, category: str, retry: str, text: str) -> None:
    found = diagnosed(gone, crash(1, 1, 12), logs=logs([], [GLOO]))
    assert (found.rank, found.category, found.retry) == ("node-0", category, retry)
    assert text in found.summary


def test_a_crash_before_its_pod_was_stopped_is_a_crash() -> None:
    crashed = stopped("DeletionByTaintManager")
    crashed["status"]["containerStatuses"][0]["lastState"] = ended(3, finishedAt="2026-11-21T10:05:01Z")
    assert diagnosed(crashed).exit_code == 3


def test_pods_of_a_suspended_job_did_not_crash() -> None:
    suspended = crash(0, 143, 9)
    suspended["metadata"] |= {"deletionTimestamp": "2026-11-21T10:05:39Z", "deletionGracePeriodSeconds": 30}
    found = diagnosed(suspended, job=trainjob(labels={QUEUE_LABEL: "q"}, spec={"suspend": True}))
    assert (found.category, found.phase, found.failed) == (Category.NONE, Phase.QUEUED, False)
    assert found.text().startswith("TrainJob ns/x is Queued: waiting for admission in queue q")
    assert "category" not in found.text()
    deleted = diagnosed(suspended)
    assert (deleted.category, deleted.retry) == (Category.DELETED, RetryVerdict.INFRASTRUCTURE)
    assert "its pod was deleted" in deleted.summary


# ---------------------------------------------------------------- more than one container


def test_the_training_container_comes_before_sidecars() -> None:
    proxy = {"name": "proxy", "state": ended(1, finishedAt="2026-11-21T10:05:01Z")}
    several = crash(0, 3, 9)
    several["status"]["containerStatuses"].insert(0, proxy)
    several["status"]["initContainerStatuses"] = [{**proxy, "name": "restartable"}]
    several["spec"]["containers"].insert(0, {"name": "proxy"})
    several["spec"]["initContainers"] = [{"name": "restartable", "restartPolicy": "Always"}]
    assert diagnosed(several).summary == "node-0 exited with code 3"
    several["status"]["containerStatuses"][1]["state"] = RUNNING
    assert diagnosed(several).summary == "node-0's container restartable exited with code 1"


def test_a_failed_init_container_is_named() -> None:
    log = [TRACE, "ValueError: not ours", "terminate called without an active exception"]
    fetching = pod(0, {}, ended(9), container="fetch", init=True)
    found = diagnosed(fetching, crash(1, 1, 30), logs=logs(log))
    assert found.summary == "node-0's container fetch exited with code 9"
    assert "not from the training code" in found.advice
    found = diagnosed(pod(0, {}, ended(139), container="fetch", init=True), logs=logs(log))
    assert found.summary == "node-0's container fetch was killed by signal 11 (SIGSEGV)"
    assert "driver" in found.advice, "the log is that of another container"


@pytest.mark.parametrize(("step", "text"), [("dataset-initializer", "URI of the dataset"), ("node", "training code")])
def test_advice_is_about_the_step_that_failed(step: str, text: str) -> None:
    assert text in diagnosed(crash(0, 4, step=step)).advice


@pytest.mark.parametrize(
    ("labels", "rank"),
    [
        (None, "pod-0"),
        ({"jobset.sigs.k8s.io/job-index": 0}, "pod-0"),
        (pod(3, step="launcher")["metadata"]["labels"], "launcher-3"),
        (pod(3)["metadata"]["labels"] | {"jobset.sigs.k8s.io/job-index": "2"}, "node-2-3"),
    ],
)
def test_a_rank_is_named_by_the_labels_of_its_pod(labels: Object | None, rank: str) -> None:
    assert rank_of({"metadata": {"labels": labels}} if labels else {}) == rank


# ---------------------------------------------------------------- unfinished jobs


def starting(state: Object | None = None, **status: Any) -> Object:
    """A pod that was created at 10:00:30 and has not started yet."""
    shown = {"phase": "Pending", "startTime": "2026-11-21T10:00:31Z", **status}
    return pod(0, state or {}, metadata={"creationTimestamp": "2026-11-21T10:00:30Z"}, **shown)


PULLING = event("Pulling", 'Pulling image "big:1"', time="2026-11-21T10:00:32Z")
PULLED = event("Pulled", "Successfully pulled", time="2026-11-21T10:00:40Z")
BUSY = starting(initContainerStatuses=[{"name": "fetch", "state": {"running": {}}}])
SIDECAR = {"nodeName": "n1", "initContainers": [{"name": "fetch", "restartPolicy": "Always"}]}


@pytest.mark.parametrize(
    ("pods", "events", "summary"),
    [
        ([starting(), starting()], [PULLED, PULLING],
         "node-0 is starting on n1 since 2026-11-21T10:00:31Z (and 1 more)"),
        ([BUSY | {"spec": SIDECAR}], [], "node-0 is starting on n1 since 2026-11-21T10:00:31Z"),
        ([starting() | {"spec": {}}], [], "node-0 waits to be scheduled"),
        ([], [], "nothing blocks the job"),
    ],
)  # fmt: skip
def test_summary_of_a_slow_start_has_the_reason(pods: list[Object], events: list[Object], summary: str) -> None:
    found = diagnosed(*pods, job=UNFINISHED, events=events)
    assert found.summary == summary
    assert (found.category, found.phase) == (Category.NONE, Phase.STARTING)


def test_a_missing_runtime_is_a_configuration_error() -> None:
    gone = ["ClusterTrainingRuntime own"]
    found = diagnosed(job=trainjob(spec={"suspend": True}), missing=gone)
    assert found.category is Category.CONFIGURATION
    assert found.summary == "the job cannot start: its ClusterTrainingRuntime own does not exist anymore"
    assert diagnosed(missing=gone).category is Category.UNKNOWN, "the job failed before"


def test_a_complete_job_has_no_category() -> None:
    found = diagnosed(crash(0, 3), job=trainjob(condition("Complete")))
    assert (found.category, found.summary) == (Category.NONE, "the job is complete")


def refused(time: str = "") -> Object:
    return event("FailedCreate", QUOTA, time=time, about="x-node-0", kind="Job")


def test_an_event_older_than_the_pods_is_outdated() -> None:
    before, same, after = (refused(f"2026-11-21T10:00:{second}Z") for second in (29.9, 30.9, 31.1))
    for events, category in (([before], "none"), ([same], "none"), ([after, same], "quota")):
        assert diagnosed(starting(), job=UNFINISHED, events=events).category == category
    assert diagnosed(job=UNFINISHED, events=[before]).summary == f"job x-node-0: FailedCreate: {QUOTA}"


def test_an_event_about_a_pod_counts_while_that_pod_starts() -> None:
    mount = event("FailedMount", 'configmap "nosuch" not found', time="2026-11-21T10:00:31Z")
    found = diagnosed(starting(), job=UNFINISHED, events=[mount])
    assert (found.rank, found.category) == ("node-0", Category.CONFIGURATION)
    assert diagnosed(starting(phase="Running"), job=UNFINISHED, events=[mount]).category is Category.NONE


def test_without_permission_to_list_pods_events_are_used() -> None:
    crashes = [event("BackOff", "Back-off restarting failed container node in pod x", time="")]
    assert diagnosed(job=UNFINISHED, events=crashes, pods_visible=False).category is Category.USER_CODE
    assert diagnosed(job=UNFINISHED, events=crashes).category is Category.NONE, "the list of pods is empty"


def test_a_failed_job_is_diagnosed_from_events_alone() -> None:
    found = diagnosed(events=[refused()])
    assert (found.category, found.retry) == (Category.QUOTA, RetryVerdict.QUOTA)
    assert found.summary == f"jobset failed; job x-node-0: FailedCreate: {QUOTA}"


# ---------------------------------------------------------------- evidence


def test_earlier_evidence_is_added_and_missing_evidence_is_reported() -> None:
    now = Evidence(failed(), [], {"a": ["now"], "b": []}, unseen=["pods: no right to list"])
    first = Evidence(None, [crash(1, 3)], {"a": ["before"], "b": ["first"]})
    second = Evidence(None, [crash(0, 1)], {"b": ["second"], "c": ["c"]})
    every = now.with_earlier(first, second)
    assert [rank_of(each) for each in every.pods] == ["node-1", "node-0"]
    assert every.logs == {"a": ["now"], "b": ["first"], "c": ["c"]}
    assert (every.trainjob, every.unseen) == (failed(), ["pods: no right to list"])
    assert "not seen: pods: no right to list" in diagnosis_of(every).text()


@pytest.mark.parametrize(
    ("log", "excerpt"),
    [
        (["x" * 5000], ("x" * 1900 + " … (3100 characters more)",)),
        (["x" * 2000], ("x" * 2000,)),
    ],
    ids=["a long line", "a line that just fits"],
)
def test_a_long_line_is_cut(log: list[str], excerpt: tuple[str, ...]) -> None:
    assert diagnosed(crash(0, 1), logs=logs(log)).log == excerpt


def test_secrets_are_masked_before_a_line_is_cut() -> None:
    secrets = f"TOKEN={'s' * 1000} " * 6
    last_searched = secrets + "-" * (2000 + 4096 - len(secrets) - 6) + "ghp_" + "q" * 36
    (line,) = diagnosed(crash(0, 1), logs=logs([last_searched])).log
    assert not {"s", "q"} & {*line.partition(" … ")[0]}, line


def test_a_termination_message_replaces_a_missing_log() -> None:
    assert diagnosed(crash(0, 1, message="a\nValueError: no\n")).log == ("a", "ValueError: no")
    assert diagnosed(crash(0, 1, message='{"trainjob": 1}')).log == ()


CAUGHT = [f"[rank1]: {line}" for line in (TRACE, '  File "/tmp/train.py", line 8', "ValueError: no labels")]
TORN_DOWN = "terminate called without an active exception"
MPIRUN = "mpirun noticed that process rank 1 with PID 7 on node x exited on signal 9 (Killed)."
SIGSEGV, SIGKILL = "node-0 was killed by signal 11 (SIGSEGV)", "node-0 was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("code", "log", "summary"),
    [
        (3, [TRACE, "  x", "ValueError: no"], "node-0 exited with code 3"),  # the exception was caught
        (137, [MPIRUN], f"{SIGKILL}: worker 1 was killed by signal 9"),
        # Native code crashes after an exception: the code has to be fixed, not a driver.
        (139, [*CAUGHT, TORN_DOWN, "step 2"], f"{SIGSEGV}: ValueError: no labels"),
        (139, [*CAUGHT, "tried again"], f"{SIGSEGV}; last log line: tried again"),
        (139, [TORN_DOWN, *CAUGHT, "went on"], f"{SIGSEGV}; last log line: went on"),
        (139, [TORN_DOWN], SIGSEGV),
        (137, [*CAUGHT, TORN_DOWN], SIGKILL),  # the signal came from outside the process
    ],
)
def test_the_exit_code_decides_whether_an_exception_is_the_cause(code: int, log: list[str], summary: str) -> None:
    found = diagnosed(crash(0, code), logs=logs(log))
    assert (found.exit_code, found.summary) == (code, summary)
    if code == 139:
        assert ("driver" in found.advice) == ("ValueError" not in summary)
        assert (found.advice == diagnosed(crash(0, 1)).advice) == ("ValueError" in summary)


def test_a_summary_is_one_line() -> None:
    refusing = starting(waiting("CreateContainerError", "x\n\n" + "y" * 5000))
    summary = diagnosed(refusing, job=UNFINISHED).summary
    assert "\n" not in summary
    assert len(summary) == 400


def test_diagnosis_handles_5000_events_and_1000_pods() -> None:
    events = [event("FailedMount", "x", time=f"2026-11-21T10:00:{n % 60:02}Z", about=f"p{n}") for n in range(5000)]
    pods = [crash(n, 1, n % 60) for n in range(1000)]
    found = diagnosed(*pods, events=events, logs={f"x-node-0-{n}-abcde": [GLOO] * 300 for n in range(64)})
    assert found.rank == "node-120", "the first rank without a log of a lost peer"


PODS = st.builds(crash, st.integers(0, 3), JSON, st.integers(0, 59), reason=JSON, message=JSON, finishedAt=JSON)
STOPPED = st.builds(stopped, JSON, JSON, JSON, phase=JSON, reason=JSON, podIP=JSON)
TIMES = {"firstTimestamp": JSON, "lastTimestamp": JSON, "eventTime": JSON}
EVENTS = st.fixed_dictionaries({"reason": JSON, "message": JSON, "involvedObject": JSON | OBJECTS}, optional=TIMES)
LINES = st.lists(st.text() | st.sampled_from([TRACE, GLOO, "ValueError: x", "[rank1]: ", "  | x"]), max_size=9)


@settings(max_examples=40)
@given(
    st.builds(
        Evidence,
        st.none() | OBJECTS | st.builds(failed, JSON, JSON, jobsStatus=JSON),
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
