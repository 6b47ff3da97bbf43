"""Calls of `trainjob.progress` become a message of a container, which is read back."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tests.unit.progress.reports import written

from trainjob import progress
from trainjob.progress import Report, message, read, report, reporter, reporting
from trainjob.progress.calls import warn_once
from trainjob.progress.message import RESERVED, text_of
from trainjob.progress.reading import history_of, value_of

SOURCE = Path(progress.__file__).parent


def test_message_has_all_fields(log: Path) -> None:
    report()
    assert set(json.loads(log.read_text())) == {"trainjob", "lastUpdatedTime"}
    report(progress=40.9, metrics={"loss": 0.25, "step": 7, "phase": "warm-up"}, remaining_seconds=89.2)
    report(outputs={"model": "file:///m"})
    content = json.loads(log.read_text())
    assert datetime.fromisoformat(content.pop("lastUpdatedTime")).tzinfo is not None
    assert list(history_of(content.pop("history"))) == ["loss", "step"]
    values = {"loss": "0.25", "step": "7", "phase": "warm-up"}
    assert content == {
        "trainjob": 1,
        "progressPercentage": 40,
        "estimatedRemainingSeconds": 90,
        "metrics": [{"name": name, "value": value} for name, value in values.items()],
        "outputs": {"model": "file:///m"},
    }


def test_a_shorter_message_replaces_a_longer_one_completely(log: Path) -> None:
    log.write_text("x" * 9000)
    inode = log.stat().st_ino
    report(progress=1)
    assert written(log).progress == 1
    assert log.stat().st_ino == inode, "a bind mount does not follow a rename"


@pytest.mark.parametrize(
    ("value", "text", "kind"),
    [
        *[(math.nan, "nan", float), (math.inf, "inf", float), (-math.inf, "-inf", float), (0.1, "0.1", float)],
        *[(np.float64(0.5), "0.5", float), (np.float32(0.5), "0.5", float), (np.array(0.5), "0.5", float)],
        *[(True, "true", bool), (np.bool_(False), "false", bool), (np.array(True), "true", bool)],
        *[(10**30, "1" + "0" * 30, int), (np.int64(3), "3", int), (np.array(3), "3", int)],
        *[(text, text, str) for text in ("adam", "1_000", "true story", "0x10", "1,5", "s3://b/1")],
    ],
)
def test_metrics_keep_type_and_value(log: Path, value: Any, text: str, kind: type) -> None:
    report(metrics={"m": value})
    assert json.loads(log.read_text())["metrics"] == [{"name": "m", "value": text}]
    read_back = written(log).metrics["m"]
    assert (text_of(read_back), type(read_back)) == (text, kind)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *[(True, True), (np.bool_(True), True), (7, 7), (np.int64(7), 7), (0.5, 0.5), (np.float32(0.5), 0.5)],
        *[(text, text) for text in ("7", "adam", "1_000", "true story", "0x10", "1,5", "s3://b/1")],
    ],
)
def test_outputs_keep_their_type(log: Path, given: Any, expected: object) -> None:
    report(outputs={"o": given})
    (read_back,) = written(log).outputs.values()
    assert (type(read_back), read_back) == (type(expected), expected)


CHARACTERS = st.characters(exclude_categories=["Cc", "Cs"])
NAMES = st.text(CHARACTERS, min_size=1, max_size=64)
METRIC_NAMES = NAMES.filter(lambda name: not name.startswith(RESERVED))
VALUES = st.one_of(
    st.floats(), st.integers(-(10**60), 10**60), st.text(CHARACTERS, min_size=1, max_size=64), st.booleans()
)
OUTPUTS = st.one_of(st.text(CHARACTERS, max_size=40), st.booleans(), st.integers(-(10**30), 10**30))
AGAIN: dict[str, Any] = {"metrics": {"a": 3, "b": 1}, "outputs": {"a": "1"}}
CALL = {
    "progress": st.floats(0, 100),
    "metrics": st.dictionaries(METRIC_NAMES, VALUES, max_size=60),
    "outputs": st.dictionaries(st.text(CHARACTERS, min_size=1, max_size=9), OUTPUTS, max_size=1),
    "remaining_seconds": st.floats(0, 1e300),
}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.fixed_dictionaries({}, optional=CALL), min_size=1, max_size=5))
@example(calls=[{"progress": 0.0}, {"progress": 5e-324}])  # the time left is infinite
@example(calls=[{"progress": 10, **AGAIN}, {"progress": 20, "metrics": {"a": 2}, "outputs": {"a": "2", "b": "3"}}, {}])
def test_any_report_fits_and_reads_back(log: Path, calls: list[dict[str, Any]]) -> None:
    reporting._reporter = reporter.Reporter(warn_once)
    expected: dict[str, Any] = {"progress": None, "outputs": {}}
    metrics: dict[str, str] = {}
    for call in calls:
        report(**call)
        if "progress" in call:
            expected["progress"] = int(call["progress"])
        expected["outputs"] |= call.get("outputs", {})
        metrics |= {name: text_of(value) for name, value in call.get("metrics", {}).items()}
        answer = written(log)
        assert {"progress": answer.progress, "outputs": answer.outputs} == expected
        for name, value in answer.metrics.items():
            assert text_of(value) == text_of(value_of(metrics[name]))
        if len(answer.metrics) < len(metrics):
            worst = min(len(json.dumps({"name": n, "value": v})) for n, v in metrics.items() if n not in answer.metrics)
            assert len(log.read_bytes()) + worst > 3800, "no metric is dropped that would have fitted"


def test_the_oldest_then_the_largest_metrics_are_dropped_first(log: Path) -> None:
    report(metrics={f"old{i}": "o" * 30 for i in range(60)})
    report(metrics={"large": "l" * 64} | {f"new{i}": i for i in range(150)}, outputs={"model": "file:///m"})
    kept = written(log).metrics
    assert {f"new{i}" for i in range(100)} <= set(kept)
    assert "large" not in kept
    assert not [name for name in kept if name.startswith("old")]
    report(metrics={"large": "l" * 64})
    assert "large" in written(log).metrics


def test_number_of_metrics_is_limited_as_in_trainer(new_reporter: reporter.Reporter) -> None:
    for i in range(300):
        report(metrics={f"m{i}": i})
    assert list(new_reporter._metrics) == [f"m{i}" for i in range(44, 300)]
    assert len(new_reporter._history._points) == 256, "the dropped ones lose their history"


@pytest.mark.parametrize(
    ("environment", "writes"),
    [
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "RANK": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": ""}, True),
    ],
)
def test_one_process_per_node_writes(
    log: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], writes: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    report(progress=1)
    assert log.exists() is writes


def test_default_termination_log_is_used_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    monkeypatch.setattr(message, "_DEFAULT_LOG", str(path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    report(progress=1)
    assert not path.exists(), "the kubelet creates the file; without it, nothing reads the message"
    path.touch()
    report(progress=2)
    assert written(path).progress == 2
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    report(progress=3)
    assert written(path).progress == 2


def test_concurrent_calls_lose_nothing_and_readers_see_complete_messages(log: Path) -> None:
    report(metrics={"start": 0})
    stop = threading.Event()
    complete: list[bool] = []

    def watch() -> None:
        while not stop.is_set():
            complete.append(read(log.read_text()) is not None)

    def work(thread: int) -> None:
        for i in range(100):
            report(metrics={f"t{thread}": i, "shared": "s" * (i % 60 + 1)})

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as workers:
        list(workers.map(work, range(8)))
    stop.set()
    watcher.join()
    assert {f"t{n}": 99 for n in range(8)}.items() <= written(log).metrics.items()
    assert complete.count(True) > 0
    assert complete.count(False) <= complete.count(True) // 10


def test_a_fork_has_a_new_reporter(log: Path, tmp_path: Path) -> None:
    code = f"""
