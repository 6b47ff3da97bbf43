"""Bring a dataset to the store of the pipeline, once and checked."""

from kfp import dsl

from trainjob_kfp import initialize_dataset, train


@dsl.pipeline(name="initialize-dataset-example")
def example_pipeline(source: str, digest: str = "") -> None:
    """The training finds it as TRAINJOB_INPUT_DATASET."""
    data = initialize_dataset(source=source, digest=digest, include=["*.parquet"])
    train(
        runtime="torch-distributed",
        command=["trainjob", "exec", "--", "torchrun", "train.py"],
        inputs={"dataset": data.outputs["uri"]},
    )
