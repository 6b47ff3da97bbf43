"""`trainjob check` and `dry_run`: tasks as a run would see them, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from airflow.sdk import DAG, Param, task
from click.testing import CliRunner
from tests.airflow.conftest import jobs
from tests.airflow.versions import older_than

from trainjob.cli.program import program
from trainjob.errors import ConfigurationError
from trainjob_airflow.check import check_dags
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.operators.data import DatasetInitializerOperator, ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "airflow"

DAGS = """
from airflow.sdk import DAG, Param
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

with DAG("d", params={"nodes": Param(%s), "free": Param(type="integer")}):
    one = TrainJobOperator(task_id="one", runtime="x", num_nodes="{{ params.nodes }}", env={"DAY": "{{ ds }}"})
    TrainJobOperator(task_id="two", runtime="x", num_nodes="{{ params.free }}", args=["{{ %s }}"])
    TrainJobOperator(task_id="file", spec="train.yaml")
    TrainJobOperator.partial(task_id="many", runtime="x").expand(num_nodes=[1, 2, %s])
    TrainJobOperator.partial(task_id="later", runtime="x").expand(args=one.output)
    TrainJobSensor(task_id="sensor", job="train-{{ ds_nodash }}", phases="{{ params.get('phase', '%s') }}")
"""


def folder(tmp_path: Path, nodes: str, name: str, mapped: str, phase: str, label: str) -> Path:
    (tmp_path / "d.py").write_text(DAGS % (nodes, name, mapped, phase))
    spec = f"runtime: x\nlabels: {{team: {label}}}\nnum_nodes: {{{{ ti.xcom_pull('n') }}}}\n"
    (tmp_path / "train.yaml").write_text(spec)
    return tmp_path


def test_the_examples_pass(airflow_home: Path, home: Path) -> None:
    found = [*check_dags(EXAMPLES)]
    later = {EXAMPLES / "train_until_good.py"} if older_than("3.4") else set()
    assert {Path(each.where) for each in found if each.problem} == later
    assert len(found) > 15
    assert jobs(home) == []


def test_valid_tasks(airflow_home: Path, tmp_path: Path) -> None:
    found = {each.where: each for each in check_dags(folder(tmp_path, "2", "run_id", "3", "Running", "vision"))}
    assert {each.problem for each in found.values()} == {""}
    opened = {where.removeprefix("d."): each.open for where, each in found.items()}
    known = dict.fromkeys(("one", "many[0]", "many[1]", "many[2]", "sensor"), ())
    assert opened == {**known, "two": ("num_nodes",), "file": ("num_nodes",), "later[0]": ("args",)}


def test_a_folder_that_airflow_cannot_search(airflow_home: Path, tmp_path: Path) -> None:
    """A virtual environment beside the DAGs contains such a symbolic link."""
    where = folder(tmp_path, "2", "run_id", "3", "Running", "vision")
    (where / "venv" / "lib").mkdir(parents=True)
    (where / "venv" / "lib64").symlink_to("lib")
    with pytest.raises(ConfigurationError, match=r"has appeared more than once.*/\.airflowignore"):
        list(check_dags(where))
    (where / ".airflowignore").write_text("venv\n")
    assert not [each for each in check_dags(where) if each.problem]


def test_invalid_tasks(airflow_home: Path, tmp_path: Path) -> None:
    found = {each.where: each for each in check_dags(folder(tmp_path, '"many"', "nosuch", "0", "Done", "a b"))}
    problems = {where.removeprefix("d."): each.problem for where, each in found.items() if each.problem}
    assert problems.keys() == {"one", "two", "file", "many[2]", "sensor"}
    assert "num_nodes: must be a whole number" in problems["one"]
    assert "'nosuch' is undefined" in problems["two"]
    assert "labels.team" in problems["file"]
    assert "num_nodes" in problems["many[2]"]
    assert "phases: 'Done' is not a phase" in problems["sensor"]


def test_what_a_cancel_stops(airflow_home: Path, tmp_path: Path) -> None:
    (tmp_path / "d.py").write_text(
        "from airflow.sdk import DAG\n"
        "from trainjob_airflow.operators.cancel import TrainJobCancelOperator as Cancel\n"
        "from trainjob_airflow.operators.trainjob import TrainJobOperator\n"
        "with DAG('d'):\n"
        "    TrainJobOperator(task_id='train', runtime='x')\n"
        "    Cancel(task_id='right', launched_by='train')\n"
        "    Cancel(task_id='open', launched_by='{{ var.value.x }}')\n"
        "    Cancel(task_id='wrong', launched_by='right')\n"
    )
    found = {each.where: each for each in check_dags(tmp_path)}
    assert {where for where, each in found.items() if each.problem} == {"d.wrong"}
    assert "has no task 'right' that launches a TrainJob" in found["d.wrong"].problem
    assert (found["d.open"].open, found["d.right"].open) == (("launched_by",), ())


def test_a_dag_file_that_cannot_be_imported(airflow_home: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from airflow.sdk import DAG\nfrom trainjob_airflow.operators.trainjob import TrainJobOperator\n"
        "with DAG('d'):\n    TrainJobOperator(task_id='t', runtime='x', num_nodes='two', command='x')\n"
    )
    (found,) = check_dags(tmp_path)
    assert found.where.endswith("broken.py")
    assert "num_nodes: must be a whole number" in found.problem
    assert "command" in found.problem
    assert "Traceback" not in found.problem


def test_the_command(airflow_home: Path, tmp_path: Path) -> None:
    dags = folder(tmp_path, "2", "run_id", "3", "Running", "v")
    right = CliRunner().invoke(program, ["check", str(dags)], standalone_mode=False)
    assert (right.return_value, right.output.count("ok ")) == (0, 8), right.output
    assert "d.two (known only at run time: num_nodes)" in right.output
    wrong = folder(tmp_path, '"many"', "nosuch", "0", "Done", "a b")
    shown = CliRunner().invoke(program, ["check", str(wrong)], standalone_mode=False)
    assert (shown.return_value, shown.output.count("failure  d.")) == (2, 5), shown.output
    as_json = CliRunner().invoke(program, ["check", "--json", str(wrong)], standalone_mode=False)
    assert as_json.return_value == 2
    lines = [json.loads(line) for line in as_json.output.splitlines() if line.startswith("{")]
    assert (len(lines), len([line for line in lines if line["problem"]])) == (8, 5)


def printed(task: Any, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    task.dry_run()
    text = capsys.readouterr().out
    first = text.splitlines()[0] if text.startswith("#") else ""
    return first, yaml.safe_load(text)


def test_dry_run_works_before_there_is_a_run(
    airflow_home: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DAG("dry", params={"nodes": Param(3, type="integer"), "gpus": Param(type="integer")}):
        dataset = DatasetInitializerOperator(task_id="d", source="s3://b/{{ ds_nodash }}", target="file:///w")
        one = TrainJobOperator(
            task_id="one",
            runtime="torch-distributed",
            command=["python", "train.py", "--day={{ ds }}"],
            num_nodes="{{ params.nodes }}",
            resources_per_node={"cpu": 2, "gpu": "{{ params.gpus }}"},
            env={"KEY": "{{ var.value.key }}", "RUN": "{{ run_id }}"},
            inputs={"data": "{{ ti.xcom_pull('d')['outputs']['uri'] }}"},
        )
        export = ModelExportOperator(
            task_id="e", source="/m", target="s3://m", name="m", metrics=one.output, datasets=[dataset.output],
            alias="champion", metric="accuracy", min_improvement="{{ dag_run.conf.get('gain', 0.1) }}",
        )  # fmt: skip

        @task.trainjob(runtime="jax-distributed")
        def fit(day: str, rate: float) -> None:
            print(day, rate)

        made: Any = fit("{{ ds }}", cast("Any", one.output)["metrics"])

    note, manifest = printed(one, capsys)
    assert note == "# known only at run time: resources_per_node.gpu, env.KEY, inputs.data"
    trainer = manifest["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["resourcesPerNode"]["requests"]) == (3, {"cpu": "2"})
    assert trainer["env"][0]["value"].startswith("manual__")
    assert trainer["command"][2].startswith("--day=20")
    assert one.num_nodes == "{{ params.nodes }}", "the task itself is unchanged"
    note, manifest = printed(export, capsys)
    assert note.startswith("# known only at run time: ")
    assert {"metrics", "min_improvement"} <= set(note.removeprefix("# known only at run time: ").split(", "))
    assert "--name=m" in manifest["spec"]["trainer"]["command"]
    note, manifest = printed(dataset, capsys)
    assert note == ""
    assert any(word.startswith("--source=s3://b/20") for word in manifest["spec"]["trainer"]["command"])
    note, manifest = printed(made.operator, capsys)
    assert "print(day, rate)" in manifest["spec"]["trainer"]["args"][0]
    assert jobs(home) == []


def test_templates_can_use_samples_like_values(airflow_home: Path) -> None:
    with DAG("samples"):
        one = TrainJobOperator(
            task_id="one",
            runtime="x",
            num_nodes="{{ ti.xcom_pull('a')['n'] | int * 2 }}",
            args=[
                "{% for each in ti.xcom_pull('a') %}{{ each.name }}{% endfor %}",
                "{{ (var.value.x ~ '-y') | upper }}",
                "{% if dag_run.conf.fast > 3 %}--fast{% endif %}",
                "{{ macros.ds_add(ds, 7) }}",
                "{{ 10 - conn.c.port }}",
                "{{ triggering_asset_events | length }}",
                "{{ data_interval_start.to_date_string() }}",
                "{{ logical_date.in_timezone('Europe/Berlin').format('YYYY-MM-DD') }}",
                "{{ dag_run.logical_date.subtract(days=1) | ds }}",
                "{{ prev_data_interval_start_success.to_date_string() }}",
                "{{ dag_run.conf | tojson }}",
                "{{ macros.json.dumps({'a': ti.xcom_pull('a')}) }}",
                "{{ var.json.x.rate | round(2) }}",
                "{{ 'n=%s' | format(ti.xcom_pull('a')) }}",
                "{{ ti.xcom_pull('a').split('/')[-1] | upper }}",
                "{{ ti.xcom_pull('a') | urlencode }}",
                "{{ macros.json.loads(ti.xcom_pull('a')).rate }}",
                "{{ macros.json.loads(ti.xcom_pull('a') ~ '') }}",
                "{{ 'x' if ti.xcom_pull('a').startswith('s3://') and var.value.x.endswith('/') else 'y' }}",
            ],
        )
        wrong = TrainJobOperator(task_id="wrong", runtime="x", args=["{{ paramz.x }}"])
        sensor = TrainJobSensor(task_id="s", job="{{ ti.xcom_pull('a') }}", phases=["Running"])
    spec, unknown = one.sample_spec()
    assert spec is not None
    assert {f"args[{number}]" for number in range(9, 18)} <= {*unknown}
    assert sensor.sample_spec() == (None, ["job"])
    with pytest.raises(TrainJobFatal, match="'paramz' is undefined"):
        wrong.sample_spec()
