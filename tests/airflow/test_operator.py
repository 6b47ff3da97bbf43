"""`TrainJobOperator` in real task runs, in a worker and deferred."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from tests import objects
from tests.airflow.conftest import Run, jobs, python
from tests.airflow.tasks import REPORT, SLEEP, both, phases, step
from tests.airflow.versions import since
from tests.processes import wait_until

from trainjob import Evidence, JobRef, Phase, TrainJobClient, TrainJobSpec
from trainjob._backends.local.backend import LocalBackend
from trainjob.errors import BackendUnavailable, Category, ConfigurationError
from trainjob.status import observe
from trainjob_airflow.compat import TaskDeferralError
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, TrainJobTimeout
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.running import RunningJob, has_ended
from trainjob_airflow.sensors.trainjob import TrainJobSensor


@both
def test_returns_what_the_job_reports(run: Run, home: Path, deferrable: bool) -> None:
    """tests/integrations tests metrics and outputs."""
    with DAG("reports") as dag:
        step("train.it", deferrable=deferrable, outputs={"model": "s3://b/m", "log": "s3://b/{{ dag.dag_id }}"})
    ran = run(dag)
    assert ran.state == "success"
    result = ran.xcoms["train.it"]
    assert [(step, value) for step, _, value in result["history"]["loss"]] == [(1, 0.333333)]
    reported = {"model": "file:///m", "promoted": False, "shards": 3}
    assert result["outputs"] == {"log": "s3://b/reports", **reported}, "reported outputs override declared ones"
    assert sum(result["goodput"]["seconds"].values()) == pytest.approx(result["seconds"]["total"], abs=0.01)
    assert [result["name"]] == jobs(home)
    assert result["name"].startswith("train-it-")
    assert "progress: 100 %, loss 0.333333, bad nan, kind x, steps 7, stopped true" in ran.log
    annotations = annotations_of(home, result["name"])
    assert annotations["trainjob.dev/key"] == f"airflow/http://airflow.test:8080/reports/{ran.run_id}/-1/train.it"
    assert annotations["trainjob.dev/delivered"] == "true"


def annotations_of(home: Path, job: str) -> dict[str, str]:
    stored = json.loads((home / "jobs" / "default" / job / "object.json").read_text())
    return dict(stored["metadata"]["annotations"])


def test_a_result_that_airflow_did_not_record_is_not_marked(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler may have given up this try: the next one returns the result, and nothing is trained twice."""

    def states(run_ids: list[str], task_ids: list[str], **_: object) -> dict[str, dict[str, str]]:
        return {run_ids[0]: {task_ids[0]: "up_for_retry"}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    with DAG("given_up") as dag:
        step()
    assert run(dag).state == "success"
    (name,) = jobs(home)
    assert "trainjob.dev/delivered" not in annotations_of(home, name)


@pytest.mark.parametrize(
    ("deferrable", "seconds"), [(False, 0), (True, 0), (False, 4)], ids=["worker", "deferred", "interrupted"]
)
def test_execution_timeout_is_a_deadline(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, deferrable: bool, seconds: float
) -> None:
    """Airflow's timer fires after the operator's; here also while the client closes and the error propagates."""
    close = TrainJobClient.close

    def slowly(client: TrainJobClient) -> None:
        close(client)
        time.sleep(seconds)  # the job is cancelled 0.4 s before the timer

    monkeypatch.setattr(TrainJobClient, "close", slowly)
    with DAG("late") as dag:
        step(code=SLEEP, execution_timeout=timedelta(seconds=4), deferrable=deferrable)
    error = run(dag).errors["train"]
    assert isinstance(error, TrainJobTimeout)
    assert "did not end within execution_timeout; it was cancelled" in str(error)
    assert jobs(home) == []


def test_templates_reach_every_field(run: Run, home: Path) -> None:
    code = "import os, sys; assert (sys.argv[1], os.environ['TRAINJOB_INPUT_D']) == ('7.yaml', 'file:///7'), sys.argv"
    with DAG("templates") as dag:
        step(
            code=code,
            runtime="{{ dag_run.conf.runtime }}",
            args=["{{ dag_run.conf.n }}.yaml"],
            inputs={"d": "file:///{{ dag_run.conf.n }}"},
            num_nodes="{{ dag_run.conf.nodes }}",
            env={"N": "{{ dag_run.conf.n }}"},
            namespace="team-{{ dag_run.conf.n }}",
        )
    ran = run(dag, runtime="trainjob-step", n="7", nodes="2")
    assert ran.state == "success", ran.log[-2000:]
    assert len(jobs(home, "team-7")) == 1


@pytest.mark.parametrize("form", ["object", "mapping", "text", "file"])
def test_a_complete_spec_is_a_template_in_every_form(run: Run, airflow_home: Path, form: str) -> None:
    code = python("import sys; assert sys.argv[1] == 'seven'")
    fields: dict[str, Any] = {"runtime": "trainjob-step", "command": code, "args": ["{{ dag_run.conf.n }}"]}
    fields["outputs"] = {"model": "s3://b/m"}
    spec: Any = {"object": TrainJobSpec.parse(fields), "mapping": fields, "text": yaml.safe_dump(fields)}.get(form)
    with DAG("whole") as dag:
        if form == "file":
            (airflow_home / "dags" / "train.yaml").write_text(yaml.safe_dump(fields))
            dag.fileloc = str(airflow_home / "dags" / "whole.py")
            spec = "train.yaml"
        TrainJobOperator(task_id="train", spec=spec)
    assert run(dag, n="seven").xcoms["train"]["outputs"] == {"model": "s3://b/m"}


# Task -> its arguments, and a text of its error.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "connection": ({"trainjob_conn_id": "nosuch"}, "connection 'nosuch' does not exist: create it with type trainjob"),
    "name": ({"env": {"A": "{{ nosuch.thing }}"}}, "the template of 'env' cannot be rendered: 'nosuch' is undefined"),
    "syntax": ({"env": {"A": "{{ run_id"}}, "the template of 'env' cannot be rendered: unexpected end of template"),
    "file": (
        {"runtime": None, "command": None, "spec": "wrong.yaml"},
        "the template wrong.yaml cannot be rendered: 'nosuch' is undefined",
    ),
    "bytes": ({"runtime": None, "command": None, "spec": "bytes.yaml"}, "bytes.yaml is not text in UTF-8"),
    "number": ({"num_nodes": "{{ params.nodes }}"}, "num_nodes: must be a whole number"),
    "runtime": ({"runtime": "nosuch"}, "runtime 'nosuch' does not exist on this machine"),
}
PROMOTION = {"alias": "champion", "metric": "{{ params.nodes }}", "min_improvement": "{{ params.nodes }}"}


