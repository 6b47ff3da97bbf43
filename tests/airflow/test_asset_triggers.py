"""Triggers of asset watchers, with real jobs and registries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests.airflow.conftest import python
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import launch

from trainjob import TrainJobClient
from trainjob.registry import connect
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.triggers.assets import ModelVersionEventTrigger, TrainJobEventTrigger

pytestmark = pytest.mark.usefixtures("no_connection")


class Store:
    """The state of an asset, as Airflow's triggerer hands it to a trigger."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.stored = asyncio.Event()

    async def aget(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = value
        self.stored.set()


def finish(key: str, code: str = "", **labels: str) -> str:
    with TrainJobClient("local") as client:
        spec = {"runtime": "trainjob-step", "command": python(code), "labels": labels}
        ref = client.launch(spec, key)
        try:
            client.wait(ref)
        except Exception:  # noqa: BLE001 - jobs that should fail
            assert code
        return ref.name


async def events(trigger: Any, count: int, meanwhile: Any = lambda: None) -> list[dict[str, Any]]:
    """The first `count` events; `meanwhile` runs once the trigger has stored its start position."""
    found: list[dict[str, Any]] = []
    if getattr(trigger, "asset_state_store", None) is None:
        trigger.asset_state_store = Store()

    async def work() -> None:
        await trigger.asset_state_store.stored.wait()
        await asyncio.to_thread(meanwhile)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group, aclosing(trigger.run()) as stream:
        group.create_task(work())
        async for event in stream:
            found.append(event.payload)
            if len(found) == count:
                break
    return found


def test_each_finished_job_is_one_event_across_restarts() -> None:
    finish("before", team="a")
    store = Store()

    def trigger() -> TrainJobEventTrigger:
        made = TrainJobEventTrigger(labels={"team": "a"}, phases=["Complete", "Failed"], poll_interval=0.1)
        path, arguments = made.serialize()
        again = TrainJobEventTrigger(**arguments)
        assert path.endswith("assets.TrainJobEventTrigger")
        again.asset_state_store = store  # type: ignore[assignment]
        return again

    async def scenario() -> None:
        # Jobs that ended before the asset was watched create no event.
        await trigger()._seen()
        await asyncio.sleep(1.1)  # timestamps are whole seconds
        first = await asyncio.to_thread(finish, "one", team="a")
        await asyncio.to_thread(finish, "other", team="b")
        second = await asyncio.to_thread(finish, "two", "raise SystemExit(3)", team="a")
        found = await events(trigger(), 2)
        assert [(each["name"], each["phase"]) for each in found] == [(first, "Complete"), (second, "Failed")]
        await trigger()._store_position((await trigger()._poll(await trigger()._seen()))[1])
        third = await asyncio.to_thread(finish, "three", team="a")
        (one,) = await events(trigger(), 1)
        assert one["name"] == third

    asyncio.run(scenario())


def test_versions_and_aliases_of_a_model() -> None:
    pytest.importorskip("mlflow", reason="trainjob's registry needs SQLAlchemy 2, which Airflow 3.0 does not take")
    uri = os.environ["TRAINJOB_REGISTRY"]

    def register(number: int) -> None:
        registry = connect(uri)
        version = registry.register("digits", f"file:///m/{number}", export_id=str(number), digest=f"sha256:{number}")
        registry.promote("digits", version.version, alias="champion")

    register(1)
    found = asyncio.run(
        events(ModelVersionEventTrigger(name="digits", registry=uri, poll_interval=0.1), 1, lambda: register(2))
    )
    assert [(each["version"], each["uri"]) for each in found] == [("2", "file:///m/2")]
    champion = ModelVersionEventTrigger(name="digits", alias="champion", registry=uri, poll_interval=0.1)
    found = asyncio.run(events(champion, 1, lambda: register(3)))
    assert [(each["name"], each["version"], each["digest"]) for each in found] == [("digits", "3", "sha256:3")]


@pytest.mark.parametrize("ahead", [-600, 600])
def test_a_triggerer_with_a_wrong_clock_misses_no_job(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """One job ends before the asset is watched, and one after that, by the server's clock."""
    backend = DirectBackend()
    backend.store.ahead = timedelta(seconds=ahead)

    @asynccontextmanager
    async def shared(_: TrainJobHook) -> AsyncIterator[DirectBackend]:
        yield backend

    async def scenario() -> None:
        early, late = [await launch(backend, key) for key in ("early", "late")]
        backend.condition(early, "Complete", "AllJobsCompleted", time=backend.ago(60))
        trigger = TrainJobEventTrigger(namespace="ns")
        start = await trigger._start_position()
        backend.store.ahead += timedelta(seconds=2)  # timestamps are whole seconds
        backend.end(late)
        found, _ = await trigger._poll(start)
        assert [each["name"] for each in found] == [late.name]

    monkeypatch.setattr(TrainJobHook, "shared_backend", shared)
    asyncio.run(scenario())
