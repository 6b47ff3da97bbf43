"""Register the trained model; it becomes the champion if it is better."""

from kfp import dsl

from trainjob_kfp import export_model, train


@dsl.pipeline(name="export-model-example")
def example_pipeline(models: str, registry: str) -> None:
    """The training reports the metrics with `trainjob.progress`."""
    trained = train(runtime="torch-distributed", command=["trainjob", "exec", "--", "torchrun", "train.py"])
    export_model(
        source=trained.outputs["model_uri"],
        name="digits",
        target=models,
        metrics=trained.outputs["result"],
        alias="champion",
        metric="accuracy",
        registry=registry,
    )
