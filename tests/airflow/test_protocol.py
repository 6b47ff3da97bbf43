"""One key, one training: what tasks do when tries, clears, kills and other launchers meet."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from airflow.sdk import DAG, task
from tests.airflow.conftest import LONG_AGO, Run, jobs, publish, python, replaced
from tests.airflow.tasks import CRASHED, SLEEP, both, meanwhile, phases, step, waits
from tests.airflow.triggers import trigger_of
from tests.processes import wait_until

import trainjob as core
from trainjob import JobRef, Phase, RanksRemain, TrainJobClient, TrainJobSpec
from trainjob._jobs.cancellation import give_up
from trainjob._manifest.render import render
from trainjob_airflow import identity
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal
from trainjob_airflow.operators import base
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.running import RunningJob

pytestmark = pytest.mark.usefixtures("no_job_is_left")


# ---------------------------------------------------------------- the attempt that counts


@both
def test_a_task_follows_to_the_attempt_that_counts(run: Run, home: Path, tmp_path: Path, deferrable: bool) -> None:
    made: list[JobRef] = []

    def replace(client: TrainJobClient, ref: JobRef) -> None:
        made.append(client.call(lambda: replaced(client.backend, ref)))
        wait_until("it runs", lambda: phases().get(made[0].name) is Phase.RUNNING, 60)
        time.sleep(1)
        (tmp_path / "end").touch()

    with DAG("follows") as dag:
        code = waits(tmp_path / "end") + "\nfrom trainjob.progress import report; report(metrics={'loss': 1})"
        train = step(code=code, deferrable=deferrable, retries=0)

        @task
        def read(ti: Any = None) -> dict[str, Any]:
            pulled = {key: ti.xcom_pull("train", key=key) for key in ("trainjob", "trainjob_training")}
            return {"job": pulled["trainjob"], "page": pulled["trainjob_training"]["uid"]}

        train >> read()
    with meanwhile(replace):
        ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    (ref,) = made
    assert (ran.xcoms["train"]["name"], ran.xcoms["train"]["attempt"]) == (ref.name, 2)
    assert ran.xcoms["train"]["metrics"] == {"loss": 1}
    assert ran.xcoms["read"]["page"] == ref.uid
    job = ran.xcoms["read"]["job"]
    assert (job["uid"], job["name"], job["attempt"]) == (ref.uid, ref.name, 2)
    with TrainJobClient("local") as client:
        (annotations,) = [each["metadata"]["annotations"] for each in client.list()]
    assert job["key"] == annotations["trainjob.dev/key"]
    assert annotations["trainjob.dev/delivered"] == "true"
    assert f"waits for TrainJob {ref}" in ran.log


@both
def test_a_job_that_another_waiter_gives_up_fails_the_task_with_its_diagnosis(
    run: Run, home: Path, deferrable: bool
) -> None:
    with DAG("given_up") as dag:
        step(code=SLEEP, deferrable=deferrable, retries=2)

    def end(client: TrainJobClient, ref: JobRef) -> None:
        client.call(lambda: give_up(client.backend, ref, CRASHED))

    with meanwhile(end):
        ran = run(dag)
    error = ran.errors["train"]
    assert isinstance(error, TrainJobFatal)
    assert error.diagnosis is not None
    assert (error.diagnosis.exit_code, error.diagnosis.rank) == (7, "node-0")
    assert "node-0 exited with code 7" in str(error)
    assert len(phases()) == 1


# ---------------------------------------------------------------- ranks of an earlier attempt


class Ranks:
    """Ranks of an earlier attempt that run for the first launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, seconds: float = 60) -> None:
        self.waited: list[bool] = []
        self.began: list[int | None] = []
        launch = core.launch

        async def remain(*given: Any, wait_for_ranks: bool = True, began: int | None = None, **more: Any) -> JobRef:
            self.waited.append(wait_for_ranks)
            self.began.append(began)
            if len(self.waited) <= count and not wait_for_ranks:
                error = RanksRemain("node-0 of x-1 on node a has not ended", seconds)
                error.began = 7
                raise error
            return await launch(*given, wait_for_ranks=wait_for_ranks, **more)

        monkeypatch.setattr(core, "launch", remain)
        monkeypatch.setattr(base, "_RANKS_PAUSE", 0.2)


@pytest.mark.parametrize(
    ("deferrable", "count", "seconds", "waits"),
    [(True, 2, 60, False), (True, 1000, 0.3, True), (False, 1000, 60, True)],
    ids=["in the triggerer", "in the triggerer for as long as they may take", "in a worker"],
)
def test_a_task_waits_for_ranks_of_an_earlier_attempt(
    run: Run, monkeypatch: pytest.MonkeyPatch, deferrable: bool, count: int, seconds: float, waits: bool
) -> None:
    """In the triggerer between two launches; in a worker, or at last, in the launch itself."""
    ranks = Ranks(monkeypatch, count, seconds)
    with DAG("ranks") as dag:
        step(deferrable=deferrable)
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    *before, last = ranks.waited
    assert (any(before), last) == (False, waits)
    assert ranks.began == [None, *[7] * len(before)], "a cancel since the first launch ends each of them"
    assert ran.log.count("node-0 of x-1 on node a has not ended") == len(before)
    assert (len(before) == count, bool(before)) == (count == 2, deferrable)
    assert len(phases()) == 1


