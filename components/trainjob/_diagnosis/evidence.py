"""What a diagnosis reads: the Kubernetes objects of a job, and the ends of its logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Evidence:
    """What is known of a job, as Kubernetes objects.

    Attributes:
        trainjob: The TrainJob; None if it is gone.
        pods: Its pods, finished ones included.
        logs: Pod name -> last lines of its log.
        events: Events of the job and its related objects, without routine ones.
        workload: The job's Workload, if Kueue manages the job.
        unseen: Evidence that could not be read, a line each (permissions, deleted objects).
        missing: Objects that the job needs and that do not exist, as ``ClusterTrainingRuntime x``.
        pods_visible: Whether pods may be listed; if not, an empty `pods` does not mean that there are none.
        reported: What rank 0 has reported so far, as in its termination message; empty where only its end reports it.
        related: Objects that explain why it waits: its LocalQueue and ClusterQueue, flavors, and a Node of each, which
            is a Node without a name if there is none.
    """

    trainjob: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    workload: Mapping[str, Any] | None = None
    unseen: Sequence[str] = ()
    missing: Sequence[str] = ()
    pods_visible: bool = True
    reported: str = ""
    related: Sequence[Mapping[str, Any]] = ()

    def with_earlier(self, *earlier: Evidence) -> Evidence:
        """Add earlier evidence of the same job: crashed pods may have been deleted since."""
        return replace(
            self,
            # The current pods first: they are in order, also if several ranks terminated in the same second.
            pods=[pod for each in (self, *earlier) for pod in each.pods],
            logs={name: lines for each in (*reversed(earlier), self) for name, lines in each.logs.items() if lines},
        )
