"""Airflow exceptions for failures of TrainJobs. Their class decides whether Airflow retries the task."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from trainjob import Diagnosis, RetryVerdict, TrainJobError


class _Diagnosed(AirflowException):
    """An exception with the verdict and the diagnosis of a failed job."""

    def __init__(
        self, message: str = "", verdict: RetryVerdict | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.diagnosis = diagnosis

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. A traceback loses its frames of trainjob.

        Airflow (3.0 to 3.3.2) logs the traceback of each failed task, whose last frames would be those that raised this
        exception, below the reason. Before, the exception passes a context manager of Airflow (`set_current_context`),
        and `contextlib` sets `__traceback__` (Python 3.11 to 3.14). Without that call the traceback is longer.
        """
        if name == "__traceback__" and isinstance(value, TracebackType):
            value = _without_own_frames(value)
        super().__setattr__(name, value)


class TrainJobFailure(_Diagnosed):
    """The task failed, and another try may succeed: a lost node, an outage, an exception in the training code.

    Attributes:
        verdict: Who has to act before another try can succeed, see `trainjob.RetryVerdict`; None if that is unknown.
            `trainjob_airflow.retries.TrainJobRetryPolicy` uses it.
        diagnosis: Why the job failed: category, rank, exit code, last log lines, advice; None if no job failed (a
            timeout, an outage). Callbacks find the exception in their context.
    """


class TrainJobTimeout(TrainJobFailure):
    """``queue_timeout``, ``start_timeout`` or ``execution_timeout`` expired."""


class TrainJobFatal(_Diagnosed, AirflowFailException):
    """Every try will fail until a person changes the code, spec or permissions, so Airflow does not retry.

    Attributes:
        verdict: Who has to act before another try can succeed, see `trainjob.RetryVerdict`; None if that is unknown.
        diagnosis: Why the job failed: category, rank, exit code, last log lines, advice; None if no job failed (the
            spec was refused, a timeout).
    """


def _without_own_frames(traceback: TracebackType) -> TracebackType | None:
    """The part of a traceback before its first frame of trainjob."""
    last: TracebackType | None = None
    entry: TracebackType | None = traceback
    while entry is not None:
        if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] in ("trainjob", "trainjob_airflow"):
            if last is None:
                return None
            last.tb_next = None
            break
        last, entry = entry, entry.tb_next
    return traceback


def airflow_error(error: TrainJobError, *, user_errors: bool = True) -> AirflowException:
    """Convert an error of `trainjob` to the exception that a task raises.

    If another try can help, this is an `AirflowException`, which uses one of the task's retries; otherwise (verdicts
    user, configuration) an `AirflowFailException`, which fails the task at once.

    Args:
        error: The error.
        user_errors: Whether to retry failures of the training code that may not recur.
    """
    from trainjob import Stuck, TimedOut, TrainJobFailed

    diagnosis = error.diagnosis if isinstance(error, TrainJobFailed) else None
    if isinstance(error, TimedOut):
        # Also RunTimeout, whose verdict is "user": Airflow retries after a task's execution_timeout, too.
        kind = TrainJobFatal if isinstance(error, Stuck) else TrainJobTimeout
        return kind("; ".join([str(error), *getattr(error, "__notes__", ())]), error.retry)
    if error.retry.retried(user_errors=user_errors):
        return TrainJobFailure(str(error), error.retry, diagnosis)
    return TrainJobFatal(str(error), error.retry, diagnosis)


def own_timeout(airflow_timeout: BaseException) -> BaseException:
    """The TrainJobTimeout that Airflow's timer interrupted; otherwise `airflow_timeout`."""
    error: BaseException | None = airflow_timeout
    while error is not None and not isinstance(error, TrainJobTimeout):
        error = error.__context__
    return error or airflow_timeout
