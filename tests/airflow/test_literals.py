"""Literals are checked when a DAG file is parsed, templates after they are rendered.

tests/unit tests the rules: here is at least one row for each check of each operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from functools import wraps
from typing import Any, cast

import pytest
from airflow.sdk import DAG, Param, task

from trainjob import TrainJobSpec
from trainjob._manifest.render import render
from trainjob.errors import TrainJobError
from trainjob_airflow.operators.cancel import TrainJobCancelOperator
from trainjob_airflow.operators.data import DatasetInitializerOperator, ModelExportOperator, ModelInitializerOperator
from trainjob_airflow.operators.evaluation import ModelEvaluationOperator, ModelGateOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.operators.tuning import TrainJobTuningOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

TOKEN = "ghp_" + "a1B2" * 9
OUTSIDE = 3
SCORED: dict[str, Any] = {
    "namespace": "ns", "name": "evaluate-1", "uid": "u", "attempt": 1, "seconds": {}, "metrics": {"accuracy": 0.9},
    "outputs": {
        "uri": "file:///e", "digest": "sha256:ee", "candidate": "sha256:cc", "champion": "1", "passed": True,
        "rule": "metrics.accuracy.min", "reason": "",
    },
}  # fmt: skip
STUDY: dict[str, Any] = {
    "space": {"x": {"type": "float", "low": 1, "high": 3}}, "metric": "loss", "direction": "minimize", "max_trials": 3,
}  # fmt: skip


def score(model: str, dataset: str) -> dict[str, Any]:
    return {"metrics": {"accuracy": 1.0}}


def closure(model: str, dataset: str) -> dict[str, Any]:
    return {"metrics": {"accuracy": OUTSIDE}}


def one(model: str) -> dict[str, Any]:
    return {}


Make = Callable[..., object]


def with_defaults(operator: Make, **defaults: Any) -> Make:
    return lambda **fields: operator(**{"task_id": "t", **defaults, **fields})


whole = with_defaults(TrainJobOperator)
train = with_defaults(TrainJobOperator, runtime="torch-distributed")
dataset = with_defaults(DatasetInitializerOperator, source="s3://b/d", target="file:///w")
model = with_defaults(ModelInitializerOperator, source="models:/m@a", target="file:///w")
export = with_defaults(ModelExportOperator, source="file:///m", target="s3://models", name="m")
evaluate = with_defaults(
    ModelEvaluationOperator, candidate="file:///m", dataset="file:///d", target="file:///e", function=score
)
gate = with_defaults(ModelGateOperator, evaluation=SCORED)
tune = with_defaults(TrainJobTuningOperator, study=STUDY, runtime="trainjob-step", command=["train"])
sensor = with_defaults(TrainJobSensor)
cancel = with_defaults(TrainJobCancelOperator, launched_by="x")


def function_with(value: object) -> object:
    @task.trainjob(runtime="jax-distributed")
    def take(when: Any) -> None:
        print(when)

    return take(value)


def function_of(**fields: Any) -> object:
    @task.trainjob(runtime="jax-distributed", **fields)
    def fit() -> None:
        print(OUTSIDE)

    return fit()


def logged(function: Callable[[], None]) -> Callable[[], None]:
    @wraps(function)
    def run() -> None:
        function()

    return run


def wrapped_function() -> object:
    @task.trainjob(runtime="jax-distributed")
    @logged
    def fit() -> None:
        pass

    return fit()


def nested(depth: int = 20_000) -> dict[str, Any]:
    """Mappings inside each other, deeper than Python's own limit of recursion."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


