"""The tabs of Airflow's UI: their registration, and their pages in Airflow's own API server application."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, task
from tests.airflow.conftest import ROOT, Run, python
from tests.airflow.tasks import stored
from tests.airflow.versions import since
from tests.processes import wait_until

from trainjob import JobRef, Observation, Phase, TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob._pages.documents.training import observed_document
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.operators.tuning import TrainJobTuningOperator
from trainjob_airflow.training import KEY
from trainjob_airflow.web import live

if TYPE_CHECKING:
    from starlette.testclient import TestClient

pytestmark = since("3.1.1", "tabs with pages of plugins")
ONE_DAG = "page_finished"  # the only DAG that the user one-dag may read, see auth.py
FINISHED = """
from trainjob.progress import report
report(progress=100, metrics={'loss': 0.25, 'bad': 'nan'}, step=4, total_steps=4)
"""
RUNNING = """
import os, time
from trainjob.progress import report
print("up", flush=True)
step = 0
while not os.path.exists(os.environ["FLAG"]):
    step += 1
    report(metrics={'loss': 1 / step}, step=step)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def server(airflow_home: Path) -> Iterator[TestClient]:
    """Airflow's API server application, with an auth manager that knows users with few permissions."""
    from airflow.api_fastapi.app import create_app, purge_cached_app
    from starlette.testclient import TestClient

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "tests.airflow.auth.StrictAuthManager")
        patch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
        purge_cached_app()
        with TestClient(create_app(apps="core"), base_url="http://airflow.test:8080") as client:
            yield client
        purge_cached_app()


Get = Callable[..., Any]


@pytest.fixture
def get(server: TestClient) -> Iterator[Get]:
    """Requests a page as a user; ``None`` is nobody."""
    from trainjob_airflow.web.app import app

    def get(path: str, user: str | None = "somebody", **params: Any) -> Any:
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

        server.cookies.clear()
        if user is not None:
            token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=user, role="ADMIN"))
            server.cookies.set("_token", token)
        return server.get(f"/trainjob{path}", params=params)

    yield get
    assert server.portal is not None
    server.portal.call(app().state.live.aclose)  # each test has its own home of jobs


def path_of(dag: DAG, run_id: str, task_id: str = "train", map_index: str = "-1", what: str = "page") -> str:
    return f"/dags/{dag.dag_id}/runs/{quote(run_id, safe='')}/tasks/{task_id}/{map_index}/{what}"


def document_in(page: Any) -> dict[str, Any]:
    """The document that a page embeds."""
    assert page.status_code == 200, page.text
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', page.text, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def train(code: str = FINISHED, task_id: str = "train", **more: Any) -> TrainJobOperator:
    return TrainJobOperator(task_id=task_id, runtime="trainjob-step", command=python(code), **more)


