"""The meaning of a failure or of a blocker: its category, who has to act, and how."""

from __future__ import annotations

from dataclasses import dataclass

from trainjob.verdicts import Category, RetryVerdict

RERUN = "launch the job again"
"""Start of the advice for a failed job that may succeed when it is launched again, see `while_running`."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a reason, of an error message or of a signal.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        advice: What to do.
        termination: How a container terminated, after the name of its rank; empty to quote reason and message.
        permanent: It cannot resolve itself.
        final: Why a retry cannot help; empty if the verdict explains it.
        resource: The resource in `resources_per_node` of which the node needs more, as ``memory``; empty if none.
    """

    category: Category
    retry: RetryVerdict
    advice: str
    termination: str = ""
    permanent: bool = False
    final: str = ""
    resource: str = ""


def while_running(advice: str) -> str:
    """The advice for a job that has not ended, since to launch it again would start a second training."""
    return f"wait: the cluster restarts it{advice.removeprefix(RERUN)}" if advice.startswith(RERUN) else advice