NO_RULE = "metric and min_improvement cannot be combined with"
WRONG: dict[str, tuple[Make, dict[str, Any], str]] = {
    # fields of a spec
    "deep affinity": (train, {"pod": {"affinity": nested()}}, "is nested 65 lists and mappings deep"),
    "no runtime": (whole, {"command": ["x"]}, "runtime: is missing"),
    "mount": (
        train,
        {"pod": {"containers": [{"volumeMounts": [{"name": "d"}]}]}},
        r"  - pod.containers\[0\].volumeMounts\[0\].mountPath: is missing",
    ),
    "volume": (
        train,
        {"pod": {"volumes": [{"name": "d", "emptyDir": {}, "secret": {"secretName": "s"}}]}},
        r"pod.volumes\[0\]: has emptyDir and secret",
    ),
    "token in args": (train, {"args": [f"--token={TOKEN}"]}, "secret"),
    # complete specs
    "large YAML": (whole, {"spec": "runtime: x\n#" + "x" * 2**20}, "at most 1,048,576"),
    "no YAML": (whole, {"spec": "runtime: [x"}, "not valid YAML"),
    "spec object": (whole, {"spec": TrainJobSpec(num_nodes=2)}, "runtime: is missing"),
    "spec and fields": (whole, {"runtime": "x", "spec": {"runtime": "y"}}, "spec cannot be combined with runtime"),
    "pods beside a spec": (whole, {"spec": "runtime: x", "pod": {}}, "spec cannot be"),
    # functions
    "closure": (function_of, {}, r"uses OUTSIDE \(line \d+\) from outside itself"),
    "decorator of a function": (wrapped_function, {}, r"fit\(\) is wrapped by @logged \(line \d+\)"),
    "command of a function": (function_of, {"command": ["x"]}, "remove command"),
    "argument that is no JSON": (function_with, {"value": date(2026, 1, 1)}, "cannot be written as JSON"),
    # what becomes of a job
    "kill action": (train, {"on_kill_action": "delete"}, "on_kill_action"),
    "crash action": (train, {"on_crash_action": "retry"}, "on_crash_action must be 'suspend', 'cancel' or 'keep'"),
    "queue timeout": (train, {"queue_timeout": 0}, "queue_timeout"),
    "switch": (train, {"fail_fast": "no"}, "fail_fast must be True or False, not 'no'"),
    "deferrable": (train, {"deferrable": "false"}, "deferrable must be True or False"),
    "connection": (train, {"trainjob_conn_id": None}, "trainjob_conn_id must be a string, not None"),
    "namespace": (train, {"namespace": "My_NS"}, "'My_NS' is not a namespace"),
    "exit code 0": (train, {"skip_on_exit_code": [0]}, "skip_on_exit_code must be 1 to 255"),
    "exit code 256": (train, {"skip_on_exit_code": 256}, "skip_on_exit_code must be 1 to 255"),
    "exit code as text": (train, {"skip_on_exit_code": ["4"]}, "skip_on_exit_code must be 1 to 255"),
    # sensors and cancels
    "sensor of nothing": (sensor, {}, "set exactly one of job and labels"),
    "sensor of two": (sensor, {"job": "x", "labels": {"a": "b"}}, "set exactly one of job and labels"),
    "sensor's name": (sensor, {"job": "Bad Name"}, "'Bad Name' is not the name of a TrainJob"),
    "sensor's label": (sensor, {"labels": {"a": "b c"}}, "labels.a: 'b c' is not a label value"),
    "sensor of no phase": (sensor, {"job": "x", "phases": []}, "phases must be one of"),
    "phase": (sensor, {"job": "x", "phases": "Succeeded"}, "phases: 'Succeeded' is not a phase"),
    "sensor's namespace": (sensor, {"job": "x", "namespace": "A B"}, "'A B' is not a namespace"),
    "sensor's switch": (sensor, {"job": "x", "deferrable": "no"}, "deferrable must be True or False"),
    "cancel of nothing": (cancel, {"launched_by": ""}, "launched_by must be a task ID"),
    "cancel of operators": (cancel, {"launched_by": [object()]}, "launched_by must be a task ID"),
    "cancel's action": (cancel, {"action": "stop"}, "action must be 'cancel' or 'suspend', not 'stop'"),
    "cancel's timeout": (cancel, {"stop_timeout": 0}, "stop_timeout"),
    "cancel's namespace": (cancel, {"namespace": "A_B"}, "'A_B' is not a namespace"),
    # steps around training
    "empty source": (dataset, {"source": ""}, "source must not be empty"),
    "digest": (dataset, {"digest": "md5:abc"}, "is not a digest"),
    "fresh dataset": (model, {"source": "s3://b/m", "if_missing": "fresh"}, "is for registered models"),
    "model without name": (export, {"name": ""}, "name must not be empty"),
    "export's arguments": (export, {"args": ["x"]}, "remove args"),
    "export's switch": (export, {"allow_pickle": "no"}, "allow_pickle must be True or False"),
    "export's metrics": (export, {"metrics": ["accuracy"]}, "metrics must be a mapping"),
    "export's base": (export, {"base_model": "s3://b/m"}, "datasets and base_model must be XComs of initializers"),
    "metric as text": (
        export,
        {"metrics": {"f1": "high"}, "metric": "f1", "alias": "c"},
        r"metrics\['f1'\] must be a number, not 'high'",
    ),
    "registry": (export, {"registry": "postgresql://db"}, "is not a supported scheme of a registry"),
    "metric without metrics": (export, {"alias": "champion", "metric": "accuracy"}, "the metrics given are: none"),
    "mode": (export, {"mode": "best"}, "mode must be 'max' or 'min'"),
    "export metric": (export, {"evaluation": SCORED, "metric": "accuracy"}, NO_RULE),
    "export XCom": (export, {"evaluation": {"outputs": {}}}, "evaluation must be the XCom of a Model"),
    # evaluations and gates
    "no command": (evaluate, {"function": None}, "set exactly one of command and function"),
    "both": (evaluate, {"command": ["x"]}, "set exactly one of command and function"),
    "command as text": (evaluate, {"function": None, "command": "python x.py"}, "command must be a list of words"),
    "lambda": (evaluate, {"function": lambda model, dataset: {}}, "function must be a function defined with def"),
    "outside": (
        evaluate,
        {"function": closure},
        r"closure\(\) uses OUTSIDE \(line \d+\) from outside itself, which does not exist",
    ),
    "parameters": (evaluate, {"function": one}, r"one\(\) must accept two paths, model and dataset"),
    "gate": (evaluate, {"gate": {"metrics": {"accuracy": {"minimum": 1}}}}, "gate.metrics.accuracy.minimum"),
    "code": (evaluate, {"code": "git"}, "code must be a mapping with uri and revision"),
    "no dataset": (evaluate, {"dataset": ""}, "dataset must not be empty"),
    "evaluation's arguments": (evaluate, {"args": ["x"]}, "ModelEvaluationOperator sets the command of the job"),
    "gate evaluation": (gate, {"evaluation": "file:///e"}, "evaluation must be the XCom of a ModelEvaluationOperator"),
    "gate branch": (gate, {"if_failed": 3}, "if_failed must be a task ID or a list of task IDs, not 3"),
    "gate skip": (gate, {"skip": "no"}, "skip must be True or False"),
    "gate skip and branch": (gate, {"skip": True, "if_failed": "x"}, "skip cannot be combined with if_failed"),
    "gate same branch": (gate, {"if_passed": "x", "if_failed": "x"}, "if_passed and if_failed both have x"),
    # studies
    "space": (tune, {"study": {**STUDY, "space": {"x": {"type": "float", "low": 3, "high": 1}}}}, "study.space.x: low"),
    "unknown parameter": (tune, {"args": ["$(KUBEFLOW_TRAINER_OPT_Y)"]}, r"args\[0\]: uses KUBEFLOW_TRAINER_OPT_Y"),
    "variable of the study": (tune, {"env": {"KUBEFLOW_TRAINER_OPT_X": "1"}}, "OPT_X: is set by the study"),
    "logs of trials": (tune, {"get_logs": True}, "remove get_logs"),
    "study that only launches": (tune, {"wait_for_completion": True}, "remove wait_for_completion"),
    "exit code of trials": (tune, {"skip_on_exit_code": True}, "remove skip_on_exit_code"),
    "suspended trials": (tune, {"on_kill_action": "suspend"}, "no trial is suspended"),
}


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_literal_is_refused_when_the_dag_is_parsed(use: str) -> None:
    make, fields, words = WRONG[use]
    with DAG("wrong"), pytest.raises((TrainJobError, ValueError, TypeError), match=words) as raised:
        make(**fields)
    assert TOKEN not in str(raised.value)


