"""Errors that a log has beside the one that ended the training: they decide nothing."""

from __future__ import annotations

import pytest
from tests.objects import ended, pod, trainjob
from tests.unit.rule_examples import diagnosed

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob.status import Observation, Phase

LIBRARY = '  File "/usr/lib/python3/dist-packages/{}.py", line 1, in x'
HEAD = ["Traceback (most recent call last):", '  File "/app/train.py", line 9, in <module>', "    work()"]
OWN = [*HEAD, "KeyError: 'label'"]
AWAY = [*HEAD, "requests.exceptions.ConnectionError: Connection refused"]
FULL = [*HEAD, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
LOST = [*HEAD, "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"]
SLOW = (
    "[rank0]:[E909 10:04:41.1 ProcessGroupNCCL.cpp:682] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
REPORT = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "train.py FAILED",
    "Root Cause (first observed failure):", "[0]:", "  rank      : 0 (local_rank: 0)", "  exitcode  : 1 (pid: 71)",
    "  traceback : To enable traceback see: https://pytorch.org/docs", "=" * 60]  # fmt: skip
TERMINATED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 62 got signal: 15"
AGAIN = "W909 10:05:01.0 62 torch/distributed/elastic/agent/server/api.py:719] [default] Worker group FAILED. 2/3 "


def ranked(number: int, lines: list[str]) -> list[str]:
    return [f"[rank{number}]: {line}" for line in lines]


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        (["step 3", *ranked(1, OWN), SLOW], "KeyError: 'label'"),
        (["step 3", SLOW, f"{AGAIN}attempts left; will restart worker group", "step 1", *OWN, *REPORT], "'label'"),
        ([*ranked(3, AWAY), *REPORT, "second try", "step 1", *ranked(1, OWN), *REPORT], "KeyError: 'label'"),
        ([*ranked(3, AWAY), *REPORT, "no cache: tokenizing", "no data in /data"], "last log line: no data in /data"),
        (["step 3", *AWAY, "next try", "step 4", "accuracy: 0.3", *REPORT], "last log line: accuracy: 0.3"),
        ([*OWN, "Task exception was never retrieved", "future: <Task finished name='Task-3'>", *AWAY], "'label'"),
        ([*OWN, "--- Logging error ---", *AWAY, "Call stack:", '  File "a", line 3', "Message: 'x'", "Arguments: ()"],
            "KeyError: 'label'"),
        ([*OWN, *HEAD, "KeyboardInterrupt"], "KeyError: 'label'"),
        ([*OWN, *HEAD, TERMINATED], "KeyError: 'label'"),
        ([*ranked(1, OWN), *HEAD, TERMINATED], "KeyError: 'label'"),
        ([*OWN, *LOST], "KeyError: 'label'"),
        ([*OWN, "-" * 74, "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD", "with errorcode 1.", ""],
            "KeyError: 'label'"),
        ([*OWN, "", "=" * 83, "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   EXIT CODE: 1"],
            "KeyError: 'label'"),
        (["terminate called after throwing an instance of 'c10::DistBackendError'", "  what():  timeout", "step 4",
            "error: accuracy: 0.3"], "last log line: error: accuracy: 0.3"),
        (["thread '<unnamed>' panicked at src/data.rs:44:31:", "the len is 10", "note: run with `RUST_BACKTRACE=1`",
            "thread 'main' panicked at src/main.rs:90:40:", "PoisonError { .. }"], "data.rs:44:31: the len is 10"),
    ],
)  # fmt: skip
def test_an_error_beside_the_last_one_is_not_the_cause(log: list[str], quoted: str) -> None:
    found = diagnosed(1, log)
    assert (found.category, found.retry) == ("user code", "unknown"), found.text()
    assert found.summary.endswith(quoted)


@pytest.mark.parametrize("tracker", ["🏃 View run a at: http://b", "COMET INFO: uploading", "wandb: "])
def test_lines_of_a_tracker_at_exit_do_not_hide_the_error(tracker: str) -> None:
    assert diagnosed(1, [*FULL, tracker, tracker]).category == "out of memory"


