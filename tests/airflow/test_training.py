"""What tasks store about their trainings: when, how large, and that nothing depends on it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from tests.airflow.conftest import Run, python
from tests.airflow.tasks import both, stored
from tests.airflow.versions import since

from trainjob import JobRef, Observation, Phase
from trainjob._backends.local.backend import LocalBackend
from trainjob._pages.documents.training import observed_document
from trainjob_airflow import training as module
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.training import KEY, Task, Training, Writer, bounded

REF = JobRef("team-a", "train-abc", "uid-1", 1)
TASK = Task("trainjob_default", 1, "dag", "run", "train", -1)
RUNNING = Observation(Phase.RUNNING, has_run=True)
REPORT = """
import os, time
from trainjob.progress import report
for step in range(3):
    report(progress=30 * step, metrics={'loss': 1 / (step + 1)}, step=step)
    time.sleep(0.3)
print("tok" + "en=" + bytes.fromhex("68756e746572322d").decode() * 3, flush=True)  # a literal secret is refused
"""


def step(code: str = REPORT, **arguments: Any) -> TrainJobOperator:
    return TrainJobOperator(task_id="train", runtime="trainjob-step", command=python(code), **arguments)


class Clock:
    """The monotonic clock of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("trainjob_airflow.training.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def loss(value: float) -> Observation:
    return replace(RUNNING, metrics={"loss": value})


QUEUED = Observation(Phase.QUEUED)
NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("stored", "observed", "due"),
    [
        ("Queued", [QUEUED], False),
        ("Queued", [QUEUED, RUNNING], True),
        ("", [RUNNING], False),
        ("Running", [replace(RUNNING, message=f"message {number}") for number in range(100)], False),
        ("Running", [loss(1.0), replace(loss(0.5), phase=Phase.COMPLETE)], False),
    ],
    ids=["is stored", "another phase", "first of a new triggerer", "no change", "the end is left to the worker"],
)
def test_a_phase_change_is_due_at_once(clock: Clock, stored: str, observed: list[Observation], due: bool) -> None:
    training = Training(REF, TASK, phase=stored)
    for observation in observed:
        clock.now += 60
        training.observe(observation, NOW)
    assert training.due == (clock.now if due else None)
    if due:
        document = training.take()
        assert document is not None
        assert (document["phase"], document["source"], training.due) == ("Running", "kept", None)


@pytest.mark.parametrize(("age", "pause"), [(0, 10), (100, 10), (1000, 50), (100_000, 120)])
def test_metrics_are_due_less_often_for_older_jobs(clock: Clock, age: float, pause: float) -> None:
    training = Training(REF, TASK, phase="Running")
    clock.now += age
    training.observe(loss(1.0), NOW)
    training.take()
    begun = clock.now
    for number in range(100):
        clock.now += 0.5
        training.observe(loss(1 / (number + 2)), NOW)
    assert training.due == pytest.approx(begun + pause, abs=0.1)
    assert training.history.points()["loss"][0][2] == 1.0


def due(number: int) -> Training:
    training = Training(replace(REF, name=f"train-{number}"), TASK._replace(run_id=f"run-{number}"), phase="Queued")
    training.observe(loss(number), NOW)
    return training


