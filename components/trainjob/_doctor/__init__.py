"""``trainjob doctor``: finds problems of a cluster or machine before jobs are launched.

May import `tuning`, and the layers below.

::

    findings.py     the result of a check
    cluster.py      the checks of a cluster
    server.py       connection, credentials, clocks
    admission.py    whether the API server accepts a TrainJob, by a dry run
    permissions.py  RBAC permissions, and what does not work without each
    queues.py       Kueue
    secrets.py      Secrets that jobs name
    local.py        the checks of this machine, for the local backend

Nothing is created or changed, and findings contain no secrets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from trainjob._doctor.findings import Finding, Level

if TYPE_CHECKING:
    from trainjob._backends.base import Backend

__all__ = ["Finding", "Level", "examine"]


async def examine(
    backend: Backend, namespace: str, runtimes: Sequence[str] = (), queue: str = ""
) -> AsyncGenerator[Finding]:
    """Check the cluster or the machine of a backend, and yield each finding as soon as it is known.

    Args:
        backend: The backend; on this machine, its directory and the settings count.
        namespace: Where jobs are to run.
        runtimes: Runtimes that jobs are to use.
        queue: LocalQueue that jobs are to name.
    """
    if backend.home is not None:
        from trainjob._backends.local.backend import LocalBackend  # noqa: PLC0415 - a cluster does without it
        from trainjob._doctor import local  # noqa: PLC0415 - a cluster does without it

        for finding in local.examine(LocalBackend(backend.home), runtimes, queue):
            yield finding
    if backend.cluster is not None:
        from trainjob._doctor import cluster  # noqa: PLC0415 - needs httpx, which the local backend does without

        async with aclosing(cluster.examine(backend.cluster.credentials, namespace, runtimes, queue)) as found:
            async for finding in found:
                yield finding
