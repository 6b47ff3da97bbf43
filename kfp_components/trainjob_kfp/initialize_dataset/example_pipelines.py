"""Download a dataset to the pipeline's store, once, and verify it."""

from kfp import dsl

from trainjob_kfp import initialize_dataset, train


@dsl.pipeline(name="initialize-dataset-example")
def example_pipeline(source: str, digest: str = "") -> None:
    """TRAINJOB_INPUT_DATASET has the location for the training."""
    data = initialize_dataset(source=source, digest=digest, include=["*.parquet"])
    train(
        runtime="torch-distributed",
        command=["trainjob", "exec", "--", "torchrun", "train.py"],
        inputs={"dataset": data.outputs["uri"]},
    )
