"""Triggers alone, and in Airflow's own `TriggerRunner`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.triggers.base import BaseTrigger, TriggerEvent
from tests.airflow.conftest import jobs, python
from tests.airflow.versions import serde, since

from trainjob import Backend, JobRef, Observation, Phase, TrainJobSpec, WaitOptions, connect
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.errors import BackendUnavailable
from trainjob.history import MetricHistory
from trainjob.lifecycle import cancel, launch
from trainjob.status import observe
from trainjob_airflow import events
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook
from trainjob_airflow.training import Task, Training
from trainjob_airflow.triggers.trainjob import TrainJobStateTrigger, TrainJobTrigger

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a triggerer, connections cannot be looked up."""

    async def none(self: TrainJobHook) -> Target:
        return Target()

    monkeypatch.setattr(TrainJobHook, "_aresolve", none)


async def started(code: str, key: str = "k", **fields: Any) -> tuple[Backend, JobRef]:
    backend = connect()
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": python(code), **fields})
    return backend, await launch(backend, spec, key, namespace="default")


def trigger_of(ref: JobRef, **arguments: Any) -> TrainJobTrigger:
    return TrainJobTrigger(
        trainjob_conn_id="trainjob_default",
        **{"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": ref.attempt, **arguments},
    )


def rebuilt(trigger: BaseTrigger) -> BaseTrigger:
    """The trigger as another process creates it: by class path and arguments in Airflow's encoding."""
    path, arguments = trigger.serialize()
    module, _, name = path.rpartition(".")
    stored = json.loads(json.dumps(serde().serialize(arguments)))
    again: BaseTrigger = getattr(import_module(module), name)(**cast(dict[str, Any], serde().deserialize(stored)))
    return again


async def only_event(trigger: BaseTrigger) -> dict[str, Any]:
    found = [event async for event in trigger.run()]
    assert len(found) == 1
    payload: dict[str, Any] = found[0].payload
    json.dumps(payload)
    return payload


async def until_running(backend: Backend, ref: JobRef) -> None:
    while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.RUNNING:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


REF = JobRef("ns", "train-abc-2", "uid-1", 2)


@pytest.mark.parametrize(
    "trigger",
    [
        trigger_of(REF),
        trigger_of(
            REF, queue_timeout=1.5, start_timeout=60, deadline="2026-11-21T10:00:00+00:00", on_kill_action="keep",
            get_logs=False, resumed=2, fail_on_first_crash=True,
            target=Target("kubernetes", "ns", Credentials(in_cluster=True)).as_json(),
        ),
        TrainJobStateTrigger(trainjob_conn_id="c", namespace=None, name="n", phases=["Running"], poll_interval=3),
    ],
    ids=["defaults", "all", "phase"],
)  # fmt: skip
def test_a_rebuilt_trigger_is_the_same(trigger: BaseTrigger) -> None:
    again = rebuilt(trigger)
    assert type(again) is type(trigger)
    assert again.serialize() == trigger.serialize()


def test_arguments_that_an_earlier_version_stored_are_read() -> None:
    """An upgraded triggerer finds the triggers of the earlier version in Airflow's database."""
    stored = {
        "trainjob_conn_id": "trainjob_default", "namespace": "ns", "name": "train-abc-2", "uid": "uid-1", "attempt": 2,
        "queue_timeout": 43200.0, "start_timeout": None, "fail_fast": False, "fail_on_first_crash": True,
        "deadline": None, "on_kill_action": "cancel", "get_logs": True, "resumed": 0, "target": None,
    }  # fmt: skip
    trigger = TrainJobTrigger(**cast(dict[str, Any], stored))
    assert trigger.wait_options == WaitOptions(timedelta(hours=12), fail_on_first_crash=True)
    assert rebuilt(trigger).serialize() == trigger.serialize()


