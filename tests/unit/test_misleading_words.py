"""Words of a rule in messages of another kind: none of them may decide with confidence."""

from __future__ import annotations

import json

import pytest
from tests.objects import CREATED, ended, pod, trainjob, waiting
from tests.unit.rule_examples import diagnosed

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.rules import objects
from trainjob.status import Observation, Phase

HEAD = ["Traceback (most recent call last):", '  File "/app/train.py", line 9, in <module>', "    work()"]
TORCH = '  File "/usr/lib/python3/dist-packages/torch/{}.py", line 1, in x'
FULL = "torch.OutOfMemoryError: CUDA out of memory. Process 71 has 77.88 GiB memory in use."
WORK = "[rank1]:[E1121 10:04:41.1 Process.cpp:552] [Rank 1] Collective WorkNCCL(SeqNum=4, OpType=X, Timeout(ms)=6)"
WORKERS = "DataLoader worker (pid(s) 311) exited unexpectedly"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2501, "
LOAD = "_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL app.Model was not allowed"
OSERROR = "safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)"
ELASTIC = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "[0]:",
    "  rank      : 0 (local_rank: 0)", "  exitcode  : 3 (pid: 71)", "=" * 60]  # fmt: skip
RECORD = {"event": "failed", "exception": [{"exc_type": "KeyError", "exc_value": "'label'", "frames": []}]}


@pytest.mark.parametrize(
    ("log", "told", "quoted"),
    [
        ([*HEAD, TORCH.format("serialization"), LOAD], ("user code", "unknown"), "Unsupported global"),
        ([*HEAD, OSERROR], ("user code", "unknown"), "No space left on device"),
        ([*HEAD, TORCH.format("hub"), "EOFError: EOF when reading a line"], ("user code", "unknown"), "EOF when"),
        ([*HEAD, f"{NCCL}ncclInvalidArgument: Broadcast : invalid root 8"], ("user code", "unknown"), "invalid root 8"),
        ([*HEAD, f"{NCCL}Cuda failure 35 'CUDA driver version is insufficient'"], ("image", "unknown"), "insufficient"),
        ([*HEAD, f"{NCCL}Cuda failure 101 'invalid device ordinal'"], ("configuration", "configuration"), "ordinal"),
        ([*HEAD, FULL], ("out of memory", "unknown"), "OutOfMemoryError"),
        (["step 1", f"{WORK} raised the following: NCCL error: remote process exited or there was a network error",
            "ncclRemoteError: A call failed"], ("unknown", "unknown"), "exited with code 1"),
        (["ERROR: No matching distribution found for a==9", "", "[notice] To update, run: pip install --upgrade pip"],
            ("configuration", "configuration"), "found for a==9"),
        ([*HEAD, "ray.exceptions.OutOfMemoryError: Task was killed", "Memory on the node (IP: 10.0.0.1) was 30 GB",
            "PID\tMEM(GB)\tCOMMAND", "Refer to the documentation on how to address it"],
            ("out of memory", "unknown"), "Task was killed"),
        ([*HEAD, "BrokenPipeError: [Errno 32] Broken pipe"], ("user code", "unknown"), "BrokenPipeError"),
        (["ERROR: Could not find a version of dataset v3"], ("user code", "unknown"), "of dataset v3"),
        (['Exception in thread "main" java.lang.OutOfMemoryError: Java heap space', "\tat App.main(App.java:3)",
            "INFO deleting /tmp/spark", "INFO stopped"], ("out of memory", "unknown"), "Java heap space"),
        (['Exception in thread "main" app.Failed: no data', "\tat App.main(App.java:3)",
            "Caused by: java.io.FileNotFoundException: /data/x"], ("user code", "unknown"), "FileNotFoundException"),
        ([json.dumps(RECORD)], ("user code", "unknown"), "exited with code 1: KeyError: 'label'"),
        (["error: No solution found", "  because torch 9 is missing", "hint: no"], ("user code", "unknown"), "solut"),
        (["panic: index out of range", "", "goroutine 1 [running]:", "main.(*Set).Next(0x1)", "\t/app/m.go:9 +0x1d",
            "created by main.main in goroutine 1"], ("user code", "unknown"), "panic: index out of range"),
        ([*HEAD, "jsonschema.ValidationError: 'data' is required", "On instance:", "{'lr': 1}"],
            ("user code", "unknown"), "last log line: {'lr': 1}; an exception before that: jsonschema.ValidationError"),
    ],
)  # fmt: skip
def test_a_failure_is_not_taken_for_another_one(log: list[str], told: tuple[str, str], quoted: str) -> None:
    found = diagnosed(1, log)
    assert (str(found.category), str(found.retry)) == told, found.text()
    assert quoted in found.summary


