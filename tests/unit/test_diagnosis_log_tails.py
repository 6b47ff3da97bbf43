"""The end of a log, with original messages of PyTorch, JAX and NCCL; the termination explains a failure.

Exceptions that the code has handled do not.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from tests.objects import ended, pod, trainjob

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.output import TAIL_LINES, Output, excerpt, read
from trainjob._diagnosis.tracebacks import Raised
from trainjob.errors import Diagnosis
from trainjob.status import Observation, Phase

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
torch.distributed.elastic.multiprocessing.texts.ChildFailedError:
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


def of(text: str) -> Output:
    return read(text.split("\n"))


def test_error_is_found_in_mixed_lines_of_two_torchrun_workers() -> None:
    tail = of(TORCHRUN)
    assert (tail.text, tail.line) == ("ValueError: step 3 has no labels", 5)
    assert (tail.consequence, tail.peers) == (False, ("127.0.0.1",))


C_STACK = """\
Fatal Python error: Segmentation fault

Current thread 0x00007fe7054cd200 [python] (most recent call first):
  File "/opt/train.py", line 4 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x4a [0x499c1d]
  Binary file "/usr/bin/python3" [0x53bf79]
  Binary file "/usr/lib/x86_64-linux-gnu/libc.so.6", at +0x406b0 [0x7fe70550e6b0]
  <truncated rest of calls>"""


@pytest.mark.parametrize("before", [TRACE + "ValueError: step 3 has no labels", "step 3 of 10", ""])
def test_the_c_stack_of_python_3_14_hides_no_error(before: str) -> None:
    without = of(f"{before}\nFatal Python error: Segmentation fault")
    assert of(f"{before}\n{C_STACK}") == without


def test_torchrun_report_replaces_a_missing_exception() -> None:
    report = TORCHRUN[TORCHRUN.index("W1121") :]
    assert of(report).text == "worker 1 exited with code 1"
    killed = of(report.replace("exitcode  : 1 ", "exitcode  : -9 "))
    assert killed.text == "worker 1 was killed by signal 9"
    assert of("Root Cause (first observed failure):\ncut off").text == ""


MPIRUN = "The first process to do so was:\n\n  Process name: [[54437,1],1]\n  Exit code:    3\n-----"


def test_mpirun_report_names_the_worker() -> None:
    assert of(MPIRUN).text == "worker 1 exited with code 3"
    assert of("  Process name: [[54437,1],1]").text == ""
    killed = "mpirun noticed that process rank 1 with PID 0 on node x-node-0-0 exited on signal 9 (Killed)."
    assert of(killed).text == "worker 1 was killed by signal 9"


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "<string>", line 1, in <module>
  | ExceptionGroup: two failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: first
    +---------------- 2 ----------------
    | KeyError: 'second'
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{TRACE}ValueError: no", "ValueError: no"),
        (f"{TRACE}KeyboardInterrupt", "KeyboardInterrupt"),
        (f"{TRACE}my.errors.Odd: a\n  b\n\n  c", "my.errors.Odd: a\nb\nc"),
        (f"{TRACE}my.errors.Odd: a\nb", "my.errors.Odd: a\nb"),
        (f"{TRACE}my.errors.Odd: a\nb\nc", ""),
        ("\x1b[31mTraceback (most recent call last):\x1b[0m\n  x\n\x1b[1mValueError\x1b[0m: no", "ValueError: no"),
        (f"{TRACE}E: 1\n\n{CHAIN}\n\n{TRACE}F: 2", "F: 2 (caused by E: 1)"),
        (f"{TRACE}E\n\n{DURING}\n\n{TRACE}F: 2", "F: 2 (while handling E)"),
        (f"{TRACE}E: 1\nrecovered\n{TRACE}F: 2", "F: 2"),
        (f"{TRACE}% not an exception", ""),
        (f"{TRACE}E: 1\n{TRACE}% not an exception", "E: 1\n% not an exception"),
        ("Traceback (most recent call last):\n  x", ""),
        ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  no device",
         "std::runtime_error: no device"),
        ("epoch 3\nterminate called after throwing an instance of 'std::runtime_error'\n  what():  no device\nAborted",
         "std::runtime_error: no device"),
        ("terminate called after throwing an instance of 'int'", "int"),
        ("usage: train.py [-h]\ntrain.py: error: no such thing: --eopchs", "train.py: error: no such thing: --eopchs"),
        ("1 of 2 files\nerror: nothing is at s3://b/x", "error: nothing is at s3://b/x"),
        (GROUP, "ValueError: first (in ExceptionGroup: two failed (2 sub-exceptions))"),
        ("epoch 1\nepoch 2", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_final_errors_are_found(text: str, error: str) -> None:
    assert of(text).text == error


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711",
        "[rank0]:[E1121 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(4)",
        "[W1121 socket.cpp:464] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer",
        "F1121 client.h:80] Terminating process because the JAX distributed service detected fatal errors.",
    ],
)
def test_lost_peers_are_recognized(line: str) -> None:
    assert of(f"epoch 3\n{line}").consequence
    assert of(f"{TRACE}{line}").consequence
    wrapped = f"{TRACE}OSError: y\n{line}\n{CHAIN}\n{TRACE}F: 2"
    assert not of(wrapped).consequence, "the final exception is another one"


def test_lines_after_the_error_may_report_a_lost_peer() -> None:
    """Native code explains its error in further lines; libraries write many lines at exit."""
    fatal = "F1121 10:00:00.1 7 client.cc:80] Terminating process."
    more = ["coordination service error", *["wandb: line"] * 30]
    assert read([fatal, *more]).consequence
    assert read([fatal, *["x"] * 5, *more]).consequence
    assert not read([fatal, *["x"] * 6, *more]).consequence, "other lines do not explain it"


@pytest.mark.parametrize(
    "line", ["ValueError: 3", "requests.exceptions.ReadTimeout: timed out", "connection to s3 closed"]
)
def test_connections_to_other_services_are_not_peers(line: str) -> None:
    assert not of(line).consequence
    assert not of(f"{TRACE}{line}").consequence


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
    shown = list(excerpt(lines, Output(line=line)))
    cut = [*lines[first : line + 1], f"[… {left_out} lines …]", *lines[-7:]]
    assert shown == (cut if left_out else lines[first:])
    assert len(shown) <= TAIL_LINES
    assert list(excerpt(lines, Output(survived=Raised("E", line=line)))) == shown


@given(st.lists(st.text() | st.sampled_from(TORCHRUN.split("\n")), max_size=30))
def test_any_text_can_be_read(lines: list[str]) -> None:
    tail = read(lines)
    assert -1 <= tail.line < len(lines)
    assert (tail.line == -1) == (not tail.text) or not tail.text


# ---------------------------------------------------------------- handled exceptions do not explain a failure


def diagnosed(code: int, *log: str) -> Diagnosis:
    """The diagnosis of a rank that terminated with `code` and the output `log`."""
    lines = "\n".join(log).split("\n") if log else []
    logs = {"x-node-0-0-abcde": lines}
    return diagnosis_of(Evidence(trainjob(), [pod(0, ended(code))], logs), Observation(Phase.FAILED))


def trace(*exception: str) -> str:
    return "\n".join(('Traceback (most recent call last):\n  File "train.py", line 3, in <module>', *exception))


ERRORS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be late",
    "ValueError: no labels\nin two lines",
    "subprocess.CalledProcessError: Command 'nvidia-smi' returned non-zero exit status 9.",
    "KeyError",
)
HANDLED = st.tuples(
    st.sampled_from(
        ["", "ERROR:root:step 3 failed\n", "Exception in thread Thread-1 (work):\n", "Exception ignored in: <f>\n"]
    ),
    st.sampled_from(ERRORS),
    st.sampled_from(["going on with a smaller batch", "epoch 4: loss 0.3", "  retried\nit worked", "\nepoch 5\n"]),
).map(lambda parts: f"{parts[0]}{trace(parts[1])}\n{parts[2]}")
ENDS = (
    (1, trace("ValueError: no such column")),
    (1, f"giving up\n{trace('E: 1')}\n\n{DURING}\n\n{trace('F: 2')}"),
    (1, "the loss is not a number, giving up"),
    (1, "1 of 2 files\nerror: nothing is at s3://b/x"),
    (2, "usage: train.py [-h]\ntrain.py: error: no such thing: --eopchs"),
    (3, "the loss is not a number"),
    (134, "terminate called after throwing an instance of 'std::runtime_error'\n  what():  no device"),
    (139, "epoch 6"),
    (137, "epoch 6"),
)  # fmt: skip


@given(st.lists(HANDLED, max_size=4), st.sampled_from([0, 30]), st.sampled_from(ENDS))
def test_a_handled_exception_does_not_change_the_verdict(handled: list[str], epochs: int, end: tuple[int, str]) -> None:
    code, last = end
    alone, after = diagnosed(code, "start", last), diagnosed(code, "start", *handled, *["epoch"] * epochs, last)
    for part in ("category", "retry", "advice"):
        assert getattr(after, part) == getattr(alone, part)
    quoted, _, before = after.summary.partition("; an exception before that: ")
    assert quoted == alone.summary
    assert not before or epochs <= 20
    assert after.log[-1] == last.splitlines()[-1], "the excerpt ends with the last line"
    assert len(after.log) <= 20


AFTERWARDS = """
import {imports}
{before}
raise ValueError("no such column")
"""


@pytest.mark.parametrize(
    ("imports", "before"),
    [
        ("sys", ""),
        ("atexit", "atexit.register(lambda: 1 / 0)"),
        ("threading", "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start(), thread.join()"),
        ("weakref", "class Odd:\n def __del__(self): 1 / 0\nodd = Odd()"),
        ("warnings", "f = open('/dev/null')"),
        ("logging",
         "try:\n 1 / 0\nexcept ZeroDivisionError:\n logging.exception('handled')\nlogging.error('going on')"),
        ("sys", "try:\n 1 / 0\nexcept ZeroDivisionError as error:\n sys.excepthook(type(error), error, None)"),
    ],
)  # fmt: skip
def test_output_of_python_at_exit_is_not_the_cause(imports: str, before: str) -> None:
    script = AFTERWARDS.format(imports=imports, before=before)
    command = [sys.executable, "-X", "dev", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = diagnosed(done.returncode, done.stderr.rstrip())
    assert found.summary == "node-0 exited with code 1: ValueError: no such column", done.stderr


BAR = " 33%|███       | 1/3 [00:01<00:02,  1.00s/it]"


@pytest.mark.parametrize(
    ("afterwards", "ends"),
    [
        (BAR, True),
        (BAR.replace("1/3", "2/3"), False),
        ("wandb: Find logs at: ./wandb/run", True),
        ("[rank0]:[W1121 10:00:00.1 ProcessGroupNCCL.cpp:1479] Warning: destroy_process_group() was not called", True),
        ("E1121 10:00:00.1 7 coordination_service.cc:518] failed\nABORTED: shut down\n\nRPC: /x.Shutdown", True),
        ("E1121 10:00:00.1 7 train.py:10] giving up", False),
        ("--------------------\nFor simplicity, JAX has removed its internal frames", True),
        ("1 validation error", True),
        ("make: *** [Makefile:3: train] Error 1", True),
        ("mpirun detected that one or more processes exited with non-zero status\n\n  Process name: [[1,1],1]", True),
        ("/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: x\n  warnings.warn(", True),
    ],
)
def test_known_lines_may_follow_the_final_traceback(afterwards: str, ends: bool) -> None:
    found = diagnosed(1, f"{BAR}{trace('ValueError: no labels')}", afterwards)
    assert ("exited with code 1: ValueError: no labels" in found.summary) == ends


def test_exceptions_of_launchers_do_not_hide_the_workers_exception() -> None:
    worker = trace("ValueError: no labels")
    called = trace("subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.")
    assert diagnosed(1, worker, called).summary == "node-0 exited with code 1: ValueError: no labels"
    assert "CalledProcessError" in diagnosed(1, worker, "going on", called).summary
    spawned = trace("torch.multiprocessing.spawn.ProcessRaisedException: ")
    log = f"{spawned}\n\n-- Process 1 terminated with the following error:\n{worker}"
    assert diagnosed(1, log).summary == "node-0 exited with code 1: ValueError: no labels"


def test_each_worker_is_read_separately() -> None:
    """PyTorch's hook writes the rank before each line, of an uncaught exception only."""
    hooked = "\n".join(f"[rank1]: {line}" for line in trace("ValueError: two\nlines").splitlines())
    assert (
        diagnosed(1, hooked, "epoch 3 of another worker").summary == "node-0 exited with code 1: ValueError: two lines"
    )


def test_excerpt_has_the_last_state_of_progress_bars() -> None:
    found = diagnosed(1, " 1%|\r 2%|\r 3%|", "done\r")
    assert found.log == (" 3%|", "done")