def test_arguments_hold_no_settings_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow stores them as plain JSON, in its database and in logs."""
    monkeypatch.setenv("TRAINJOB_REGISTRY", "mlflow+https://user:hunter2@host")
    _, arguments = trigger_of(REF, deadline="2026-11-21T10:00:00+00:00").serialize()
    assert all(isinstance(value, str | int | float | bool | None) for value in arguments.values())
    assert len(json.dumps(arguments)) < 400
    assert "hunter2" not in json.dumps(arguments)


def test_observations_are_restored_from_events() -> None:
    now = datetime(2026, 11, 21, 10, 0, 0, 123, tzinfo=UTC)
    for observation in (
        Observation(
            Phase.COMPLETE,
            "JobsCompleted",
            "m",
            created=now,
            admitted=now,
            finished=now,
            metrics={"a": 1, "b": True, "c": "x"},
        ),
        Observation(Phase.DELETED),
    ):
        packed = json.loads(json.dumps(events.pack(observation)))
        assert events.unpack(packed) == observation
        assert events.unpack({**packed, "of_a_later_version": 1}) == observation
    assert events.unpack(None) is None


async def _ends(code: str) -> dict[str, Any]:
    _, ref = await started(code, key=code)
    trigger = rebuilt(trigger_of(ref))
    trigger._log = cast(Any, logging.getLogger("tests.trigger"))  # structlog's loggers bypass caplog
    return await only_event(trigger)


def test_reports_the_end_and_logs_the_lines_of_all_ranks(caplog: pytest.LogCaptureFixture, home: Path) -> None:
    caplog.set_level(logging.INFO, logger="tests.trigger")
    event = asyncio.run(_ends("print('hello'); print('bye')"))
    assert event["status"] == "complete"
    assert event["final"]["phase"] == "Complete"
    assert event["name"] == jobs(home)[0]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.index("[node-0] hello") < lines.index("[node-0] bye") < len(lines)
    assert asyncio.run(_ends("raise SystemExit(3)"))["status"] == "failed"


def test_the_event_has_the_phases_for_the_goodput(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> dict[str, Any]:
        _, ref = await started("import time; time.sleep(1)")
        training = Training(ref, Task("trainjob_default", 1, "dag", "run", "train", -1))
        monkeypatch.setattr(TrainJobTrigger, "_training", lambda _: training)
        return await only_event(trigger_of(ref))

    event = asyncio.run(scenario())
    phases = [phase for _, phase in json.loads(json.dumps(event))["phases"]]
    assert phases[-2:] == ["Running", "Complete"]
    history = MetricHistory()
    history.merge_phases(event["phases"])
    assert [str(phase) for _, phase in history.phases] == phases


def test_a_flood_of_lines_is_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.progress_log.MAX_LINES_SECONDS", 600.0)
    caplog.set_level(logging.INFO, logger="tests.trigger")
    asyncio.run(_ends("import time\ntime.sleep(1)\nfor i in range(9000): print(i)"))
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("[node-0]")]
    assert len(lines) == 2000
    assert "(7000 lines were left out: more than 2000 in 600 s)" in caplog.text


def test_a_job_that_ended_before_its_deadline_did_not_time_out() -> None:
    """No triggerer ran at either time: it was restarted."""

    async def scenario() -> None:
        backend, ref = await started("")
        while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.COMPLETE:  # noqa: ASYNC110 - the state is a file
            await asyncio.sleep(0.02)
        event = await only_event(trigger_of(ref, deadline=datetime.now(UTC).isoformat()))
        assert event["status"] == "complete"

    asyncio.run(scenario())


def test_a_deadline_is_an_event_and_leaves_the_job_to_the_worker() -> None:
    async def scenario() -> None:
        backend, ref = await started(SLEEP)
        await until_running(backend, ref)
        past = (datetime.now(UTC) + timedelta(seconds=0.5)).isoformat()
        event = await only_event(trigger_of(ref, deadline=past))
        assert event["status"] == "timeout"
        assert "execution_timeout" in event["message"]
        assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.RUNNING
        event = await only_event(trigger_of(ref, deadline=past))
        assert event["status"] == "timeout", "a deadline that passed while no triggerer ran"
        await cancel(backend, ref)

    asyncio.run(scenario())


def test_a_queue_timeout_is_an_event() -> None:
    async def scenario() -> None:
        backend, ref = await started(SLEEP, suspend=True, labels={"kueue.x-k8s.io/queue-name": "q"})
        event = await only_event(trigger_of(ref, queue_timeout=0.2))
        assert event["status"] == "timeout"
        assert "was not admitted within queue_timeout" in event["message"]
        await cancel(backend, ref)

    asyncio.run(scenario())


def test_errors_are_events_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: Exception) -> Callable[..., Any]:
        def backend(self: TrainJobHook) -> Backend:
            raise error

        return backend

    monkeypatch.setattr(TrainJobHook, "shared_backend", failing(BackendUnavailable("the API server is away")))
    assert asyncio.run(only_event(trigger_of(REF))) | {"uid": ""} == {
        "status": "error",
        "message": "the API server is away",
        "retryable": True,
        "namespace": "ns",
        "name": "train-abc-2",
        "uid": "",
        "attempt": 2,
        "resumed": 0,
    }
    monkeypatch.setattr(TrainJobHook, "shared_backend", failing(ZeroDivisionError("a bug")))
    event = asyncio.run(only_event(trigger_of(REF)))
    assert (event["status"], event["retryable"], event["message"]) == ("error", False, "ZeroDivisionError: a bug")


def test_waits_for_a_phase_of_a_job_that_does_not_exist_yet() -> None:
    async def scenario() -> None:
        from trainjob.manifest import job_name

        trigger = TrainJobStateTrigger(
            trainjob_conn_id="c", namespace="default", name=job_name("later", 1), phases=["Running"], poll_interval=0.1
        )
        waiting = asyncio.create_task(only_event(rebuilt(trigger)))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await started("", key="later")
        event = await waiting
        assert event["status"] == "reached"

    asyncio.run(scenario())


class Triggerer:
    """Airflow's `TriggerRunner`, without its database."""

    def __init__(self) -> None:
        from airflow.jobs.triggerer_job_runner import TriggerRunner

        self.runner: Any = TriggerRunner()  # type: ignore[no-untyped-call]

    def start(self, trigger: BaseTrigger) -> asyncio.Task[None]:
        trigger.timeout_after = None  # type: ignore[attr-defined]
        self.runner.triggers[1] = {"task": None, "name": "t", "events": 0, "is_watcher": False}
        return asyncio.create_task(self.runner.run_trigger(1, trigger))

    @property
    def events(self) -> list[TriggerEvent]:
        return [entry.event if hasattr(entry, "event") else entry[1] for entry in self.runner.events]


