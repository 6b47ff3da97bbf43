"""Stops the TrainJob of a terminated step, and all TrainJobs of a run from its exit handler."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from http.client import HTTPException
from itertools import chain, repeat
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import anyio

from trainjob import JobRef, Phase, TimedOut, TrainJobClient, TrainJobError
from trainjob.integration import (
    KFP_PIPELINE,
    KFP_RUN,
    KFP_TASK,
    CancelAction,
    TrainJob,
    cancelling,
    kfp_label,
    labels_of,
    observe,
    request_cancel,
)
from trainjob_kfp.execution import Execution
from trainjob_kfp.steplog import end_process, write_line

if TYPE_CHECKING:
    from trainjob.integration import PreparedRequest

_CANCEL_SECONDS = 10.0  # kfp.local and plain pods wait that long before SIGKILL; a KFP backend waits 0.02 to 3 s
_WARM_SECONDS = 20.0  # between two requests that keep a connection open: some load balancers close it after 30 idle s
_FIRST_SECONDS = (1.0, 2.0)  # the first pauses, shorter, to measure early how long a PATCH takes
_POD_SECONDS = 0.02  # a read takes 6 ms, the longest of 110 took 22 ms
_SUSPEND_SECONDS = 0.03  # from SIGTERM on; on a quiet control plane a PATCH takes 8 to 26 ms, a DELETE 3 to 11 ms

_DELETED = 'the TrainJob was deleted; "Retry run" launches a new one, which resumes from checkpoints if there are any'


class StopWithStep:
    """Context manager: SIGTERM and Ctrl-C stop the TrainJob before they end the process.

    If the cluster evicts the step's pod, for example in a drain, the job keeps running and the next pod adopts it.
    Terminate, a drain and the deletion of the run all arrive as SIGTERM, so the process reads its pod first.

    After Terminate, Python has 0.02 to 3 s on a KFP backend (its parent process exits at once, which ends the
    container), and the API server drops a request whose client is gone. So the requests are prepared in advance, each
    on an open connection, and are sent before anything else. A PATCH waits for the webhooks of TrainJobs; a DELETE has
    none. A suspend that is not answered in time, or is expected to take longer, is replaced by a deletion.
    """

    def __init__(self, client: TrainJobClient, key: str, action: str) -> None:
        self._client, self._key, self._action = client, key, action
        self.job: TrainJob | None = None
        self._suspend: PreparedRequest | None = None
        self._delete: PreparedRequest | None = None
        self._pod: PreparedRequest | None = None

    @property
    def _how(self) -> CancelAction:
        return "suspend" if self._action == "suspend" else "delete"

    async def keep_ready(self) -> None:
        """Keep the requests prepared, and their connections open, until the client is closed."""
        cluster = self._client.backend.cluster
        if self._action == "keep" or self.job is None or cluster is None:
            return
        ref, patch = JobRef.of(self.job), cancelling(self.job, self._how)
        self._delete = await cluster.prepared_request(ref, None)
        if patch is not None:
            self._suspend = await cluster.prepared_request(ref, patch)
        if pod := os.environ.get("KFP_POD_NAME", ""):
            self._pod = await cluster.prepared_pod_request(cluster.default_namespace, pod)
        requests = [each for each in (self._delete, self._suspend, self._pod) if each is not None]
        try:
            async with anyio.create_task_group() as tasks:
                for each in requests:
                    tasks.start_soon(_keep_warm, each)
                tasks.start_soon(self._warn_about_drains, pod)
        finally:
            self._delete = self._suspend = self._pod = None
            for each in requests:
                each.close()

    async def _warn_about_drains(self, pod: str) -> None:
        """Log what a drain does if this step may not read its pod."""
        if self._pod is None:
            return
        with suppress(TrainJobError, OSError, HTTPException):
            await self._pod.warm()
        if self._pod.forbidden:
            write_line(
                f"no permission to list pods, so a drain that evicts pod {pod} stops the TrainJob as Terminate does"
            )

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        outcome = "the TrainJob keeps running"
        try:
            if self._action != "keep":
                outcome = self._stop_job(time.monotonic() + _SUSPEND_SECONDS)
        except Exception as error:  # noqa: BLE001 - the process ends now, on any error
            outcome = f"cannot stop the TrainJob, which may keep running: {error!r}"
        finally:
            end_process(f"{signal.Signals(number).name}: {outcome}", 128 + number)

    def _stop_job(self, suspended_by: float) -> str:
        """Stop the job by a prepared request, otherwise by a new one.

        Args:
            suspended_by: Deadline for the answer to a suspend, by the monotonic clock.

        Returns:
            What was done, as text.
        """
        suspend, delete, pod = self._suspend, self._delete, self._pod
        if pod is not None:
            from trainjob.integration import disruption_of  # noqa: PLC0415 - an extra, imported by now

            if (found := pod.read(_POD_SECONDS)) and (reason := disruption_of(found)):
                return f"the TrainJob keeps running: its step's next pod waits for it ({reason})"
        if suspend is not None and delete is not None:
            sent = suspend.send_or(delete, max(0.0, suspended_by - time.monotonic()))
            if sent is not None:
                return (
                    self._stop_outcome
                    if sent is suspend
                    else f"{_DELETED}: the API server takes too long to suspend it"
                )
        elif delete is not None and delete.send():
            return self._stop_outcome
        self._client.start(self.request).result(_CANCEL_SECONDS)
        return self._stop_outcome

    @property
    def _stop_outcome(self) -> str:
        """What was done if the request succeeded, as text."""
        if self._action == "suspend" and self.job is not None and cancelling(self.job, "suspend") is None:
            return f"{_DELETED}: Kueue would resume a suspended job"
        return f"the TrainJob was asked to stop ({self._action})"

    async def request(self) -> None:
        """Request that the job stops: one request once the job is known."""
        if self.job is not None:
            await request_cancel(self._client.backend, self.job, self._how)
            return
        # SIGTERM during the launch: the request that creates the job may be in flight.
        for _ in range(20):
            jobs = await self._client.backend.find(self._client.namespace, labels_of(self._key))
            for job in jobs:
                if not observe(job).phase.terminal:
                    await request_cancel(self._client.backend, job, self._how)
                    return
            await anyio.sleep(0.05)


async def _keep_warm(request: PreparedRequest) -> None:
    for pause in chain(_FIRST_SECONDS, repeat(_WARM_SECONDS)):
        with suppress(TrainJobError, OSError, HTTPException):  # a new request remains possible
            await request.warm()
        await anyio.sleep(pause)


def stop_all(client: TrainJobClient, run: str, action: CancelAction, seconds: float) -> list[str]:
    """Stop the jobs of a run, including jobs that are created meanwhile.

    Returns:
        The names of the jobs that were running.

    Raises:
        TimedOut: pods of some jobs still exist after `seconds`.
    """

    async def stop() -> list[str]:
        stopped: dict[str, JobRef] = {}
        deadline = time.monotonic() + seconds
        while True:
            found = await client.backend.find(client.namespace, run_label(run))
            active = [job for job in found if _must_stop(job, action)]
            for job in active:
                ref = JobRef.of(job)
                if ref.uid not in stopped:
                    write_line(f"TrainJob {ref} is still {observe(job).phase}: {action}")
                    stopped[ref.uid] = ref
                await request_cancel(client.backend, job, action)
            remaining = [ref for ref in stopped.values() if not await client.backend.stopped(ref)]
            if not remaining and not active:
                return sorted(ref.name for ref in stopped.values())
            if time.monotonic() > deadline:
                names = ", ".join(str(ref) for ref in remaining)
                raise TimedOut(f"{seconds:g} s after the stop request, pods of these TrainJobs still exist: {names}")
            await anyio.sleep(0.5)

    return client.call(stop)


def _must_stop(trainjob: TrainJob, action: CancelAction) -> bool:
    """Whether `action` has to be applied: the job runs or waits to run, or is suspended and is to be deleted."""
    phase = observe(trainjob).phase
    if phase.terminal or "deletionTimestamp" in trainjob["metadata"]:
        return False
    return phase is not Phase.SUSPENDED or action == "delete"


def run_label(run: str) -> dict[str, str]:
    """The label that selects the jobs of a run."""
    return {KFP_RUN: kfp_label(run)}


def origin_of(execution: Execution) -> dict[str, str]:
    """Labels with the pipeline, the run and the task of a job."""
    values = {KFP_PIPELINE: execution.pipeline, KFP_TASK: execution.task}
    return run_label(execution.run) | {name: kfp_label(value) for name, value in values.items() if value}
