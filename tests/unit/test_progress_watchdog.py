"""The watchdog of `trainjob.progress`: what a rank writes about its steps, and when it makes none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from trainjob import progress


def run(script: str, *, timeout: str = "1.2", **env: str) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The markers, the lines of stacks and the other lines that a script writes to stderr."""
    cleared = {name: value for name, value in os.environ.items() if name not in progress._RANKS + progress._WORLDS}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, time\nfrom trainjob import progress\n{script}"],
        env={**cleared, "TRAINJOB_STALL_TIMEOUT": timeout, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stderr.splitlines()
    markers = [json.loads(line.removeprefix(progress.RANK_MARKER)) for line in lines if "trainjob.rank" in line]
    stacks = [line for line in lines if line.startswith(progress.STACK_MARKER)]
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


def test_a_stalled_rank_writes_its_stacks_once_for_each_stall() -> None:
    script = """
import threading
def load(): event.wait()
def stuck(): time.sleep(2)
event = threading.Event()
threading.Thread(target=load, daemon=True).start()
progress.step(); stuck(); progress.step(); time.sleep(0.4)
"""
    markers, stacks, other = run(script, JAX_PROCESS_ID="2")
    stalled = [each for each in markers if "stalled_seconds" in each]
    assert [(each["rank"], each["steps"]) for each in stalled] == [(2, 1)]
    assert stalled[0]["stalled_seconds"] >= 0.6
    assert stacks[0] == "trainjob.stack 2| Main thread (most recent call first):"
    assert stacks[1].endswith("in stuck"), "the main thread is first"
    assert any(line.endswith("in load") for line in stacks), "and all other threads follow"
    assert not any("progress.py" in line for line in stacks), "but for the watchdog itself"
    assert markers[-1]["steps"] == 2
    assert len(other) == 1
    assert "raise stall_timeout" in other[0]


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
        ("progress.step('soon')", {}),
    ],
)
def test_ranks_write_numbers_that_can_be_compared(script: str, number: dict[str, int]) -> None:
    markers, _, _ = run(script)
    assert {name: value for name, value in markers[-1].items() if name in ("step", "steps")} == number


@pytest.mark.parametrize("timeout", ["", "soon", "-1", "inf", "nan", "0"])
def test_without_a_timeout_nothing_is_written(timeout: str) -> None:
    assert run("progress.step(); time.sleep(0.2)", timeout=timeout) == ([], [], [])


def test_a_child_process_does_not_report_the_end_of_its_parent() -> None:
    script = "progress.step()\nif os.fork() == 0: raise SystemExit\nos.wait(); time.sleep(0.2)"
    markers, _, _ = run(script)
    assert [each.get("ended") for each in markers].count(True) == 1


def test_stderr_that_is_closed_does_not_end_the_training() -> None:
    assert run("os.close(2); progress.step(); time.sleep(1.5)\nprint('done')") == ([], [], [])