# ---------------------------------------------------------------- tasks that do not wait


def test_a_clear_of_a_task_that_does_not_wait(
    airflow_home: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the job runs, it is adopted; once it is complete, it is trained again."""
    from airflow.models.dagrun import DagRun

    monkeypatch.setattr(DagRun, "generate_run_id", lambda **_: "manual__1")
    with DAG("cleared_launch") as dag:
        step(code=waits(tmp_path / "end"), wait_for_completion=False)
    publish(dag)

    def ran() -> None:
        assert str(dag.test(logical_date=LONG_AGO).state) == "success"

    ran()
    ran()
    (name,) = jobs(home)
    (tmp_path / "end").touch()
    wait_until("it is complete", lambda: phases()[name] is Phase.COMPLETE, 60)
    ran()
    assert [each[-2:] for each in jobs(home)] == ["-1", "-2"], "trained again"


@pytest.mark.parametrize(("action", "policy"), [("cancel", "suspend"), ("suspend", "suspend"), ("keep", None)])
def test_nothing_that_somebody_waits_for_lacks_a_policy(run: Run, home: Path, action: str, policy: str | None) -> None:
    with DAG("policies") as dag:
        step(code="", wait_for_completion=False, on_kill_action=action)
    assert run(dag).state == "success"
    with TrainJobClient("local") as client:
        assert [job["metadata"]["labels"].get("trainjob.dev/unattended") for job in client.list()] == [policy]


# ---------------------------------------------------------------- kills


KEY, FIELDS = "airflow/a/d/r/-1/train", {"runtime": "trainjob-step", "command": python(SLEEP)}
SPEC = TrainJobSpec.parse(FIELDS)


def arrive(client: TrainJobClient, number: int, tried: int) -> None:
    """Create an attempt, as a request whose reply was lost does."""
    made = render(SPEC, KEY, number, "default")
    made["metadata"]["annotations"]["trainjob.dev/try"] = str(tried)
    client.call(lambda: client.backend.create(made))


def launched(client: TrainJobClient, tried: int) -> JobRef:
    return client.call(lambda: core.launch(client.backend, SPEC, KEY, namespace="default", tried=tried))


def kill_in_the_worker(client: TrainJobClient, ref: JobRef, action: Any) -> None:
    for _ in range(2):
        assert RunningJob(client, KEY, ref, tried=1).stop(action, 30).ended, "nothing is left to stop"


def kill_in_the_triggerer(client: TrainJobClient, ref: JobRef, action: Any) -> None:
    trigger = trigger_of(ref, on_kill_action=action, key=KEY, tried=1)
    assert client.call(lambda: trigger.cancel(client.backend)) == f"TrainJob {ref} has ended ({action})"


@pytest.mark.parametrize("kill", [kill_in_the_worker, kill_in_the_triggerer])
@pytest.mark.parametrize(("action", "stopped"), [("cancel", Phase.CANCELLED), ("suspend", Phase.SUSPENDED)])
def test_a_kill_stops_each_attempt_of_its_key(
    home: Path, kill: Callable[..., None], action: str, stopped: Phase
) -> None:
    """Not only the one that the task knows: a request whose reply was lost may have created another one since."""
    with TrainJobClient("local") as client:
        ref = launched(client, 1)
        arrive(client, 2, 1)
        arrive(client, 3, 2)
        wait_until("all run", lambda: [*phases().values()] == [Phase.RUNNING] * 3, 60)
        kill(client, ref, action)
        assert [*phases().values()] == [stopped, stopped, Phase.RUNNING], "that of the next try keeps running"


def test_a_kill_stops_a_job_with_an_earlier_key(home: Path) -> None:
    """The deployment may have been renamed since the launch."""
    with TrainJobClient("local") as client:
        ref = RunningJob(client, "airflow/old/d/r/-1/train").launch(SPEC, {})
        assert RunningJob(client, "airflow/new/d/r/-1/train", ref).stop("cancel", 30).ended
        assert [*phases().values()] == [Phase.CANCELLED]


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(("action", "phase"), [("cancel", Phase.CANCELLED), ("suspend", Phase.SUSPENDED)])
def test_a_clear_stops_the_job_of_the_earlier_try_only(
    home: Path, action: Literal["cancel", "suspend"], phase: Phase, changed: bool
) -> None:
    """The next try resumes a suspended job, or replaces it if the author has changed the task before the clear."""
    with TrainJobClient("local") as client:
        launched(client, 1)
        running = RunningJob(client, KEY, tried=2)
        running.stop_earlier_tries(action, 60)
        assert [*phases().values()] == [phase]
        ref = running.launch(TrainJobSpec.parse(FIELDS | {"env": {"A": "1"}}) if changed else SPEC, {})
        wait_until("it runs", lambda: phases()[ref.name] is Phase.RUNNING, 60)
        assert ref.attempt == (1 if action == "suspend" and not changed else 2)
        assert running.adopted == (ref if ref.attempt == 1 else None)


@pytest.mark.parametrize("error", [TimeoutError(), AirflowException("the webhook refused it")])
def test_the_last_line_of_a_kill_names_the_command(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> bool:
        raise error

    monkeypatch.setattr(base, "is_wanted", lambda _: False)
    operator = TrainJobOperator(task_id="train", spec={"runtime": "x"})
    with TrainJobClient("local", "team") as client:
        running = RunningJob(client, "airflow/a/d/it's/-1/train")
        monkeypatch.setattr(running, "stop", fail)
        with pytest.raises(TrainJobFailure) as failure:
            operator._handle_kill(cast(Any, {}), running)
    text = str(failure.value)
    assert "the TrainJob of airflow/a/d/it's/-1/train could not be cancelled: " in text
    assert ("took longer than 3.5 s" in text) is isinstance(error, TimeoutError)
    assert text.endswith("""trainjob cancel --key 'airflow/a/d/it'"'"'s/-1/train' -n team""")


def test_a_kill_before_the_launch_launches_nothing(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(TrainJobOperator):
        def _spec(self, *given: Any) -> TrainJobSpec:
            self.on_kill()
            return super()._spec(*given)

    monkeypatch.setattr(base, "is_wanted", lambda _: False)
    with DAG("killed_early") as dag:
        Killed(task_id="train", runtime="trainjob-step", command=["true"])
    error = run(dag).errors["train"]
    assert "the task was killed" in str(error)
    assert jobs(home) == []


# ---------------------------------------------------------------- the key after a change of settings


def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.test")


@pytest.mark.parametrize("stored", [True, False], ids=["3.3", "before"])
def test_a_retry_finds_its_job_after_base_url_was_changed(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Before Airflow 3.3, which has no task state, by the labels of its job."""

    class Dies(TrainJobOperator):
        def _deliver(self, *_: Any) -> Any:
            type(self)._deliver = TrainJobOperator._deliver  # type: ignore[method-assign]
            renamed(monkeypatch)
            raise AirflowException("the worker was lost")

    if not stored:
        monkeypatch.setattr(identity, "_store", lambda _: None)
    with DAG("renamed_retry") as dag:
        Dies(task_id="train", runtime="trainjob-step", command=["true"], retries=1, retry_delay=timedelta(0))
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    assert ran.xcoms["train"]["attempt"] == 1
    assert len(jobs(home)) == 1


def job(key: str, created: str = "2026-11-21T10:00:00Z", **labels: str) -> dict[str, Any]:
    annotations = {"trainjob.dev/key": key}
    return {"metadata": {"labels": labels, "annotations": annotations, "creationTimestamp": created}}


def context(**given: Any) -> Any:
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="train", map_index=-1, try_number=2)
    return {"ti": ti, "dag_run": SimpleNamespace(start_date=datetime(2026, 11, 21, 9, 0, 0, 7, tzinfo=UTC)), **given}


