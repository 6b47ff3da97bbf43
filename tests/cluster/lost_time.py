"""How the time of a piece of work was spent, as ``trainjob goodput`` measures it, beside what a test knows."""

from __future__ import annotations

from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._goodput import Attempt, measure, pieces_of_work
from trainjob.goodput import Activity, Goodput
from trainjob.job import labels_of

SECONDS = 2.0
"""By which a sum may differ from the times of a test: those of Kubernetes are whole seconds."""

INTERRUPTED = (Activity.QUEUED, Activity.REPEATED, Activity.RESTARTING, Activity.STOPPED)
"""Activities of work that was interrupted."""


async def measured(backend: KubernetesBackend, namespace: str, key: str) -> Goodput:
    """The goodput of the latest work of a key. Its activities sum to its wall time."""
    jobs = await backend.states(namespace, labels_of(key))
    assert backend.cluster is not None
    found = measure([Attempt(job) for job in pieces_of_work(jobs)[0]], backend.cluster.now())
    assert abs(sum(found.seconds.values()) - found.wall_seconds) <= 0.01 * found.wall_seconds, found
    return found


def lasted(found: Goodput, shortest: float, longest: float, *without: Activity) -> None:
    """Check the wall time of a piece of work, in seconds, and that none of it is of the activities `without`."""
    assert shortest - SECONDS <= found.wall_seconds <= longest + SECONDS, (shortest, longest, found)
    assert not any(found.seconds[each] for each in without), found.seconds
