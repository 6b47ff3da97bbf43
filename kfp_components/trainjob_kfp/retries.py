"""``retry``: a retry policy under which a training may take as long as it takes."""

from __future__ import annotations

from typing import Any

from kfp.dsl import structures

_MONTH = 30 * 24 * 3600
"""Seconds after the first try's start at which Argo ends a later one. KFP's own default is an hour."""


def retry(task: Any, times: int, *, pause: int = 60, seconds: int = _MONTH) -> Any:
    """Let KFP try `task` again, for as long as a training may take.

    ``task.set_retry`` alone allows an hour from the start of the first try (``backoffMaxDuration`` 3600 s): a later
    try, which goes on with the TrainJob that is there, is ended in the middle of it, and up to SDK 2.16 no more can be
    asked for. What a retry does is up to the diagnosis of what failed: a new attempt where that can help, else the same
    failure at once.

    KFP 2.17 as it is installed does not try again what exits with an error, whatever is set here (its
    ``templateDefaults`` have ``retryPolicy: OnError``); docs/kfp.md says what an administrator has to change.

    Args:
        task: Task of a pipeline.
        times: How often at most.
        pause: Seconds before the first retry; twice as long before each further one.
        seconds: How long after the first try's start a try may still go on.

    Returns:
        The task.

    Raises:
        ValueError: a number is negative, or `seconds` is not longer than `pause`.
    """
    if times < 0 or pause < 0 or seconds <= pause:
        raise ValueError(f"retry: times {times}, pause {pause} and seconds {seconds} do not fit each other")
    task._task_spec.retry_policy = _Policy(times, f"{pause}s", 2.0, f"{seconds}s")
    return task


class _Policy(structures.RetryPolicy):  # type: ignore[misc]
    """KFP's, without the limit of an hour that it has up to 2.16."""

    def to_proto(self) -> Any:
        policy = super().to_proto()
        policy.backoff_max_duration.FromJsonString(self.backoff_max_duration)
        return policy
