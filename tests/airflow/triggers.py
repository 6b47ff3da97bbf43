"""Triggers alone, and in Airflow's own `TriggerRunner`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from importlib import import_module
from typing import Any, cast

import pytest
from airflow.triggers.base import BaseTrigger, TriggerEvent
from tests.airflow.conftest import python
from tests.airflow.versions import serde

from trainjob import Backend, JobRef, Phase, TrainJobSpec, connect
from trainjob._backends.local.backend import LocalBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.steps import StepPolicy
from trainjob.status import observe
from trainjob_airflow.triggers.trainjob import TrainJobTrigger


async def started(code: str, key: str = "k", **fields: Any) -> tuple[Backend, JobRef]:
    backend = connect()
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": python(code), **fields})
    return backend, await launch(backend, spec, key, namespace="default")


def trigger_of(ref: JobRef, **arguments: Any) -> TrainJobTrigger:
    return TrainJobTrigger(
        trainjob_conn_id="trainjob_default",
        job=[ref.namespace, ref.name, ref.uid, ref.attempt],
        policy=asdict(StepPolicy(tried=arguments.pop("tried", 1))),
        **{"key": "k", **arguments},
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
    while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.RUNNING:
        await asyncio.sleep(0.02)


class Triggerer:
    """Airflow's `TriggerRunner`, without its database."""

    def __init__(self) -> None:
        from airflow.jobs.triggerer_job_runner import TriggerRunner

        self.runner: Any = TriggerRunner()  # type: ignore[no-untyped-call]  # Airflow has no types here

    def start(self, trigger: BaseTrigger) -> asyncio.Task[None]:
        trigger.timeout_after = None  # type: ignore[attr-defined]  # as the triggerer sets it
        self.runner.triggers[1] = {"task": None, "name": "t", "events": 0, "is_watcher": False}
        return asyncio.create_task(self.runner.run_trigger(1, trigger))

    @property
    def events(self) -> list[TriggerEvent]:
        return [entry.event if hasattr(entry, "event") else entry[1] for entry in self.runner.events]


class Presence:
    """Records for which jobs a process waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[str] = []
        self.all: list[str] = []
        attend, leave = LocalBackend.attend, LocalBackend.leave

        def attending(backend: LocalBackend, ref: JobRef) -> None:
            self.jobs.append(ref.name)
            self.all.append(ref.name)
            attend(backend, ref)

        def leaving(backend: LocalBackend, ref: JobRef, *, ended: bool) -> None:
            self.jobs.remove(ref.name)
            leave(backend, ref, ended=ended)

        monkeypatch.setattr(LocalBackend, "attend", attending)
        monkeypatch.setattr(LocalBackend, "leave", leaving)


UNATTENDED = {"metadata": {"annotations": {"trainjob.dev/cancelled": "unattended"}}, "spec": {"suspend": True}}
