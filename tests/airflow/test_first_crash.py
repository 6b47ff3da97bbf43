"""Ranks that crash while their job keeps running, in a worker and deferred.

On the local backend a crash ends the job at once, so the tests add the evidence of a crash on a cluster to what the
backend returns; tests/cluster/test_first_crash.py has real crashes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG
from tests.airflow.conftest import Run
from tests.airflow.test_operator import SLEEP, both, step
from tests.airflow.test_triggers import only_event, rebuilt, started, trigger_of, until_running

import trainjob
from trainjob import Backend, JobRef, Phase, TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob._diagnosis.serialization import unpack_diagnosis, unpack_evidence
from trainjob._jobs.cancellation import cancel
from trainjob._manifest.attempts import given_up
from trainjob.status import observe
from trainjob.verdicts import Evidence
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook

CRASHED = {
    "metadata": {
        "name": "x-node-0-1",
        "uid": "uid-1",
        "labels": {"batch.kubernetes.io/job-completion-index": "1", "jobset.sigs.k8s.io/replicatedjob-name": "node"},
    },
    "status": {
        "containerStatuses": [
            {"name": "node", "lastState": {"terminated": {"exitCode": 3, "finishedAt": "2026-11-21T10:00:10Z"}}}
        ]
    },
}
EVIDENCE = Evidence(None, [CRASHED], {"x-node-0-1": ["loading", "ValueError: the data is wrong"]})


UNTIL_REPORTED = """
import os, time
for _ in range(1200):
    if os.path.exists(os.environ["REPORTED"]):
        break
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = tmp_path / "reported"
    monkeypatch.setenv("REPORTED", str(reported))

    async def crashes(backend: LocalBackend, ref: JobRef) -> AsyncGenerator[Evidence]:
        await until_running(backend, ref)
        yield EVIDENCE
        reported.touch()  # the waiter has read the evidence and requests the next one
        await asyncio.sleep(600)

    monkeypatch.setattr(LocalBackend, "crashes", crashes)


@both
@pytest.mark.parametrize(("action", "phase"), [("suspend", Phase.SUSPENDED), ("cancel", None)])
def test_the_first_crash_fails_the_task(run: Run, deferrable: bool, action: Any, phase: Phase | None) -> None:
    with DAG("crashes") as dag:
        step(
            code=SLEEP,
            fail_on_first_crash=True,
            on_crash_action=action,
            retries=2,
            retry_user_errors=False,
            deferrable=deferrable,
        )
    ran = run(dag)
    assert ran.states == {"train": "failed"}
    error = ran.errors["train"]
    assert isinstance(error, TrainJobFatal)
    assert isinstance(error, AirflowFailException)
    for text in ("node-1 exited with code 3", "  | ValueError: the data is wrong", "category: user code"):
        assert text in str(error)
        assert text in ran.log
    assert ("was suspended" if phase else "was deleted") in ran.log
    with TrainJobClient() as client:
        left, deadline = client.list(), time.monotonic() + 30
        while [observe(job).phase for job in left] != ([phase] if phase else []):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
            left = client.list()
        for job in left:
            assert given_up(job), "the object keeps the reason: its pods are gone"
            client.cancel(JobRef.of(job))


@both
def test_a_crash_is_a_warning_with_the_last_lines(run: Run, deferrable: bool) -> None:
    with DAG("warns") as dag:
        step(code=UNTIL_REPORTED, deferrable=deferrable)
    ran = run(dag)
    assert ran.state == "success"
    assert "node-1 exited with code 3; the job keeps running if" in ran.log
    assert "  | ValueError: the data is wrong" in ran.log


@pytest.mark.parametrize("action", ["delete", "", None])
def test_unknown_actions_are_refused(action: Any) -> None:
    with pytest.raises(ValueError, match="on_crash_action must be 'suspend', 'cancel' or 'keep'"):
        step(on_crash_action=action)


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(self: TrainJobHook) -> Target:
        return Target()

    monkeypatch.setattr(TrainJobHook, "_aresolve", none)


@pytest.mark.usefixtures("no_connection")
def test_a_trigger_sends_evidence_of_crashes_to_the_worker() -> None:
    """A worker that resumes after the end of the job finds no pods."""

    async def scenario() -> None:
        backend, ref = await started(SLEEP, key="crashed")
        event = await only_event(rebuilt(trigger_of(ref, fail_on_first_crash=True)))
        assert (event["status"], event["retryable"]) == ("crashed", True)
        assert unpack_diagnosis(event["diagnosis"]).log[-1] == "ValueError: the data is wrong"
        await cancel(backend, ref)
        _, ref = await started(UNTIL_REPORTED, key="ended")
        event = await only_event(rebuilt(trigger_of(ref)))
        assert event["status"] == "complete"
        assert unpack_evidence(event["crash"]) is not None

    asyncio.run(scenario())


@pytest.mark.usefixtures("no_connection")
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
        assert [event["status"] for event in events] == ["complete"] * 3
        assert len(opened) == 1
        assert closed == opened
        async with TrainJobHook().shared_backend() as again:
            assert again is not opened[0]

    asyncio.run(scenario())
