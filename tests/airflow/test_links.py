"""Links, asset events and the state that Airflow keeps of a task, after real task runs."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from airflow.sdk import DAG, Asset
from tests.airflow.conftest import Run
from tests.airflow.tasks import both, step, stored
from tests.airflow.versions import older_than
from tests.local.hanging import SLOW_RANK

from trainjob import JobRef, TrainJobClient
from trainjob._backends.local import backend as on_this_machine
from trainjob_airflow import lineage
from trainjob_airflow.links import format_urls
from trainjob_airflow.operators.trainjob import TrainJobOperator

LINKS = {
    "job_url": "https://dashboard.test/{namespace}/{name}?uid={uid}",
    "logs_url": "https://logs.test/{name}?from={started}",
    "model_url": "https://models.test/{model}/{version}",
}
REPORT = "from trainjob.progress import report; report(metrics={'loss': 0.5}, outputs={'model': 's3://b/m'})"


@pytest.fixture(autouse=True)
def connection(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"backend": "local", **LINKS}
    monkeypatch.setenv("AIRFLOW_CONN_TRAINJOB_DEFAULT", json.dumps({"conn_type": "trainjob", "extra": extra}))


@both
def test_a_task_links_to_its_job(run: Run, deferrable: bool) -> None:
    with DAG("linked") as dag:
        step("t", REPORT, deferrable=deferrable)
    ran = run(dag)
    job = ran.xcoms["t"]
    found = stored(ran.run_id, "xcom")
    assert found["_link_TrainJobLink"] == f"https://dashboard.test/default/{job['name']}?uid={job['uid']}"
    assert found["_link_TrainJobLogsLink"].startswith(f"https://logs.test/{job['name']}?from=20")
    if older_than("3.3"):
        return  # task state is not stored
    state = stored(ran.run_id, "task_state_store")
    key = f"airflow/http://airflow.test:8080/linked/{ran.run_id}/-1/t"
    assert state["trainjob"] == {name: job[name] for name in ("namespace", "name", "uid", "attempt")} | {"key": key}
    assert state["trainjob_key"] == key


@pytest.mark.parametrize("base_url", ["http://airflow.test:8080/sub/", ""], ids=["base_url", "none"])
def test_without_configuration_the_link_opens_the_xcoms(
    run: Run, monkeypatch: pytest.MonkeyPatch, base_url: str
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_TRAINJOB_DEFAULT")
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base_url)
    with DAG("unlinked") as dag:
        quiet = TrainJobOperator(task_id="quiet", runtime="trainjob-step", command=["true"], do_xcom_push=False)
        many = TrainJobOperator.partial(task_id="many", runtime="trainjob-step")
        quiet >> many.expand(command=[["true"]])
        TrainJobOperator(task_id="failed", runtime="trainjob-step", command=["false"])
    ran = run(dag)
    page = f"{base_url.rstrip('/')}/dags/unlinked/runs/{quote(ran.run_id, safe='')}/tasks"
    assert links_of(ran.run_id, "_link_TrainJobLink") == {
        "many": f"{page}/many/mapped/0/xcom",
        "failed": f"{page}/failed/xcom",
        "quiet": "",
    }
    job = {name: ran.xcoms["many[0]"][name] for name in ("namespace", "name", "uid", "attempt")}
    identities = links_of(ran.run_id, "trainjob")
    key = f"airflow/{base_url or 'airflow'}/unlinked/{ran.run_id}/0/many"
    assert identities["many"] == job | {"key": key}
    assert identities["failed"]["name"].startswith("failed-"), "also of a task that returns nothing"
    assert "quiet" not in identities


def links_of(run_id: str, key: str) -> dict[str, Any]:
    """The XComs of a run with that key, by task."""
    from airflow.utils.session import create_session
    from sqlalchemy import text

    with create_session() as session:
        query = "SELECT task_id, value FROM xcom WHERE run_id = :run AND key = :key"
        rows = session.execute(text(query), {"run": run_id, "key": key})
        return {task_id: _decoded(value) for task_id, value in rows}


def _decoded(value: str) -> Any:
    """Decode a JSON column; Airflow 3.0 stores a JSON string that contains JSON."""
    once = json.loads(value)
    return json.loads(once) if isinstance(once, str) and once[:1] in {"{", '"'} else once


def test_urls_need_a_value_for_each_placeholder() -> None:
    values = {"namespace": "ns", "name": "a b", "uid": "u"}
    assert format_urls(LINKS, values) == {"job_url": "https://dashboard.test/ns/a%20b?uid=u"}
    assert format_urls({"job_url": "{nosuch}", "logs_url": "{", "model_url": None}, values) == {}


def test_the_event_of_an_outlet_has_the_result_of_the_job(run: Run) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with DAG("outlet") as dag:
        step("t", REPORT, outlets=[Asset("s3://b/m")])
    job = run(dag).xcoms["t"]
    with create_session() as session:
        (event,) = session.scalars(select(AssetEvent).where(AssetEvent.source_dag_id == "outlet")).all()
    assert event.extra == {
        "model": "s3://b/m",
        "trainjob": f"default/{job['name']}",
        "uid": job["uid"],
        "metrics": {"loss": 0.5},
    }


def test_openlineage_gets_inputs_and_outputs(run: Run, tmp_path: Path) -> None:
    operator = TrainJobOperator(
        task_id="t", runtime="x", inputs={"dataset": "s3://bucket/data"}, outputs={"model": f"file://{tmp_path}/m"},
        initializer={"model": {"storage_uri": "hf://org/model"}},
    )  # fmt: skip
    outputs = {"report": "https://user:pw@host:1/r", "text": "x"}
    result = {"namespace": "ns", "name": "n", "uid": "u", "outputs": outputs}
    read, written = operator.data_of(result)
    assert [lineage.name_of(uri) for uri in read] == [("s3://bucket", "data"), ("hf://org", "model")]
    assert [lineage.name_of(uri) for uri in written] == [("file", f"{tmp_path}/m"), ("https://host:1", "/r")]
    facets = lineage.facets(read, written, result)
    assert [(each.namespace, each.name) for each in facets.inputs] == [("s3://bucket", "data"), ("hf://org", "model")]
    assert facets.run_facets["externalQuery"].externalQueryId == "u"
    assert "trainjob_goodput" not in facets.run_facets


@pytest.mark.parametrize("hours", [None, {"training": 1.5}])
def test_openlineage_gets_the_goodput_as_its_schema_says(hours: dict[str, float] | None) -> None:
    from openlineage.client.serde import Serde

    spent = {"ratio": 0.75, "seconds": {"queued": 25.0, "training": 75.0}, "gpu_hours": hours}
    facets = lineage.facets((), (), {"namespace": "ns", "name": "n", "uid": "u", "goodput": spent})
    sent = json.loads(Serde.to_json(facets.run_facets["trainjob_goodput"]))
    version, name = "1-0-0", "TrainJobGoodputRunFacet"
    path = Path(__file__).parents[2] / "docs" / "reference" / "openlineage" / version / f"{name}.json"
    schema = json.loads(path.read_text())
    assert sent.pop("_schemaURL") == f"{schema['$id']}#/$defs/{name}"
    assert path.as_posix().endswith(schema["$id"].removeprefix("https://trainjob.dev/"))
    assert sent.pop("_producer").startswith("https://trainjob.dev/#")
    _, own = schema["$defs"][name]["allOf"]
    jsonschema.validate(sent, own | {"additionalProperties": False})
    assert sent == {"ratio": 0.75, "seconds": spent["seconds"]} | ({"gpuHours": hours} if hours else {})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, Any]]:
    """Metric of Airflow -> its latest value and tags."""
    from airflow.providers.common.compat.sdk import Stats

    sent: dict[str, tuple[Any, Any]] = {}
    for kind in ("gauge", "timing"):
        # Airflow itself gives the value of a timing as `dt` in 3.0.
        monkeypatch.setattr(
            Stats,
            kind,
            lambda name, value=None, *, dt=None, tags=None: sent.update({name: (dt if value is None else value, tags)}),
        )
    return sent


@pytest.mark.full
def test_a_straggler_is_a_metric_with_its_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.providers.common.compat.sdk import Stats

    counted: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(Stats, "incr", lambda name, *_, tags=None, **__: counted.append((name, tags)))
    with DAG("slow") as dag:
        step("t", SLOW_RANK, num_nodes=2, stall_timeout=1.5)
    ran = run(dag)
    (slow,) = ran.xcoms["t"]["stragglers"]
    assert slow["rank"] == "node-1"
    assert slow["summary"] in ran.log
    assert ("trainjob.stragglers", {"dag_id": "slow", "task_id": "t", "node": slow["node"]}) in counted


@pytest.mark.parametrize("state", ["success", "failed"])
def test_stats_get_the_goodput(run: Run, sent: dict[str, tuple[Any, Any]], state: str) -> None:
    with DAG("counts") as dag:
        step("t", f"import time; time.sleep(0.5); assert {state == 'success'}")
    ran = run(dag)
    assert ran.state == state
    ratio, tags = sent["trainjob.goodput"]
    assert (0 < ratio <= 1, tags) == (True, {"dag_id": "counts", "task_id": "t"})
    spent = {name: value for name, (value, _) in sent.items() if name.startswith("trainjob.activity.")}
    assert spent["trainjob.activity.training"] > timedelta(0)
    if state == "success":
        seconds = ran.xcoms["t"]["goodput"]["seconds"]
        assert spent == {f"trainjob.activity.{name}": timedelta(seconds=each) for name, each in seconds.items() if each}


SLEEP = "import time; time.sleep(60)"
HANG = f"from trainjob import progress; progress.step(); progress.step(); {SLEEP}"


@pytest.fixture
def full_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended job of a queue stays there: the local backend does not know it as one that it starts at once."""
    monkeypatch.setattr(on_this_machine, "QUEUE_LABEL", "")


