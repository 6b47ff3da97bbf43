"""Which arguments are refused when a pipeline is compiled, and which are checked only in the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl
from tests.kfp.conftest import nested
from tests.kfp.pipelines import calling, compiled

from trainjob.errors import TrainJobError
from trainjob_kfp import (
    cleanup,
    evaluate_model,
    export_model,
    initialize_dataset,
    initialize_model,
    train,
    tune,
    wait,
)

TOKEN = "ghp_" + "a1B2" * 9
TRAIN = {"runtime": "torch-distributed"}
DATASET = {"source": "s3://b/d"}
EXPORT = {"source": "s3://b/m", "name": "digits"}
EVALUATE = {"candidate": "s3://b/m", "dataset": "s3://b/d", "command": ["python", "evaluate.py"]}
SPACE = {"x": {"type": "float", "low": -2.0, "high": 2.0}}
STUDY = {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 3.0}
TUNE = {
    "study": STUDY,
    "runtime": "trainjob-step",
    "command": ["python", "trial.py", "$(KUBEFLOW_TRAINER_OPT_X)"],
}
OUTSIDE = 3


def closure(model: str, dataset: str) -> dict[str, Any]:
    return {"metrics": {"accuracy": OUTSIDE}}


def released(evaluation: dict[str, Any]) -> None:
    """Export with the evaluation of another step, and with a rule beside it."""
    task = evaluate_model(**evaluation)
    export_model(source="s3://b/m", name="m", evaluation=task.outputs["evaluation"], metric="accuracy")


WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "depth": (train, {**TRAIN, "spec": nested(20_000)}, "spec is nested 65 lists and mappings deep"),
    "size": (train, {**TRAIN, "args": ["x" * 2**20]}, "args has more than 1,048,576 bytes"),
    "token in env": (train, {**TRAIN, "env": {"T": TOKEN}}, "secret"),
    "argument in spec": (train, {**TRAIN, "spec": {"labels": {"a": "b"}}}, "spec.labels: is a parameter of the"),
    "token of a step": (initialize_dataset, {**DATASET, "env": {"T": TOKEN}}, "secret"),
    "namespace": (train, {**TRAIN, "namespace": "A B"}, "'A B' is not a namespace"),
    "backend": (train, {**TRAIN, "backend": "docker"}, "backend must be 'kubernetes' or 'local', not 'docker'"),
    "crash action": (train, {**TRAIN, "on_crash_action": "retry"}, "on_crash_action must be 'suspend', 'cancel' or"),
    "timeout": (train, {**TRAIN, "queue_timeout": -5}, "queue_timeout is -5; give a number of seconds"),
    "no source": (initialize_dataset, {"source": ""}, "initialize-dataset: source is empty"),
    "no name": (export_model, {**EXPORT, "name": ""}, "export-model: name is empty"),
    "target": (export_model, {**EXPORT, "target": "https://host/x"}, "https:// can only be read"),
    "name of a job": (wait, {"job": "Bad Name", "run_id": "x"}, "'Bad Name' is not the name of a TrainJob"),
    "no run": (cleanup, {"run_id": ""}, "cleanup: run_id is empty"),
    "action": (cleanup, {"run_id": "x", "action": "delete"}, "action must be 'suspend' or 'cancel', not 'delete'"),
    "fresh": (initialize_model, {"source": "s3://b/m", "if_missing": "fresh"}, "is for registered models"),
    "metric": (export_model, {**EXPORT, "metrics": {"a": 1}, "alias": "c", "metric": "b"}, "the metrics given are: a"),
    "no command": (evaluate_model, {**EVALUATE, "command": []}, "set exactly one of command and function"),
    "no candidate": (evaluate_model, {**EVALUATE, "candidate": ""}, "evaluate-model: candidate is empty"),
    "gate": (evaluate_model, {**EVALUATE, "gate": {"metric": {}}}, "gate.metric"),
    "closure": (evaluate_model, {**EVALUATE, "command": [], "function": closure}, "uses OUTSIDE (line "),
    "rule beside an evaluation": (
        released,
        {"evaluation": EVALUATE},
        "metric and min_improvement cannot be combined with evaluation",
    ),
    "no study": (tune, {**TUNE, "study": {}}, "tune: study is empty"),
    "range": (tune, {**TUNE, "study": {**STUDY, "space": {"x": {"type": "float", "low": 2, "high": 1}}}}, "low is 2"),
    "parameter": (tune, {**TUNE, "args": ["$(KUBEFLOW_TRAINER_OPT_LR)"]}, "uses KUBEFLOW_TRAINER_OPT_LR"),
}


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_literal_is_refused_when_the_pipeline_is_compiled(use: str) -> None:
    component, arguments, words = WRONG[use]
    with pytest.raises(TrainJobError) as raised:
        calling(component, **arguments)
    assert words in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_values_known_only_in_the_run_compile(tmp_path: Path) -> None:
    @dsl.pipeline  # type: ignore[untyped-decorator]  # KFP has no types
    def right(runtime: str, nodes: int, data: str, command: list, env: dict, spec: dict, alias: str) -> None:  # type: ignore[type-arg]  # as KFP has it
        dataset = initialize_dataset(source=data, digest=data)
        base = initialize_model(source=f"models:/digits@{alias}", if_missing="fresh")
        trained = train(
            runtime=runtime,
            num_nodes=nodes,
            command=["python", f"--data={data}", 3],
            env={"DATA": data, "EPOCHS": 3, "RUN": dsl.PIPELINE_JOB_ID_PLACEHOLDER},
            inputs={"dataset": dataset.outputs["uri"], "model": base.outputs["uri"], "more": "/mnt/more"},
            resources_per_node={"memory": data, "cpu": 2},
            checkpoints=data,
            labels={"team": alias},
            spec={"runtime_patches": [{"manager": alias}]},
        )
        train(runtime="x", command=command, args=command, env=env, spec=spec)
        export_model(
            source=trained.outputs["model_uri"],
            name="digits",
            metrics=trained.outputs["result"],
            alias=alias,
            metric="accuracy",
            min_improvement=0.1,
        )

    compiled(right, tmp_path / "right.yaml")
