"""Triggers alone, and in Airflow's own `TriggerRunner`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.triggers.base import BaseTrigger
from tests.airflow.conftest import python
from tests.airflow.tasks import SLEEP, waits
from tests.airflow.triggers import (
    Presence,
    Triggerer,
    only_event,
    rebuilt,
    started,
    trigger_of,
    until_running,
)
from tests.airflow.versions import since
from tests.objects import ended, pod

import trainjob
from trainjob import Backend, JobRef, Phase, TrainJobSpec, connect
from trainjob._backends.credentials import Credentials
from trainjob._backends.local.backend import LocalBackend
from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.steps import unpack_error
from trainjob.errors import BackendUnavailable, RankCrashed
from trainjob.job import job_name
from trainjob.status import observe
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook
from trainjob_airflow.training import Task, Training
from trainjob_airflow.triggers.pause import PauseTrigger
from trainjob_airflow.triggers.state import TrainJobStateTrigger
from trainjob_airflow.triggers.trainjob import TrainJobTrigger

pytestmark = pytest.mark.usefixtures("no_connection")


REF = JobRef("ns", "train-abc-2", "uid-1", 2)


@pytest.mark.parametrize(
    "trigger",
    [
        trigger_of(REF),
        trigger_of(
            REF, queue_timeout=1.5, start_timeout=60, deadline="2026-11-21T10:00:00+00:00", on_kill_action="keep",
            get_logs=False, resumed=2, fail_on_first_crash=True, key="airflow/a/dag/run/-1/train", tried=3,
            target=Target("kubernetes", "ns", Credentials(in_cluster=True)).as_json(),
        ),
        TrainJobStateTrigger(trainjob_conn_id="c", namespace=None, name="n", phases=["Running"], poll_interval=3),
        PauseTrigger(seconds=10, event={"until": "2026-11-21T10:00:00+00:00", "began": 7}),
    ],
    ids=["defaults", "all", "phase", "pause"],
)  # fmt: skip
def test_a_rebuilt_trigger_is_the_same(trigger: BaseTrigger) -> None:
    again = rebuilt(trigger)
    assert type(again) is type(trigger)
    assert again.serialize() == trigger.serialize()


def test_arguments_hold_no_settings_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow stores them as plain JSON, in its database and in logs."""
    monkeypatch.setenv("TRAINJOB_REGISTRY", "mlflow+https://user:hunter2@host")
    _, arguments = trigger_of(REF, deadline="2026-11-21T10:00:00+00:00").serialize()
    assert len(json.dumps(arguments)) < 500
    assert "hunter2" not in json.dumps(arguments)