def test_a_rule_beside_the_xcom_of_an_evaluation_is_refused() -> None:
    with DAG("wrong"), pytest.raises((TrainJobError, ValueError), match=NO_RULE):
        export(evaluation=cast("Any", evaluate(task_id="e")).output, metric="accuracy")


def test_a_default_action_of_the_dag_is_that_of_a_study() -> None:
    with DAG("defaults", default_args={"on_kill_action": "keep"}):
        assert cast("Any", tune()).on_kill_action == "keep"


def test_the_pod_of_a_task_is_a_patch_of_all_nodes() -> None:
    own = {"manager": "example.com/me", "training_runtime_spec": {}}
    metadata, mounts = {"labels": {"team": "vision"}}, [{"name": "data", "mountPath": "/data"}]
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "{{ params.claim }}"}}]
    pod = {"metadata": metadata, "spec": {"volumes": volumes, "containers": [{"volumeMounts": mounts}]}}
    with DAG("pods", params={"claim": "digits"}):
        task = TrainJobOperator(task_id="t", runtime={"name": "deepspeed-distributed"}, runtime_patches=[own], pod=pod)
    spec, _ = task.sample_spec()
    assert spec is not None
    patches = render(spec, "k", 1, "ns")["spec"]["runtimePatches"]
    assert [patch["manager"] for patch in patches] == ["example.com/me", "trainjob.dev/pod"]
    jobs = {job["name"]: job["template"]["spec"]["template"] for job in replicated_jobs(patches[1])}
    assert jobs["node"] == jobs["launcher"]
    assert jobs["node"]["metadata"] == metadata
    assert jobs["node"]["spec"]["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "digits"}}]
    assert jobs["node"]["spec"]["containers"] == [{"name": "node", "volumeMounts": mounts}]


def replicated_jobs(patch: Any) -> Any:
    return patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]


