"""Stops the TrainJobs of a terminated step."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import chain, repeat
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio

from trainjob import JobRef, Phase, TrainJobClient, TrainJobError, cancel_key
from trainjob._backends.base import TrainJob
from trainjob._jobs.cancellation import (
    cancelling,
    request_cancel,
)
from trainjob._manifest.attempts import (
    CancelAction,
    given_up,
)
from trainjob._manifest.render import (
    KEY,
    key_hash,
)
from trainjob._manifest.workflow_labels import STUDY
from trainjob._support.kube_objects import mapping
from trainjob.status import observe
from trainjob_kfp.sharing import SharedJobs
from trainjob_kfp.steplog import end_process, leave_message, write_line

if TYPE_CHECKING:
    from trainjob import Cancelled
    from trainjob._backends.kubernetes.prepared import PreparedRequest
    from trainjob.tuning import Trial

_CANCEL_SECONDS = 10.0  # kfp.local and plain pods wait that long before SIGKILL; a KFP backend waits 0.02 to 3 s
_WARM_SECONDS = 20.0  # between two requests that keep a connection open: some load balancers close it after 30 idle s
_FIRST_SECONDS = (1.0, 2.0)  # the first pauses, shorter, to measure early how long a PATCH takes
_POD_SECONDS = 0.02  # a read takes 6 ms, the longest of 110 took 22 ms
_SUSPEND_SECONDS = 0.03  # from SIGTERM on; on a quiet control plane a PATCH takes 8 to 26 ms, a DELETE 3 to 11 ms
_LOOK_SECONDS = 1.0  # for the job of a launch that is on its way; a create takes 10 to 60 ms
_WAITERS_SECONDS = 1.0  # for a read of the Leases after SIGTERM; the latest one before is at most 20 s old
_MARK_SECONDS = 0.5  # for a read of the records of cancels before a suspension by a new request

_READY_TRIALS = 32  # each has two open connections
_NAMED = 40  # most jobs in a last line, which has at most 4096 bytes

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
        work = str(mapping(self.job, "metadata", "labels").get(KEY) or "")
        mark = await _version_mark(client, work) or "true"
        ref, patch = JobRef.of(self.job), cancelling(self.job, how(self._action), mark)
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
        self._followed: JobRef | None = None
        self._requests: _Requests | None = None
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
            from trainjob._backends.kubernetes.pods import disruption_of  # noqa: PLC0415 - an extra, imported by now

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
            return _Requests(job, self._action).outcome
        if not (await self._cancel_key(_LOOK_SECONDS)).jobs:
            return self._not_stopped("its launch has not created it yet")
        return f"the TrainJob was asked to stop ({self._action})"

    async def _request_cancel(self, job: TrainJob) -> None:
        action = how(self._action)
        is_suspended = cancelling(job, action) is not None
        mark = await mark_for(self._client, self._key, "suspend" if is_suspended else "delete")
        await request_cancel(self._client.backend, job, action, mark)

    async def _cancel_key(self, look_seconds: float = 0.0) -> Cancelled:
        return await cancel_key(
            self._client.backend,
            self._key,
            namespace=self._client.namespace,
            action=how(self._action),
            timeout_seconds=0,
            look_seconds=look_seconds,
        )


class StopTrialsWithStep(StopWithStep):
    """Context manager: SIGTERM and Ctrl-C stop the running trials of a study as `StopWithStep` stops a job.

    A trial that another run of the same study key waits for keeps running, see `SharedJobs`.

    Args:
        client: A client that is used by this step only.
        key: Key of the study.
        action: ``suspend``, ``cancel`` or ``keep``.
        run: Id of the run.

    Attributes:
        search: The running search. It is cancelled first: a search that sees its trials end records that they failed.
    """

    _kept = "the trials keep running"

    def __init__(self, client: TrainJobClient, key: str, action: str, run: str) -> None:
        super().__init__(client, key, action)
        self.search: Future[Any] | None = None
        self._jobs = SharedJobs(client, run)
        self._running: set[str] = set()
        self._launching: set[int] = set()
        self._ready: dict[str, _Requests] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}

    def change(self, trials: Sequence[Trial]) -> None:
        """Take the trials after a change, on the event loop of the client."""
        self._running = {trial.job for trial in trials if trial.job and not trial.ended}
        self._launching = {trial.number for trial in trials if not trial.job and not trial.ended}
        if self._changed is not None:
            self._changed.set()

    async def _keep_jobs_ready(self) -> None:
        async with anyio.create_task_group() as tasks:
            if self._jobs.is_shared(self._key):
                tasks.start_soon(self._keep_known)
            while True:
                self._changed = anyio.Event()
                for name in self._scopes.keys() - self._running:
                    self._scopes.pop(name).cancel()
                for name in sorted(self._running - self._scopes.keys())[: _READY_TRIALS - len(self._scopes)]:
                    self._scopes[name] = scope = anyio.CancelScope()
                    tasks.start_soon(self._keep_trial_ready, name, scope)
                await self._changed.wait()

    async def _keep_known(self) -> None:
        """Keep known which trials other runs wait for: after SIGTERM there is no time to ask."""
        for pause in chain(_FIRST_SECONDS, repeat(_WARM_SECONDS)):
            await self._jobs.refresh()
            await anyio.sleep(pause)

    async def _keep_trial_ready(self, name: str, scope: anyio.CancelScope) -> None:
        with scope, suppress(TrainJobError):  # a new request remains possible
            job = await self._client.backend.get(self._client.namespace, name)
            if job is not None:
                self._ready[name] = _Requests(job, self._action)
                try:
                    await self._ready[name].keep_ready(self._client)
                finally:
                    del self._ready[name]

    def _stop_jobs(self, signal_name: str, suspended_by: float) -> str:
        """Stop the trials by prepared requests, all at once; those without one by new requests."""
        if self.search is not None:
            self.search.cancel()
        if ready := [each for each in dict(self._ready).values() if self._jobs.may_stop(each.job)]:
            with ThreadPoolExecutor(len(ready)) as threads:
                list(threads.map(lambda each: each.send(suspended_by), ready))
        return self._stop_by_new_requests(signal_name)

    def _not_stopped(self, why: str) -> str:
        named = sorted(self._running)[:_NAMED]
        if not named:
            return f"cannot stop all trials of study {self._key}: {why}"
        command = f"{command_of(self._client)} cancel -n {self._client.namespace}"
        return (
            f"cannot stop all trials of study {self._key}, which may keep running: {why}; stop them: "
            f"for job in {' '.join(named)}; do {command} $job; done"
        )

    async def request(self) -> str:
        """Request that the trials stop, also those whose launch is on its way."""
        backend, namespace, action = self._client.backend, self._client.namespace, how(self._action)
        launches: list[Awaitable[object]] = []
        if self._jobs.is_shared(self._key):
            with anyio.move_on_after(_WAITERS_SECONDS):
                await self._jobs.refresh()
        else:  # of a shared study, the record of a cancel would end another run's launch of the same trial
            launches = [
                cancel_key(
                    backend,
                    f"{self._key}/{number}",
                    namespace=namespace,
                    action=action,
                    timeout_seconds=0,
                    look_seconds=_LOOK_SECONDS,
                )
                for number in sorted(self._launching)
            ]
        await all_at_once([self._stop_found(action), *launches])
        return f'the trials were asked to stop ({self._action}); a retry or "Retry run" continues the study'

    async def _stop_found(self, action: CancelAction) -> None:
        """Stop the trials that exist or appear soon."""
        until = time.monotonic() + (_LOOK_SECONDS if self._launching else 0.1)
        # One mark for all suspensions: this stop does not apply to a launch that begins meanwhile.
        mark, jobs = await asyncio.gather(mark_for(self._client, self._key, action), self._find())
        late = False
        while True:
            mine = [job for job in jobs if must_stop(job, action) and self._jobs.may_stop(job)]
            await request_all(self._client, mine, action, mark)
            if late:
                return
            await anyio.sleep(0.1)
            late = time.monotonic() >= until
            jobs = await self._find()

    async def _find(self) -> list[TrainJob]:
        return await self._client.backend.find(self._client.namespace, {STUDY: key_hash(self._key)})


async def _keep_warm(request: PreparedRequest) -> None:
    for pause in chain(_FIRST_SECONDS, repeat(_WARM_SECONDS)):
        with suppress(TrainJobError, OSError, HTTPException):  # a new request remains possible
            await request.warm()
        await anyio.sleep(pause)


async def all_at_once(requests: Iterable[Awaitable[object]]) -> None:
    """Send all requests, and raise the first error once all have been answered."""
    for each in await asyncio.gather(*requests, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each


async def mark_for(client: TrainJobClient, key: str, action: CancelAction) -> str:
    """The mark of jobs that are going to be suspended by new requests: the present version of the records of cancels.

    A waiter of a later launch compares it with that launch, and resumes a job whose suspension arrives late. On the
    local backend no request arrives late, and its versions count cancels only.

    Args:
        client: A client of the jobs' backend and namespace.
        key: Selects the records in the reply, whose version is that of all records.
        action: ``suspend``; a deletion needs no mark.

    Returns:
        The version; ``true``, which no waiter undoes, if it is unknown or not needed.
    """
    if action == "suspend" and client.backend.cluster is not None:
        with anyio.move_on_after(_MARK_SECONDS):
            return await _version_mark(client, key_hash(key)) or "true"
    return "true"


async def _version_mark(client: TrainJobClient, work: str) -> str:
    """The present version of the records of cancels, as a mark; empty if it cannot be read."""
    with suppress(TrainJobError):
        version, _ = await client.backend.cancels(client.namespace, work)
        return "" if version is None else str(version)
    return ""


async def request_all(client: TrainJobClient, jobs: Sequence[TrainJob], action: CancelAction, mark: str) -> None:
    """Request that the jobs stop: all active ones at once, then those that are suspended or given up.

    Args:
        client: A client of the jobs' backend.
        jobs: The jobs.
        action: ``suspend`` or ``delete``.
        mark: The mark of suspended jobs, see `mark_for`.

    Raises:
        TrainJobError: A request failed; the others of its group were sent.
    """
    active = [job for job in jobs if is_active(job)]
    for group in (active, [job for job in jobs if not is_active(job)]):
        await all_at_once(request_cancel(client.backend, job, action, mark) for job in group)


def command_of(client: TrainJobClient) -> str:
    """The command that reads jobs of the client's backend, wherever it is run."""
    return "trainjob --backend local" if client.backend.cluster is None else "trainjob"


def is_active(job: TrainJob) -> bool:
    """Whether the job runs or waits to run, and is not suspended or given up."""
    return observe(job).phase is not Phase.SUSPENDED and given_up(job) is None


def must_stop(trainjob: TrainJob, action: CancelAction) -> bool:
    """Whether `action` has to be applied: the job runs or waits to run, or is suspended and is to be deleted."""
    phase = observe(trainjob).phase
    if phase.terminal or "deletionTimestamp" in trainjob["metadata"]:
        return False
    return phase is not Phase.SUSPENDED or action == "delete"
