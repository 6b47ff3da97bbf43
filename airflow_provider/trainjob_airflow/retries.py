"""`TrainJobRetryPolicy`: the delay before a retry depends on what failed. Airflow 3.3 and later."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import RetryDecision, RetryPolicy

from trainjob_airflow.exceptions import TrainJobFailure, TrainJobTimeout

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context


class TrainJobRetryPolicy(RetryPolicy):
    """Sets the delay before a retry by what failed, and reports the reason in Airflow's log and on the task.

    `TrainJobFatal` (code, spec, permissions) fails the task without a retry, with or without this policy. The task's
    own settings decide about other exceptions, and about the number of retries.

    Args:
        preempted: Delay after a preemption: other jobs use the capacity now, and the queue hands it back by itself.
        infrastructure: Delay after the loss of a node, an outage, or an unexplained failure.
        quota: Delay after a full quota or queue.
    """

    def __init__(
        self,
        *,
        preempted: timedelta = timedelta(seconds=30),
        infrastructure: timedelta = timedelta(minutes=2),
        quota: timedelta = timedelta(minutes=10),
    ) -> None:
        self.delays = {"preempted": preempted, "infrastructure": infrastructure, "quota": quota}

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Retry after the delay for the verdict of `exception`, or use the task's own settings."""
        del try_number, max_tries, context
        verdict = exception.verdict if isinstance(exception, TrainJobFailure) else None
        if verdict is None or isinstance(exception, TrainJobTimeout):
            return RetryDecision.default()
        delay = self.delays.get(verdict.value)
        if delay is None:
            return RetryDecision.default()
        first = str(exception).splitlines()[0] if str(exception) else verdict.value
        return RetryDecision.retry(delay, f"{verdict.value}: {first}"[:500])