class Airflow:
    """Stands for the connection of a triggerer to its supervisor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from airflow.providers.common.compat.sdk import XCom

        self.values: dict[str, Any] = {}
        self.log: list[str] = []
        monkeypatch.setattr(XCom, "get_one", self.get_one)
        monkeypatch.setattr(XCom, "set", self.set)

    def get_one(self, *, key: str, run_id: str, **place: Any) -> Any:
        self.log.append("call")
        assert (key, place["task_id"]) == (KEY, "train")
        return self.values.get(run_id)

    def set(self, *, key: str, value: Any, run_id: str, **place: Any) -> None:
        self.log.append("call")
        self.values[run_id] = json.loads(json.dumps(value))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    monkeypatch.setattr(module, "_PAUSE", 0.02)
    return Airflow(monkeypatch)


def test_a_thousand_triggers_call_airflow_once_a_pause(api: Airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    async def pause(_: float) -> None:
        api.log.append("pause")
        await sleep(0)

    async def run() -> None:
        writer = Writer()
        for number in range(1000):
            writer.add(due(number))
        while len(api.values) < 20:
            await sleep(0.01)
        writer._waiting.clear()

    monkeypatch.setattr(asyncio, "sleep", pause)
    asyncio.run(asyncio.wait_for(run(), 60))
    assert api.log.count("call") >= 40, "each page is read and written"
    assert all({one, other} != {"call"} for one, other in pairwise(api.log))


def test_a_trigger_completes_what_another_process_has_stored(api: Airflow) -> None:
    earlier = observed_document(due(7).ref, loss(9), NOW)
    earlier["history"] = {"loss": [[1, 1769860800.0, 9.0]]}
    earlier["spec"] = {"runtime": "torch-distributed"}
    api.values["run-7"] = earlier

    async def run() -> None:
        writer, training = Writer(), due(7)
        writer.add(training)
        while not api.values["run-7"].get("airflow"):
            await asyncio.sleep(0.01)
        await writer.until_written(training)

    asyncio.run(asyncio.wait_for(run(), 20))
    document = api.values["run-7"]
    assert [value for _, _, value in document["history"]["loss"]] == [9, 7]
    assert document["spec"] == {"runtime": "torch-distributed"}
    assert document["airflow"]["run_id"] == "run-7"


def test_a_write_that_fails_is_logged_once(
    api: Airflow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow.providers.common.compat.sdk import XCom

    monkeypatch.setattr(XCom, "set", Mock(side_effect=RuntimeError("away")))

    async def run() -> None:
        writer = Writer()
        for number in range(3):
            writer.add(due(number))
        while writer._waiting or writer._current:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert [record.message for record in caplog.records] == ["pages of trainings cannot be stored: RuntimeError: away"]


def rank(number: int, *, culprit: bool = False) -> dict[str, Any]:
    names = {"rank": f"node-{number}", "pod": "p" * 60, "node": "n" * 60, "state": "Running"}
    return {**names, "exit_code": None, "culprit": culprit, "bad": culprit}


def test_a_document_is_at_most_100_kb() -> None:
    document = observed_document(REF, RUNNING, NOW)
    series = [[i, 1769860800.0 + i, i / 7] for i in range(2000)]
    document["history"] = {f"metric-{i}": series for i in range(50)}
    document["logs"] = [{"rank": "node-0", "time": "", "text": "x" * 100}] * 500
    document["events"] = [{"message": "x" * 2000}] * 100
    document["ranks"] = [rank(i, culprit=i == 900) for i in range(1000)]
    times = {"start": "2026-11-21T10:00:00Z", "end": "2026-11-21T10:00:01Z"}
    spent = {"assumed": 0.0, "segments": [{"activity": "training", "source": "steps", **times}] * 100, **times}
    more = {"history": {"loss": series}, "goodput": spent}
    document["attempts"] = [{**document["attempts"][0], "uid": str(i), **more} for i in range(20)]
    made = bounded(document)
    assert len(json.dumps(made)) <= 100_000
    assert all(each["goodput"]["end"] == times["end"] for each in made["attempts"])
    one = bounded({**document, "attempts": document["attempts"][:1], "events": [], "ranks": []})
    assert len(one["attempts"][0]["goodput"]["segments"]) >= 10
    assert made["logs"] == []
    assert "node-900" in [each["rank"] for each in made["ranks"]], "the culprit is kept"
    assert len(made["history"]) == 50
    assert made["unseen"][-1].endswith("more ranks")


def kept(run: Run, code: str = REPORT, state: str = "success", **arguments: Any) -> dict[str, Any]:
    """The document that a task stores."""
    with DAG("keeps") as dag:
        step(code, **arguments)
    ran = run(dag)
    assert ran.state == state
    document: dict[str, Any] = stored(ran.run_id, "xcom").get(KEY, {})
    assert "hunter2" not in json.dumps(document)
    return document


@both
def test_a_finished_task_stores_its_training(run: Run, deferrable: bool) -> None:
    document = kept(run, deferrable=deferrable)
    assert (document["kind"], document["source"], document["phase"]) == ("training", "kept", "Complete")
    assert document["metrics"]["loss"] == pytest.approx(1 / 3, abs=1e-5)
    assert [point[0] for point in document["history"]["loss"]] == [0, 1, 2]
    assert document["ranks"][0]["state"] == "Completed"
    assert document["airflow"].pop("run_id").startswith("manual__")
    own = {"dag_id": "keeps", "task_id": "train", "map_index": -1, "try_number": 1}
    assert document["airflow"] == own | {"conn_id": "trainjob_default"}
    assert (document["task"], document["logs"]) == ("train", [])


@both
def test_a_job_that_exceeds_a_timeout_is_stored_before_it_is_deleted(run: Run, deferrable: bool) -> None:
    limit = timedelta(seconds=5)
    document = kept(run, REPORT + "time.sleep(60)", "failed", execution_timeout=limit, deferrable=deferrable)
    assert document["phase"] == "Running"
    assert document["ranks"][0]["state"] == "Running"


def test_a_task_without_xcoms_stores_nothing(run: Run) -> None:
    assert kept(run, "pass", do_xcom_push=False) == {}


RESUMES = """
import os, time
from trainjob import progress
again = os.path.exists(first)
for step in range(1, 9 if again else 7):
    time.sleep(0.1)
    progress.report(step=step, metrics={"loss": 1 / step})
