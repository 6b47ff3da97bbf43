"""Nothing that a script reports, and nothing that happens to a channel, ends a training."""

from __future__ import annotations

import errno
import gc
import io
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.progress.reports import written

from trainjob.progress import calls, report, reporting, step

LONG = "eval_super_glue_record_question_answering_exact_match_normalized_macro_avg"
SPECIAL_METHODS = ("__float__", "__index__", "__str__", "__repr__", "__len__", "__eq__", "__getattr__", "__bool__")


def hostile(*_: object) -> Any:
    raise LookupError("of the value")


Hostile = type("Hostile", (), {**dict.fromkeys(SPECIAL_METHODS, hostile), "__hash__": lambda self: 7, "items": hostile})
Text, Whole = type("Text", (str,), {"__str__": hostile}), type("Whole", (int,), {"__index__": hostile})


class Endless(Mapping[str, float]):
    """A mapping whose iteration fails after two entries."""

    __len__ = __getitem__ = hostile

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError

    def items(self) -> Any:
        """Two entries, then an error."""
        yield from {"a": 1.0, "b": 2.0}.items()
        raise OSError("of the mapping")


NUMBERS: list[tuple[Any, object]] = [
    *(
        (number, 0.5)
        for number in (np.float16(0.5), np.array([0.5]), np.array([[0.5]]), Decimal("0.5"), Fraction(1, 2))
    ),
    *((number, 0.5) for number in (jnp.bfloat16(0.5), jnp.array([0.5], jnp.bfloat16), jnp.array(0.5))),
    *((number, 3) for number in (np.int8(3), np.array([3]), jnp.array(3), np.uint64(3))),
    *((flag, True) for flag in (np.bool_(True), np.array([True]), jnp.array(True))),
    (Text("adam"), "adam"),
    *((number, number) for number in (10**63, 10**64 - 1, 1 - 10**63)),
    ("x\x00\udce9\x1b", "x\ufffd\ufffd\ufffd"),
]


@pytest.mark.parametrize("index", range(len(NUMBERS)))
def test_scalars_of_all_libraries_are_reported(log: Path, capsys: pytest.CaptureFixture[str], index: int) -> None:
    given, reported = NUMBERS[index]
    report(metrics={"m": given}, outputs={"o": given})
    found = written(log)
    assert (found.metrics, found.outputs) == ({"m": reported}, {"o": reported})
    assert capsys.readouterr().err == ""


UNREPORTABLE: list[Any] = [
    *(
        None,
        [1, 2],
        [],
        {1},
        b"x",
        1j,
        object,
        Hostile(),
        Path("/x"),
        (each for each in "ab"),
        memoryview(b""),
        10**64,
        -(10**63),
    ),
    *(np.array([1.0, 2.0]), np.array([]), jnp.zeros((2, 2)), 10**5000, Whole(10**70), np.complex64(1), {"a": {"b": 1}}),
]


@pytest.mark.parametrize("index", range(len(UNREPORTABLE)))  # pytest calls methods of parameters
def test_what_cannot_be_reported_is_left_out_with_one_line(
    log: Path, capsys: pytest.CaptureFixture[str], index: int
) -> None:
    given = UNREPORTABLE[index]
    for number in range(3):
        report(progress=40, metrics={f"bad{number}": given, "loss": 1}, outputs={"bad": given, "model": "s3://m"})
    found = written(log)
    assert (found.progress, found.metrics, found.outputs) == (40, {"loss": 1}, {"model": "s3://m"})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is ")[0] for line in lines] == [
        "trainjob.progress: metrics['bad0']", "trainjob.progress: outputs['bad']",
    ]  # fmt: skip
    assert all("; the training continues" in line for line in lines)


CHANGED: dict[str, tuple[dict[str, Any], str, object]] = {
    "a last, partial step": ({"progress": 800 / 7}, "progress", 100),
    "rounding": ({"progress": 100.00000001}, "progress", 100),
    "negative": ({"progress": -1}, "progress", 0),
    "no time left": ({"remaining_seconds": -3}, "remaining_seconds", 0),
    "a long name": ({"metrics": {LONG: 0.5}}, "metrics", {"ok": 1, LONG[:64]: 0.5}),
    "a reserved name": ({"metrics": {"trainjob.step": 3}}, "metrics", {"ok": 1}),
    "an empty name": ({"metrics": {"": 3}}, "metrics", {"ok": 1}),
    "a name that fails": ({"metrics": {Hostile(): 3}}, "metrics", {"ok": 1}),
    "long text": ({"metrics": {"m": "v" * 65}}, "metrics", {"ok": 1}),
    "empty text": ({"metrics": {"m": ""}}, "metrics", {"ok": 1}),
    "an infinite output": ({"outputs": {"o": math.inf}}, "outputs", {"ok": 1}),
    "an output without space": ({"outputs": {"o": "x" * 5000, "p": "s3://p"}}, "outputs", {"ok": 1, "p": "s3://p"}),
    "no mapping": ({"metrics": [1, 2]}, "metrics", {"ok": 1}),
    "a hostile mapping": ({"outputs": Hostile()}, "outputs", {"ok": 1}),
    "a mapping that ends early": ({"metrics": Endless()}, "metrics", {"ok": 1, "a": 1, "b": 2}),
    "a fraction": ({"step": 1.5}, "details", {"step": 7}),
    "a negative step": ({"step": -1}, "details", {"step": 7}),
    "a huge step": ({"step": 10**400}, "details", {"step": 7}),
    "NaN": ({"step": math.nan}, "details", {"step": 7}),
    "no steps": ({"total_steps": 0}, "progress", None),
    "a flag that fails": ({"checkpoint": np.array([True, False])}, "details", {"step": 7}),
}


