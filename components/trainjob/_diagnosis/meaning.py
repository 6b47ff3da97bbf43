"""The meaning of a failure or of a blocker: its category, who has to act, and how."""

from __future__ import annotations

from dataclasses import dataclass

from trainjob.errors import Category, RetryVerdict

RERUN = "launch the job again"
"""Start of the advice for a failed job that may succeed when it is launched again, see `while_running`."""

ENDED_EARLY = (
    "find out why that rank ends early: all ranks must run the same number of steps, also with a dataset that does not "
    "divide evenly"
)
"""Advice for a rank that ended with code 0 while others waited for it."""


@dataclass(frozen=True)
class Meaning:
    """What a row of a table of rules means.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed; ``configuration`` is permanent: it cannot resolve
            itself.
        advice: What to do.
        ended: How a container ended, after the name of its rank; empty to quote reason and message.
        node_memory: More memory in `resources_per_node` would help.
    """

    category: Category
    retry: RetryVerdict
    advice: str
    ended: str = ""
    node_memory: bool = False

    @property
    def permanent(self) -> bool:
        """Whether it cannot resolve itself."""
        return self.retry is RetryVerdict.CONFIGURATION


NOTHING_KNOWN = Meaning(Category.UNKNOWN, RetryVerdict.UNKNOWN, "check the job's events and its nodes")
"""The meaning of what no rule knows."""


def while_running(advice: str) -> str:
    """The advice for a job that has not ended, since to launch it again would start a second training."""
    return f"wait: the cluster restarts it{advice.removeprefix(RERUN)}" if advice.startswith(RERUN) else advice
