"""The watchdog of `trainjob.progress`: what a rank writes about its steps, and when it makes none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainjob._diagnosis.ranks import ranks_in
from trainjob.progress import watchdog
from trainjob.progress.message import RANKS


def cleared() -> dict[str, str]:
    """This environment without a rank."""
    return {name: value for name, value in os.environ.items() if name not in RANKS + watchdog._WORLDS}


def run(script: str, *, timeout: str = "1.2", **env: str) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The markers, the lines of stacks and the other lines that a script writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os, time\nfrom trainjob import progress\n{script}"],
        env={**cleared(), "TRAINJOB_STALL_TIMEOUT": timeout, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stderr.splitlines()
    markers = [json.loads(line.removeprefix(watchdog.RANK_MARKER)) for line in lines if "trainjob.rank" in line]
    stacks = [line for line in lines if line.startswith(watchdog.STACK_MARKER)]
    return markers, stacks, [line for line in lines if "trainjob.rank" not in line and line not in stacks]


def test_a_rank_that_makes_steps_writes_no_stack() -> None:
    markers, stacks, other = run(
        "for n in range(60): progress.step(n); time.sleep(0.02)", RANK="3", WORLD_SIZE="8", timeout="4"
    )
    assert {(each["rank"], each["world"]) for each in markers} == {(3, 8)}
    assert "count" not in markers[0], "the first one is written before the first step"
    assert (markers[-1]["count"], markers[-1]["step"], markers[-1]["ended"]) == (60, 59, True)
    assert all(0.01 < each["step_seconds"] < 1 for each in markers if "step_seconds" in each)
    assert len(markers) < 12, "at most one in a quarter of the timeout"
    assert (stacks, other) == ([], [])


def test_a_stalled_rank_writes_its_stacks_once_for_each_stall(tmp_path: Path) -> None:
    script = """
import threading
def load(): event.wait()
def stuck(): time.sleep(2)
event = threading.Event()
threading.Thread(target=load, daemon=True).start()
progress.step(); stuck(); progress.step(); time.sleep(0.4)
"""
    markers, stacks, other = run(script, JAX_PROCESS_ID="2", PATH=str(tmp_path))
    stalled = [each for each in markers if "stalled_seconds" in each]
    assert [(each["rank"], each["steps"]) for each in stalled] == [(2, 1)]
    assert stalled[0]["stalled_seconds"] >= 0.6
    assert stacks[0] == "trainjob.stack 2| Main thread (most recent call first):"
    assert stacks[1].endswith("in stuck"), "the main thread is first"
    assert any(line.endswith("in load") for line in stacks), "and all other threads follow"
    assert not any("trainjob/progress/" in line for line in stacks), "but for the watchdog itself"
    assert not any(watchdog.NATIVE_HEADING in line for line in stacks), "py-spy is not there"
    assert markers[-1]["steps"] == 2
    assert len(other) == 1
    assert "raise stall_timeout" in other[0]


def test_native_frames_follow_if_py_spy_is_there() -> None:
    script = """
def stuck(): time.sleep(3)
progress.step(); stuck()
"""
    markers, stacks, _ = run(script, timeout="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    texts = [line.removeprefix("trainjob.stack 0| ") for line in stacks]
    native = texts[texts.index(watchdog.NATIVE_HEADING) + 1 :]
    assert native[0].startswith("Thread ")
    assert '"MainThread"' in native[0], "the main thread is first"
    assert any("nanosleep" in line for line in native), "the function of C that sleeps; Debian strips those of Python"
    assert any(line.strip().startswith("stuck (") for line in native)
    assert not any("watchdog" in line for line in stacks)
    assert not any("import os, time" in line for line in stacks), "the command line may have secrets"
    assert markers[-1]["ended"]
    state = ranks_in("node-0", [f"{watchdog.RANK_MARKER}{json.dumps(markers[-2])}", *stacks])["node-0", 0]
    assert state.marker.stack[0].function == "stuck"
    assert any("nanosleep" in line for line in state.marker.native)
    assert not any("Thread" in line for line in state.marker.native)


@pytest.mark.parametrize(
    ("folder", "file", "kind"),
    [
        ("torch/distributed", "distributed_c10d.py", "waiting"),
        ("torch/autograd", "graph.py", "waiting"),
        ("torch/cuda", "streams.py", "device"),
        ("torch/utils/data", "dataloader.py", "loading"),
        ("torch/nn", "module.py", ""),
    ],
)
def test_a_marker_has_what_the_main_thread_spent_its_time_with(
    tmp_path: Path, folder: str, file: str, kind: str
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / file).write_text("import time, threading\ndef wait(): threading.Event().wait(0.03)\n")
    module = file.removesuffix(".py")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / folder)!r})
import {module}
for n in range(80):
    {module}.wait() if n < 40 else time.sleep(0.03)
    progress.step(n)
"""
    markers, _, _ = run(script, timeout="4")
    spent = markers[-1]["spent"]
    assert spent.keys() == {"all", *([kind] if kind else [])}
    assert spent["all"] > 1.5
    if kind:
        assert 0.2 < spent[kind] / spent["all"] < 0.8, "half, and a look at the stack may be late on a busy machine"