@pytest.mark.parametrize(
    ("package", "error"),
    [
        ("mlflow/utils/validation", "mlflow.exceptions.MlflowException: value has length 503, at most 500 are allowed"),
        ("mlflow/utils/validation", "mlflow.exceptions.MlflowException: invalid value nan at step 403"),
        ("google/api_core/x", "google.api_core.exceptions.InvalidArgument: 400 The batch has 503 rows"),
        ("datasets/table", "datasets.table.CastError: Couldn't cast column 403: string to int64"),
        ("botocore/client", 'botocore.exceptions.ParamValidationError: Unknown parameter in input: "connect_timeout"'),
        ("sqlalchemy/x", 'sqlalchemy.exc.ProgrammingError: (psycopg2.errors.X) column "timeout" does not exist'),
        ("sqlalchemy/x", "sqlalchemy.exc.InternalError: (psycopg2.errors.X) current transaction is aborted"),
        ("sqlalchemy/x", "sqlalchemy.exc.TimeoutError: QueuePool limit of size 5 reached, connection timed out"),
        ("psycopg2/x", "psycopg2.errors.QueryCanceled: canceling statement due to statement timeout"),
        ("torch/distributed/checkpoint/default_planner", "RuntimeError: Missing key: model.connector.weight."),
        ("torch/distributed/fsdp/_flat_param", "RuntimeError: Cannot writeback; closest shape is [3]"),
        ("torch/distributed/distributed_c10d", "RuntimeError: DDP expects same model, not connection.reset.weight"),
        ("xgboost/core", "xgboost.core.XGBoostError: [10:00:00] data.cc:501: Size of labels of remote.csv"),
        ("jax/_src/compiler", "jax.errors.JaxRuntimeError: INVALID_ARGUMENT: unsupported optimization_barrier operand"),
        ("jax/_src/compiler", "jax.errors.JaxRuntimeError: INTERNAL: failed to enable peer access from device 0 to 1"),
        ("torch/utils/data/x", "RuntimeError: DataLoader worker (pid 3) is killed by signal: Segmentation fault. "),
        ("subprocess", "subprocess.CalledProcessError: Command '['kill', '-s', 'SIGKILL', '7']' returned non-zero"),
        ("x", "ImportError: cannot import name 'N' from partially initialized module 'm' (a circular import)"),
    ],
)
def test_words_of_a_rule_among_the_values_of_an_error_are_no_rule(package: str, error: str) -> None:
    found = diagnosed(1, [*HEAD, LIBRARY.format(package), error])
    assert (found.category, found.retry) == ("user code", "unknown"), found.text()


@pytest.mark.parametrize("error", ["lightning.pytorch.utilities.exceptions.SIGTERMException", TERMINATED])
def test_a_program_that_was_terminated_did_not_fail_by_its_own_code(error: str) -> None:
    found = diagnosed(1, [*HEAD, error])
    assert (found.category, found.retry) == ("unknown", "infrastructure")


def test_an_outage_that_was_logged_before_the_last_line_is_not_the_cause() -> None:
    found = diagnosed(1, ["10:04:00 WARNING no metrics", *AWAY, "loss is nan: stopping"])
    assert (found.category, found.retry) == ("user code", "unknown")
    assert "last log line: loss is nan: stopping; an exception before that: requests" in found.summary


def test_the_second_line_of_the_message_of_an_outage_belongs_to_it() -> None:
    found = diagnosed(1, ["step 3", *HEAD, "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: x", "", "Wait."])
    assert (found.category, found.retry) == ("outage", "infrastructure")


def test_a_checkpoint_that_another_rank_could_not_write_earlier_names_no_culprit() -> None:
    saved = [*HEAD, "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])"]
    logs = {"x-node-0-0-abcde": [*saved, "next try", "step 5", *OWN], "x-node-0-1-abcde": LOST}
    pods = [pod(0, ended(1, finishedAt="2026-11-21T10:05:04Z")), pod(1, ended(1))]
    assert diagnosis_of(Evidence(trainjob(), pods, logs), Observation(Phase.FAILED)).rank == "node-0"


@pytest.mark.parametrize(
    ("code", "log", "quoted"),
    [
        (134, ["epoch 0", "/app/ggml.c:3210: GGML_ASSERT(a->ne[2] == b->ne[0]) failed", "Aborted (core dumped)"],
            ": GGML_ASSERT(a->ne[2] == b->ne[0]) failed"),
        (134, ["CUDA error: out of memory", "Aborted (core dumped)"], "; last log line: CUDA error: out of memory"),
        (139, ["blas: pthread_create failed"], "; last log line: blas: pthread_create failed"),
        (1, ["ERROR: LoadError: OutOfMemoryError()", "Stacktrace:", " [1] Array", "   @ ./boot.jl:578 [inlined]",
            "in expression starting at /app/train.jl:12"], "ERROR: LoadError: OutOfMemoryError()"),
    ],
)  # fmt: skip
def test_the_summary_has_the_last_message_of_a_native_crash_and_of_julia(
    code: int, log: list[str], quoted: str
) -> None:
    assert diagnosed(code, log).summary.endswith(quoted)
