"""Literals are checked when a DAG file is parsed, templates after they are rendered."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any, cast

import pytest
from airflow.sdk import DAG, Param, task

from trainjob import TrainJobSpec
from trainjob.errors import TrainJobError
from trainjob_airflow.operators.cancel import TrainJobCancelOperator
from trainjob_airflow.operators.data import DatasetInitializerOperator, ModelExportOperator, ModelInitializerOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

TOKEN = "ghp_" + "a1B2" * 9
OUTSIDE = 3


def train(**fields: Any) -> Callable[[], object]:
    return lambda: TrainJobOperator(task_id="t", **{"runtime": "torch-distributed", **fields})


def dataset(**fields: Any) -> Callable[[], object]:
    return lambda: DatasetInitializerOperator(task_id="t", **{"source": "s3://b/d", "target": "file:///w", **fields})


def model(**fields: Any) -> Callable[[], object]:
    return lambda: ModelInitializerOperator(task_id="t", **{"source": "models:/m@a", "target": "file:///w", **fields})


def export(**fields: Any) -> Callable[[], object]:
    given = {"source": "file:///m", "target": "s3://models", "name": "m"}
    return lambda: ModelExportOperator(task_id="t", **{**given, **fields})


def sensor(**fields: Any) -> Callable[[], object]:
    return lambda: TrainJobSensor(task_id="t", **fields)


def cancel(**fields: Any) -> Callable[[], object]:
    return lambda: TrainJobCancelOperator(task_id="t", **fields)


def function(body: str, **fields: Any) -> Callable[[], object]:
    def of() -> object:
        if body == "closure":

            @task.trainjob(runtime="jax-distributed", **fields)
            def fit() -> None:
                print(OUTSIDE)

            return fit()

        @task.trainjob(runtime="jax-distributed", **fields)
        def take(when: Any = None) -> None:
            print(when)

        return take(date(2026, 1, 1) if body == "argument" else None)

    return of


def nested(kind: Callable[[Any], Any], depth: int = 20_000) -> Any:
    """Lists or mappings inside each other, deeper than Python's own limit of recursion."""
    value: Any = 1
    for _ in range(depth):
        value = kind(value)
    return value