def test_on_kill_does_not_make_the_first_call_to_airflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call, Airflow (3.3.2) starts its API in the triggerer; that may exceed the time of on_kill."""
    called = []

    def states_of(task_instance: Any) -> list[str]:
        called.append(task_instance.task_id)
        return ["deferred"]

    monkeypatch.setattr("trainjob_airflow.triggers.trainjob.states_of", states_of)
    monkeypatch.setattr(TrainJobTrigger, "_has_called_airflow", False)

    async def two() -> None:
        for key in ("first", "second"):
            _, ref = await started("print()", key)
            trigger = trigger_of(ref)
            trigger.task_instance = cast(Any, SimpleNamespace(task_id=key))
            assert (await only_event(trigger))["status"] == "complete"

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
    monkeypatch.setattr("trainjob.telemetry.record_goodput", lambda *given: recorded.append(given))

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
            while observe(await backend.get(ref.namespace, ref.name)).phase != phase:  # noqa: ASYNC110 - the state is a file
                await asyncio.sleep(0.05)
            while not recorded and action != "keep":  # noqa: ASYNC110 - no event reports it
                await asyncio.sleep(0.05)
        await cancel(backend, ref)
        assert [each for each, spent in recorded if spent.segments] == ([] if action == "keep" else [ref])

    asyncio.run(scenario())


def test_a_restarted_triggerer_continues(airflow_home: Path) -> None:
    async def scenario() -> None:
        backend, ref = await started("import time; time.sleep(2)")
        trigger = trigger_of(ref)
        waiting = Triggerer().start(rebuilt(trigger))
        await until_running(backend, ref)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.RUNNING
        another = Triggerer()
        await another.start(rebuilt(trigger))
        assert [event.payload["status"] for event in another.events] == ["complete"]

    asyncio.run(scenario())


def test_logs_that_fail_do_not_fail_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainjob.backends.local.backend import LocalBackend

    async def broken(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise OSError("no logs today")
        yield

    monkeypatch.setattr(LocalBackend, "logs", broken)
    assert asyncio.run(_ends("print(1)"))["status"] == "complete"
