"""Stops the trials of a terminated step that runs a study."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from trainjob import TrainJobClient, TrainJobError, cancel_key
from trainjob._backends.base import TrainJob
from trainjob._manifest.attempts import CancelAction, stops_by
from trainjob._manifest.workflow_labels import STUDY
from trainjob.job import key_hash
from trainjob_kfp.sharing import SharedJobs
from trainjob_kfp.stop_requests import StopRequests, all_at_once, mark_for, must_stop, pauses, request_all
from trainjob_kfp.stopping import LOOK_SECONDS, StopWithStep, command_of

if TYPE_CHECKING:
    from trainjob.tuning import Trial

_WAITERS_SECONDS = 1.0  # for a read of the Leases after SIGTERM; the latest one before is at most 20 s old

_READY_TRIALS = 32  # each has two open connections
_NAMED = 40  # most jobs in a last line, which has at most 4096 bytes


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
        self._ready: dict[str, StopRequests] = {}
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
        for pause in pauses():
            await self._jobs.refresh()
            await anyio.sleep(pause)

    async def _keep_trial_ready(self, name: str, scope: anyio.CancelScope) -> None:
        with scope, suppress(TrainJobError):  # a new request remains possible
            job = await self._client.backend.get(self._client.namespace, name)
            if job is not None:
                self._ready[name] = StopRequests(job, self._action)
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
        backend, namespace, action = self._client.backend, self._client.namespace, stops_by(self._action)
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
                    look_seconds=LOOK_SECONDS,
                )
                for number in sorted(self._launching)
            ]
        await all_at_once([self._stop_found(action), *launches])
        return f'the trials were asked to stop ({self._action}); a retry or "Retry run" continues the study'

    async def _stop_found(self, action: CancelAction) -> None:
        """Stop the trials that exist or appear soon."""
        until = time.monotonic() + (LOOK_SECONDS if self._launching else 0.1)
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
