"""A job that hangs fails its task, in a worker and deferred; the core's tests are in tests/unit/test_stalls.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from airflow.sdk import DAG
from tests.airflow.conftest import Run, python
from tests.airflow.test_operator import both, step

from trainjob import JobHung, JobRef, Phase, TrainJobClient
from trainjob._jobs.cancellation import give_up
from trainjob._manifest.attempts import given_up
from trainjob.status import observe
from trainjob.verdicts import Category
from trainjob_airflow.exceptions import TrainJobFailure
from trainjob_airflow.sensors.trainjob import TrainJobSensor

HANGS = """
import time
from trainjob import progress
progress.step()
def read_forever(): time.sleep(600)
read_forever()
"""


@both
def test_a_job_that_hangs_fails_the_task_with_its_stack(run: Run, deferrable: bool) -> None:
    with DAG("hangs") as dag:
        step(code=HANGS, stall_timeout="1s", deferrable=deferrable)
    ran = run(dag)
    assert ran.states == {"train": "failed"}
    error = ran.errors["train"]
    assert isinstance(error, TrainJobFailure), "another try may succeed"
    for text in ("no rank has made progress for 1s: node-0 makes no step in read_forever()", "category: hang"):
        assert text in str(error)
        assert text in ran.log
    assert "was suspended" in ran.log
    with TrainJobClient() as client:
        (job,) = client.list()
        assert observe(job).phase is Phase.SUSPENDED
        reason = given_up(job)
        assert reason is not None
        assert reason.category == "hang"
        client.cancel(JobRef.of(job))


@pytest.mark.parametrize("timeout", ["soon", 0])
def test_an_invalid_timeout_fails_when_the_dag_is_parsed(timeout: object) -> None:
    with pytest.raises(Exception, match="stall_timeout"):
        step(stall_timeout=timeout)


@pytest.mark.parametrize("soft_fail", [False, True], ids=["fails", "skipped"])
@both
def test_a_sensor_for_the_end_of_a_job_that_hangs_fails(run: Run, deferrable: bool, soft_fail: bool) -> None:
    spec = {"runtime": "trainjob-step", "command": python(HANGS), "stall_timeout": 1}
    with TrainJobClient("local") as client:
        ref = client.launch(spec, "launched-elsewhere")
        with DAG("senses") as dag:
            TrainJobSensor(
                task_id="wait",
                job=ref.name,
                poke_interval=0.2,
                deferrable=deferrable,
                soft_fail=soft_fail,
                timeout=240,
            )
        ran = run(dag)
        trainjob = client.get(ref)
        client.cancel(ref)
    assert observe(trainjob).phase is Phase.RUNNING, "a sensor does not change the job"
    assert ran.states == {"wait": "skipped" if soft_fail else "failed"}, ran.log
    assert "no rank has made progress for 1s: node-0 makes no step in read_forever()" in ran.log
    if not soft_fail:
        error = ran.errors["wait"]
        assert isinstance(error, TrainJobFailure)
        assert error.diagnosis is not None
        assert error.diagnosis.category is Category.HANG


@both
def test_a_sensor_for_a_phase_before_the_end_waits_for_a_job_that_hangs(run: Run, deferrable: bool) -> None:
    """Its launcher may suspend it then, for which this sensor waits."""
    spec = {"runtime": "trainjob-step", "command": python(HANGS), "stall_timeout": 1}
    with TrainJobClient("local") as client:
        ref = client.launch(spec, "launched-elsewhere")

        def suspend() -> None:
            with pytest.raises(JobHung) as caught:
                client.wait(ref)
            diagnosis = caught.value.diagnosis
            client.call(lambda: give_up(client.backend, ref, diagnosis))

        with DAG("senses_suspension") as dag, ThreadPoolExecutor(1) as pool:
            TrainJobSensor(task_id="wait", job=ref.name, phases="Suspended", poke_interval=0.2, deferrable=deferrable)
            suspended = pool.submit(suspend)
            ran = run(dag)
            suspended.result()
        client.cancel(ref)
    assert ran.states == {"wait": "success"}, ran.log
