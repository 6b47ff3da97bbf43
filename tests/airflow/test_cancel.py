"""`TrainJobCancelOperator` in real task runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowSkipException
from airflow.sdk import DAG, task, task_group
from tests.airflow.conftest import Run, jobs, python
from tests.airflow.tasks import phases
from tests.processes import wait_until

from trainjob import JobRef, Phase, TrainJobClient, TrainJobFailed, TrainJobSpec, launch
from trainjob._backends.local.backend import LocalBackend
from trainjob.job import key_hash
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal
from trainjob_airflow.identity import RUN_START, labels_of_instance, labels_of_run
from trainjob_airflow.operators.cancel import TrainJobCancelOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.operators.tuning import TrainJobTuningOperator

pytestmark = pytest.mark.usefixtures("no_job_is_left")
SLEEP = "import time; time.sleep(600)"


def launched(task_id: str = "train", code: str = SLEEP, **arguments: Any) -> TrainJobOperator:
    return TrainJobOperator(
        task_id=task_id, runtime="trainjob-step", command=python(code), wait_for_completion=False, **arguments
    )


@pytest.mark.full
@pytest.mark.parametrize("action", ["cancel", "suspend"])
def test_a_teardown_stops_what_its_setup_launched(run: Run, home: Path, tmp_path: Path, action: str) -> None:
    """Also if the work in between fails. The job has no process any longer when the teardown ends."""
    running, pid = [], tmp_path / "pid"
    write = f"import os, pathlib; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); "

    with DAG("torn_down", params={"action": action}) as dag:

        @task
        def work() -> None:
            (name,) = jobs(home)
            wait_until("the job runs", lambda: pid.exists() and phases()[name] is Phase.RUNNING)
            running.append(name)
            raise ValueError("the work is broken")

        train = launched(code=write + SLEEP)
        cancel: Any = TrainJobCancelOperator(task_id="cancel", launched_by="train", action="{{ params.action }}")
        train >> work() >> cancel.as_teardown(setups=train)
    ran = run(dag)
    assert ran.states == {"train": "success", "work": "failed", "cancel": "success"}, ran.log[-3000:]
    assert ran.xcoms["cancel"] == running
    assert f"default/{running[0]} (attempt 1) is Running: {action}" in ran.log
    assert phases() == {running[0]: Phase.CANCELLED if action == "cancel" else Phase.SUSPENDED}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_nothing_to_stop_is_a_success(run: Run, home: Path) -> None:
    with DAG("nothing_left") as dag:
        ended = TrainJobOperator(task_id="ended", runtime="trainjob-step", command=["true"])
        failed = TrainJobOperator(task_id="failed", runtime="trainjob-step", command=["false"])
        never = launched("never", trigger_rule="all_skipped")
        cancel = TrainJobCancelOperator(
            task_id="cancel", launched_by=["ended", "failed", "never"], trigger_rule="all_done"
        )
        [ended, failed] >> never >> cancel
    ran = run(dag)
    assert ran.states["cancel"] == "success", ran.errors
    assert ran.states["never"] == "skipped"
    assert ran.xcoms["cancel"] == []
    assert "no TrainJob of ended, failed, never needs to be stopped" in ran.log
    assert sorted(phases().values()) == [Phase.COMPLETE, Phase.FAILED]


def test_a_launch_on_its_way_obeys_although_no_job_exists(run: Run, home: Path) -> None:
    """The cancel of a published key is recorded for launches that began before it."""
    spec = {"runtime": "trainjob-step", "command": python(SLEEP)}
    began: list[int | None] = []
    keys: list[str] = []

    with DAG("on_its_way") as dag:

        @task
        def lost(ti: Any = None) -> None:
            published = ti.xcom_pull("train", key="trainjob")
            keys.append(published["key"])
            with TrainJobClient("local") as client:
                client.cancel(client.find(published["name"]))
                version, _ = client.call(lambda: client.backend.cancels("default", key_hash(keys[0])))
            began.append(version)

        launched() >> lost() >> TrainJobCancelOperator(task_id="cancel", launched_by="train")
    ran = run(dag)
    assert ran.states["cancel"] == "success", ran.errors
    assert ran.xcoms["cancel"] == []

    async def late(client: TrainJobClient) -> JobRef:
        parsed = TrainJobSpec.parse(spec)
        return await launch(client.backend, parsed, keys[0], namespace="default", began=began[0])

    with TrainJobClient("local") as client, pytest.raises(TrainJobFailed, match="cancelled while it was launched"):
        client.call(lambda: late(client))
    assert [*phases().values()] == [Phase.CANCELLED]


def test_the_trials_of_a_search_with_a_key_of_its_author(run: Run) -> None:
    """Their keys do not name the run; their labels do."""
    template: dict[str, Any] = {"runtime": "trainjob-step", "command": python(SLEEP)}
    study = {"space": {"x": {"type": "float", "low": 1, "high": 3}}, "metric": "loss", "direction": "minimize"}

    with DAG("searched") as dag:

        @task
        def trial(**context: Any) -> None:
            labels = labels_of_instance(context["ti"], "search", -1) | labels_of_run(context)  # type: ignore[arg-type]  # it is Airflow's
            spec = TrainJobSpec.parse(template)
            with TrainJobClient("local") as client:
                client.call(lambda: launch(client.backend, spec, "weekly/0", namespace="default", origin=labels))

        search = TrainJobTuningOperator(
            task_id="search", study={**study, "max_trials": 1}, key="weekly", trigger_rule="all_skipped", **template
        )
        trial() >> search >> TrainJobCancelOperator(task_id="cancel", launched_by="search", trigger_rule="all_done")
    ran = run(dag)
    assert len(ran.xcoms["cancel"]) == 1, ran.log[-3000:]
    assert [*phases().values()] == [Phase.CANCELLED]


def test_all_jobs_of_a_mapped_task(run: Run, home: Path) -> None:
    with DAG("mapped", params={"place": "elsewhere"}) as dag:
        train = TrainJobOperator.partial(
            task_id="train", runtime="trainjob-step", wait_for_completion=False, namespace="{{ params.place }}"
        ).expand(command=[python(SLEEP), python(SLEEP), ["true"]])
        train >> TrainJobCancelOperator(task_id="cancel", launched_by="train")
    ran = run(dag)
    assert ran.states["cancel"] == "success", ran.errors
    assert set(ran.xcoms["cancel"]) >= {ran.xcoms["train[0]"]["name"], ran.xcoms["train[1]"]["name"]}
    assert set(phases("elsewhere").values()) <= {Phase.COMPLETE, Phase.CANCELLED}


def test_in_a_mapped_group_only_the_jobs_of_its_own_map_index(run: Run) -> None:
    with DAG("grouped") as dag:

        @task_group
        def each(seconds: str) -> None:
            train = launched(env={"SECONDS": seconds})

            @task
            def chosen(seconds: str) -> None:
                if seconds == "2":
                    raise AirflowSkipException

            cancel = TrainJobCancelOperator(task_id="cancel", launched_by="each.train")
            train >> chosen(seconds) >> cancel

        each.expand(seconds=["1", "2"])
    ran = run(dag)
    assert ran.errors == {}, ran.errors
    assert (ran.states["each.cancel[0]"], ran.states["each.cancel[1]"]) == ("success", "skipped")
    stopped, left = (ran.xcoms[f"each.train[{index}]"]["name"] for index in (0, 1))
    assert ran.xcoms["each.cancel[0]"] == [stopped]
    assert {name for name, phase in phases().items() if phase is not Phase.CANCELLED} == {left}


def test_a_job_of_another_deployment_is_not_stopped(
    run: Run, airflow_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its labels can be equal: another Airflow in the namespace can have a DAG and a run with the same names."""
    with DAG("namesakes") as dag:

        @task
        def elsewhere(run_id: str | None = None) -> None:
            with TrainJobClient("local") as client:
                client.launch(
                    {"runtime": "trainjob-step", "command": python(SLEEP)},
                    f"airflow/http://another.test/namesakes/{run_id}/-1/train",
                    origin=client.list()[0]["metadata"]["labels"] | {RUN_START: "20260102T000000.000000"},
                )

        launched() >> elsewhere() >> TrainJobCancelOperator(task_id="cancel", launched_by="train")
    ran = run(dag)
    assert ran.states["cancel"] == "success", ran.errors
    assert ran.xcoms["cancel"] == [ran.xcoms["train"]["name"]]
    assert sorted(phases().values()) == [Phase.CANCELLED, Phase.RUNNING]
    assert (
        "is not stopped: it has the labels of task train in this run, but by its key airflow/http://another" in ran.log
    )