if not again:
    open(first, "x")
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("deferrable", "deleted"), [(False, False), (True, False), (True, True)], ids=["worker", "deferred", "deleted"]
)
@since("3.3", "the state of a task that a new try does not clear")
def test_a_later_try_has_the_earlier_attempts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferrable: bool, deleted: bool
) -> None:
    """Steps that it repeats are no training, if the earlier attempt was not deleted, as by ttlSecondsAfterFinished."""
    find = LocalBackend.find

    async def latest(backend: LocalBackend, namespace: str, labels: Any) -> list[Any]:
        found = sorted(await find(backend, namespace, labels), key=lambda job: JobRef.of(job).attempt)
        return found[-1:] if deleted else found

    monkeypatch.setattr(LocalBackend, "find", latest)
    code = f"first = {str(tmp_path / 'first')!r}\n{RESUMES}"
    with DAG("repeats") as dag:
        step(code, retries=1, retry_delay=timedelta(0), deferrable=deferrable)
    ran = run(dag)
    document = stored(ran.run_id, "xcom")[KEY]
    first, second = document["attempts"]
    assert (first["phase"], second["phase"]) == ("Failed", "Complete"), ran.log
    assert (bool(first["history"]["loss"]), document["airflow"]["try_number"]) == (True, 2)
    assert "exited with code 3" in first["summary"]
    assert first["goodput"]["seconds"]["repeated"] == 0
    why = f"earlier attempts were deleted or could not be read ({first['name']})"
    note = f"{why}: steps that were repeated after them count as training"
    assert document["notes"] == ([note] if deleted else [])
    repeated = second["goodput"]["seconds"]["repeated"]
    assert repeated == 0 if deleted else repeated >= 0.4
    assert document["goodput"]["seconds"]["repeated"] == repeated


def test_a_failing_store_does_not_fail_the_task(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = RuntimeTaskInstance.xcom_push

    def fail(self: Any, key: str, value: Any) -> None:
        if key == KEY:
            raise RuntimeError("away")
        push(self, key, value)

    monkeypatch.setattr(RuntimeTaskInstance, "xcom_push", fail)
    with DAG("keeps_not") as dag:
        step("pass")
    ran = run(dag)
    assert ran.state == "success"
    assert caplog.text.count("the page of the training cannot be stored: RuntimeError: away") == 1