def test_a_try_that_cannot_succeed_is_the_last(run: Run, airflow_home: Path, home: Path) -> None:
    (airflow_home / "dags" / "wrong.yaml").write_text("runtime: trainjob-step\ncommand: [echo, '{{ nosuch.thing }}']")
    (airflow_home / "dags" / "bytes.yaml").write_bytes(b"runtime: \xff")
    never: dict[str, Any] = {"retries": 2, "retry_delay": timedelta(0)}
    with DAG("wrong", params={"nodes": "many"}) as dag:
        dag.fileloc = str(airflow_home / "dags" / "wrong.py")
        for name, (fields, _) in WRONG.items():
            step(name, **fields, **never)
        mapped = TrainJobOperator.partial(task_id="mapped", runtime="trainjob-step", command=["true"], **never)
        mapped.expand(env=[{"A": "{{ nosuch.thing }}"}])
        TrainJobSensor(task_id="sensor", job="some", trainjob_conn_id="nosuch", deferrable=True, **never)
        ModelExportOperator(task_id="promotion", source="s", target="t", name="n", **{**PROMOTION, **never})
    errors = run(dag).errors
    texts = {name: text for name, (_, text) in WRONG.items()}
    texts |= {"mapped": texts["name"], "sensor": texts["connection"], "promotion": "min_improvement must be a number"}
    assert {name: text for name, text in texts.items() if text not in str(errors[name])} == {}
    assert {type(error) for error in errors.values()} == {TrainJobFatal}
    assert jobs(home) == []


