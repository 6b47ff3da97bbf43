"""``retry``: a retry policy for long trainings."""

from __future__ import annotations

from typing import Any

from kfp.dsl import structures

_MONTH = 30 * 24 * 3600
"""Seconds from the start of the first try after which Argo terminates a later one. KFP's default is an hour."""


def retry(task: Any, times: int, *, pause: int = 60, seconds: int = _MONTH) -> Any:
    """Let KFP retry `task`, with a time limit of a month instead of an hour.

    ``task.set_retry`` alone limits all tries to one hour from the start of the first (``backoffMaxDuration`` 3600 s).
    A later try, which keeps waiting for the existing TrainJob, is then terminated while the job runs, and up to SDK
    2.16 the limit cannot be raised. The diagnosis of the failure decides what a retry does: it starts a new attempt if
    that can help, otherwise it reports the same failure at once.

    KFP 2.17 with its default configuration does not retry a step that exits with an error, whatever is set here: its
    ``templateDefaults`` have ``retryPolicy: OnError``. docs/how-to/kfp-backend.md has the change that an administrator
    can make.

    Args:
        task: Task of a pipeline.
        times: Maximum number of retries.
        pause: Seconds before the first retry; doubled before each further one.
        seconds: Seconds from the start of the first try until a running try is terminated.

    Returns:
        The task.

    Raises:
        ValueError: a number is negative, or `seconds` is not greater than `pause`.
    """
    if times < 0 or pause < 0 or seconds <= pause:
        raise ValueError(
            f"retry: times={times}, pause={pause}, seconds={seconds} is invalid: times and pause must be 0 or more, "
            "and seconds greater than pause"
        )
    task._task_spec.retry_policy = _Policy(times, f"{pause}s", 2.0, f"{seconds}s")
    return task


class _Policy(structures.RetryPolicy):  # type: ignore[misc]
    """KFP's retry policy without the limit of one hour that the SDK has up to 2.16."""

    def to_proto(self) -> Any:
        policy = super().to_proto()
        policy.backoff_max_duration.FromJsonString(self.backoff_max_duration)
        return policy