DIED = "subprocess.CalledProcessError: Command 'x' failed"
SAVED = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])"


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        ([*HEAD, "ValueError: two problems:", "- lr is 0", "- no data"], "two problems: - lr is 0 - no data"),
        ([*HEAD, SAVED, "Traceback (most recent call last): (RANK 1)", *HEAD[1:], "ValueError: no"], "ValueError: no"),
        (["fatal error: no such key", *HEAD, DIED], "code 1: fatal error: no such key"),
        (["reading 3 files", *HEAD, DIED], "Command 'x' failed"),
        (["fatal: no access", "", "Please make sure you have the correct access rights", "and the repository exists."],
            "code 1: fatal: no access"),
        (["step 3", *ELASTIC], "worker 0 exited with code 3; last log line: step 3"),
        (["-" * 74, "No slots for 8", "processes.", "", "Ask for fewer.", "-" * 74], ": No slots for 8 processes."),
    ],
)  # fmt: skip
def test_the_summary_has_the_error_to_its_end_and_not_its_envelope(log: list[str], quoted: str) -> None:
    assert diagnosed(1, log).summary.endswith(quoted)


LOST = [*HEAD, "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"]
GRAPH = [*HEAD, "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:", ""]


@pytest.mark.parametrize(
    "victim",
    [
        [*LOST, "cleaning up", "giving up"],
        [*GRAPH, "<stack traces unavailable>", "Collective ops is aborted by: Connection reset by peer"],
        [*HEAD, '  File "/site-packages/xgboost/core.py", line 1, in f', "xgboost.core.XGBoostError: [1] result.cc:78:",
            "- [socket.cc:172]: Failed to connect to x-node-0-0.x:9091", "- system error:Connection refused"],
        [*HEAD, SAVED, "OSError: [Errno 28] No space left on device"],
    ],
)  # fmt: skip
@pytest.mark.parametrize(("code", "culprit"), [(1, [*HEAD, "KeyError: 'x'"]), (139, ["step 3"])])
def test_the_rank_that_others_lost_is_named_although_they_end_first(
    victim: list[str], code: int, culprit: list[str]
) -> None:
    pods = [pod(0, ended(1)), pod(1, ended(code, finishedAt="2026-11-21T10:05:04Z"))]
    logs = {"x-node-0-0-abcde": victim, "x-node-0-1-abcde": culprit}
    assert diagnosis_of(Evidence(trainjob(), pods, logs), Observation(Phase.FAILED)).rank == "node-1"


@pytest.mark.parametrize(
    ("log", "created", "rank"),
    [
        (LOST, CREATED, "node-0"),
        (LOST, "2026-11-21T10:06:00Z", "node-1"),  # created again later
        ([*HEAD, "KeyError: 'x'"], CREATED, "node-1"),
    ],
)
def test_a_rank_that_cannot_start_explains_those_that_waited_for_it(log: list[str], created: str, rank: str) -> None:
    pulls = waiting("ErrImagePull", "x:1: not found")
    pods = [pod(0, pulls, metadata={"creationTimestamp": created}, phase="Pending"), pod(1, ended(1))]
    found = diagnosis_of(Evidence(trainjob(), pods, {"x-node-0-1-abcde": log}), Observation(Phase.FAILED))
    assert (found.rank, str(found.category) == "image") == (rank, rank == "node-0")


