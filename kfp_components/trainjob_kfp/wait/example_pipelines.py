"""Wait for a TrainJob that another system launches, and take its metrics."""

from kfp import dsl

from trainjob_kfp import wait


@dsl.pipeline(name="wait-example")
def example_pipeline(name: str) -> None:
    """Its failure fails the step, and the step changes nothing about it."""
    wait(name=name, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, run_timeout=24 * 3600)