def set_state(run_id: str, state: str, task_id: str = "train") -> None:
    """Set the state of a task in Airflow's database."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import update

    with create_session() as session:
        instance = TaskInstance.run_id == run_id, TaskInstance.task_id == task_id
        session.execute(update(TaskInstance).where(*instance).values(state=state))


# ---------------------------------------------------------------- registration


def test_airflow_knows_the_tabs(airflow_home: Path) -> None:
    from airflow.plugins_manager import get_plugin_info

    (ours,) = [each for each in get_plugin_info() if each["name"] == "trainjob"]
    assert {each["destination"]: each["name"] for each in ours["external_views"]} == {
        "task_instance": "Training",
        "dag_run": "Trainings",
    }
    assert ours["external_views"][0]["href"] == (
        "/trainjob/dags/{DAG_ID}/runs/{RUN_ID}/tasks/{TASK_ID}/{MAP_INDEX}/page"
    )
    assert [each["url_prefix"] for each in ours["fastapi_apps"]] == ["/trainjob"]


def test_the_address_has_the_path_of_the_base_url(airflow_home: Path) -> None:
    code = "from trainjob_airflow.plugin import TrainJobPlugin as it; print(*[v['href'] for v in it.external_views])"
    given: dict[str, Any] = {"env": {**os.environ, "AIRFLOW__API__BASE_URL": "https://host.test/team/airflow/"}}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, **given)
    assert [each.partition("/dags")[0] for each in done.stdout.split()] == ["/team/airflow/trainjob"] * 2


# ---------------------------------------------------------------- pages of finished tasks


@pytest.fixture
def finished(run: Run) -> tuple[DAG, str]:
    with DAG(ONE_DAG) as dag:
        train()
    ran = run(dag)
    assert ran.state == "success"
    return dag, ran.run_id


def test_the_page_of_a_finished_task(finished: tuple[DAG, str], get: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "connect", lambda *_, **__: pytest.fail("the page connects"))
    page = get(path_of(*finished))
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'self'" in page.headers["content-security-policy"]
    assert "connect-src 'none'" in page.text, "the page of a finished task makes no request"
    document = document_in(page)
    assert (document["phase"], document["metrics"]["loss"], document["source"]) == ("Complete", 0.25, "kept")
    assert document["metrics"]["bad"] == "nan"
    assert "airflow" not in document
    placeholder = get(path_of(*finished, map_index="%7BMAP_INDEX%7D"))
    assert document_in(placeholder)["phase"] == "Complete", "the task is not mapped"


def test_the_pages_of_a_run_and_its_tasks(run: Run, get: Get) -> None:
    with DAG("page_run") as dag:
        code = "from trainjob.progress import report; import sys; report(metrics={'loss': float(sys.argv[1])})"
        train() >> train("raise ValueError('the data is wrong')", "broken")
        many = TrainJobOperator.partial(task_id="many", runtime="trainjob-step")
        many.expand(command=[[*python(code), "1"], [*python(code), "2"]])
    run_id = run(dag).run_id
    path = f"/dags/{dag.dag_id}/runs/{quote(run_id)}"
    document = document_in(get(f"{path}/page"))
    assert (document["kind"], document["title"]) == ("workflow", f"page_run, {run_id}")
    shown = {each["task"]: each for each in document["trainings"]}
    phases = {"train": "Complete", "broken": "Failed", "many [0]": "Complete", "many [1]": "Complete"}
    assert {name: each["phase"] for name, each in shown.items()} == phases
    assert get(f"{path}/document").json()["kind"] == "workflow"

    pages = {name: document_in(get(each["href"].removeprefix("/trainjob"))) for name, each in shown.items()}
    assert [pages[f"many [{index}]"]["metrics"]["loss"] for index in (0, 1)] == [1, 2]
    assert get(path_of(dag, run_id, "many", map_index="2")).status_code == 404
    failed = pages["broken"]
    assert (failed["phase"], failed["notes"]) == ("Failed", [])
    assert "the data is wrong" in failed["diagnosis"]["summary"]
    assert failed["diagnosis"]["log"]


def test_another_task_has_a_message(run: Run, get: Get) -> None:
    with DAG("page_other") as dag:
        EmptyOperator(task_id="other")
    run_id = run(dag).run_id
    for state, message, refreshes in (("success", "no TrainJob.", False), ("queued", "no TrainJob yet.", True)):
        set_state(run_id, state, "other")
        page = get(path_of(dag, run_id, "other"))
        assert page.status_code == 200
        assert f"This task has {message}" in page.text
        assert ('http-equiv="refresh"' in page.text) is refreshes
    assert get(path_of(dag, run_id, "other", what="document")).status_code == 404
    assert "This DAG run has no trainings." in get(f"/dags/{dag.dag_id}/runs/{quote(run_id)}/page").text


@pytest.mark.parametrize("what", ["page", "document"])
def test_unknown_runs_and_tasks_are_not_found(finished: tuple[DAG, str], get: Get, what: str) -> None:
    dag, run_id = finished
    unknown = [path_of(dag, "nosuch", what=what), path_of(dag, run_id, "nosuch", what=what), f"/nosuch/{what}"]
    unknown += [f"/dags/{dag.dag_id}/runs/nosuch/{what}", f"/dags/nosuch/runs/{quote(run_id)}/{what}"]
    assert {path: get(path).status_code for path in unknown} == dict.fromkeys(unknown, 404)


# ---------------------------------------------------------------- authorization


@pytest.mark.parametrize("what", ["page", "document"])
@pytest.mark.parametrize(("user", "status"), [(None, 401), ("nobody", 403), ("no-xcoms", 403), ("somebody", 200)])
def test_airflow_authorizes(finished: tuple[DAG, str], get: Get, what: str, user: str | None, status: int) -> None:
    dag, run_id = finished
    for path in (path_of(dag, run_id, what=what), f"/dags/{dag.dag_id}/runs/{quote(run_id)}/{what}"):
        answer = get(path, user)
        assert answer.status_code == status
        if status != 200:
            assert "loss" not in answer.text


def test_the_dag_of_the_address_is_authorized(finished: tuple[DAG, str], get: Get, run: Run) -> None:
    dag, run_id = finished
    with DAG("page_foreign") as foreign:
        train()
    other = run(foreign).run_id
    assert get(path_of(dag, run_id), "one-dag").status_code == 200
    assert get(path_of(foreign, other), "one-dag").status_code == 403
    assert get(path_of(foreign, other), "one-dag", dag_id=dag.dag_id).status_code == 403
    assert get(path_of(dag, other), "one-dag").status_code == 404, "a run of another DAG"


# ---------------------------------------------------------------- studies


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_page_of_a_study(run: Run, get: Get, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainjob.tuning.journal import open_journal

    study = {"space": {"x": {"type": "float", "low": 0, "high": 1}}, "metric": "loss", "direction": "minimize"}
    with DAG("page_study") as dag:
        TrainJobTuningOperator(
            task_id="train",
            study={**study, "max_trials": 1},
            runtime="trainjob-step",
            command=python("import time; time.sleep(60)"),
            execution_timeout=timedelta(seconds=5),
        )
    run_id = run(dag).run_id
    path = path_of(dag, run_id, what="document")
    stored = get(path).json()
    assert (stored["kind"], stored["state"], stored["counts"]) == ("study", "running", {"running": 1})
    assert stored["notes"] == ["The task is failed. The study can be continued: clear the task."]
    assert "airflow" not in stored
    assert "This DAG run has no trainings." in get(f"/dags/page_study/runs/{quote(run_id)}/page").text

    set_state(run_id, "running")
    (journal,) = (home / "studies").iterdir()
    with open_journal(journal.as_uri()) as opened:  # as a launcher on another machine does
        opened.create("ended/00000", {"state": "complete", "value": 0.25, "values": [[4, 0.25]]})
    shown = get(path).json()
    assert (shown["counts"], shown["best"], shown["notes"]) == ({"complete": 1}, 0, [])
    assert "connect-src 'self'" in get(path.removesuffix("document") + "page").text

    monkeypatch.setenv("TRAINJOB_WORKSPACE", (home / "other").as_uri())
    (note,) = get(path).json()["notes"]
    assert "its journal is not in the workspace of the API server (TRAINJOB_WORKSPACE)" in note
    monkeypatch.delenv("TRAINJOB_WORKSPACE")
    monkeypatch.setattr(live, "_is_key_of", lambda *_: False)
    (note,) = get(path).json()["notes"]
    assert "the key of the study was set by the argument key" in note


# ---------------------------------------------------------------- running tasks


@pytest.fixture
def running(run: Run, tmp_path: Path) -> Iterator[tuple[DAG, str, Path]]:
    """A task of state ``running`` whose job runs until a file exists."""
    flag = tmp_path / "flag"
    with DAG("page_running") as dag:
        train(RUNNING, env={"FLAG": str(flag)}, wait_for_completion=False)
    ran = run(dag)
    set_state(ran.run_id, "running")
    yield dag, ran.run_id, flag
    flag.touch()


def test_a_running_task_is_live(running: tuple[DAG, str, Path], get: Get) -> None:
    dag, run_id, flag = running
    page = get(path_of(dag, run_id))
    assert "connect-src 'self'" in page.text
    path = path_of(dag, run_id, what="document")

    def shown() -> dict[str, Any]:
        document: dict[str, Any] = get(path).json()
        return document

    first = wait_until("metrics are shown", lambda: (d := shown())["metrics"] and d, 30, poll=0.2)
    assert (first["source"], first["notes"], first["phase"]) == ("live", [], "Running")
    assert first["task"] == "train"
    later = wait_until("new metrics are shown", lambda: (d := shown())["step"] > first["step"] and d, 10, poll=0.1)
    assert len(later["history"]["loss"]) >= 2
    assert later["logs"][0]["text"] == "up"
    assert [each["text"] for each in get(path, rank="node-0").json()["logs"]] == ["up"]

    hidden = get(path, "no-logs").json()
    assert hidden["notes"] == ["Log lines are not shown: they need the permission to read task logs of this DAG."]
    assert hidden["logs"] == get(path, "no-logs", rank="node-0").json()["logs"] == []
    flag.touch()
    ended = wait_until("the end is shown", lambda: (d := shown())["phase"] == "Complete" and d, 30, poll=0.2)
    assert ended["history"]["loss"]


def job_of(run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = stored(run_id, "xcom")[KEY]
    return document


def test_the_page_of_a_deleted_job_shows_what_is_stored(running: tuple[DAG, str, Path], get: Get, home: Path) -> None:
    dag, run_id, _ = running
    with TrainJobClient(LocalBackend(home=home)) as client:
        ref = client.find(job_of(run_id)["name"])
        client.call(lambda: client.backend.delete(ref))
        wait_until("the job is deleted", lambda: client.get(ref) is None, 120)
    document = document_in(get(path_of(dag, run_id)))
    assert document["source"] == "kept"
    (note,) = document["notes"]
    assert note.startswith("The job cannot be read from Airflow's API server: it was deleted, or it runs on another")
    assert document["taken"] in note


def test_a_connection_that_the_api_server_cannot_use(
    running: tuple[DAG, str, Path], get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    dag, run_id, _ = running
    extra = {"backend": "kubernetes", "kube_config_path": "/only/on/workers"}
    monkeypatch.setenv("AIRFLOW_CONN_TRAINJOB_DEFAULT", json.dumps({"conn_type": "trainjob", "extra": extra}))
    document = document_in(get(path_of(dag, run_id)))
    assert document["source"] == "kept"
    assert "see the log of the API server" in document["notes"][0]
    assert "/only/on/workers" not in json.dumps(document)


def store(run_id: str, value: Any) -> None:
    """Replace the stored document, as a person with the permission to edit XComs can; bytes are its JSON."""
    from airflow.utils.session import create_session
    from sqlalchemy import text

    stored = value.decode() if isinstance(value, bytes) else json.dumps(value)
    change = text("UPDATE xcom SET value = :value WHERE run_id = :run AND key = :key")
    with create_session() as session:
        session.execute(change, {"value": stored, "run": run_id, "key": KEY})


def test_a_changed_xcom_shows_no_job_of_another_task(
    running: tuple[DAG, str, Path], get: Get, run: Run, tmp_path: Path
) -> None:
    with DAG("page_secret") as secret:
        train(RUNNING, env={"FLAG": str(tmp_path / "flag")}, wait_for_completion=False)
    theirs = job_of(run(secret).run_id)
    dag, run_id, _ = running
    store(run_id, {**job_of(run_id), **{name: theirs[name] for name in ("namespace", "name", "uid")}})
    document = document_in(get(path_of(dag, run_id)))
    assert document["source"] == "kept"
    assert "it belongs to another task" in document["notes"][0]
    assert document["key"] != theirs["key"]


DOCUMENT = observed_document(JobRef("ns", "job", "uid"), Observation(Phase.RUNNING), datetime(2026, 11, 29, tzinfo=UTC))
UNREADABLE: list[tuple[Any, str]] = [
    *((value, "") for value in ({"kind": "training"}, {"kind": "training", "attempts": 7}, "text", 7, None, [1])),
    (b"[" * 4000 + b"]" * 4000, "is not readable: it is nested 65 lists and mappings deep"),
    (b'{"kind": "training", "kind": "study"}', "which occurs twice"),
    (DOCUMENT | {"version": 2}, "was written by a newer trainjob (format 2; this one reads 1): upgrade"),
]


@pytest.mark.parametrize(("value", "why"), UNREADABLE)
def test_a_broken_xcom_is_an_error_page(finished: tuple[DAG, str], get: Get, value: Any, why: str) -> None:
    dag, run_id = finished
    store(run_id, value)
    page = get(path_of(dag, run_id))
    assert page.status_code == 200
    assert "<h1>" in page.text
    assert why in page.text
    assert get(f"/dags/{dag.dag_id}/runs/{quote(run_id)}/page").status_code == 200


# ---------------------------------------------------------------- other runs and other tasks


def compared(loss: float, promoted: bool) -> DAG:
    """A DAG whose other tasks return what an initializer and an export return."""
    with DAG("page_compared") as dag:

        @task
        def initialize() -> dict[str, Any]:
            return {"outputs": {"uri": "s3://bucket/digits", "digest": "sha256:aa", "source": "hf://digits"}}

        @task
        def export() -> dict[str, Any]:
            outputs = {"uri": "s3://models/1", "digest": "sha256:bb", "name": "digits", "version": "1", "reason": ""}
            return {"outputs": {**outputs, "promoted": promoted}}

        code = f"from trainjob.progress import report; report(metrics={{'loss': {loss}}}, step=1)"
        initialize() >> train(code, inputs={"dataset": "s3://bucket/digits"}) >> export()
        TrainJobOperator.partial(task_id="many", runtime="trainjob-step").expand(command=[["true"]])
    return dag


def test_comparison_and_lineage(run: Run, get: Get) -> None:
    runs = [run(compared(loss, promoted)).run_id for loss, promoted in ((3, False), (2, True), (1, False), (0.5, True))]
    dag = compared(0, False)
    document = document_in(get(path_of(dag, runs[3])))
    others = {each["label"]: each for each in document["compare"]}
    assert {label: each["metrics"]["loss"] for label, each in others.items()} == {"previous run": 1, "champion": 2}
    address = others["champion"]["href"]
    assert document_in(get(address.removeprefix("/trainjob")))["metrics"]["loss"] == 2
    assert document["lineage"]["datasets"][0]["digest"] == "sha256:aa"
    registered = document["lineage"]["registered"]
    assert (registered["model"], registered["version"], registered["alias"]) == ("digits", "1", "champion")
    assert document_in(get(path_of(dag, runs[0])))["compare"] == []
    # The item of an index may be another one in each run, so the label names the index.
    mapped = document_in(get(path_of(dag, runs[1], "many", map_index="0")))
    assert [each["label"] for each in mapped["compare"]] == ["previous run, index 0"]


def test_a_custom_xcom_backend_is_called_only_if_that_is_allowed(
    finished: tuple[DAG, str], get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.providers.common.compat.sdk import XCom

    dag, run_id = finished
    document = job_of(run_id)
    store(run_id, "s3://bucket/reference")
    monkeypatch.setattr(XCom, "deserialize_value", lambda row: document if row.value.startswith("s3://") else None)
    page = get(path_of(dag, run_id))
    assert "Set [trainjob] xcom_backend_in_api_server = True" in page.text
    monkeypatch.setenv("AIRFLOW__TRAINJOB__XCOM_BACKEND_IN_API_SERVER", "True")
    assert document_in(get(path_of(dag, run_id)))["phase"] == "Complete"
