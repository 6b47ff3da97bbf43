"""Keys of tasks, and labels of their jobs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow.sdk import DAG
from hypothesis import given, strategies as st
from tests.airflow.conftest import Run, python

from trainjob import TrainJobClient
from trainjob._manifest.unattended import Policy, policy_of
from trainjob._spec.checks import metadata_problems
from trainjob_airflow.identity import key_of, labels_of_task
from trainjob_airflow.operators.trainjob import TrainJobOperator


def context(loop: Any = None, **fields: Any) -> Any:
    values = {"dag_id": "d", "task_id": "group.train", "run_id": "r", "map_index": -1, "try_number": 1} | fields
    return {"ti": SimpleNamespace(**values)} | ({"loop": loop} if loop else {})


@given(st.text(min_size=1, max_size=250), st.text(min_size=1, max_size=250), st.integers(-1, 10_000))
def test_labels_are_valid(name: str, run_id: str, map_index: int) -> None:
    labels = labels_of_task(context(dag_id=name, task_id=name, run_id=run_id, map_index=map_index))
    assert [*metadata_problems(labels, {})] == []
    assert (labels["try_number"], labels.get("map_index", "-1")) == ("1", str(map_index))


def test_labels_equal_those_of_the_pod_operator() -> None:
    """Values that `make_safe_label_value` of apache-airflow-providers-cncf-kubernetes 10.25.0 returns."""
    labels = labels_of_task(context(run_id="manual__2026-11-21T10:00:00+00:00", dag_id="d" * 100, task_id="-_x_-"))
    assert labels == {
        "dag_id": f"{'d' * 53}-9e2f63268",
        "task_id": "x-31e4fb5c8",
        "run_id": "manual__2026-11-21T1000000000-fc749c55d",
        "try_number": "1",
    }


def test_labels_identify_task_and_try(run: Run, home: Path, tmp_path: Path) -> None:
    """The first try fails, so the second one launches another job."""
    flag = str(tmp_path / "second")
    code = f"import os, sys; there = os.path.exists({flag!r}); open({flag!r}, 'w'); sys.exit(0 if there else 3)"
    with DAG("labelled") as dag:
        TrainJobOperator.partial(
            task_id="train",
            runtime="trainjob-step",
            labels={"team": "vision"},
            unattended_after="{{ 'PT30M' }}",
            retries=1,
            retry_delay=timedelta(0),
        ).expand(command=[python(code)])
    ran = run(dag)
    assert ran.state == "success", ran.log[-3000:]
    with TrainJobClient("local") as client:
        assert {policy_of(job) for job in client.list()} == {Policy("suspend", timedelta(minutes=30))}
        found = sorted((job["metadata"]["labels"] for job in client.list()), key=lambda labels: labels["try_number"])
    for number, labels in enumerate(found, 1):
        own = {"dag_id": "labelled", "task_id": "train", "map_index": "0", "try_number": str(number)}
        assert (own | {"team": "vision"}).items() <= labels.items()
        assert labels["run_id"].startswith("manual__")
    assert len(found) == 2


def test_each_iteration_of_a_loop_has_its_own_key() -> None:
    """With the context of Airflow 3.4, which cannot be installed here yet."""
    loops = [SimpleNamespace(region_id="a", index=0), SimpleNamespace(region_id="a", index=1)]
    loops.append(SimpleNamespace(region_id="b", index=0))
    keys = {key_of(context(loop)) for loop in loops}
    assert len(keys) == 3
    assert {key.rpartition("/")[2] for key in keys} == {"group.train"}
    assert key_of(context(loops[0])) == key_of(context(loops[0], try_number=2))
    store = SimpleNamespace(get=lambda _: "the key of the first iteration", set=lambda *_: None)
    assert key_of(context(loops[1]) | {"task_state_store": store}) in keys
    assert key_of(context()) not in keys