def _mapping(value: Any) -> dict[str, Any]:
    return {"a": value}


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "deep labels": (train(labels=nested(_mapping)), "is nested 65 lists and mappings deep"),
    "deep affinity": (train(affinity=nested(_mapping)), "is nested 65 lists and mappings deep"),
    "large YAML": (lambda: TrainJobOperator(task_id="t", spec="runtime: x\n#" + "x" * 2**20), "at most 1,048,576"),
    "no runtime": (lambda: TrainJobOperator(task_id="t", command=["x"]), "runtime: is missing"),
    "bool as a number": (train(num_nodes=True), "num_nodes: must be a number, not a bool"),
    "name of a runtime": (train(runtime="Torch_Distributed"), "runtime.name: 'Torch_Distributed' is not a valid name"),
    "command as text": (train(command="python train.py"), "command"),
    "unit of bytes": (train(resources_per_node={"memory": "64GB"}), "64GB"),
    "token in args": (train(args=[f"--token={TOKEN}"]), "secret"),
    "number in env": (train(env={"EPOCHS": 3}), "write '3'"),
    "input": (train(inputs={"d": "bucket/x"}), "inputs.d: 'bucket/x' is not a URI"),
    "checkpoints": (train(checkpoints="bucket/x"), "checkpoints"),
    "label": (train(labels={"team": "a b"}), "labels"),
    "misspelled argument": (lambda: TrainJobOperator(task_id="t", runtime="x", num_node=2), "num_node"),
    "spec and fields": (lambda: TrainJobOperator(task_id="t", runtime="x", spec={"runtime": "y"}), "spec cannot be"),
    "field of YAML": (lambda: TrainJobOperator(task_id="t", spec="runtime: x\nnum_nodes: two"), "num_nodes"),
    "no YAML": (lambda: TrainJobOperator(task_id="t", spec="runtime: [x"), "not valid YAML"),
    "spec object": (lambda: TrainJobOperator(task_id="t", spec=TrainJobSpec(num_nodes=2)), "runtime: is missing"),
    "kind of a manifest": (lambda: TrainJobOperator(task_id="t", spec={"kind": "PyTorchJob"}), "TrainJob"),
    "initializer": (train(initializer={"dataset": {"uri": "s3://b"}}), "initializer"),
    "volume without source": (train(volumes=[{"name": "d"}]), r"  - volumes\[0\]: needs a name and one source"),
    "mount": (train(volume_mounts=[{"name": "d"}]), r"  - volume_mounts\[0\].mount_path: is missing"),
    "toleration": (train(tolerations={"key": "x"}), "  - tolerations: "),
    "affinity": (train(affinity={"nodeAffinty": {}}), "  - affinity.nodeAffinty"),
    "service account": (train(service_account_name="My Account"), "  - service_account_name: 'My Account'"),
    "label of pods": (train(pod_labels={"team": 5}), "  - pod_labels.team: "),
    "field of a patch": (
        train(runtime_patches=[], volumes=[{"name": "d"}]),
        r"runtime_patches\[0\].trainingRuntimeSpec.*volumes\[0\]: needs",
    ),
    "pods beside a spec": (lambda: TrainJobOperator(task_id="t", spec="runtime: x", volumes=[]), "spec cannot be"),
    "patch": (train(runtime_patches=[{"manager": "x"}]), "runtime_patches"),
    "closure": (function("closure"), "uses OUTSIDE from outside itself"),
    "argument that is no JSON": (function("argument"), "cannot be written as JSON"),
    "kill action": (train(on_kill_action="delete"), "on_kill_action"),
    "crash action": (train(on_crash_action="retry"), "on_crash_action must be 'suspend', 'cancel' or 'keep'"),
    "stall timeout": (train(stall_timeout="soon"), "stall_timeout"),
    "queue timeout": (train(queue_timeout=-1), "queue_timeout"),
    "switch": (train(fail_fast="no"), "fail_fast must be True or False, not 'no'"),
    "deferrable": (train(deferrable="false"), "deferrable must be True or False"),
    "connection": (train(trainjob_conn_id=None), "trainjob_conn_id must be a string, not None"),
    "sensor of nothing": (sensor(), "set exactly one of job and labels"),
    "sensor of two": (sensor(job="x", labels={"a": "b"}), "set exactly one of job and labels"),
    "sensor's name": (sensor(job="Bad Name"), "'Bad Name' is not the name of a TrainJob"),
    "sensor's label": (sensor(labels={"a": "b c"}), "labels.a: 'b c' is not a label value"),
    "sensor of no phase": (sensor(job="x", phases=[]), "phases must be one of"),
    "sensor's namespace": (sensor(job="x", namespace="A B"), "'A B' is not a namespace"),
    "sensor's switch": (sensor(job="x", deferrable="no"), "deferrable must be True or False"),
    "cancel": (cancel(launched_by=5), "launched_by must be a task ID"),
    "cancel's namespace": (cancel(launched_by="x", namespace="A_B"), "'A_B' is not a namespace"),
    "namespace": (train(namespace="My_NS"), "'My_NS' is not a namespace"),
    "empty source": (dataset(source=""), "source must not be empty"),
    "empty target": (dataset(target=" "), "target must not be empty"),
    "model without name": (export(name=""), "name must not be empty"),
    "export to the web": (export(target="http://host/x"), "http:// can only be read"),
    "export's switch": (export(allow_pickle="no"), "allow_pickle must be True or False"),
    "export's metrics": (export(metrics=["accuracy"]), "metrics must be a mapping"),
    "export's base": (export(base_model="s3://b/m"), "datasets and base_model must be XComs of initializers"),
    "metric as text": (
        export(metrics={"f1": "high"}, metric="f1", alias="c"),
        r"metrics\['f1'\] must be a number, not 'high'",
    ),
    "phase": (sensor(job="x", phases="Succeeded"), "phases: 'Succeeded' is not a phase"),
    "scheme of a source": (dataset(source="ftp://host/x"), "ftp:// is not a supported scheme"),
    "digest": (dataset(digest="md5:abc"), "is not a digest"),
    "fresh dataset": (model(source="s3://b/m", if_missing="fresh"), "is for registered models"),
    "if missing": (model(if_missing="ignore"), "'fail' or 'fresh'"),
    "registry": (export(registry="postgresql://db"), "is not a supported scheme of a registry"),
    "name of a model": (export(name="a/b"), "is not a valid model name"),
    "metric without metrics": (export(alias="champion", metric="accuracy"), "the metrics given are: none"),
    "metric without alias": (export(metrics={"accuracy": 1}, metric="accuracy"), "requires an alias; set alias"),
    "mode": (export(mode="best"), "mode must be 'max' or 'min'"),
}


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_literal_is_refused_when_the_dag_is_parsed(use: str) -> None:
    make, words = WRONG[use]
    with DAG("wrong"), pytest.raises((TrainJobError, ValueError, TypeError), match=words) as raised:
        make()
    assert TOKEN not in str(raised.value)


POD: dict[str, Any] = {
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volume_mounts": [{"name": "data", "mountPath": "/data"}],
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "service_account_name": "trainer",
    "image_pull_secrets": [{"name": "registry"}],
    "security_context": {"runAsNonRoot": True},
    "pod_labels": {"team": "vision"},
    "pod_annotations": {"example.com/note": "x"},
}


