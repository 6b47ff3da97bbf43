"""Search a learning rate and an optimizer, and register the best model."""

from kfp import dsl

from trainjob_kfp import export_model, tune


@dsl.pipeline(name="tune-example")
def example_pipeline(dataset: str, registry: str) -> None:
    """A trial has the parameter lr as KUBEFLOW_TRAINER_OPT_LR, and writes its own model."""
    tuned = tune(
        study={
            "space": {
                "lr": {"type": "float", "low": 0.001, "high": 1, "log": True},
                "optimizer": {"type": "categorical", "choices": ["sgd", "adam"]},
            },
            "metric": "accuracy",
            "direction": "maximize",
            "max_trials": 20,
            "parallel": 4,
            "pruner": {"name": "successive_halving"},
        },
        runtime="torch-distributed",
        image="registry.example/digits:1",
        command=["trainjob", "exec", "--", "torchrun", "train.py"],
        args=[
            "--data=$(TRAINJOB_INPUT_DATASET)",
            "--out=$(TRAINJOB_OUTPUT_MODEL)",
            "--lr=$(KUBEFLOW_TRAINER_OPT_LR)",
            "--optimizer=$(KUBEFLOW_TRAINER_OPT_OPTIMIZER)",
        ],
        resources_per_node={"gpu": 1},
        inputs={"dataset": dataset},
        workspace="s3://team/studies",
    )
    export_model(
        source=tuned.outputs["model_uri"],
        name="digits",
        metrics=tuned.outputs["result"],
        registry=registry,
    )
