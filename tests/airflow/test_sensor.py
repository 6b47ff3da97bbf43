"""`TrainJobSensor` in real task runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.exceptions import AirflowRescheduleException
from airflow.providers.common.compat.sdk import AirflowSensorTimeout
from airflow.sdk import DAG
from tests.airflow.conftest import Run, python, replaced
from tests.airflow.tasks import CRASHED, both, launched, meanwhile, waits
from tests.airflow.triggers import UNATTENDED, Presence
from tests.fakes.kube.direct import DirectBackend

from trainjob import JobHung, JobRef, TrainJobClient, TrainJobFailed, TrainJobSpec, launch
from trainjob._jobs.cancellation import give_up
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.sensors.trainjob import TrainJobSensor
from trainjob_airflow.states import Wait, Wanted

HANGS = "import time; from trainjob import progress; progress.step(); progress.step(); time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "text"), [("raise SystemExit(1)", "node-0 exited with code 1"), (HANGS, "no rank has made progress")]
)
def test_a_soft_failure_is_a_skip(run: Run, code: str, text: str) -> None:
    ref = launched(code, stall_timeout=1)
    with DAG("soft") as dag:
        for deferrable in (False, True):
            TrainJobSensor(
                task_id=f"wait_{deferrable}", job=ref.name, poke_interval=0.2, soft_fail=True, deferrable=deferrable
            )
    ran = run(dag)
    assert ran.states == {"wait_False": "skipped", "wait_True": "skipped"}, ran.log
    assert text in ran.log
    with TrainJobClient() as client:
        client.cancel(ref)


@both
def test_a_failed_job_fails_a_sensor_with_its_diagnosis(run: Run, deferrable: bool) -> None:
    ref = launched("raise SystemExit(3)")
    with DAG("failed") as dag:
        TrainJobSensor(task_id="wait", job=ref.name, poke_interval=0.2, deferrable=deferrable)
    error = run(dag).errors["wait"]
    assert isinstance(error, TrainJobFatal)
    assert error.diagnosis is not None
    assert (error.diagnosis.rank, error.diagnosis.exit_code) == ("node-0", 3)


@both
def test_a_sensor_for_a_phase_before_the_end_waits_for_a_job_that_hangs(run: Run, deferrable: bool) -> None:
    """Its launcher may suspend it then, for which this sensor waits."""
    ref = launched(HANGS, stall_timeout=1)

    def suspend(client: TrainJobClient, ref: JobRef) -> None:
        with pytest.raises(JobHung) as caught:
            client.wait(ref)
        diagnosis = caught.value.diagnosis
        client.call(lambda: give_up(client.backend, ref, diagnosis))

    with DAG("senses_suspension") as dag:
        TrainJobSensor(task_id="wait", job=ref.name, phases="Suspended", poke_interval=0.2, deferrable=deferrable)
    with meanwhile(suspend):
        ran = run(dag)
    assert ran.states == {"wait": "success"}, ran.log
    with TrainJobClient("local") as client:
        client.cancel(ref)


@both
def test_the_newest_job_with_the_labels(run: Run, deferrable: bool) -> None:
    with TrainJobClient("local") as client:
        for key, code in (("old", "raise SystemExit(1)"), ("young", "")):
            spec = {"runtime": "trainjob-step", "command": python(code), "labels": {"team": "a"}}
            ref = client.launch(spec, key)
            with contextlib.suppress(TrainJobFailed):
                client.wait(ref)
            time.sleep(1.1)  # creation timestamps are whole seconds, as on a cluster
    with DAG("labelled") as dag:
        TrainJobSensor(task_id="wait", labels={"team": "a"}, poke_interval=0.1, deferrable=deferrable)
        TrainJobSensor(task_id="by_condition", labels={"team": "a"}, condition="Complete", poke_interval=0.1)
        TrainJobSensor(task_id="reached_before", labels={"team": "a"}, phases=["Running"], poke_interval=0.1)
    assert run(dag).state == "success"


def test_rendered_arguments_are_checked(run: Run) -> None:
    short: dict[str, Any] = {"poke_interval": 0.1, "timeout": 0.3}
    with DAG("which") as dag:
        TrainJobSensor(task_id="none", job="{{ '' }}")
        TrainJobSensor(task_id="both", job="{{ 'x' }}", labels={"team": "a"})
        TrainJobSensor(task_id="phase", job="x", phases="{{ 'Completed' }}")
        TrainJobSensor(task_id="never", job="never-launched", **short)
    errors = run(dag).errors
    assert [str(errors[name]) for name in ("none", "both")] == ["set exactly one of job and labels"] * 2
    assert "phases: 'Completed' is not a phase" in str(errors["phase"])
    assert isinstance(errors["never"], AirflowSensorTimeout)


# ---------------------------------------------------------------- a sensor is a waiter


@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_a_sensor_counts_as_waiting(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Between two pokes, too: the process waits, or leaves a record."""
    presence = Presence(monkeypatch)
    ref = launched(waits(tmp_path / "end"), unattended="suspend")
    seen: list[list[str]] = []
    with DAG("attends") as dag:
        sensor = TrainJobSensor(task_id="wait", job=ref.name, poke_interval=0.3, mode=mode, timeout=240)
    poke, close = TrainJobSensor.poke, TrainJobSensor._close

    def poked(self: TrainJobSensor, context: Any) -> Any:
        found = poke(self, context)
        seen.append([*presence.jobs])
        if len(seen) == 2:
            (tmp_path / "end").touch()
        return found

    def closed(self: TrainJobSensor) -> None:
        close(self)
        if mode == "reschedule" and len(seen) == 1:
            (tmp_path / "end").touch()
            assert presence.all == [ref.name]

    monkeypatch.setattr(TrainJobSensor, "poke", poked)
    monkeypatch.setattr(TrainJobSensor, "_close", closed)
    if mode == "poke":
        assert run(dag).state == "success"
        assert seen[:2] == [[ref.name]] * 2
    else:
        with pytest.raises(AirflowRescheduleException):
            sensor.execute({"ti": SimpleNamespace(get_first_reschedule_date=lambda _: None)})  # type: ignore[typeddict-item]
    assert presence.jobs == []


