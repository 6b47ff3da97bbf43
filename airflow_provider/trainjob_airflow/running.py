"""The job that a task handles in this process; a signal handler can interrupt the launch and the wait."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob_airflow.exceptions import TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.tasklog import progress_logger

if TYPE_CHECKING:
    from trainjob import (
        Backend,
        Diagnosis,
        Evidence,
        JobRef,
        Observation,
        TrainJobClient,
        TrainJobResult,
        TrainJobSpec,
        WaitOptions,
    )
    from trainjob._backends.base import TrainJob
    from trainjob._jobs.cancellation import CrashAction
    from trainjob._manifest.attempts import CancelAction
    from trainjob.goodput import Goodput
    from trainjob_airflow.study import TaskStudy
    from trainjob_airflow.tasklog import Log
    from trainjob_airflow.training import TaskTraining

_T = TypeVar("_T")

REPLY_SECONDS = 1.0  # of the 5 s that a killed task has left
_LOOK_SECONDS = 1.0  # to look for the job of an interrupted launch, whose request may be on its way
_EVIDENCE_SECONDS = 5.0
_LAST_LOOK = 5.0  # seconds to observe a job whose deadline passed while nothing waited: it may have ended before


@contextmanager
def connected(trainjob_conn_id: str, namespace: str | None) -> Iterator[TrainJobClient]:
    """Open a client of the connection and convert errors to Airflow's, as `airflow_errors` does."""
    with airflow_errors(), TrainJobHook(trainjob_conn_id).client(namespace) as client:
        yield client


@contextmanager
def airflow_errors() -> Iterator[None]:
    """Convert errors of `trainjob` to Airflow's.

    Raises:
        TrainJobFatal: The connection does not exist, or another try cannot succeed.
        TrainJobFailure: Another try may succeed.
    """
    from trainjob import TrainJobError

    try:
        yield
    except AirflowNotFoundException as error:
        raise TrainJobFatal(str(error)) from None
    except TrainJobError as error:
        raise airflow_error(error) from None


def has_ended(trainjob: TrainJob | None) -> bool:
    """Whether a job has ended or was deleted."""
    from trainjob.status import observe

    return trainjob is None or observe(trainjob).phase.terminal


def seconds_to_wait(deadline: datetime | None, margin: float = 0.0) -> float | None:
    """Seconds until `margin` before the deadline; 5 s if that has passed, None without a deadline."""
    if deadline is None:
        return None
    left = (deadline - datetime.now(UTC)).total_seconds() - margin
    return left if left > 0 else _LAST_LOOK


async def stop_key(
    backend: Backend,
    key: str,
    action: CancelAction,
    seconds: float,
    *,
    namespace: str,
    tried: int,
    ref: JobRef | None = None,
    look: float = 0.0,
) -> bool:
    """Stop all attempts of a key, also one whose launch is on its way, unless a later try has launched or adopted it.

    Args:
        backend: Backend that runs the jobs.
        key: The key.
        action: ``cancel`` or ``suspend``.
        seconds: How long to wait for the last pod.
        namespace: Namespace of the jobs.
        tried: Number of the try that is ended.
        ref: The attempt that counts, if it is known.
        look: How long to look for an active attempt before that, in seconds.

    Returns:
        True if nothing of the attempts runs any longer; False if they are still terminating.
    """
    from trainjob import cancel, cancel_key

    deadline = monotonic() + look + seconds
    stopped = await cancel_key(
        backend,
        key,
        namespace=namespace,
        action=action,
        timeout_seconds=seconds,
        tried=tried,
        look_seconds=look,
    )
    if ref is None or ref.uid in {each.uid for each in stopped.jobs}:
        return stopped.ended
    # The job's deletion was requested before, or its key is that of an earlier name of the deployment.
    left = max(0.0, deadline - monotonic())
    return await cancel(backend, ref, action, timeout_seconds=left, tried=tried) and stopped.ended


class DeadlineReached(Exception):
    """The task's ``execution_timeout`` expired; the job keeps running."""


