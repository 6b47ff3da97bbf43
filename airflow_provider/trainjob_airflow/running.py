"""The job that a task handles in this process; a signal handler can interrupt the launch and the wait."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.providers.common.compat.sdk import AirflowNotFoundException, AirflowTaskTimeout

from trainjob_airflow.exceptions import TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook

if TYPE_CHECKING:
    from trainjob import JobRef, TrainJobClient, TrainJobSpec, WaitOptions
    from trainjob._backends.base import TrainJob
    from trainjob._jobs.steps import Stopped
    from trainjob._manifest.attempts import CancelAction
    from trainjob_airflow.step import Step
    from trainjob_airflow.study import TaskStudy
    from trainjob_airflow.training import TaskTraining

_T = TypeVar("_T")

REPLY_SECONDS = 1.0  # of the 5 s that a killed task has left
_LOOK_SECONDS = 1.0  # to look for the job of an interrupted launch, whose request may be on its way
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


class RunningJob:
    """The job of one key. All calls run on the client's event loop, so that `stop` works while `wait` is blocked.

    Args:
        client: Client of the job's backend and namespace.
        key: The identity of the task.
        ref: The job, if it is known already.
        tried: Number of the task's try.

    Attributes:
        ref: The attempt that counts, as far as it is known.
        training: What the task stores about the job; None if it stores nothing.
        adopted: The job, if another launch has created it.
    """

    def __init__(self, client: TrainJobClient, key: str, ref: JobRef | None = None, tried: int = 1) -> None:
        self.client = client
        self.key = key
        self.ref = ref
        self.tried = tried
        self.adopted: JobRef | None = None
        self.training: TaskTraining | None = None
        self._launching: Future[JobRef] | None = None
        self._waiting: Future[Any] | None = None
        self._changes = SimpleQueue[None]()  # its `put` may interrupt its `get`: a signal handler cancels the wait
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

    def wait(self, step: Step, seconds: float | None, on_follow: Callable[[JobRef], None]) -> dict[str, Any]:
        """Wait for the end of the job; returns what `Step.outcome` does.

        Meanwhile this thread stores what `training` has to store: no other thread may call Airflow.

        Args:
            step: The wait.
            seconds: Its limit; None: no limit.
            on_follow: Called in this thread when another attempt counts.

        Raises:
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        step.on_change = lambda: self._changes.put(None)

        def work() -> float | None:
            if step.ref != self.ref:
                self.ref = step.ref
                on_follow(step.ref)
            return stored_when_due(self.training)

        return self.result_of(lambda: step.outcome(self.client.backend, seconds), work)

    def result_of(self, function: Callable[[], Awaitable[_T]], work: Callable[[], float | None]) -> _T:
        """The result of an async function.

        Args:
            function: The function.
            work: Called in this thread before the function ends, and whenever something has changed; returns the
                monotonic time when it has to be called again, None if that is not known.

        Raises:
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        self._waiting = end = self.client.start(function)
        end.add_done_callback(lambda _: self._changes.put(None))
        if self._killed:
            end.cancel()
        while True:
            try:
                due = work()
                if end.done():
                    return end.result()
                with suppress(Empty):
                    self._changes.get(timeout=None if due is None else max(0.0, due - monotonic()))
            except AirflowTaskTimeout:  # of Airflow's timer, once, a moment after the limit of `function`
                if end.done():
                    raise

    def look(self) -> TrainJob | None:
        """The job as it is now; None if it was deleted."""
        return self.client.get(self.ref) if self.ref else None

    def stop(self, action: CancelAction, seconds: float) -> Stopped:
        """Stop all attempts of the key, also if the launch has not returned one.

        Later tries do not obey. If a request is refused or late, its record remains, which the reaper obeys.
        """
        if self._launching is not None:
            self._launching.cancel()  # it may wait for ranks of an earlier attempt
        return self.client.start(lambda: self._stop(action, seconds)).result(seconds)

    async def _stop(self, action: CancelAction, seconds: float) -> Stopped:
        from trainjob._jobs.steps import stop

        # Half the time, so that the result arrives before `stop` stops waiting for it.
        look = min(_LOOK_SECONDS, seconds / 4) if self.ref is None else 0.0
        return await stop(
            self.client.backend,
            self.key,
            action,
            seconds / 2 - look,
            namespace=self.client.namespace,
            tried=self.tried,
            ref=self.ref,
            history=self.training.history if self.training is not None else None,
            look=look,
        )

    def stop_earlier_tries(self, action: CancelAction, seconds: float) -> None:
        """Delete or suspend the job of the earlier tries; the launch of this try does not obey."""
        from trainjob import cancel_key

        client, tried = self.client, self.tried - 1
        client.call(
            lambda: cancel_key(
                client.backend,
                self.key,
                namespace=client.namespace,
                action=action,
                timeout_seconds=seconds,
                tried=tried,
            )
        )

    def stop_waiting(self) -> None:
        """Make `wait` and `launch` raise CancelledError; called by a signal handler that interrupts them."""
        self._killed = True
        if self._launching is not None:
            wait([self._launching], REPLY_SECONDS)  # the reply to a creation in progress names the job
            self._launching.cancel()
        if self._waiting is not None:
            self._waiting.cancel()


def stored_when_due(page: TaskTraining | TaskStudy | None) -> float | None:
    """Store `page` if that is due; returns the monotonic time when it is due next, None if that is not known."""
    if page is not None and page.due is not None and page.due <= monotonic():
        page.store()
    return None if page is None else page.due