@both
def test_a_sensor_resumes_what_was_suspended_as_unattended(run: Run, tmp_path: Path, deferrable: bool) -> None:
    (tmp_path / "end").touch()
    ref = launched(waits(tmp_path / "end"), suspend=True, unattended="suspend")
    with TrainJobClient("local") as client:
        client.call(lambda: client.backend.patch(ref, UNATTENDED))
    with DAG("resumes") as dag:
        left = TrainJobSensor(task_id="left", job=ref.name, phases="Suspended", poke_interval=0.3)
        left >> TrainJobSensor(task_id="wait", job=ref.name, poke_interval=0.3, deferrable=deferrable)
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    assert "it was suspended because nobody waited for it; it is resumed" in ran.log


@both
def test_a_sensor_follows_to_the_attempt_that_counts(run: Run, tmp_path: Path, deferrable: bool) -> None:
    ref = launched(waits(tmp_path / "end"))
    made: list[JobRef] = []

    def replace(client: TrainJobClient, ref: JobRef) -> None:
        made.append(client.call(lambda: replaced(client.backend, ref)))
        time.sleep(1)
        (tmp_path / "end").touch()

    with DAG("follows") as dag:
        TrainJobSensor(task_id="wait", job=ref.name, poke_interval=0.2, deferrable=deferrable)
    with meanwhile(replace, 2):
        ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    assert (ran.xcoms["wait"]["name"], ran.xcoms["wait"]["uid"]) == (made[0].name, made[0].uid)


@pytest.mark.parametrize("given", [True, False], ids=["given up", "deleted"])
@both
def test_a_wait_for_a_job_that_never_ends_otherwise_ends(
    run: Run, tmp_path: Path, given: bool, deferrable: bool
) -> None:
    ref = launched(waits(tmp_path / "end"))

    def end(client: TrainJobClient, ref: JobRef) -> None:
        if given:
            client.call(lambda: give_up(client.backend, ref, CRASHED))
        else:
            client.call(lambda: client.backend.delete(ref))

    with DAG("ends") as dag:
        TrainJobSensor(task_id="wait", job=ref.name, poke_interval=0.2, timeout=120, deferrable=deferrable)
    with meanwhile(end, 3):
        error = run(dag).errors["wait"]
    assert isinstance(error, TrainJobFatal)
    assert ("node-0 exited with code 7" if given else "is Deleted; it can no longer be Complete") in str(error)
    with TrainJobClient("local") as client:
        client.cancel(ref)


@pytest.mark.parametrize(
    ("minutes", "recorded"), [([], True), ([25], True), ([25, 15], False)], ids=["none", "old", "recent"]
)
def test_a_rescheduled_sensor_leaves_few_records_on_a_cluster(
    monkeypatch: pytest.MonkeyPatch, minutes: list[int], recorded: bool
) -> None:
    """Each is a Lease, so one is left when the latest is older than a third of `unattended_after`."""
    monkeypatch.setattr("trainjob_airflow.states._RECORD_SECONDS", 0)
    backend, attended = DirectBackend(), list[JobRef]()
    monkeypatch.setattr(backend, "attend", attended.append)
    monkeypatch.setattr(backend, "leave", lambda *_, **__: None)
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["x"], "unattended": "suspend"})

    async def scenario() -> JobRef:
        ref = await launch(backend, spec, "k", namespace="ns")
        backend.job(ref)["metadata"]["creationTimestamp"] = backend.ago(7200)
        for number, each in enumerate(minutes):
            backend.waits(ref, lease=f"other-{number}", age=60 * each)
        wait = Wait(cast(Any, backend), ref, Wanted(ref.name), lasts=False)
        await wait.observe(backend.job(ref))
        assert attended == []
        await wait.record()
        return ref

    ref = asyncio.run(scenario())
    assert attended == ([ref] if recorded else [])