def test_arguments_about_pods_become_a_patch_of_all_nodes() -> None:
    own = {"manager": "example.com/me", "training_runtime_spec": {}}
    with DAG("pods"):
        task = TrainJobOperator(task_id="t", runtime="torch-distributed", runtime_patches=[own], **POD)
        launcher = TrainJobOperator(task_id="m", runtime={"name": "deepspeed-distributed"}, node_selector={"a": "b"})
    patches = TrainJobSpec.parse(task.spec_fields("k")).model_dump(by_alias=True, mode="json", exclude_none=True)[
        "runtimePatches"
    ]
    assert [patch["manager"] for patch in patches] == ["example.com/me", "trainjob.dev/airflow"]
    (job,) = patches[1]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    assert template["metadata"] == {"labels": {"team": "vision"}, "annotations": {"example.com/note": "x"}}
    pod = template["spec"]
    assert (job["name"], pod["volumes"], pod["serviceAccountName"]) == ("node", POD["volumes"], "trainer")
    assert pod["containers"] == [{"name": "node", "volumeMounts": POD["volume_mounts"]}]
    assert (pod["nodeSelector"], pod["tolerations"]) == (POD["node_selector"], POD["tolerations"])
    assert (pod["imagePullSecrets"], pod["securityContext"]) == ([{"name": "registry"}], {"runAsNonRoot": True})
    (patch,) = TrainJobSpec.parse(launcher.spec_fields("k")).runtime_patches
    names = [each["name"] for each in patch.api()["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]]
    assert names == ["node", "launcher"]


def test_models_of_the_kubernetes_package_are_accepted() -> None:
    class Claim:
        attribute_map = {"claim_name": "claimName", "read_only": "readOnly"}  # noqa: RUF012 - as in that package
        claim_name, read_only = "{{ params.claim }}", None

    class Volume:
        attribute_map = {"name": "name", "persistent_volume_claim": "persistentVolumeClaim"}  # noqa: RUF012 - likewise
        name, persistent_volume_claim = "data", Claim()

    with DAG("models", params={"claim": "digits"}):
        task = TrainJobOperator(task_id="t", runtime="x", volumes=[Volume()])
    assert task.volumes == [{"name": "data", "persistentVolumeClaim": {"claimName": "{{ params.claim }}"}}]
    spec, missing = task.sample_spec()
    assert missing == []
    assert "digits" in str(spec)


def test_templates_are_not_checked_before_they_are_rendered() -> None:
    with DAG("right", params={"nodes": Param(2, type="integer")}):
        first = TrainJobOperator(task_id="first", runtime="{{ params.runtime }}", num_nodes="{{ params.nodes }}")
        TrainJobOperator(
            task_id="all",
            runtime={"name": "{{ params.runtime }}", "kind": "TrainingRuntime"},
            command=["python", "{{ params.script }}"],
            num_nodes="{{ params.nodes }}",
            resources_per_node={"gpu": "{{ params.gpus }}", "memory": "64Gi"},
            env={"A": "{{ ds }}", "S": {"valueFrom": {"secretKeyRef": {"name": "{{ params.secret }}", "key": "k"}}}},
            inputs={"dataset": "{{ params.data }}"},
            initializer={"dataset": {"storage_uri": "{{ params.data }}"}},
            runtime_patches=[{"manager": "{{ params.me }}"}],
            labels={"{{ params.label }}": "x"},
            active_deadline_seconds="{% if params.fast %}60{% else %}600{% endif %}",
        )
        TrainJobOperator(task_id="text", spec="runtime: x\nnum_nodes: {{ params.nodes }}")
        TrainJobOperator(task_id="file", spec="train.yaml")
        TrainJobOperator(task_id="xcom", spec=cast("Any", first.output))
        TrainJobOperator(task_id="tune", runtime="{{ x }}", torchtune={"epochs": 1})
        TrainJobOperator(task_id="args", runtime="x", args=cast("Any", first.output))
        TrainJobOperator.partial(task_id="mapped", runtime="x").expand(args=first.output)
        TrainJobSensor(task_id="sensor", job="{{ params.name }}", phases="{{ params.phase }}")
        DatasetInitializerOperator(task_id="d", source="{{ params.data }}", target="s3://b/{{ ds }}", digest="{{ d }}")
        ModelInitializerOperator(task_id="m", source="{{ params.model }}", target="/w", if_missing="fresh")
        ModelExportOperator(
            task_id="e",
            source="{{ x }}",
            target="/m",
            name="m",
            metrics=first.output,
            alias="{{ params.alias }}",
            metric="accuracy",
            min_improvement="{{ params.gain }}",
        )
        ModelExportOperator(
            task_id="e2", source="/m", target="/m", name="m", metrics={"a": 1}, alias="{{ x }}", metric="a"
        )
        ModelExportOperator(task_id="e3", source="/m", target="/m", name="m", metric="{{ x }}", min_improvement=0.1)


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
