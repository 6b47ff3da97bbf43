"""The end of a log, with original messages of PyTorch, JAX and NCCL."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from trainjob._diagnosis.log_tails import TAIL_LINES, Tail, excerpt, parse
from trainjob.verdicts import Category

TRACE = "Traceback (most recent call last):\n  x\n"
CHAIN = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"

TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/opt/train.py", line 9, in <module>
[rank0]: Traceback (most recent call last):
[rank1]:     raise ValueError("step 3 has no labels")
[rank0]:   File "/opt/train.py", line 10, in <module>
[rank1]: ValueError: step 3 has no labels
[rank0]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40514
W1121 10:00:01.000000 7 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 9 closing signal SIGTERM
E1121 10:00:01.000000 7 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/opt/train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_10:00:01
  host      : x-node-0-0.x
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 10)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


def of(text: str) -> Tail:
    return parse(text.split("\n"))


def test_error_is_found_in_mixed_lines_of_two_torchrun_workers() -> None:
    tail = of(TORCHRUN)
    assert (tail.error, tail.line) == ("ValueError: step 3 has no labels", 5)
    assert (tail.lost_peer, tail.peers) == (False, ("127.0.0.1",))


def test_torchrun_report_replaces_a_missing_exception() -> None:
    report = TORCHRUN[TORCHRUN.index("W1121") :]
    assert of(report).error == "worker 1 exited with code 1"
    killed = of(report.replace("exitcode  : 1 ", "exitcode  : -9 "))
    assert killed.error == "worker 1 was killed by signal 9"
    assert killed.meaning is not None
    assert killed.meaning.category is Category.UNKNOWN
    assert of("Root Cause (first observed failure):\ncut off").error == ""


MPIRUN = """\
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[54437,1],1]
  Exit code:    3
