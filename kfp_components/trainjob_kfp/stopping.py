"""Stop TrainJobs: that of a step with the step, those of a run after it."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from http.client import HTTPException
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import anyio

from trainjob import Phase, TrainJobClient, TrainJobError
from trainjob.backends.base import TrainJob
from trainjob.errors import TimedOut
from trainjob.launch import CancelAction, cancelling, request_cancel
from trainjob.manifest import JobRef, key_hash, labels_of
from trainjob.status import observe
from trainjob_kfp.execution import Execution
from trainjob_kfp.steplog import say

if TYPE_CHECKING:
    from trainjob.backends.kubernetes.urgent import Urgent

RUN = "pipeline/runid"
"""Label of a run's TrainJobs: that which KFP gives to the run's pods."""
PIPELINE, TASK = "trainjob.dev/kfp-pipeline", "trainjob.dev/kfp-task"
"""Labels of a TrainJob: the names of its pipeline and of its task."""

_LABEL_VALUE = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

_CANCEL_SECONDS = 10.0  # kfp.local and plain pods leave that long; on a KFP backend it is 0.03 to 1.7 s
_WARM_SECONDS = 20.0  # between two requests that keep a connection open: some load balancers cut what is idle for 30 s


class StopWithStep:
    """While it is entered, SIGTERM and Ctrl-C stop the TrainJob before they end the process.

    After Terminate, Python has 0.03 to 1.7 s on a KFP backend (its parent dies at once and takes the container along).
    So the request is prepared beforehand, on a connection that is open, and goes out before anything else.
    """

    def __init__(self, client: TrainJobClient, key: str, action: str) -> None:
        self._client, self._key, self._action = client, key, action
        self.job: TrainJob | None = None
        self._urgent: Urgent | None = None

    @property
    def _how(self) -> CancelAction:
        return "suspend" if self._action == "suspend" else "delete"

    async def keep_ready(self) -> None:
        """Have the request ready, and its connection open, until the client is closed."""
        from trainjob.backends.kubernetes.backend import KubernetesBackend  # noqa: PLC0415 - an extra

        backend = self._client.backend
        if self._action == "keep" or self.job is None or not isinstance(backend, KubernetesBackend):
            return
        urgent = await backend.urgent(JobRef.of(self.job), cancelling(self.job, self._how))
        if urgent is None:
            return
        try:
            while True:
                with suppress(TrainJobError, OSError, HTTPException):  # the usual way is still there
                    await urgent.warm()
                    self._urgent = urgent
                await anyio.sleep(_WARM_SECONDS)
        finally:
            self._urgent = None
            urgent.close()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        outcome = "the TrainJob goes on"
        try:
            if self._action != "keep":
                if self._urgent is None or not self._urgent.send():
                    self._client.start(self.request).result(_CANCEL_SECONDS)
                outcome = f"the TrainJob was asked to stop ({self._action})"
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends now
            outcome = f"the TrainJob could not be asked to stop and may go on: {error!r}"
        finally:
            # Past Python's buffers, which whoever was interrupted may be holding.
            os.write(1, f"{signal.Signals(number).name}: {outcome}\n".encode())
            os._exit(128 + number)

    async def request(self) -> None:
        """Ask the job to stop: one request, once it is known which job it is."""
        if self.job is not None:
            await request_cancel(self._client.backend, self.job, self._how)
            return
        # In the middle of launching: the request that creates the job may be on its way.
        for _ in range(20):
            jobs = await self._client.backend.find(self._client.namespace, labels_of(self._key))
            for job in jobs:
                if not observe(job).phase.terminal:
                    await request_cancel(self._client.backend, job, self._how)
                    return
            await anyio.sleep(0.05)


def stop_all(client: TrainJobClient, run: str, action: CancelAction, seconds: float) -> list[str]:
    """Stop the jobs of a run, those included that appear meanwhile; the names of those that were running.

    Raises:
        TimedOut: some were still ending after `seconds`.
    """

    async def stop() -> list[str]:
        stopped: dict[str, JobRef] = {}
        deadline = time.monotonic() + seconds
        while True:
            found = await client.backend.find(client.namespace, run_label(run))
            going = [job for job in found if _goes_on(job, action)]
            for job in going:
                ref = JobRef.of(job)
                if ref.uid not in stopped:
                    say(f"TrainJob {ref} is still {observe(job).phase}: {action}")
                    stopped[ref.uid] = ref
                await request_cancel(client.backend, job, action)
            left = [ref for ref in stopped.values() if not await client.backend.stopped(ref)]
            if not left and not going:
                return sorted(ref.name for ref in stopped.values())
            if time.monotonic() > deadline:
                names = ", ".join(str(ref) for ref in left)
                raise TimedOut(f"after {seconds:g} s pods of TrainJobs that were told to stop are still there: {names}")
            await anyio.sleep(0.5)

    return client.call(stop)


def _goes_on(trainjob: TrainJob, action: CancelAction) -> bool:
    """Whether it runs, or will: one that is suspended does not, unless Kueue has suspended it."""
    phase = observe(trainjob).phase
    if phase.terminal or "deletionTimestamp" in trainjob["metadata"]:
        return False
    return phase is not Phase.SUSPENDED or action == "delete"


def run_label(run: str) -> dict[str, str]:
    """The label of a run's jobs."""
    return {RUN: label_value(run)}


def origin_of(execution: Execution) -> dict[str, str]:
    """Labels that say which task of which run of which pipeline a job is for."""
    values = {PIPELINE: execution.pipeline, TASK: execution.task}
    return run_label(execution.run) | {name: label_value(value) for name, value in values.items() if value}


def label_value(text: str) -> str:
    """`text` as a label's value; a hash where it is too long or has other characters."""
    return text if _LABEL_VALUE.fullmatch(text) else key_hash(text)
