"""How a TrainJob's failure reads to Airflow: whether it retries the task is decided by the class alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from trainjob import Diagnosis
    from trainjob.errors import TrainJobError
    from trainjob.verdicts import RetryVerdict


class _Explained(AirflowException):
    """An exception that says why a job failed."""

    def __init__(
        self, message: str = "", verdict: RetryVerdict | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.diagnosis = diagnosis


class TrainJobFailure(_Explained):
    """It did not work, and another try may end differently: a node was lost, an outage, an exception of the training.

    Attributes:
        verdict: Who has to act before another try can succeed; None where nothing is known of it. See
            `trainjob.RetryVerdict`, and `trainjob_airflow.retries.TrainJobRetryPolicy`, which goes by it.
        diagnosis: Why the job failed: category, rank, exit code, last lines, advice; None where no job has failed (a
            timeout, an outage). For callbacks, which find the exception in their context.
    """


class TrainJobTimeout(TrainJobFailure):
    """``queue_timeout``, ``start_timeout`` or ``execution_timeout`` ran out."""


class TrainJobFatal(_Explained, AirflowFailException):
    """It is certain not to work until a person changes something (code, spec, rights), so Airflow does not retry.

    Attributes:
        verdict: See `TrainJobFailure`.
        diagnosis: See `TrainJobFailure`; None also where the job was refused.
    """


def airflow_error(error: TrainJobError, *, user_errors: bool = True) -> AirflowException:
    """The exception to raise for an error of the core.

    A verdict that leaves room for a retry becomes an `AirflowException`, which uses up one of the task's retries; the
    others (user, configuration) an `AirflowFailException`, which fails the task at once.

    Args:
        error: What happened.
        user_errors: Whether failures of the training code that are not certain to come again are retried.
    """
    from trainjob.errors import TimedOut, TrainJobFailed

    diagnosis = error.diagnosis if isinstance(error, TrainJobFailed) else None
    if isinstance(error, TimedOut):
        # Also RunTimeout, whose verdict is "user": that is how Airflow treats a task's execution_timeout.
        return TrainJobTimeout(str(error), error.retry)
    if error.retry.retried(user_errors=user_errors):
        return TrainJobFailure(str(error), error.retry, diagnosis)
    return TrainJobFatal(str(error), error.retry, diagnosis)
