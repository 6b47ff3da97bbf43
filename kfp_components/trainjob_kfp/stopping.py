"""Stops the TrainJob of a terminated step, and all TrainJobs of a run from its exit handler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import chain, repeat
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio

from trainjob import JobRef, Phase, TimedOut, TrainJobClient, TrainJobError
from trainjob.integration import (
    KFP_PIPELINE,
    KFP_RUN,
    KFP_TASK,
    STUDY,
    CancelAction,
    TrainJob,
    cancelling,
    key_hash,
    kfp_label,
    labels_of,
    observe,
    request_cancel,
)
from trainjob_kfp.execution import Execution
from trainjob_kfp.steplog import end_process, write_line

if TYPE_CHECKING:
    from trainjob.integration import PreparedRequest, Trial

_CANCEL_SECONDS = 10.0  # kfp.local and plain pods wait that long before SIGKILL; a KFP backend waits 0.02 to 3 s
_WARM_SECONDS = 20.0  # between two requests that keep a connection open: some load balancers close it after 30 idle s
_FIRST_SECONDS = (1.0, 2.0)  # the first pauses, shorter, to measure early how long a PATCH takes
_POD_SECONDS = 0.02  # a read takes 6 ms, the longest of 110 took 22 ms
_SUSPEND_SECONDS = 0.03  # from SIGTERM on; on a quiet control plane a PATCH takes 8 to 26 ms, a DELETE 3 to 11 ms

_READY_TRIALS = 32  # each has two open connections

_DELETED = 'the TrainJob was deleted; "Retry run" launches a new one, which resumes from checkpoints if there are any'


class _Requests:
    """The prepared requests that stop one job.

    Args:
        job: The job.
        action: ``suspend`` or ``cancel``.
    """

    def __init__(self, job: TrainJob, action: str) -> None:
        self.job, self._action = job, action
        self._suspend: PreparedRequest | None = None
        self._delete: PreparedRequest | None = None

    async def keep_ready(self, client: TrainJobClient) -> None:
        """Keep the requests prepared, and their connections open, until this call is cancelled."""
        cluster = client.backend.cluster
        if cluster is None:
            return
        ref, patch = JobRef.of(self.job), cancelling(self.job, how(self._action))
        self._delete = await cluster.prepared_request(ref, None)
        if patch is not None:
            self._suspend = await cluster.prepared_request(ref, patch)
        requests = [each for each in (self._delete, self._suspend) if each is not None]
        try:
            async with anyio.create_task_group() as tasks:
                for each in requests:
                    tasks.start_soon(_keep_warm, each)
        finally:
            self._delete = self._suspend = None
            for each in requests:
                each.close()

    def send(self, suspended_by: float) -> str:
        """Stop the job.

        Args:
            suspended_by: Deadline for the answer to a suspend, by the monotonic clock.

        Returns:
            What was done, as text; empty if no request could be sent.
        """
        suspend, delete = self._suspend, self._delete
        if suspend is not None and delete is not None:
            sent = suspend.send_or(delete, max(0.0, suspended_by - time.monotonic()))
            if sent is delete:
                return f"{_DELETED}: the API server takes too long to suspend it"
            return self.outcome if sent is suspend else ""
        return self.outcome if delete is not None and delete.send() else ""

    @property
    def outcome(self) -> str:
        """What was done if the request succeeded, as text."""
        if self._action == "suspend" and cancelling(self.job, "suspend") is None:
            return f"{_DELETED}: Kueue would resume a suspended job"
        return f"the TrainJob was asked to stop ({self._action})"


def how(action: str) -> CancelAction:
    """What the action of a component does with a job."""
    return "suspend" if action == "suspend" else "delete"


class StopWithStep:
    """Context manager: SIGTERM and Ctrl-C stop the TrainJob before they end the process.

    If the cluster evicts the step's pod, for example in a drain, the job keeps running and the next pod adopts it.
    Terminate, a drain and the deletion of the run all arrive as SIGTERM, so the process reads its pod first.

    After Terminate, Python has 0.02 to 3 s on a KFP backend (its parent process exits at once, which ends the
    container), and the API server drops a request whose client is gone. So the requests are prepared in advance, each
    on an open connection, and are sent before anything else. A PATCH waits for the webhooks of TrainJobs; a DELETE has
    none. A suspend that is not answered in time, or is expected to take longer, is replaced by a deletion.
    """

    _kept = "the TrainJob keeps running"

    def __init__(self, client: TrainJobClient, key: str, action: str) -> None:
        self._client, self._key, self._action = client, key, action
        self.job: TrainJob | None = None
        self._requests: _Requests | None = None
        self._pod: PreparedRequest | None = None

    async def keep_ready(self) -> None:
        """Keep the requests prepared, and their connections open, until the client is closed."""
        if self._action == "keep" or self._client.backend.cluster is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_pod_ready)
            await self._keep_jobs_ready()

    async def _keep_jobs_ready(self) -> None:
        if self.job is not None:
            self._requests = _Requests(self.job, self._action)
            await self._requests.keep_ready(self._client)

    async def _keep_pod_ready(self) -> None:
        """Keep the request prepared that reads this step's pod; log what a drain does if the step may not read it."""
        cluster, pod = self._client.backend.cluster, os.environ.get("KFP_POD_NAME", "")
        if cluster is None or not pod:
            return
        request = await cluster.prepared_pod_request(cluster.default_namespace, pod)
        if request is None:
            return
        self._pod = request
        try:
            with suppress(TrainJobError, OSError, HTTPException):
                await request.warm()
            if request.forbidden:
                write_line(
                    f"no permission to list pods, so a drain that evicts pod {pod} stops the TrainJob as Terminate does"
                )
            await _keep_warm(request)
        finally:
            self._pod = None
            request.close()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        outcome = self._kept
        try:
            if self._action != "keep":
                outcome = self._evicted() or self._stop_jobs(time.monotonic() + _SUSPEND_SECONDS)
        except Exception as error:  # noqa: BLE001 - the process ends now, on any error
            outcome = f"cannot stop the TrainJob, which may keep running: {error!r}"
        finally:
            end_process(f"{signal.Signals(number).name}: {outcome}", 128 + number)

    def _evicted(self) -> str:
        """What happens to the jobs if the cluster evicts this step's pod, as text; empty if it does not."""
        if (pod := self._pod) is not None:
            from trainjob.integration import disruption_of  # noqa: PLC0415 - an extra, imported by now

            if (found := pod.read(_POD_SECONDS)) and (reason := disruption_of(found)):
                return f"{self._kept}: its step's next pod waits for it ({reason})"
        return ""

    def _stop_jobs(self, suspended_by: float) -> str:
        """Stop the job by a prepared request, otherwise by a new one.

        Args:
            suspended_by: Deadline for the answer to a suspend, by the monotonic clock.

        Returns:
            What was done, as text.
        """
        if self._requests is not None and (outcome := self._requests.send(suspended_by)):
            return outcome
        self._client.start(self.request).result(_CANCEL_SECONDS)
        if self.job is not None:
            return _Requests(self.job, self._action).outcome
        return f"the TrainJob was asked to stop ({self._action})"

    async def request(self) -> None:
        """Request that the job stops: one request once the job is known."""
        if self.job is not None:
            await request_cancel(self._client.backend, self.job, how(self._action))
            return
        # SIGTERM during the launch: the request that creates the job may be in flight.
        for _ in range(20):
            jobs = await self._client.backend.find(self._client.namespace, labels_of(self._key))
            for job in jobs:
                if not observe(job).phase.terminal:
                    await request_cancel(self._client.backend, job, how(self._action))
                    return
            await anyio.sleep(0.05)