QUEUED: dict[str, Any] = {"suspend": True, "labels": {"kueue.x-k8s.io/queue-name": "q"}}
ENDED_EARLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "queue_timeout": (SLEEP, {**QUEUED, "queue_timeout": 1}, "queued"),
    "execution_timeout": (SLEEP, {"execution_timeout": timedelta(seconds=4)}, "training"),
    "hang": (HANG, {"stall_timeout": 1, "on_crash_action": "cancel"}, "stalled"),
}


@both
@pytest.mark.usefixtures("full_queues")
@pytest.mark.parametrize("way", ENDED_EARLY)
def test_a_task_that_ends_its_job_publishes_the_goodput(
    run: Run, sent: dict[str, tuple[Any, Any]], way: str, deferrable: bool
) -> None:
    code, arguments, activity = ENDED_EARLY[way]
    found: list[dict[str, Any]] = []

    def failed(context: Any) -> None:
        task = context["ti"].task
        found.append(task.get_openlineage_facets_on_failure(context["ti"]).run_facets)

    with DAG("early") as dag:
        step("t", code, deferrable=deferrable, on_failure_callback=failed, **arguments)
    ran = run(dag)
    assert ran.states == {"t": "failed"}, ran.log
    spent = {name: value for name, (value, _) in sent.items() if name.startswith("trainjob.activity.")}
    assert spent[f"trainjob.activity.{activity}"] > timedelta(seconds=0.5)
    assert f"goodput {100 * sent['trainjob.goodput'][0]:.1f}%: " in ran.log
    (facets,) = found
    assert facets["trainjob_goodput"].ratio == sent["trainjob.goodput"][0]
    assert facets["externalQuery"].externalQueryId


@pytest.mark.usefixtures("full_queues")
def test_a_job_that_keeps_running_is_counted_by_the_try_that_ends_it(
    run: Run, sent: dict[str, tuple[Any, Any]]
) -> None:
    with DAG("kept") as dag:
        step("t", SLEEP, queue_timeout=0.5, cancel_on_timeout=False, **QUEUED)
    ran = run(dag)
    assert ran.states == {"t": "failed"}
    assert not [name for name in sent if name.startswith("trainjob.activity.")]
    with TrainJobClient() as client:
        (job,) = client.list()
        client.cancel(JobRef.of(job))
