"""Continue the training of the champion of a registry."""

from kfp import dsl

from trainjob_kfp import initialize_model, train


@dsl.pipeline(name="initialize-model-example")
def example_pipeline(registry: str) -> None:
    """In the first run there is no champion: `uri` is empty, and the training starts from scratch."""
    champion = initialize_model(source="models:/digits@champion", if_missing="fresh", registry=registry)
    train(
        runtime="torch-distributed",
        command=["trainjob", "exec", "--", "torchrun", "train.py"],
        inputs={"model": champion.outputs["uri"]},
    )
