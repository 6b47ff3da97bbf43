"""Who has to act before another attempt of a failed job can succeed."""

from __future__ import annotations

from enum import StrEnum


class RetryVerdict(StrEnum):
    """Whether another attempt of the same spec can be expected to end differently."""

    USER = "user"
    """The training code failed and would fail again: a module is missing, an argument is unknown."""
    UNKNOWN = "unknown"
    """The training failed, and the failure may not repeat: the orchestrator's own retries decide."""
    INFRASTRUCTURE = "infrastructure"
    """A node, network or service failed; another attempt may succeed."""
    PREEMPTED = "preempted"
    """The job was preempted; another attempt can succeed when capacity is available."""
    QUOTA = "quota"
    """The request exceeds the quota; wait, or request less."""
    CONFIGURATION = "configuration"
    """The spec, the permissions or the cluster's configuration is wrong; a person has to change it."""

    @property
    def retryable(self) -> bool:
        """Whether an automatic retry of the unchanged spec may succeed."""
        return self not in (RetryVerdict.USER, RetryVerdict.CONFIGURATION)

    def retried(self, *, user_errors: bool) -> bool:
        """Whether an orchestrator retries.

        Args:
            user_errors: Retry also after a failure of the training code that may not repeat.
        """
        return self.retryable and (user_errors or self is not RetryVerdict.UNKNOWN)

    @property
    def words(self) -> str:
        """Whether a retry makes sense, and why."""
        return _WORDS[self]


_WORDS = {
    RetryVerdict.USER: "not retried: the same code would fail again",
    RetryVerdict.UNKNOWN: "can be retried: the failure may not repeat",
    RetryVerdict.INFRASTRUCTURE: "can be retried: the cause is outside the job's own code",
    RetryVerdict.PREEMPTED: "can be retried once capacity is available",
    RetryVerdict.QUOTA: "can be retried once quota is available",
    RetryVerdict.CONFIGURATION: "not retried: the configuration must be changed first",
}