def test_only_jobs_of_the_same_run_of_the_same_deployment_have_an_earlier_key() -> None:
    """Scheduled runs of two deployments have the same names, but do not start in the same microsecond."""
    ours = identity.labels_of_run(context())
    assert ours == {"airflow.apache.org/run-start": "20261121T090000.000007"}
    key = identity.key_of(context())
    old, older = (f"airflow/http://{name}/d/r/-1/train" for name in ("old", "older"))
    other = {"airflow.apache.org/run-start": "20261121T090000.000008"}
    assert identity.key_of_earlier_try([], context(), key) == key
    assert identity.key_of_earlier_try([job(old, **other), job(old)], context(), key) == key
    assert identity.key_of_earlier_try([job(old, **ours)], context(dag_run=None), key) == key
    assert identity.key_of_earlier_try([job("airflow/http://old/d/r/-1/other", **ours)], context(), key) == key
    found = [job(older, "2026-11-21T09:59:59Z", **ours), job(old, **ours)]
    assert identity.key_of_earlier_try(found, context(), key) == old
    assert identity.key_of_earlier_try([*found, job(key, **ours)], context(), key) == key


def test_a_job_is_of_this_run_by_its_key_or_its_run() -> None:
    ours = identity.labels_of_run(context())
    old, present = "airflow/http://old/d/r/-1/train", identity.key_of(context())
    assert identity.is_of_this_run(job(present), context(), ())
    assert identity.is_of_this_run(job(old), context(), {old})
    assert identity.is_of_this_run(job(old, **ours), context(), ())
    assert not identity.is_of_this_run(job(old), context(), {present})
    assert not identity.is_of_this_run(job(old), context(dag_run=None), ())


def test_a_deployment_without_a_name_is_warned_about_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "")
    monkeypatch.setattr(identity, "_WARNED", set())
    with DAG("unnamed") as dag:
        step("one", code="") >> step("two", code="")
    ran = run(dag)
    assert ran.state == "success"
    assert ran.log.count("this deployment of Airflow has no name") == 1
    assert "set [api] base_url (AIRFLOW__API__BASE_URL) or [trainjob] deployment" in ran.log
