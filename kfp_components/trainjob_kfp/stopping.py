"""Stops the TrainJob of a terminated step."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from contextlib import suppress
from http.client import HTTPException
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

import anyio

from trainjob import JobRef, TrainJobClient, TrainJobError, cancel_key
from trainjob._backends.base import TrainJob
from trainjob._jobs.cancellation import cancelling, request_cancel
from trainjob._manifest.attempts import stops_by
from trainjob._support.signals import handled
from trainjob_kfp.steplog import end_process, leave_message, write_line
from trainjob_kfp.stop_requests import StopRequests, keep_warm, mark_for

if TYPE_CHECKING:
    from trainjob import Cancelled
    from trainjob._backends.base import PreparedRequest

LOOK_SECONDS = 1.0
"""For the job of a launch that is on its way; a create takes 10 to 60 ms."""

_CANCEL_SECONDS = 10.0  # kfp.local and plain pods wait that long before SIGKILL; a KFP backend waits 0.02 to 3 s
_POD_SECONDS = 0.02  # a read takes 6 ms, the longest of 110 took 22 ms
_SUSPEND_SECONDS = 0.03  # from SIGTERM on; on a quiet control plane a PATCH takes 8 to 26 ms, a DELETE 3 to 11 ms


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
        self._followed: JobRef | None = None
        self._requests: StopRequests | None = None
        self._pod: PreparedRequest | None = None
        self._changed: anyio.Event | None = None

    def follow(self, ref: JobRef) -> None:
        """Stop this attempt from now on, on the event loop of the client."""
        self.job, self._requests, self._followed = None, None, ref
        if self._changed is not None:
            self._changed.set()

    async def keep_ready(self) -> None:
        """Keep the requests prepared, and their connections open, until the client is closed."""
        if self._action == "keep" or self._client.backend.cluster is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_pod_ready)
            await self._keep_jobs_ready()

    async def _keep_jobs_ready(self) -> None:
        while True:
            self._changed = changed = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_job_ready)
                await changed.wait()
                tasks.cancel_scope.cancel()

    async def _keep_job_ready(self) -> None:
        with suppress(TrainJobError):  # a new request remains possible
            if (ref := self._followed) is not None:
                found = await self._client.backend.get(ref.namespace, ref.name)
                if found is not None and found["metadata"]["uid"] == ref.uid:
                    self.job = found
            if self.job is not None:
                self._requests = StopRequests(self.job, self._action)
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
            await keep_warm(request)
        finally:
            self._pod = None
            request.close()

    def __enter__(self) -> Self:
        self._handled = handled(self._stop)
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handled.__exit__(kind, error, tb)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        outcome, name = self._kept, signal.Signals(number).name
        try:
            if self._action != "keep":
                outcome = self._evicted() or self._stop_jobs(name, time.monotonic() + _SUSPEND_SECONDS)
        except TimeoutError:
            outcome = self._not_stopped(f"the API server has not confirmed it within {_CANCEL_SECONDS:g} s")
        except Exception as error:  # noqa: BLE001 - the process ends now, on any error
            outcome = self._not_stopped(str(error) if isinstance(error, TrainJobError) else repr(error))
        finally:
            end_process(f"{name}: {outcome}", 128 + number)

    def _evicted(self) -> str:
        """What happens to the jobs if the cluster evicts this step's pod, as text; empty if it does not."""
        if (pod := self._pod) is not None:
            from trainjob._backends.kubernetes.pods import disruption_of

            if (found := pod.read(_POD_SECONDS)) and (reason := disruption_of(found)):
                return f"{self._kept}: its step's next pod waits for it ({reason})"
        return ""

    def _stop_jobs(self, signal_name: str, suspended_by: float) -> str:
        """Stop the job by a prepared request, then the rest of its key; without a prepared request, all by new ones.

        Args:
            signal_name: Name of the received signal.
            suspended_by: Deadline for the answer to a suspend, by the monotonic clock.

        Returns:
            What was done, as text.
        """
        until = time.monotonic() + _CANCEL_SECONDS
        if self._requests is not None and (outcome := self._requests.send(suspended_by)):
            self._stop_the_rest(f"{signal_name}: {outcome}", until)
            return outcome
        return self._stop_by_new_requests(signal_name)

    def _stop_the_rest(self, line: str, until: float) -> None:
        """Stop other attempts of the key and launches on their way, after the job was stopped. Best effort.

        Args:
            line: The last line of this process, which can be killed before the end of this call.
            until: Deadline, by the monotonic clock.
        """
        with suppress(Exception):  # the job was stopped, and the process ends now
            requested = self._client.start(self._cancel_key)
            with suppress(OSError):
                leave_message(line)
            requested.result(max(0.0, until - time.monotonic()))

    def _stop_by_new_requests(self, signal_name: str) -> str:
        requested = self._client.start(self.request)
        if self._client.backend.cluster is not None:  # this process can be killed before the reply
            with suppress(OSError):
                leave_message(f"{signal_name}: {self._not_stopped('the request has not been confirmed yet')}")
        return requested.result(_CANCEL_SECONDS)

    def _not_stopped(self, why: str) -> str:
        """The last line if the job was not stopped: the reason, and the command for a person."""
        if self.job is None:
            what, words = f"the TrainJob of key {self._key}", ["--key", self._key]
        else:
            ref = JobRef.of(self.job)
            what, words = f"TrainJob {ref}", [ref.name]
        command = f"{command_of(self._client)} cancel -n {self._client.namespace} {shlex.join(words)}"
        return f"cannot stop {what}, which may keep running: {why}; stop it: {command}"

    async def request(self) -> str:
        """Request that the job stops, by new requests; during its launch, as soon as it appears.

        The record of the cancel lets a launch on its way stop what it creates, and the reaper repeat a suspension that
        is refused for longer than this process has.

        Returns:
            What was done, as text.
        """
        if (job := self.job) is not None:
            requests = (self._request_cancel(job), self._cancel_key())
            sent, _ = await asyncio.gather(*requests, return_exceptions=True)
            if isinstance(sent, BaseException):
                raise sent
            return StopRequests(job, self._action).outcome
        if not (await self._cancel_key(LOOK_SECONDS)).jobs:
            return self._not_stopped("its launch has not created it yet")
        return f"the TrainJob was asked to stop ({self._action})"

    async def _request_cancel(self, job: TrainJob) -> None:
        action = stops_by(self._action)
        is_suspended = cancelling(job, action) is not None
        mark = await mark_for(self._client, self._key, "suspend" if is_suspended else "cancel")
        await request_cancel(self._client.backend, job, action, mark)

    async def _cancel_key(self, look_seconds: float = 0.0) -> Cancelled:
        return await cancel_key(
            self._client.backend,
            self._key,
            namespace=self._client.namespace,
            action=stops_by(self._action),
            timeout_seconds=0,
            look_seconds=look_seconds,
        )


def command_of(client: TrainJobClient) -> str:
    """The command that reads jobs of the client's backend, wherever it is run."""
    return "trainjob --backend local" if client.backend.cluster is None else "trainjob"