@pytest.mark.parametrize(
    ("argument", "write"),
    [
        ("volumes", "write pod: {volumes: […]}"),
        ("node_selector", "write pod: {nodeSelector: {…}}"),
        ("env_vars", "write env: {NAME: value}"),
        ("cmds", "write command"),
        ("container_resources", "write resources_per_node"),
    ],
)
def test_arguments_of_other_operators_are_refused_with_the_line_to_write(argument: str, write: str) -> None:
    with DAG("wrong"), pytest.raises(ValueError, match=re.escape(write)):
        train(**{argument: ["x"]})


def test_models_of_the_kubernetes_package_are_accepted() -> None:
    class Claim:
        attribute_map = {"claim_name": "claimName", "read_only": "readOnly"}  # noqa: RUF012 - as in that package
        claim_name, read_only = "{{ params.claim }}", None

    class Volume:
        attribute_map = {"name": "name", "persistent_volume_claim": "persistentVolumeClaim"}  # noqa: RUF012 - likewise
        name, persistent_volume_claim = "data", Claim()

    with DAG("models", params={"claim": "digits"}) as dag:
        task = TrainJobOperator(task_id="t", runtime="x", pod={"volumes": [Volume()]})
        whole(task_id="u", spec={"runtime": "x", "pod": {"volumes": [Volume()]}})
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "{{ params.claim }}"}}
    assert task.pod == cast("Any", dag.task_dict["u"]).spec["pod"] == {"volumes": [volume]}
    spec, missing = task.sample_spec()
    assert missing == []
    assert "digits" in str(spec)