@pytest.mark.parametrize("ends", ["Complete", "Failed"])
def test_a_deferrable_task_does_not_defer_on_a_job_that_has_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Airflow's scheduler can treat a task whose trigger fires at once as lost, in this try and in the next ones."""
    launch = RunningJob.launch

    def launch_and_see_it_end(self: RunningJob, *arguments: Any, **more: Any) -> JobRef:
        ref = launch(self, *arguments, **more)
        wait_until("the job has ended", lambda: has_ended(self.look()), 120)
        return ref

    monkeypatch.setattr(RunningJob, "launch", launch_and_see_it_end)
    monkeypatch.setattr(TrainJobOperator, "defer", lambda *_, **__: pytest.fail("it was deferred"))
    with DAG("ended") as dag:
        step(code=REPORT if ends == "Complete" else "raise SystemExit(3)", deferrable=True)
    ran = run(dag)
    if ends == "Complete":
        assert ran.xcoms["train"]["outputs"]["shards"] == 3
    else:
        assert "node-0 exited with code 3" in str(ran.errors["train"])


@since("3.1", "callbacks in the process of the task")
@both
@pytest.mark.parametrize(
    ("code", "retried", "final", "line"),
    [
        ("raise ValueError('no labels')", True, False, "ValueError: no labels"),
        ("raise ValueError('no labels')", False, True, "ValueError: no labels"),
        ("import nosuch", True, True, "No module named 'nosuch'"),
    ],
    ids=["may not repeat", "is not retried by the author", "repeats"],
)
def test_callbacks_get_the_diagnosis(
    run: Run, deferrable: bool, code: str, retried: bool, final: bool, line: str
) -> None:
    calls: list[tuple[str, BaseException]] = []
    with DAG("callbacks") as dag:
        step(
            code=code,
            deferrable=deferrable,
            retries=1,
            retry_delay=timedelta(0),
            retry_user_errors=retried,
            on_retry_callback=lambda context: calls.append(("retry", context["exception"])),
            on_failure_callback=lambda context: calls.append(("failure", context["exception"])),
        )
    run(dag)
    assert [name for name, _ in calls] == (["failure"] if final else ["retry", "failure"])
    for _, error in calls:
        assert isinstance(error, TrainJobFatal if final else TrainJobFailure)
        assert isinstance(error, AirflowFailException) is final
        assert error.diagnosis is not None
        assert error.verdict is error.diagnosis.retry
        assert (error.diagnosis.rank, error.diagnosis.exit_code) == ("node-0", 1)
        assert error.diagnosis.category is Category.USER_CODE
        assert error.diagnosis.log[-1].endswith(line)


@both
def test_an_exit_code_can_skip_the_task(run: Run, deferrable: bool) -> None:
    with DAG("skips") as dag:
        for code in (4, 5, 6):
            step(f"ends_{code}", f"raise SystemExit({code})", skip_on_exit_code=[4, 5], deferrable=deferrable)
    ran = run(dag)
    assert ran.states == {"ends_4": "skipped", "ends_5": "skipped", "ends_6": "failed"}