def test_a_rank_before_its_first_step_has_twice_the_time() -> None:
    markers, stacks, _ = run("progress.watch(); time.sleep(0.9)", timeout="1.6")
    assert [each.get("ended") for each in markers] == [None, True], "half of the timeout has passed, and it compiles"
    assert stacks == []
    markers, stacks, _ = run("progress.watch(); time.sleep(1.5)", timeout="1.0")
    assert "stalled_seconds" in markers[1]
    assert stacks


@pytest.mark.parametrize(
    ("script", "number"),
    [
        ("progress.step(); progress.report(step=500); progress.step()", {"steps": 2}),
        ("progress.step(7); progress.report(step=500)", {"step": 7}),
        ("progress.report(step=500)", {"step": 500}),
        ("progress.report(metrics={'loss': 1})", {}),
        ("import trainjob.progress.message as sent; sent.watch(); time.sleep(0.1)", {}),  # of a function trainer
    ],
)
def test_ranks_write_numbers_that_can_be_compared(script: str, number: dict[str, int]) -> None:
    markers, _, _ = run(script)
    assert {name: value for name, value in markers[-1].items() if name in ("step", "steps")} == number
    assert [each.get("ended") for each in (markers[0], markers[-1])] == [None, True]


def test_a_timeout_that_is_no_number_is_logged() -> None:
    markers, stacks, (line,) = run("progress.step(); progress.step(); time.sleep(0.2)", timeout="soon")
    assert (markers, stacks) == ([], [])
    assert line.startswith("trainjob.progress: the watchdog of this rank failed: ValueError")


@pytest.mark.parametrize("timeout", ["", "-1", "inf", "nan", "0"])
def test_without_a_timeout_nothing_is_written(timeout: str) -> None:
    assert run("progress.step(); time.sleep(0.2)", timeout=timeout) == ([], [], [])


def test_a_child_process_does_not_report_the_end_of_its_parent() -> None:
    script = "progress.step()\nif os.fork() == 0: raise SystemExit\nos.wait(); time.sleep(0.2)"
    markers, _, _ = run(script)
    assert [each.get("ended") for each in markers].count(True) == 1


def test_stderr_that_is_closed_does_not_end_the_training() -> None:
    assert run("os.close(2); progress.step(); time.sleep(1.5)\nprint('done')") == ([], [], [])


# ---------------------------------------------------------------- programs that do not call it


def executed(script: str, tmp_path: Path, *words: str, **env: str) -> tuple[list[str], str]:
    """Lines that a script writes to stderr, and its stdout, if `trainjob exec` runs it."""
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [str(Path(sys.executable).with_name("trainjob")), "exec", "--", sys.executable, str(path), *words]
    env = {**cleared(), "TRAINJOB_STALL_TIMEOUT": "2", "JOB_COMPLETION_INDEX": "5", **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines(), done.stdout


def test_exec_watches_a_script_but_no_process_that_it_starts(tmp_path: Path) -> None:
    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    lines, out = executed(script, tmp_path)
    assert [watchdog.RANK_MARKER in line for line in lines] == [True, True], "the begin and the end of one process"
    assert '"rank":5' in lines[0]
    assert out == "1\n"


def test_exec_does_not_watch_the_launcher_of_ranks(tmp_path: Path) -> None:
    script = """
import os, subprocess, sys
if sys.argv[1:] == ["torchrun"]:
    subprocess.run([sys.executable, __file__], check=True, env={**os.environ, "RANK": "7"})
"""
    lines, _ = executed(script, tmp_path, "torchrun")
    assert [('"rank":7' in line) for line in lines] == [True, True]


def test_exec_keeps_the_path_and_the_sitecustomize_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.CUSTOM = 'kept'")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert executed("print(CUSTOM)", tmp_path, PYTHONPATH=path)[1] == "kept\n"
    script = "import os\nprint(os.environ['PYTHONPATH'])"
    assert executed(script, tmp_path, PYTHONPATH=path, TRAINJOB_STALL_TIMEOUT="")[1] == f"{path}\n", "no timeout"