SECRET = {"valueFrom": {"secretKeyRef": {"name": "{{ params.secret }}", "key": "k"}}}
COMMAND = ["python", "{{ params.script }}", "{model}", "{dataset}", "{scores}"]
OPEN: list[tuple[Make, dict[str, Any]]] = [
    (train, {"runtime": "{{ params.runtime }}", "num_nodes": "{{ params.nodes }}"}),
    (train, {"runtime": {"name": "{{ params.runtime }}", "kind": "TrainingRuntime"}, "command": ["{{ params.x }}"]}),
    (
        train,
        {"resources_per_node": {"gpu": "{{ params.gpus }}", "memory": "64Gi"}, "env": {"A": "{{ ds }}", "S": SECRET}},
    ),
    (train, {"inputs": {"d": "{{ params.data }}"}, "initializer": {"dataset": {"storage_uri": "{{ params.data }}"}}}),
    (train, {"runtime_patches": [{"manager": "{{ params.me }}"}], "labels": {"{{ params.label }}": "x"}}),
    (train, {"active_deadline_seconds": "{% if params.fast %}60{% else %}600{% endif %}"}),
    (train, {"runtime": "{{ x }}", "torchtune": {"epochs": 1}}),
    (whole, {"spec": "runtime: x\nnum_nodes: {{ params.nodes }}"}),
    (whole, {"spec": "train.yaml"}),
    (sensor, {"job": "{{ params.name }}", "phases": "{{ params.phase }}"}),
    (dataset, {"source": "{{ params.data }}", "target": "s3://b/{{ ds }}", "digest": "{{ d }}"}),
    (model, {"source": "{{ params.model }}", "if_missing": "fresh"}),
    (export, {"metrics": {"a": 1}, "alias": "{{ x }}", "metric": "a"}),
    (export, {"metric": "{{ x }}", "min_improvement": 0.1}),
    (export, {"evaluation": "{{ params.evaluation }}", "metric": "{{ params.metric }}"}),
    (evaluate, {"candidate": "{{ params.m }}", "dataset": "{{ d }}", "target": "{{ t }}", "champion": "{{ c }}"}),
    (evaluate, {"function": None, "command": COMMAND, "gate": {"metrics": {"accuracy": {"min": "{{ params.min }}"}}}}),
    (gate, {"evaluation": "{{ ti.xcom_pull('evaluate') }}"}),
]


def test_templates_are_not_checked_before_they_are_rendered() -> None:
    with DAG("right", params={"nodes": Param(2, type="integer")}):
        for number, (make, fields) in enumerate(OPEN):
            make(task_id=f"task{number}", **fields)
        first = cast("Any", train(task_id="first")).output
        whole(task_id="xcom", spec=first)
        train(task_id="args", args=first)
        TrainJobOperator.partial(task_id="mapped", runtime="x").expand(args=first)
        rule = {"alias": "{{ params.alias }}", "metric": "accuracy", "min_improvement": "{{ params.gain }}"}
        export(task_id="export", metrics=first, **rule)
        gate(task_id="gate", evaluation=cast("Any", evaluate(task_id="scores")).output)
        given = ModelEvaluationOperator.partial(task_id="many", dataset="/d", target="/e", function=score)
        given.expand(candidate=["/a", "/b"])


def test_literals_beside_templates_of_a_pod_are_checked() -> None:
    mounts = [{"volumeMounts": [{"name": "data", "mountPath": "/data"}]}]
    volumes = [{"name": "{{ params.name }}", "emptyDir": {}}]
    with DAG("open"):
        train(pod={"volumes": volumes, "containers": mounts})
    with DAG("mixed"), pytest.raises(TrainJobError, match="tolerationz"):
        train(pod={"nodeSelector": {"a": "{{ params.pool }}"}, "tolerationz": [{}]})


def test_literals_beside_templates_are_checked() -> None:
    with DAG("mixed"), pytest.raises(TrainJobError, match="64GB") as raised:
        TrainJobOperator(
            task_id="t",
            runtime="{{ params.runtime }}",
            num_nodes="{{ params.nodes }}",
            resources_per_node={"gpu": "{{ params.gpus }}", "memory": "64GB"},
            env={"A": "{{ ds }}", "B": 3},
        )
    assert "write '3'" in str(raised.value)