@pytest.mark.parametrize("do_xcom_push", [True, False], ids=["by its XCom", "by the run"])
def test_a_job_is_stopped_after_base_url_was_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch, do_xcom_push: bool
) -> None:
    """The key that the launch has stored counts: this worker may have another configuration."""
    if do_xcom_push:
        monkeypatch.setattr("trainjob_airflow.identity.labels_of_run", lambda _: {})
    with DAG("renamed") as dag:

        @task
        def rename() -> None:
            monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.test")

        train = launched(do_xcom_push=do_xcom_push)
        train >> rename() >> TrainJobCancelOperator(task_id="cancel", launched_by="train")
    ran = run(dag)
    assert ran.states["cancel"] == "success", ran.errors
    assert [*phases().values()] == [Phase.CANCELLED]
    assert ran.xcoms["cancel"] == [*phases()]


def test_pods_that_do_not_end_in_time_fail_the_task(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: LocalBackend, ref: JobRef) -> bool:
        return False

    monkeypatch.setattr(LocalBackend, "stopped", never)
    with DAG("stuck") as dag:
        launched() >> TrainJobCancelOperator(task_id="cancel", launched_by="train", stop_timeout=0.2)
    error = run(dag).errors["cancel"]
    assert isinstance(error, TrainJobFailure)
    assert "have not ended 0.2 s after" in str(error)


def test_invalid_rendered_arguments_fail_without_a_retry(run: Run) -> None:
    with DAG("wrong", params={"of": "trian"}) as dag:
        launched(code="")
        TrainJobOperator.partial(task_id="many", runtime="trainjob-step", command=["true"]).expand(namespace=["a", "b"])
        TrainJobCancelOperator(task_id="typo", launched_by="{{ params.of }}", retries=2)
        TrainJobCancelOperator(task_id="spread", launched_by="many")
        TrainJobCancelOperator(task_id="verb", launched_by="train", action="{{ params.of }}")
    errors = run(dag).errors
    assert {type(error) for error in errors.values()} == {TrainJobFatal}
    assert "has no task 'trian' that launches a TrainJob; tasks that do: many, train" in str(errors["typo"])
    assert "namespace of task many is mapped; set namespace of spread" in str(errors["spread"])
    assert "action must be 'cancel' or 'suspend'" in str(errors["verb"])