--------------------------------------------------------------------------"""


def test_mpirun_report_names_the_worker() -> None:
    assert of(MPIRUN).error == "worker 1 exited with code 3"
    assert of("  Process name: [[54437,1],1]").error == ""
    killed = "mpirun noticed that process rank 1 with PID 0 on node x-node-0-0 exited on signal 9 (Killed)."
    assert of(killed).error == "worker 1 was killed by signal 9"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{TRACE}ValueError: no", "ValueError: no"),
        (f"{TRACE}KeyboardInterrupt", "KeyboardInterrupt"),
        (f"{TRACE}my.errors.Odd: a\n  b\n\n  c", "my.errors.Odd: a"),
        (f"{TRACE}my.errors.Odd: a\nb", ""),
        ("\x1b[31mTraceback (most recent call last):\x1b[0m\n  x\n\x1b[1mValueError\x1b[0m: no", "ValueError: no"),
        (f"{TRACE}E: 1\n\n{CHAIN}\n\n{TRACE}F: 2", "F: 2 (caused by E: 1)"),
        (f"{TRACE}E\n\n{DURING}\n\n{TRACE}F: 2", "F: 2 (caused by E)"),
        (f"{TRACE}E: 1\nrecovered\n{TRACE}F: 2", "F: 2"),
        (f"{TRACE}% not an exception", ""),
        (f"{TRACE}E: 1\n{TRACE}% not an exception", ""),
        ("Traceback (most recent call last):\n  x", ""),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no device",
         "std::runtime_error: no device"),
        ("epoch 3\nterminate called after throwing an instance of 'std::runtime_error'\n  what():  no device\nAborted",
         "std::runtime_error: no device"),
        ("terminate called after throwing an instance of 'int'", "int"),
        ("usage: train.py [-h]\ntrain.py: error: no such thing: --eopchs", "train.py: error: no such thing: --eopchs"),
        ("1 of 2 files\nerror: nothing is at s3://b/x", "error: nothing is at s3://b/x"),
        ("epoch 1\nepoch 2", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_final_errors_are_found(text: str, error: str) -> None:
    assert of(text).error == error


def test_an_exception_group_is_read() -> None:
    script = "raise ExceptionGroup('two failed', [ValueError('first'), KeyError('second')])"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr
    assert of(output).error in (
        "KeyError: 'second'",
        "ValueError: first",
        "ExceptionGroup: two failed (2 sub-exceptions)",
    )


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Read error [10.88.0.7]:4711: Connection reset by peer",
        "[rank0]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(4)",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "[W1121 socket.cpp:464] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
        "jax.errors.JaxRuntimeError: UNAVAILABLE: Task /job:jax_worker/replica:0/task:1 heartbeat timeout.",
        "F1121 client.h:80] Terminating process because the JAX distributed service detected fatal errors.",
        "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-gather failed: Connection closed by peer [10.0.0.1]:1",
    ],
)
def test_lost_peers_are_recognized(line: str) -> None:
    assert of(f"epoch 3\n{line}").lost_peer
    assert of(f"{TRACE}{line}").lost_peer
    wrapped = f"{TRACE}OSError: y\n{line}\n{CHAIN}\n{TRACE}F: 2"
    assert not of(wrapped).lost_peer, "the final exception is another one"


def test_lines_after_the_error_may_report_a_lost_peer() -> None:
    """Native code explains its error in further lines; libraries write many lines at exit."""
    fatal = "F1121 10:00:00.1 7 client.cc:80] Terminating process."
    more = ["coordination service error", *["wandb: line"] * 30]
    assert parse([fatal, *more]).lost_peer
    assert parse([fatal, *["x"] * 5, *more]).lost_peer
    assert not parse([fatal, *["x"] * 6, *more]).lost_peer, "other lines do not explain it"


@pytest.mark.parametrize(
    "line", ["ValueError: 3", "requests.exceptions.ReadTimeout: timed out", "connection to s3 closed"]
)
def test_connections_to_other_services_are_not_peers(line: str) -> None:
    assert not of(line).lost_peer
    assert not of(f"{TRACE}{line}").lost_peer


def test_a_lost_connection_is_distinguished_from_a_lost_peer() -> None:
    tail = of(f"{TRACE}ConnectionResetError: [Errno 104] Connection reset by peer")
    assert (tail.lost_connection, tail.lost_peer) == (True, False)


@pytest.mark.parametrize(
    ("error", "category"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Category.OUT_OF_MEMORY),
        ("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes.", Category.OUT_OF_MEMORY),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB for an array", Category.OUT_OF_MEMORY),
        ("MemoryError", Category.OUT_OF_MEMORY),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Category.NODE_LOST),
        ("ImportError: libgomp.so: cannot allocate memory in static TLS block", Category.USER_CODE),
        ("ModuleNotFoundError: No module named 'apex'", Category.USER_CODE),
        ("OSError: [Errno 28] No space left on device", Category.USER_CODE),
    ],
)
def test_known_errors_have_a_category(error: str, category: Category) -> None:
    meaning = of(f"{TRACE}{error}").meaning
    assert meaning is not None
    assert meaning.category is category


def test_unknown_errors_have_no_category() -> None:
    assert of("epoch 1: No space left on device, trying another" + "\nepoch" * 30).meaning is None
    assert of(f"{TRACE}ValueError: no").meaning is None


@pytest.mark.parametrize(
    ("line", "first", "left_out"),
    [
        (-1, 80, 0),  # no exception
        (80, 80, 0),
        (79, 68, 13),
        (50, 39, 42),
        (3, 0, 89),
        (0, 0, 92),
    ],
)
def test_excerpt_has_the_exception_and_the_last_lines(line: int, first: int, left_out: int) -> None:
    lines = [f"line {number}" for number in range(100)]
    shown = list(excerpt(lines, Tail(line=line)))
    cut = [*lines[first : line + 1], f"[… {left_out} lines …]", *lines[-7:]]
    assert shown == (cut if left_out else lines[first:])
    assert len(shown) <= TAIL_LINES
    assert list(excerpt(lines, Tail(survived=line))) == shown


@given(st.lists(st.text() | st.sampled_from(TORCHRUN.split("\n")), max_size=30))
def test_any_text_can_be_read(lines: list[str]) -> None:
    tail = parse(lines)
    assert -1 <= tail.line < len(lines)
    assert (tail.line == -1) == (not tail.error) or not tail.error
