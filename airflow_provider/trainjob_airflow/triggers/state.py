"""The trigger of a deferred `TrainJobSensor`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import TriggerEvent

from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.states import Wait, Wanted, diagnosis_of_end
from trainjob_airflow.tasklog import progress_logger
from trainjob_airflow.triggers.base import Trigger, event_of, load

if TYPE_CHECKING:
    from trainjob import Backend, JobRef, Observation
    from trainjob._jobs.progress_log import ProgressLogger


class TrainJobStateTrigger(Trigger):
    """Waits until a job reaches one of several phases or a condition. Yields one event and never raises.

    If the job is gone or was given up, and another attempt of its key counts, the trigger waits for that one.

    The event's payload is ``{"status": "reached" | "ended" | "hung" | "error", "message": …, "retryable": …}``. With
    ``hung``, by the ``stall_timeout`` of the job, and with the ``ended`` of a failed job it has a ``diagnosis``.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        namespace: Namespace of the job; the connection's if None.
        name: Name of the job, which need not exist yet; empty if `labels` select the job.
        labels: Labels of the job.
        phases: Names of the phases.
        condition: Type of a status condition, instead of phases.
        job: Namespace, name, UID and attempt of the job, if the task has found it: it may be deleted since.
        poll_interval: Seconds between two checks whether the job exists.
        target: Settings of the connection, if they hold no secret: the result of `TrainJobHook.target`.
    """

    def __init__(
        self,
        *,
        trainjob_conn_id: str,
        namespace: str | None,
        name: str = "",
        labels: dict[str, str] | None = None,
        phases: list[str],
        condition: str = "",
        job: list[Any] | None = None,
        poll_interval: float = 10,
        target: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.trainjob_conn_id = trainjob_conn_id
        self.namespace = namespace
        self.name = name
        self.labels = labels
        self.phases = phases
        self.condition = condition
        self.job = job
        self.poll_interval = poll_interval
        self.target = target

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("trainjob_conn_id", "namespace", "name", "labels", "phases", "condition", "job", "poll_interval")
        arguments = {name: getattr(self, name) for name in (*names, "target")}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the phase or condition, and yield one event."""
        yield TriggerEvent(await self._outcome())

    async def _outcome(self) -> dict[str, Any]:
        await asyncio.to_thread(load)
        from trainjob import JobHung, TrainJobError, TrainJobFailed
        from trainjob._diagnosis.serialization import pack_diagnosis

        hook = TrainJobHook(self.trainjob_conn_id, self.target)
        try:
            async with hook.shared_backend() as backend:
                namespace = self.namespace or await hook.namespace() or backend.default_namespace
                return await self._wait(backend, namespace)
        except TrainJobFailed as error:  # it hangs, or another process has given it up
            status = "hung" if isinstance(error, JobHung) else "ended"
            return event_of(status, str(error)) | {"diagnosis": pack_diagnosis(error.diagnosis)}
        except TrainJobError as error:
            return event_of("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            self.log.exception("the trigger failed")
            return event_of("error", f"{type(error).__name__}: {error}", retryable=False)

    async def _wait(self, backend: Backend, namespace: str) -> dict[str, Any]:
        from trainjob import JobRef
        from trainjob._jobs.successors import JobReplaced

        sought = Wanted(self.name, self.labels, tuple(self.phases), self.condition)
        if self.job is not None:
            ref = JobRef(*self.job)
        else:
            while (trainjob := await sought.find(backend, namespace)) is None:
                await asyncio.sleep(self.poll_interval)
            ref = JobRef.of(trainjob)
        while True:
            wait = Wait(backend, ref, sought)
            try:
                return await self._watch(backend, wait, sought)
            except JobReplaced as replaced:
                self.log.warning("TrainJob %s is gone or was given up; waiting for TrainJob %s", ref, replaced.by)
                ref = replaced.by
            finally:
                wait.leave()

    async def _watch(self, backend: Backend, wait: Wait, sought: Wanted) -> dict[str, Any]:
        """Watch one attempt.

        Raises:
            JobReplaced: Another attempt of the key counts.
            JobHung: Only the end of the job is waited for, and no rank made progress for its `stall_timeout`.
        """
        ref, progress, latest = wait.ref, progress_logger(self.log), None
        async with aclosing(self._observed(backend, wait, sought, progress)) as changes:
            async for observation, notice, trainjob in changes:
                if observation != latest or notice:
                    progress.change(observation, notice)
                latest = observation
                if sought.reached(trainjob, observation):
                    job = {"namespace": ref.namespace, "job": ref.name}
                    return event_of("reached", f"TrainJob {ref} is {observation.phase}") | job
                if observation.phase.terminal:
                    break
        return await self._missed(backend, ref, latest, sought)

    async def _observed(
        self, backend: Backend, wait: Wait, sought: Wanted, progress: ProgressLogger
    ) -> AsyncGenerator[tuple[Observation, str, Mapping[str, Any] | None]]:
        """Observations of a job with notices, and with the object unless only its end is waited for."""
        from trainjob._jobs.following import follow

        if sought.is_end:
            async with aclosing(follow(backend, wait.ref, notify=progress.change)) as changes:
                async for observation, notice in changes:
                    yield observation, notice, None
            return
        async with aclosing(backend.watch(wait.ref)) as snapshots:
            async for snapshot in snapshots:
                observation, notice = await wait.observe(snapshot.trainjob, snapshot.blocker)
                yield observation, notice or snapshot.notice, snapshot.trainjob

    async def _missed(
        self, backend: Backend, ref: JobRef, latest: Observation | None, sought: Wanted
    ) -> dict[str, Any]:
        """The event of a job that has ended before it was in the state."""
        from trainjob._diagnosis.serialization import pack_diagnosis

        ended = f"is {latest.phase}" if latest is not None else "was deleted"
        event = event_of("ended", f"TrainJob {ref} {ended}; it can no longer {sought.state}")
        diagnosis = await diagnosis_of_end(backend, ref, latest)
        return event if diagnosis is None else event | {"diagnosis": pack_diagnosis(diagnosis)}