@pytest.mark.usefixtures("no_job_is_left")
@both
def test_a_skipped_crash_ends_its_job(run: Run, monkeypatch: pytest.MonkeyPatch, deferrable: bool) -> None:
    async def crashes(backend: LocalBackend, ref: JobRef) -> AsyncGenerator[Evidence]:
        while observe(await backend.get(ref.namespace, ref.name)).phase is not Phase.RUNNING:
            await asyncio.sleep(0.02)
        yield Evidence(None, [objects.pod(1, last=objects.ended(3))])
        await asyncio.sleep(600)

    monkeypatch.setattr(LocalBackend, "crashes", crashes)
    with DAG("skips_a_crash") as dag:
        step("train", SLEEP, fail_on_first_crash=True, skip_on_exit_code=3, deferrable=deferrable)
    assert run(dag).states == {"train": "skipped"}
    assert [*phases().values()] == [Phase.SUSPENDED]


@both
def test_a_task_that_only_launches(run: Run, home: Path, deferrable: bool) -> None:
    code = f"import time; time.sleep(1)\n{REPORT}"
    with DAG("launches") as dag:
        launch = step("launch", code, wait_for_completion=False, deferrable=deferrable)
        name = "{{ ti.xcom_pull('launch')['name'] }}"
        launch >> TrainJobSensor(task_id="wait", job=name, poke_interval=0.2)
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    assert ran.xcoms["launch"]["metrics"] == {}
    assert ran.xcoms["wait"]["metrics"]["steps"] == 7
    assert ran.xcoms["wait"]["uid"] == ran.xcoms["launch"]["uid"]
    assert len(jobs(home)) == 1
    with TrainJobClient("local") as client:
        (job,) = client.list()
    assert job["metadata"]["labels"]["trainjob.dev/unattended"] == "suspend", "a sensor waits for it"
    assert job["metadata"]["annotations"]["trainjob.dev/delivered"] == "true"


def test_after_a_failure_of_the_triggerer_the_worker_waits(run: Run, home: Path) -> None:
    class Unlucky(TrainJobOperator):
        def execute_complete(self, context: Any, event: Any) -> Any:
            del context, event
            raise TaskDeferralError("Trigger failure")

    with DAG("unlucky") as dag:
        code = f"import time; time.sleep(3)\n{REPORT}"  # otherwise the job may end before the task defers
        Unlucky(task_id="train", runtime="trainjob-step", command=python(code), deferrable=True)
    ran = run(dag)
    assert ran.state == "success"
    assert "waiting in this worker instead" in ran.log
    assert len(jobs(home)) == 1


def test_the_worker_waits_where_the_triggerer_cannot_connect(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its image may lack a package, a file or a permission that the worker has."""

    @asynccontextmanager
    async def refused(_: TrainJobHook) -> AsyncIterator[NoReturn]:
        raise ConfigurationError("the triggerer has no kubeconfig")
        yield

    monkeypatch.setattr(TrainJobHook, "shared_backend", refused)
    with DAG("unconnected") as dag:
        step("train", f"import time; time.sleep(3)\n{REPORT}", deferrable=True)
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    assert "the triggerer has no kubeconfig); waiting in this worker instead" in ran.log
    assert len(jobs(home)) == 1


@pytest.mark.parametrize(("resumed", "again"), [(0, [1, 1]), (2, [3, 3]), (3, [])])
def test_a_task_is_deferred_again_three_times_after_outages(
    resumed: int, again: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also during the outage; not once its job has ended."""
    operator = TrainJobOperator(task_id="train", spec={"runtime": "x"}, deferrable=True)
    deferred: list[int] = []
    monkeypatch.setattr(operator, "_defer", lambda _context, _running, _ref, again: deferred.append(again))
    event = {"job": ["ns", "train-1", "uid", 1], "resumed": resumed, "page": None}
    running = RunningJob(TrainJobClient("local"), "key", JobRef("ns", "train-1", "uid", 1))
    runs = {"metadata": {"uid": "uid"}}
    monkeypatch.setattr(running, "look", Mock(side_effect=[runs, BackendUnavailable("away"), None]))
    for _ in range(3):
        with nullcontext() if again else pytest.raises(TrainJobFailure, match="could not be watched: away"):
            operator._defer_again({}, running, event, BackendUnavailable("away"))
    assert deferred == again