def test_the_event_has_the_result_and_the_page(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> dict[str, Any]:
        _, ref = await started("import time; time.sleep(1)")
        training = Training(ref, Task("trainjob_default", 1, "dag", "run", "train", -1))
        monkeypatch.setattr(TrainJobTrigger, "_training", lambda _: training)
        return await only_event(trigger_of(ref))

    event = asyncio.run(scenario())
    result, page = event["result"], event["page"]
    assert [result[name] for name in ("namespace", "name", "uid", "attempt")] == event["job"]
    assert result["goodput"]["seconds"]["training"] > 0
    assert (page["uid"], page["phase"]) == (result["uid"], "Complete")


def test_a_job_that_ended_before_its_deadline_did_not_time_out() -> None:
    """No triggerer ran at either time: it was restarted."""

    async def scenario() -> None:
        backend, ref = await started("")
        while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.COMPLETE:
            await asyncio.sleep(0.02)
        event = await only_event(trigger_of(ref, deadline=datetime.now(UTC).isoformat()))
        assert event["result"]["uid"] == ref.uid

    asyncio.run(scenario())


def test_errors_are_events_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> Callable[..., Any]:
        def backend(self: TrainJobHook) -> Backend:
            raise error

        return backend

    monkeypatch.setattr(TrainJobHook, "shared_backend", failing(BackendUnavailable("the API server is away")))
    event = asyncio.run(only_event(trigger_of(REF)))
    error = unpack_error(event["error"])
    assert (type(error), str(error), error.retry.retryable) == (BackendUnavailable, "the API server is away", True)
    del event["error"]
    assert event == {
        "job": ["ns", "train-abc-2", "uid-1", 2], "followed": False, "key": "k", "resumed": 0, "page": None
    }  # fmt: skip
    monkeypatch.setattr(TrainJobHook, "shared_backend", failing(ZeroDivisionError("a bug")))
    error = unpack_error(asyncio.run(only_event(trigger_of(REF)))["error"])
    assert (str(error), error.retry.retryable) == ("ZeroDivisionError: a bug", False)


def state_trigger(name: str, phase: str) -> TrainJobStateTrigger:
    return TrainJobStateTrigger(trainjob_conn_id="c", namespace="default", name=name, phases=[phase], poll_interval=0.1)


def test_a_job_that_is_deleted_between_task_and_trigger_ends_the_wait() -> None:
    """The task has found it, so it is not one that does not exist yet."""
    name = job_name("deleted", 1)
    trigger = state_trigger(name, "Complete")
    trigger.job = ["default", name, "uid", 1]
    event = asyncio.run(only_event(rebuilt(trigger)))
    assert (event["status"], event["message"]) == (
        "ended", f"TrainJob default/{name} is Deleted; it can no longer be Complete"
    )  # fmt: skip


def test_waits_for_a_phase_of_a_job_that_does_not_exist_yet() -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(only_event(rebuilt(state_trigger(job_name("later", 1), "Running"))))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await started("", key="later")
        assert (await waiting)["status"] == "reached"

    asyncio.run(scenario())


def test_on_kill_does_not_make_the_first_call_to_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call, Airflow (3.3.2) starts its API in the triggerer; that may exceed the time of on_kill."""
    called = []

    def states_of(task_instance: Any) -> list[str]:
        called.append(task_instance.task_id)
        return ["deferred"]

    monkeypatch.setattr("trainjob_airflow.triggers.base.states_of", states_of)
    monkeypatch.setattr(TrainJobTrigger, "_has_called_airflow", False)

    async def two() -> None:
        for key in ("first", "second"):
            _, ref = await started("print()", key)
            trigger = trigger_of(ref)
            trigger.task_instance = cast(Any, SimpleNamespace(task_id=key))
            assert "result" in await only_event(trigger)

    asyncio.run(two())
    assert called == ["first"]


@since("3.3", "triggers with on_kill")
@pytest.mark.parametrize("pause", [0, 0.5])
@pytest.mark.parametrize(
    ("action", "phase"), [("cancel", Phase.CANCELLED), ("suspend", Phase.SUSPENDED), ("keep", Phase.RUNNING)]
)
def test_killed_by_a_person(
    airflow_home: Path, monkeypatch: pytest.MonkeyPatch, action: str, phase: Phase, pause: float
) -> None:
    recorded: list[tuple[JobRef, Any]] = []
    monkeypatch.setattr("trainjob._jobs.telemetry.record_goodput", lambda *given: recorded.append(given))

    async def scenario() -> None:
        from airflow.jobs.triggerer_job_runner import _USER_ACTION_CANCEL_MSG

        backend, ref = await started(SLEEP)
        waiting = Triggerer().start(rebuilt(trigger_of(ref, on_kill_action=action)))
        await until_running(backend, ref)
        await asyncio.sleep(0.3)
        while not waiting.done():  # a triggerer cancels again with every sync, at any instant
            waiting.cancel(_USER_ACTION_CANCEL_MSG)
            await asyncio.sleep(pause)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20):
            while observe(await backend.get(ref.namespace, ref.name)).phase != phase:
                await asyncio.sleep(0.05)
            while not recorded and action != "keep":
                await asyncio.sleep(0.05)
        await cancel(backend, ref)
        assert [each for each, spent in recorded if spent.segments] == ([] if action == "keep" else [ref])

    asyncio.run(scenario())


@pytest.mark.parametrize("action", ["cancel", "suspend"])
def test_a_kill_of_an_earlier_try_that_arrives_late_does_not_end_the_next_one(action: str) -> None:
    """A person clears a deferred task, and the next try adopts its job before the triggerer has read or changed it."""

    async def scenario() -> None:
        backend = connect()
        spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": python(SLEEP)})
        ref = await launch(backend, spec, "k", namespace="default", tried=1)
        await until_running(backend, ref)
        assert await launch(backend, spec, "k", namespace="default", tried=2) == ref
        done = await trigger_of(ref, on_kill_action=action, tried=1).cancel(backend)
        assert done == f"TrainJob {ref} keeps running: try 2 has adopted it"
        assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.RUNNING
        await trigger_of(ref, on_kill_action="cancel", tried=2).cancel(backend)
        assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.CANCELLED

    asyncio.run(scenario())


# ---------------------------------------------------------------- crashes of ranks

UNTIL_REPORTED = """
import os, time
for _ in range(1200):
    if os.path.exists(os.environ["REPORTED"]):
        break
    time.sleep(0.05)
"""
CRASHED = pod(1, last=ended(3))


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank crashes while its job keeps running, as on a cluster; a job of `UNTIL_REPORTED` ends afterwards."""
    reported = tmp_path / "reported"
    monkeypatch.setenv("REPORTED", str(reported))

    async def crashes(backend: LocalBackend, ref: JobRef) -> AsyncIterator[Evidence]:
        await until_running(backend, ref)
        lines = {CRASHED["metadata"]["name"]: ["loading", "ValueError: the data is wrong"]}
        yield Evidence(None, [CRASHED], lines)
        reported.touch()  # the waiter has read the evidence and requests the next one
        await asyncio.sleep(600)

    monkeypatch.setattr(LocalBackend, "crashes", crashes)


@pytest.mark.usefixtures("crashing")
def test_a_trigger_ends_a_job_whose_rank_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event has the diagnosis and what became of the job: a worker that resumes afterwards finds no pods."""

    async def scenario() -> None:
        backend, ref = await started(SLEEP, key="crashed")
        event = await only_event(rebuilt(trigger_of(ref, fail_on_first_crash=True)))
        error = unpack_error(event["error"])
        assert isinstance(error, RankCrashed)
        assert error.diagnosis.log[-1] == "ValueError: the data is wrong"
        assert error.__notes__ == [f"{ref} was suspended"]
        assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.SUSPENDED
        await cancel(backend, ref)
        _, ref = await started(UNTIL_REPORTED, key="ended")
        assert "result" in await only_event(rebuilt(trigger_of(ref)))

    asyncio.run(scenario())


@pytest.mark.usefixtures("crashing")
def test_triggers_of_one_process_share_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LocalBackend] = []
    closed: list[LocalBackend] = []

    class Counted(LocalBackend):
        async def aclose(self) -> None:
            closed.append(self)

    def connect(name: str | None = None, *, shared: bool = False, credentials: object = None) -> Backend:
        assert shared, "on a cluster they would not share their watches"
        opened.append(Counted())
        return opened[-1]

    async def scenario() -> None:
        refs = [(await started(UNTIL_REPORTED, key=f"shared {n}"))[1] for n in range(3)]
        monkeypatch.setattr(trainjob, "connect", connect, raising=False)
        first = asyncio.create_task(only_event(trigger_of(refs[0])))
        events = await asyncio.gather(*(only_event(trigger_of(ref)) for ref in refs[1:]))
        events.append(await first)
        assert all("result" in event for event in events)
        assert len(opened) == 1
        assert closed == opened
        async with TrainJobHook().shared_backend() as again:
            assert again is not opened[0]

    asyncio.run(scenario())


# ---------------------------------------------------------------- the trigger of a sensor


def test_a_deferred_sensor_counts_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence(monkeypatch)

    async def scenario() -> None:
        backend, ref = await started(waits(tmp_path / "end"), unattended="suspend")
        waiting, suspension = (
            asyncio.create_task(only_event(rebuilt(state_trigger(ref.name, phase))))
            for phase in ("Complete", "Suspended")
        )
        await until_running(backend, ref)
        async with asyncio.timeout(20):
            while not presence.jobs:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert presence.jobs == [ref.name], "who waits for a suspension does not prevent it"
        (tmp_path / "end").touch()
        assert (await waiting)["status"] == "reached"
        assert (await suspension)["status"] == "ended"
        assert presence.jobs == []

    asyncio.run(scenario())
