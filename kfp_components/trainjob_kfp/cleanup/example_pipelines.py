"""Stop all jobs of a run, however the run ends."""

from kfp import dsl

from trainjob_kfp import cleanup, train


@dsl.pipeline(name="cleanup-example")
def example_pipeline() -> None:
    """KFP also runs the exit handler after Terminate."""
    with dsl.ExitHandler(cleanup(run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)):
        train(runtime="torch-distributed", command=["torchrun", "train.py"], num_nodes=2)