class RunningJob:
    """The job of one key. All calls run on the client's event loop, so that `cancel` works while `wait` is blocked.

    Args:
        client: Client of the job's backend and namespace.
        key: The identity of the task.
        ref: The job, if it is known already.
        tried: Number of the task's try.

    Attributes:
        ref: The attempt that counts, as far as it is known.
        evidence: Evidence of the job; None if it was not read.
        training: What the task stores about the job; None if it stores nothing.
        on_follow: Called in the thread that waits when another attempt counts.
        adopted: The job, if another launch has created it.
    """

    def __init__(self, client: TrainJobClient, key: str, ref: JobRef | None = None, tried: int = 1) -> None:
        self.client = client
        self.key = key
        self.ref = ref
        self.tried = tried
        self.on_follow: Callable[[JobRef], None] | None = None
        self._followed: SimpleQueue[JobRef] = SimpleQueue()
        self.adopted: JobRef | None = None
        self.evidence: Evidence | None = None
        self.training: TaskTraining | None = None
        self._launching: Future[JobRef] | None = None
        self._waiting: Future[Any] | None = None
        self._killed = False

    def __str__(self) -> str:
        return f"TrainJob {self.ref}" if self.ref else f"the TrainJob of {self.key}"

    @property
    def is_created(self) -> bool:
        """Whether its launch has returned, or there was none."""
        return self.ref is not None or self._launching is None

    @property
    def advice(self) -> str:
        """What to do if the job could not be stopped in time."""
        command = f"trainjob cancel --key {shlex.quote(self.key)} -n {self.client.namespace}"
        return f"; `trainjob reap` stops it if it has the record of this cancel; to stop it now: {command}"

    def launch(
        self,
        spec: TrainJobSpec,
        origin: dict[str, str],
        *,
        wait_for_ranks: bool = True,
        began: int | None = None,
        timeouts: WaitOptions | None = None,
    ) -> JobRef:
        """Launch or adopt the job of the key.

        Args:
            spec: What to run.
            origin: Labels of a new job.
            wait_for_ranks: Wait until no rank of an earlier attempt runs.
            began: That of `RanksRemain`, if an earlier launch of this try has raised it.
            timeouts: Timeouts of the wait, which count while the job is created, too.

        Raises:
            RanksRemain: Ranks of an earlier attempt run, and `wait_for_ranks` is False.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob import launch

        client = self.client
        if self._killed:
            raise CancelledError
        self._launching = client.start(
            lambda: launch(
                client.backend,
                spec,
                self.key,
                namespace=client.namespace,
                tried=self.tried,
                origin=origin,
                wait_for_ranks=wait_for_ranks,
                began=began,
                on_adopt=self._adopt,
                timeouts=timeouts,
            )
        )
        self.ref = self._launching.result()
        if self._killed:
            raise CancelledError
        return self.ref

    def _adopt(self, ref: JobRef) -> None:
        self.adopted = ref

    def wait(self, ref: JobRef, options: WaitOptions, log: Log, *, logs: bool, seconds: float | None) -> TrainJobResult:
        """Wait for the end of the job for at most `seconds`; log changes, crashes and, with `logs`, the ranks' lines.

        If another attempt of the key counts instead of the job, that one is waited for.

        Meanwhile this thread stores what `training` has to store: no other thread may call Airflow.

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob import wait

        progress, backend = progress_logger(log), self.client.backend
        on_log = progress.line if logs else None
        changes = SimpleQueue[None]()  # its `put` may interrupt its `get`: a signal handler cancels the wait

        def on_change(observation: Observation, notice: str) -> None:
            progress.change(observation, notice)
            if self.training is not None:
                self.training.observe(observation, backend.now())
                changes.put(None)

        def on_follow(job: JobRef) -> None:
            self.ref, self.evidence = job, None
            if self.training is not None:
                self.training.follow(job)
            self._followed.put(job)
            changes.put(None)

        end: Future[TrainJobResult] = self.client.start(
            lambda: wait(
                backend,
                ref,
                options,
                on_change=on_change,
                on_log=on_log,
                on_crash=progress.crash,
                on_evidence=self.keep_evidence,
                on_follow=on_follow,
            )
        )
        self._waiting = end
        try:
            return self.result_of(end, changes, seconds, self.training)
        finally:
            progress.end()

    def result_of(
        self, end: Future[_T], changes: SimpleQueue[None], seconds: float | None, page: TaskTraining | TaskStudy | None
    ) -> _T:
        """Wait for `end` for at most `seconds`, and store `page` when it is due, which each of `changes` may change.

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        end.add_done_callback(lambda _: changes.put(None))
        if self._killed:
            end.cancel()
        deadline = None if seconds is None else monotonic() + seconds
        while not end.done():
            self._report_followed()
            now = monotonic()
            if deadline is not None and now >= deadline:
                end.cancel()
                raise DeadlineReached
            due = page.due if page is not None else None
            if page is not None and due is not None and due <= now:
                page.store()
                continue
            times = [time for time in (deadline, due) if time is not None]
            with suppress(Empty):
                changes.get(timeout=min(times) - now if times else None)
        self._report_followed()
        return end.result()

    def _report_followed(self) -> None:
        with suppress(Empty):
            while True:
                followed = self._followed.get_nowait()
                if self.on_follow is not None:
                    self.on_follow(followed)

    def keep_evidence(self, evidence: Evidence) -> None:
        """Keep the evidence of the job's end."""
        self.evidence = evidence

    def read_evidence(self) -> Evidence | None:
        """Evidence of the job, read now if that was not done before; None if it cannot be read in 5 s."""
        import anyio

        from trainjob import TrainJobError

        async def evidence_in_time(ref: JobRef) -> Evidence | None:
            with anyio.move_on_after(_EVIDENCE_SECONDS):
                return await self.client.backend.evidence(ref)
            return None

        ref = self.ref
        if self.evidence is None and ref is not None:
            with suppress(TrainJobError):
                self.evidence = self.client.call(lambda: evidence_in_time(ref))
        return self.evidence

    def read_attempts(self) -> Sequence[Evidence] | None:
        """The attempts of the key that still exist; none for the first one, None if they cannot be read in 5 s."""
        import anyio

        from trainjob import TrainJobError
        from trainjob._pages.live import read_attempts

        async def attempts_in_time(ref: JobRef) -> Sequence[Evidence] | None:
            with anyio.move_on_after(_EVIDENCE_SECONDS):
                return await read_attempts(self.client.backend, ref, self.key)
            return None

        ref = self.ref
        if ref is None or ref.attempt <= 1:
            return ()
        with suppress(TrainJobError):
            return self.client.call(lambda: attempts_in_time(ref))
        return None

    def measure(self, *, hangs: bool = False) -> Goodput | None:
        """How the time of the job was spent until now; None if it cannot be read in 5 s, or is a study.

        Args:
            hangs: Whether it has been found that the job hangs.
        """
        from trainjob._jobs.results import measured

        evidence, history = self.read_evidence(), self.training.history if self.training is not None else None
        if self.ref is None or evidence is None:
            return None
        return measured(self.ref, evidence, history, self.client.backend.now(), hangs=hangs)

    def start_measuring(self) -> Future[Goodput] | None:
        """The same in the background, while the job is being cancelled."""
        from trainjob._jobs.results import spent_so_far

        ref, client, history = self.ref, self.client, self.training.history if self.training is not None else None
        return None if ref is None else client.start(lambda: spent_so_far(client.backend, ref, history))

    def look(self) -> TrainJob | None:
        """The job as it is now; None if it was deleted."""
        return self.client.get(self.ref) if self.ref else None

    def has_ended(self) -> bool:
        """Whether the job has ended or was deleted."""
        return has_ended(self.look())

    def is_replaced(self) -> bool:
        """Whether the next launch replaces the job, which got no capacity, by one with the changes of `on_retry`."""
        from trainjob import TrainJobError
        from trainjob._manifest.attempts import is_replaced

        with suppress(TrainJobError):
            trainjob = self.look()
            return trainjob is not None and is_replaced(trainjob)
        return False

    def give_up(self, ref: JobRef, diagnosis: Diagnosis, action: CrashAction) -> str:
        """Apply `action` to a job that failed its task; return what was done."""
        from trainjob._jobs.cancellation import give_up

        client = self.client
        return client.call(lambda: give_up(client.backend, ref, diagnosis, action))

    def cancel(self, action: Literal["cancel", "suspend"], seconds: float) -> bool:
        """Stop all attempts of the key, also if the launch has not returned one.

        Later tries do not obey. If a request is refused or late, its record remains, which the reaper obeys.

        Returns:
            True if nothing of the attempts runs any longer; False if they are still terminating.
        """
        if self._launching is not None:
            self._launching.cancel()  # it may wait for ranks of an earlier attempt
        return self.client.start(lambda: self._stop(action, seconds)).result(seconds)

    async def _stop(self, action: CancelAction, seconds: float) -> bool:
        # Half the time, so that the result arrives before `cancel` stops waiting for it.
        look = min(_LOOK_SECONDS, seconds / 4) if self.ref is None else 0.0
        client = self.client
        return await stop_key(
            client.backend,
            self.key,
            action,
            seconds / 2 - look,
            namespace=client.namespace,
            tried=self.tried,
            ref=self.ref,
            look=look,
        )

    def stop_earlier_tries(self, action: CancelAction, seconds: float) -> None:
        """Delete or suspend the job of the earlier tries; the launch of this try does not obey."""
        client, tried = self.client, self.tried - 1
        client.call(
            lambda: stop_key(client.backend, self.key, action, seconds, namespace=client.namespace, tried=tried)
        )

    def stop_waiting(self) -> None:
        """Make `wait` and `launch` raise CancelledError; called by a signal handler that interrupts them."""
        self._killed = True
        if self._launching is not None:
            wait([self._launching], REPLY_SECONDS)  # the reply to a creation in progress names the job
            self._launching.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