@pytest.mark.parametrize("case", CHANGED)
def test_arguments_out_of_range_are_cut_or_left_out_with_one_line(
    log: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    call, field, value = CHANGED[case]
    report(step=7, metrics={"ok": 1}, outputs={"ok": 1})
    for _ in range(3):
        report(**call)
    assert getattr(written(log), field) == value
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("trainjob.progress: ")


def test_only_256_metrics_of_a_call_are_reported(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(metrics={str(number): number for number in range(300)})
    assert "299" not in written(log).metrics
    assert capsys.readouterr().err.count("metrics has more than 256 entries") == 1


def test_many_reasons_do_not_flood_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(300):
        report(metrics={"m": type(f"Type{number}", (), {})()})
    assert capsys.readouterr().err.count("\n") == 100
    assert log.exists()


@pytest.mark.parametrize("strict", ["", "0", "1"])
def test_strict_progress_raises_after_the_rest_was_reported(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], strict: str
) -> None:
    monkeypatch.setenv("TRAINJOB_STRICT_PROGRESS", strict)
    before = reporting._counter.count
    calls: list[Callable[[], None]] = [lambda: report(progress="half", metrics={"a": None, "b": 1}), lambda: step("x")]  # type: ignore[arg-type]  # as untyped scripts call it
    raised = 0
    for call in calls:
        try:
            call()
        except ValueError:
            raised += 1
    assert (raised, capsys.readouterr().err.count("\n")) == ((2, 0) if strict == "1" else (0, 3))
    assert written(log).metrics == {"b": 1}
    assert reporting._counter.count == before + 2


NO_STEPS: list[Any] = ["x", -1, 1.5, math.nan, 10**400, [], Hostile(), 2**53 + 2]
STEPS: list[tuple[Any, dict[str, int]]] = [
    *[("3", {"step": 3}), (np.array([4]), {"step": 4}), (True, {"step": 1})],
    *((given, {"steps": 1}) for given in NO_STEPS),
]


@pytest.mark.parametrize("index", range(len(STEPS)))
def test_each_call_of_step_counts_once(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setattr(reporting, "_counter", calls.Counter())
    given, number = STEPS[index]
    step(given)
    assert (reporting._counter.count, reporting._counter.number()) == (1, number)


# --- channels ------------------------------------------------------------------------------------------------------


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path)


def link_to_a_folder(path: Path) -> None:
    path.symlink_to(path.parent)


def file_in_a_file(path: Path) -> None:
    path.write_text("")
    os.environ["TRAINJOB_TERMINATION_LOG"] += "/log"


@pytest.mark.parametrize(
    "make", [folder, loop, link_to_a_folder, os.mkfifo, file_in_a_file], ids=lambda make: make.__name__
)
def test_a_path_that_is_no_file_is_logged_once(
    log: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(log)
    report(progress=1)
    report(progress=2, outputs={"model": "s3://m"})
    reporting.flush()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "termination message failed, the training continues" in error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_file_system_that_refuses_is_logged_once(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    report(progress=1)
    report(progress=2)
    monkeypatch.undo()
    assert capsys.readouterr().err.count(os.strerror(number)) == 1


def test_a_message_that_was_written_in_part_is_an_error(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk takes a part of the bytes. Then the file must not be extended with NUL."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:20], at))
    report(progress=1)
    assert "no space for" in capsys.readouterr().err
    assert log.stat().st_size == 20


class Failing(io.StringIO):
    """A stream of the script, which fails."""

    write = hostile


@pytest.mark.parametrize("stream", [None, Failing(), io.StringIO()], ids=["none", "failing", "closed"])
def test_a_stderr_that_fails_does_not_matter(log: Path, monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    if isinstance(stream, io.StringIO):
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    report(progress=math.nan, metrics={"a": None, "b": 1})
    step("x")  # type: ignore[arg-type]  # as untyped scripts call it
    monkeypatch.undo()
    assert written(log).metrics == {"b": 1}


def test_a_fault_within_the_package_is_logged_once(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "_made", hostile)
    report(progress=1)
    report(progress=2)
    assert capsys.readouterr().err.count("report failed: LookupError: of the value") == 1
    assert not log.exists()


def test_callbacks_of_the_garbage_collector_may_report(log: Path) -> None:
    class Node:
        """An object in a cycle."""

    for number in range(20):
        node = Node()
        vars(node)["self"] = node
        weakref.finalize(node, report, metrics={"freed": number})
    report(metrics={"loss": type("Collects", (), {"__float__": lambda _: float(gc.collect() >= 0)})()})
    assert written(log).metrics.keys() == {"freed", "loss"}


AT_EXIT = """
import atexit, os, signal, sys, threading
from trainjob import progress
signal.signal(signal.SIGALRM, lambda *_: progress.report(progress=[], metrics={"alarm": 1}))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.05)
def work():
    for _ in range(50):
        progress.report(step=object(), metrics={"m": None})
threads = [threading.Thread(target=work) for _ in range(4)]
[each.start() for each in threads]
for number in range(200):
    progress.step(number / 2)
[each.join() for each in threads]
signal.setitimer(signal.ITIMER_REAL, 0)
if os.fork() == 0:
    progress.report(progress=object())
    os._exit(0)
os.wait()
atexit.register(lambda: progress.report(progress=object(), metrics={"end": 1}))
os.close(2)
"""


def test_threads_forks_signals_and_the_exit_of_the_interpreter_may_report_anything(log: Path) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert written(log).metrics["end"] == 1
    reasons = [line.split(" that cannot")[0] for line in done.stderr.splitlines()]
    assert reasons.count("trainjob.progress: progress is a object") == 1, "of the child, whose lines are its own"
    assert len(reasons) == len(set(reasons)), done.stderr
