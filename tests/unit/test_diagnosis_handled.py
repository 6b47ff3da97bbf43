"""Handled exceptions do not explain a failure; the termination does."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from tests.objects import ended, pod, trainjob

from trainjob._diagnosis import diagnosis_of
from trainjob.status import Observation, Phase
from trainjob.verdicts import Category, Diagnosis, Evidence


def diagnosed(code: int, *log: str) -> Diagnosis:
    """The diagnosis of a rank that terminated with `code` and the output `log`."""
    lines = "\n".join(log).split("\n") if log else []
    logs = {"x-node-0-0-abcde": lines}
    return diagnosis_of(Evidence(trainjob(), [pod(0, ended(code))], logs), Observation(Phase.FAILED))


def trace(*exception: str) -> str:
    return "\n".join(('Traceback (most recent call last):\n  File "train.py", line 3, in <module>', *exception))


DURING = "During handling of the above exception, another exception occurred:"
ERRORS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "MemoryError",
    "ModuleNotFoundError: No module named 'apex'",
    "ImportError: cannot import name 'x'",
    "OSError: [Errno 28] No space left on device",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be late",
    "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation",
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
    (1, trace("ModuleNotFoundError: No module named 'apex'")),
    (1, trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")),
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
    for part in ("summary", "category", "retry", "advice"):
        assert getattr(after, part) == getattr(alone, part)
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


def test_a_handled_out_of_memory_error_is_not_the_cause() -> None:
    """A handled CUDA OOM, and a later failure with a message of the script."""
    oom = trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    found = diagnosed(1, oom, "batch size 64 -> 32", *["epoch"] * 40, "validation failed: accuracy 0.1 is below 0.9")
    assert found.category is Category.USER_CODE
    assert found.summary == ("node-0 exited with code 1; last log line: validation failed: accuracy 0.1 is below 0.9")
    assert found.log[0].startswith("Traceback"), "the handled exception and the number of omitted lines are shown"
    assert found.log[3] == "[… 35 lines …]"
    assert found.log[-1] == "validation failed: accuracy 0.1 is below 0.9"


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
        ("1 validation error", False),
        ("make: *** [Makefile:3: train] Error 1", True),
        ("mpirun detected that one or more processes exited with non-zero status\n\n  Process name: [[1,1],1]", True),
        ("/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: x\n  warnings.warn(", True),
    ],
)
def test_known_lines_may_follow_the_final_traceback(afterwards: str, ends: bool) -> None:
    found = diagnosed(1, f"{BAR}{trace('ValueError: no labels')}", afterwards)
    assert ("ValueError: no labels" in found.summary) == ends


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
    assert diagnosed(1, hooked, "epoch 3 of another worker").summary == "node-0 exited with code 1: ValueError: two"


def test_excerpt_has_the_last_state_of_progress_bars() -> None:
    found = diagnosed(1, " 1%|\r 2%|\r 3%|", "done\r")
    assert found.log == (" 3%|", "done")