import os, sys, threading
from trainjob import progress
progress.report(progress=10)
held, go = threading.Event(), threading.Event()
def hold():
    with progress.reporting._reporter._lock:
        held.set(); go.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    os.environ["TRAINJOB_TERMINATION_LOG"] = {str(tmp_path / "child")!r}
    progress.report(metrics={{"m": 1}})
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=30)
    child = written(tmp_path / "child")
    assert child == Report(metrics={"m": 1}, updated=child.updated, history=child.history)


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("", "  \n", "Traceback (most recent call last):", "null", "[]", "12", "{}", "[" * 100_000),
        *('{"trainjob": 2}', '{"trainjob": "1"}', '{"trainjob": true}', '{"trainjob": 1.0}'),
        *('{"trainjob": 1, "progressPercentage": 4', '{"progressPercentage": 40}'),
        '{"trainjob": 1' + "0" * 5000 + "}",
    ],
)
def test_other_messages_are_ignored(text: str) -> None:
    assert read(text) is None


def test_unknown_keys_and_text_after_the_object_are_ignored() -> None:
    text = """
    {"trainjob": 1, "new": {"a": [1]}, "progressPercentage": 12.7, "estimatedRemainingSeconds": -4, "outputs":
     {"model": "s3://m", "bad": [3], "worse": NaN}, "metrics":
     [{"name": "loss", "value": 0.5, "unit": "nats"}, 5, {"name": "x"},
     {"value": "1"}, {"name": "t", "value": true}, {"name": "n", "value": null}], "lastUpdatedTime": 5}
    """
    assert read(text) == Report(progress=12, metrics={"loss": 0.5, "t": True}, outputs={"model": "s3://m"})
    assert read('{"trainjob":1,"progressPercentage":7}"}],"outputs":{}}') == Report(progress=7)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "101", '"5"', "true", "null", "[]", "1e999"])
def test_values_of_wrong_types_count_as_absent(value: str) -> None:
    assert read(f'{{"trainjob": 1, "progressPercentage": {value}, "metrics": {value}, "outputs": {value}}}') == Report()


@given(st.text())
def test_reading_never_raises(text: str) -> None:
    assert read(text) is None
    read('{"trainjob": 1, "metrics": ' + text)


def test_report_is_immutable_and_comparable() -> None:
    one = Report(5, 6, {"a": "b"}, {"c": "d"}, "t")
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Report(5)
    assert repr(Report(5)) == (
        "Report(progress=5, remaining_seconds=None, metrics={}, outputs={}, updated='', returned=None, history={}, "
        "details={})"
    )
    with pytest.raises(AttributeError):
        one.progress = 7  # type: ignore[misc, unused-ignore]  # it is frozen


def test_a_copied_folder_works_without_the_package(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "progress", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
before = set(sys.modules)
import progress
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
progress.report(progress=50)
progress.merge("returned", [7])
assert "progress.watchdog" in sys.modules
assert "trainjob" not in sys.modules
assert loaded <= set(sys.stdlib_module_names) | {{"progress"}}, loaded
heavy = {{"json", "typing", "dataclasses", "ssl", "http", "datetime", "inspect"}} & loaded
assert not heavy, heavy
"""
    log = tmp_path / "log"
    env = {"TRAINJOB_TERMINATION_LOG": str(log), "TRAINJOB_STALL_TIMEOUT": "60"}
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, env=env, timeout=30)
    assert (written(log).progress, written(log).returned) == (50, [7])