def test_a_launcher_that_kills_the_others_is_no_victim() -> None:
    killer = "[rank: 1] Child process with PID 312 terminated with code 1. Forcefully terminating all other processes"
    pods = [pod(0, ended(1)), pod(1, ended(137, finishedAt="2026-11-21T10:05:09Z"))]
    logs = {"x-node-0-0-abcde": LOST, "x-node-0-1-abcde": [*HEAD, "KeyError: 'x'", killer]}
    found = diagnosis_of(Evidence(trainjob(), pods, logs), Observation(Phase.FAILED))
    assert (found.rank, found.retry) == ("node-1", "unknown")
    assert found.summary == "node-1 was killed by signal 9 (SIGKILL): KeyError: 'x'"


@pytest.mark.parametrize(("after", "category"), [([], "out of memory"), (["step 4", "the end"], "user code")])
def test_an_exception_of_another_java_thread_does_not_end_the_process(after: list[str], category: str) -> None:
    thrown = ['Exception in thread "worker-0" java.lang.OutOfMemoryError: Java heap space', "\tat App.run(App.java:3)"]
    assert diagnosed(1, [*thrown, *after]).category == category


def test_a_pool_of_threads_is_no_child_process() -> None:
    pool = '  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 401, in __get_result'
    found = diagnosed(1, [*HEAD, pool, "ConnectionResetError: [Errno 104] Connection reset by peer"])
    assert (found.category, found.retry) == ("outage", "infrastructure")


def test_an_outage_while_an_own_error_was_handled_may_be_that_of_the_clean_up() -> None:
    handled = [*HEAD, "KeyError: 'bird'", "", "During handling of the above exception, another exception occurred:", ""]
    found = diagnosed(1, [*handled, *HEAD, f"requests.exceptions.ConnectionError: {'refused ' * 200}"])
    assert (found.category, found.retry) == ("outage", "unknown")
    assert found.summary.endswith("(while handling KeyError: 'bird')")


@pytest.mark.parametrize(("last", "retry"), [("the loss is not a number", "unknown"), ("train.py: error: no", "user")])
def test_a_line_that_begins_with_usage_is_no_refusal_of_arguments(last: str, retry: str) -> None:
    assert diagnosed(2, ["Usage: gpu 93%", last]).retry == retry


@pytest.mark.parametrize(
    ("reason", "message", "permanent"),
    [
        ("CreateContainerError", 'apparmor_parser version: exec: "apparmor_parser": executable file not found', False),
        ("StartError", "runc create failed: unable to apply cgroup configuration: no such file or directory", False),
        ("StartError", 'error during container init: exec: "trian": executable file not found in $PATH', True),
    ],
)  # fmt: skip
def test_a_program_of_the_node_is_not_the_command_of_the_container(reason: str, message: str, permanent: bool) -> None:
    meaning = objects.meaning_of(reason, message)
    assert meaning is not None
    assert meaning.permanent == permanent


@pytest.mark.parametrize(
    ("reason", "message", "rule"),
    [
        ("CreateContainerConfigError", 'failed to prepare subPath for volumeMount "data"', "start-mount-path"),
        ("CreateContainerConfigError", "cannot get image config: unexpected end of JSON input", "start-other"),
        ("ExceedsMaxQuota", "current podset request (16) > maximum capacity (8)", "queue-too-small"),
    ],
)
def test_a_row_has_the_reasons_of_other_phases_and_versions(reason: str, message: str, rule: str) -> None:
    found = objects.rule_of(reason, message)
    assert found is not None
    assert found.id == rule


@pytest.mark.parametrize("other", ["didn't have free ports", "has pod using PersistentVolumeClaim", "didn't satisfy"])
def test_a_node_that_matches_the_selector_is_not_denied(other: str) -> None:
    unmatched = "4 node(s) didn't match Pod's node affinity/selector. preemption: 0/5 nodes are available."
    rule = objects.rule_of("Unschedulable", f"0/5 nodes are available: 1 node(s) {other} x, {unmatched}")
    assert rule is not None
    assert rule.id == "unscheduled"
