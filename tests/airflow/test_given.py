"""Values that only a run knows: of tasks, parameters and templates, in fields that are text, lists and mappings."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest
from airflow.sdk import DAG, Param, task, task_group
from tests.airflow.conftest import Run

from trainjob_airflow.operators.cancel import TrainJobCancelOperator
from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sample import rendered
from trainjob_airflow.sensors.trainjob import TrainJobSensor


class Shown(TrainJobOperator):
    """Returns its spec instead of launching a job."""

    def execute(self, context: Any) -> Any:
        return self.job_spec("key", context).model_dump(mode="json", exclude_unset=True)


def shown(**fields: Any) -> Shown:
    return Shown(**{"task_id": "shown", "runtime": "trainjob-step", "command": ["x"], **fields})


DAY = datetime(2026, 3, 1, tzinfo=UTC)
GIVEN: dict[str, Any] = {"n": 3, "flag": True, "f": 0.1, "whole": 2.0, "day": DAY, "big": 2**60, "text": "1.10"}
TEXTS = ["3", "true", "0.1", "2", "2026-03-01T00:00:00+00:00", str(2**60), "1.10"]


@task(multiple_outputs=True)
def values() -> dict[str, Any]:
    return GIVEN


@task
def nothing() -> None:
    return None


@task
def count() -> int:
    return 3


def test_values_of_tasks_become_text_where_text_is_due(run: Run) -> None:
    with DAG("given_by_tasks") as dag:
        made: Any = values()
        given = [made[name] for name in GIVEN]
        patch = {"trainingRuntimeSpec": {"template": {"metadata": {"labels": {"n": made["n"]}}}}}
        shown(
            command=["x", *given],
            env={"A": made["n"], "B": {"valueFrom": {"secretKeyRef": {"name": made["n"], "key": "k"}}}},
            labels={"n": made["n"]},
            annotations={"n": made["flag"]},
            image=made["whole"],
            num_nodes=made["n"],
            runtime_patches=[patch],
        )
    spec = run(dag).xcoms["shown"]
    assert spec["command"] == ["x", *TEXTS]
    assert (spec["env"]["A"], spec["env"]["B"]["secretKeyRef"]["name"]) == ("3", "3")
    assert (spec["labels"], spec["annotations"], spec["image"]) == ({"n": "3"}, {"n": "true"}, "2")
    assert spec["num_nodes"] == 3
    assert spec["runtime_patches"][0]["trainingRuntimeSpec"]["template"]["metadata"]["labels"] == {"n": "3"}


PARAMS: dict[str, Any] = {"n": 3, "flag": True, "none": None, "text": "1.10", "env": {"A": 1}, "words": ["x", 2]}


def test_parameters_become_text_where_text_is_due(run: Run) -> None:
    with DAG("given_by_parameters", params={"epochs": Param(2, type="integer")}) as dag:
        env = {"A": dag.param("epochs"), "B": dag.param("rate", 0.5), "C": dag.param("none", None)}
        shown(env=env, args=["--epochs", dag.param("epochs")])
    spec = run(dag).xcoms["shown"]
    assert (spec["args"], spec["env"]) == (["--epochs", "2"], {"A": "2", "B": "0.5", "C": ""})


def test_native_templates_become_text_where_text_is_due(run: Run) -> None:
    """Airflow reads the text 1.10 of a native template as the number 1.1."""
    env = {name: f"{{{{ params.{name} }}}}" for name in ("n", "flag", "none", "text")}
    with DAG("given_natively", params=PARAMS, render_template_as_native_obj=True) as dag:
        shown(
            env=env | {"PART": "-{{ params.flag }}", "DAY": "{{ macros.datetime(2026, 3, 1).date() }}"},
            command="{{ params.words }}",
            image="{{ params.none }}",
            labels="{{ {'day': '20260301'} }}",
            num_nodes="{{ params.n }}",
            resources_per_node={"cpu": "{{ params.n }}"},
        )
    spec = run(dag).xcoms["shown"]
    assert spec["env"] == {"n": "3", "flag": "true", "none": "", "text": "1.10", "PART": "-true", "DAY": "2026-03-01"}
    assert (spec["command"], spec["labels"], spec["num_nodes"]) == (["x", "2"], {"day": "20260301"}, 3)
    assert "image" not in spec


@pytest.mark.parametrize("template", ["{{ params.%s }}", "{{ params.%s | tojson }}"])
@pytest.mark.parametrize("native", [False, True])
def test_one_template_is_read_as_a_mapping_or_a_list(run: Run, template: str, native: bool) -> None:
    params = {"env": {"A": "ü'\"\n", "B": True, "C": 3}, "words": ["x", 2], "gpu": {"gpu": 1}, "none": []}
    with DAG(f"given_as_text_{native}", params=params, render_template_as_native_obj=native) as dag:
        fields = {"env": "env", "command": "words", "resources_per_node": "gpu", "runtime_patches": "none"}
        shown(**{field: template % name for field, name in fields.items()})
    spec = run(dag).xcoms["shown"]
    assert spec["env"] == {"A": "ü'\"\n", "B": "true", "C": "3"}
    assert (spec["command"], spec["runtime_patches"]) == (["x", "2"], [])
    assert spec["resources_per_node"]["limits"] == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize("native", [False, True])
def test_nothing_in_place_of_a_mapping_leaves_the_field_out(run: Run, native: bool) -> None:
    written = {"pod": "{{ params.none }}", "env": "{{ params.none or '' }}", "labels": "{{ params.none }}"}
    written |= {"annotations": "{{ params.empty }}", "resources_per_node": "{{ params.none or '' }}"}
    params = {"none": None, "empty": " "}
    with DAG(f"given_nothing_{native}", params=params, render_template_as_native_obj=native) as dag:
        shown(**written)
    assert written.keys().isdisjoint(run(dag).xcoms["shown"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "word": (
        {"command": "{{ params.text }}"},
        "command: the template {{ params.text }} gives 'python x.py', which is not",
    ),
    "list as env": ({"resources_per_node": "{{ params.words }}"}, "which is not a mapping; give JSON"),
    "mapping as words": ({"args": "{{ params.env }}"}, "which is not a list; give JSON"),
}


@pytest.mark.parametrize("use", WRONG)
def test_a_text_that_is_no_mapping_or_list_is_refused(run: Run, use: str) -> None:
    fields, words = WRONG[use]
    with DAG("given_wrong", params={"text": "python x.py", "words": ["x"], "env": {"A": 1}}) as dag:
        shown(**fields)
    assert words in str(run(dag).errors["shown"])


@pytest.mark.parametrize(
    ("field", "where"),
    [("env", "env.A"), ("command", "command[0]"), ("image", "image"), ("num_nodes", "num_nodes"), ("args", "args")],
)
def test_a_task_that_returned_nothing_is_named(run: Run, field: str, where: str) -> None:
    with DAG("given_nothing") as dag:
        made = nothing()
        shown(**{field: {"env": {"A": made}, "command": [made]}.get(field, made)})
    assert f"{where}: task nothing returned nothing (None)" in str(run(dag).errors["shown"])


@pytest.mark.parametrize("native", [False, True])
def test_a_template_of_a_task_that_returned_nothing_is_named(run: Run, native: bool) -> None:
    template = "{{ ti.xcom_pull('nothing') }}"
    with DAG("given_nothing_by_template", render_template_as_native_obj=native) as dag:
        nothing() >> shown(args=["--rows", template])
    assert f"args[1]: the task of {template} returned nothing (None)" in str(run(dag).errors["shown"])


@task
def elements() -> list[dict[str, Any]]:
    return [{"env": {"A": 1}, "args": [2.5, True]}, {"env": {"A": 3}, "args": ["1.10"]}]


@task
def envs() -> list[dict[str, Any]]:
    return [{"A": 1}, {"A": None}]


@pytest.mark.full
def test_mapped_tasks_take_values_of_other_tasks(run: Run) -> None:
    partial = {"runtime": "trainjob-step", "command": ["x"]}
    with DAG("given_mapped") as dag:
        Shown.partial(task_id="kwargs", **partial).expand_kwargs(cast("Any", elements()))
        Shown.partial(task_id="fields", **partial).expand(env=envs())
        Shown.partial(task_id="literal", **partial).expand(env=[{"A": 3}])
        numbers = count.partial().expand_kwargs([{}, {}])
        shown(task_id="lazy", args=numbers)

        @task_group
        def group(number: int) -> None:
            shown(task_id="inside", args=["-n", number], env={"N": number})

        group.expand(number=[1, 2])
    ran = run(dag)
    assert [ran.xcoms[f"kwargs[{i}]"]["env"] for i in (0, 1)] == [{"A": "1"}, {"A": "3"}]
    assert [ran.xcoms[f"kwargs[{i}]"]["args"] for i in (0, 1)] == [["2.5", "true"], ["1.10"]]
    assert (ran.xcoms["fields[0]"]["env"], ran.xcoms["fields[1]"]["env"]) == ({"A": "1"}, {"A": ""})
    assert ran.xcoms["lazy"]["args"] == ["3", "3"]
    assert (ran.xcoms["group.inside[1]"]["args"], ran.xcoms["group.inside[1]"]["env"]) == (["-n", "2"], {"N": "2"})
    assert "write '3'" in str(ran.errors["literal"]), "the author can write it"


def test_texts_of_other_operators_stay_as_they_are_written(airflow_home: object) -> None:
    params = {"version": "1.10", "n": 5, "job": "1e5", "metrics": {"f1": 0.5}, "none": None}
    with DAG("given_elsewhere", params=params, render_template_as_native_obj=True):
        export = ModelExportOperator(
            task_id="export", source="s3://b/{{ params.version }}", target="s3://m", name="{{ params.n }}",
            alias="{{ params.none }}", metrics="{{ params.metrics }}", min_improvement="{{ params.n }}",
        )  # fmt: skip
        sensor = TrainJobSensor(task_id="sensor", job="{{ params.job }}", namespace="{{ params.n }}")
        cancel = TrainJobCancelOperator(task_id="cancel", launched_by="{{ ['export', 'sensor'] }}")
    made = rendered(export)
    assert (made.source, made.name, made.alias, made.min_improvement) == ("s3://b/1.10", "5", None, 5)
    assert made.metrics == {"f1": 0.5}
    assert (rendered(sensor).job, rendered(sensor).namespace) == ("1e5", "5")
    assert rendered(cancel).launched_by == ["export", "sensor"]