class StopTrialsWithStep(StopWithStep):
    """Context manager: SIGTERM and Ctrl-C stop the running trials of a study as `StopWithStep` stops a job.

    Attributes:
        search: The running search. It is cancelled first: a search that sees its trials end records that they failed.
    """

    _kept = "the trials keep running"

    def __init__(self, client: TrainJobClient, key: str, action: str) -> None:
        super().__init__(client, key, action)
        self.search: Future[Any] | None = None
        self._running: set[str] = set()
        self._ready: dict[str, _Requests] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._changed: anyio.Event | None = None

    def change(self, trials: Sequence[Trial]) -> None:
        """Take the trials after a change, on the event loop of the client."""
        self._running = {trial.job for trial in trials if trial.job and not trial.ended}
        if self._changed is not None:
            self._changed.set()

    async def _keep_jobs_ready(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                self._changed = anyio.Event()
                for name in self._scopes.keys() - self._running:
                    self._scopes.pop(name).cancel()
                for name in sorted(self._running - self._scopes.keys())[: _READY_TRIALS - len(self._scopes)]:
                    self._scopes[name] = scope = anyio.CancelScope()
                    tasks.start_soon(self._keep_trial_ready, name, scope)
                await self._changed.wait()

    async def _keep_trial_ready(self, name: str, scope: anyio.CancelScope) -> None:
        with scope, suppress(TrainJobError):  # a new request remains possible
            job = await self._client.backend.get(self._client.namespace, name)
            if job is not None:
                self._ready[name] = _Requests(job, self._action)
                try:
                    await self._ready[name].keep_ready(self._client)
                finally:
                    del self._ready[name]

    def _stop_jobs(self, suspended_by: float) -> str:
        """Stop the trials by prepared requests, all at once; those without one by new requests."""
        if self.search is not None:
            self.search.cancel()
        if ready := dict(self._ready):
            with ThreadPoolExecutor(len(ready)) as threads:
                list(threads.map(lambda each: each.send(suspended_by), ready.values()))
        self._client.start(self.request).result(_CANCEL_SECONDS)
        return f'the trials were asked to stop ({self._action}); a retry or "Retry run" continues the study'

    async def request(self) -> None:
        """Request that the trials stop."""
        for pause in (0.1, 0.0):  # the request that creates a job may be in flight
            jobs = await self._client.backend.find(self._client.namespace, {STUDY: key_hash(self._key)})
            async with anyio.create_task_group() as tasks:
                for job in jobs:
                    if _must_stop(job, how(self._action)):
                        tasks.start_soon(request_cancel, self._client.backend, job, how(self._action))
            await anyio.sleep(pause)


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
