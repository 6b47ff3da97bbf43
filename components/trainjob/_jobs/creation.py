"""Create an attempt within the timeouts of its waiter, which count before the job exists, too."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import anyio

from trainjob._backends.base import Backend, TrainJob
from trainjob._manifest.attempts import adoption_of
from trainjob._support.display import short
from trainjob.errors import QueueTimeout, RunTimeout, StartTimeout, TimedOut, TrainJobError
from trainjob.wait_options import WaitOptions

_LOOKS, _PAUSE = 5, 1.0  # looks for the job whose creation was given up: the API server gives up with the connection
_LEAST = timedelta(seconds=10)  # that a creation gets, however short the timeouts are
_ERRORS: dict[str, type[TimedOut]] = {
    "queue_timeout": QueueTimeout,
    "start_timeout": StartTimeout,
    "run_timeout": RunTimeout,
}


async def create(backend: Backend, trainjob: TrainJob, timeouts: WaitOptions | None, began: float) -> TrainJob:
    """Create a job, as `Backend.create`, unless the shortest of the waiter's timeouts expires before.

    The creation is then given up, and the job looked for: an API server may have stored it after all.

    Args:
        backend: Backend of the job.
        trainjob: The job; its annotation `ADOPTED` distinguishes it from a job of another launch.
        timeouts: Of the waiter.
        began: Monotonic time at which the launch began.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout: the job does not exist, or that is unknown. The next launch of its key
            finds it, and a cancel of the key reaches it, if it exists after all.
    """
    given: dict[str, timedelta | None] = {name: getattr(timeouts, name, None) for name in _ERRORS}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if not limits:
        return await backend.create(trainjob)
    name = min(limits, key=limits.__getitem__)
    limit = max(limits[name], _LEAST)
    with anyio.move_on_after(max(0.0, began + limit.total_seconds() - time.monotonic())):
        return await backend.create(trainjob)
    return await _created_after_all(backend, trainjob, name, limit)


async def _created_after_all(backend: Backend, trainjob: TrainJob, name: str, limit: timedelta) -> TrainJob:
    """The job, if it was created although no reply said so."""
    metadata = trainjob["metadata"]
    unknown = True
    for _ in range(_LOOKS):
        await anyio.sleep(_PAUSE)
        with suppress(TrainJobError), anyio.move_on_after(_PAUSE):
            present = await backend.get(metadata["namespace"], metadata["name"])
            if present is not None and adoption_of(present) == adoption_of(trainjob):
                return present
            unknown = False
    known = "it is unknown whether it was created after all" if unknown else "it does not exist"
    job = f"TrainJob {metadata['namespace']}/{metadata['name']}"
    raise _ERRORS[name](
        f"{job} could not be created within {name} of {short(limit)}, and {known}: the API server, or an admission "
        "webhook that it calls (as Trainer's), has not answered. Check the deployment of the webhook, then launch the "
        "same key again"
    )
