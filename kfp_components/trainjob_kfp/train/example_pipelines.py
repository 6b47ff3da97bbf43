"""Train on two nodes with eight GPUs each."""

from kfp import dsl

from trainjob_kfp import train


@dsl.pipeline(name="train-example")
def example_pipeline(dataset: str, epochs: int = 3) -> None:
    """The variables have the locations of the input and of the output, which becomes the artifact `model`."""
    train(
        runtime="torch-distributed",
        image="registry.example/digits:1",
        command=["trainjob", "exec", "--", "torchrun", "train.py"],
        args=["--data=$(TRAINJOB_INPUT_DATASET)", "--out=$(TRAINJOB_OUTPUT_MODEL)", f"--epochs={epochs}"],
        num_nodes=2,
        resources_per_node={"cpu": 8, "memory": "64Gi", "gpu": 8},
        inputs={"dataset": dataset},
    )
