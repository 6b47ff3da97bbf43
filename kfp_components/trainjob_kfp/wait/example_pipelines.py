"""Wait for a TrainJob that another system launches, and use its metrics."""

from kfp import dsl

from trainjob_kfp import wait


@dsl.pipeline(name="wait-example")
def example_pipeline(job: str) -> None:
    """If the job fails, the step fails. The step never changes the job."""
    wait(job=job, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, run_timeout=24 * 3600)
