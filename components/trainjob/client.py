"""`TrainJobClient`: a synchronous client for scripts, notebooks and signal handlers."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from trainjob import names
from trainjob._backends import connect
from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs import cancellation, launching as flow, models, named, report, waiting
from trainjob._jobs.cancellation import Cancelled
from trainjob._jobs.launching import AfterFailure
from trainjob._jobs.report import Report
from trainjob._jobs.results import TrainJobResult
from trainjob._spec import TrainJobSpec
from trainjob._support.log_lines import LogLine
from trainjob._support.loop_thread import LoopThread
from trainjob.errors import ConfigurationError, Diagnosis, NotFound
from trainjob.job import MANAGED_BY, JobRef
from trainjob.settings import Settings
from trainjob.status import Observation
from trainjob.wait_options import WaitOptions

if TYPE_CHECKING:
    from trainjob.data import Exported

T = TypeVar("T")


class TrainJobClient:
    """Launches, waits for and cancels TrainJobs. Runs an event loop in a thread.

    It therefore works inside another event loop (a notebook), and `start` can be called from a signal handler while
    another call is blocked. Use it as a context manager, or call `close`; a script that does neither still ends with
    its last line. After a fork, the child connects anew.

    A job is named by its `JobRef`, by its name, or by its key, which stands for the attempt that counts.

    Args:
        backend: A backend or its name; ``TRAINJOB_BACKEND`` if left out.
        namespace: Namespace of the jobs; ``TRAINJOB_NAMESPACE`` if left out.

    Raises:
        ConfigurationError: the backend is unknown, or the namespace's name is invalid.
    """

    def __init__(self, backend: Backend | str | None = None, namespace: str | None = None) -> None:
        self._backend_name = backend if backend is None or isinstance(backend, str) else None
        self._made = not (backend is None or isinstance(backend, str))  # by the caller
        self.backend: Backend = connect(backend) if backend is None or isinstance(backend, str) else backend
        self.namespace = names.namespace(namespace or Settings().namespace or self.backend.default_namespace)
        self._thread: LoopThread | None = None
        self._starting = RLock()  # several threads may use one client; reentrant, since signal handlers use it, too
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Jobs keep running."""
        thread, self._thread = self._thread, None
        if thread is None or self._process != os.getpid():
            return
        try:
            thread.call(self.backend.aclose)
        finally:  # also if a signal interrupts the line above
            # A call that Ctrl-C or a signal interrupted still runs in the thread; without this, the next line waits.
            thread.stop()

    def _running(self) -> LoopThread:
        if self._process != os.getpid():  # a fork copies neither threads nor connections, and may copy a held lock
            if self._made and self.backend.home is None:
                raise ConfigurationError("this client was made before the process was forked: make one in the child")
            self._thread, self._starting = None, RLock()
            self.backend = self.backend if self._made else connect(self._backend_name)
            self._process = os.getpid()  # last: another thread of the child may look at it
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread()
            return self._thread

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function without arguments on the event loop, and return its result."""
        return self._running().call(function)

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments in the background. Works while another call is blocked."""
        return self._running().start(function)

    def launch(
        self,
        spec: TrainJobSpec | Mapping[str, Any] | str | Path,
        key: str | None = None,
        *,
        tried: int | None = None,
        after_failure: AfterFailure = "retry",
        origin: Mapping[str, str] | None = None,
        on_adopt: Callable[[JobRef], object] | None = None,
        timeouts: WaitOptions | None = None,
    ) -> JobRef:
        """Create the job of `key`, or adopt the existing one, as `trainjob.launch` does.

        Args:
            spec: What to run: a `TrainJobSpec`, a mapping, YAML text or the path of a YAML file.
            key: Identity of the work. The same key adopts the same job; without one, each call launches another job.
            tried: Number of the caller's try, for callers that count them.
            after_failure: When a new attempt follows one that failed: always (``retry``), unless its verdict is final
                (``verdict``), or only if the cause was outside the training code (``infrastructure``).
            origin: Labels of a new job that record where it comes from, such as DAG, run and try.
            on_adopt: Called with the job, on another thread, if another launch has created it.
            timeouts: Timeouts that count while the job is created, too; those of `wait`.

        Raises:
            InvalidSpec: the spec is invalid, or the key is blank.
            SpecMismatch: the job of this key was launched from another spec, and runs, waits or is complete.
            TrainJobFailed: the earlier attempt failed, and `after_failure` rules out a new one.
            LaunchError: the job was refused.
            TimedOut: it could not be created within one of the `timeouts`.
        """
        parsed = TrainJobSpec.parse(spec)
        work = f"job/{secrets.token_hex(6)}" if key is None else key
        return self.call(
            lambda: flow.launch(
                self.backend,
                parsed,
                work,
                namespace=self.namespace,
                tried=tried,
                after_failure=after_failure,
                origin=origin,
                on_adopt=on_adopt,
                timeouts=timeouts,
            )
        )

    def run(
        self, spec: TrainJobSpec | Mapping[str, Any] | str | Path, key: str | None = None, **options: Any
    ) -> TrainJobResult:
        """Launch a job and wait until it ends. If this process ends before, the job keeps running.

        Args:
            spec: What to run, as for `launch`.
            key: Identity of the work, as for `launch`.
            **options: Those of `wait`.

        Raises:
            TrainJobError: Any error of `launch` and `wait`.
        """
        given = {name: options.get(name) for name in ("queue_timeout", "start_timeout", "run_timeout")}
        timeouts = options.get("options") or WaitOptions.parse(
            {n: each for n, each in given.items() if each is not None}
        )
        return self.wait(self.launch(spec, key, timeouts=timeouts), **options)

    def dry_run(self, spec: TrainJobSpec | Mapping[str, Any] | str | Path, key: str) -> TrainJob:
        """The TrainJob that the server would store, with its defaults. Creates nothing.

        Raises:
            LaunchError: the job would be refused.
        """
        parsed = TrainJobSpec.parse(spec)
        return self.call(lambda: flow.dry_run(self.backend, parsed, key, namespace=self.namespace))

    def wait(
        self,
        job: JobRef | str,
        options: WaitOptions | None = None,
        *,
        queue_timeout: timedelta | float | str | None = None,
        start_timeout: timedelta | float | str | None = None,
        run_timeout: timedelta | float | str | None = None,
        fail_fast: bool = False,
        fail_on_first_crash: bool = False,
        on_change: Callable[[Observation, str], None] | None = None,
        on_log: Callable[[LogLine], None] | None = None,
        on_crash: Callable[[Diagnosis], None] | None = None,
        on_follow: Callable[[JobRef], None] | None = None,
    ) -> TrainJobResult:
        """Wait until a job ends, and return its result, as `trainjob.wait` does.

        If the job is gone or was given up, and another attempt of its key counts, that one is waited for.

        Args:
            job: The job: its reference, name or key.
            options: When to stop waiting before the job has ended; never if left out.
            queue_timeout: As in `options`, in place of it: a timedelta, seconds, or text such as ``1h30m``.
            start_timeout: Likewise.
            run_timeout: Likewise.
            fail_fast: Likewise: True or False.
            fail_on_first_crash: Likewise.
            on_change: Called with each new observation and its notice.
            on_log: Called with each line of every rank as it is written.
            on_crash: Called with the diagnosis of each rank that crashes while the job keeps running.
            on_follow: Called with the attempt that is waited for from now on, if that changes.

        Raises:
            TrainJobFailed: the job failed; has the diagnosis.
            RankCrashed: a rank crashed, and `fail_on_first_crash` is set. The job keeps running.
            JobHung: no rank made progress for the job's `stall_timeout`. The job keeps running.
            TimedOut: a timeout expired, or `fail_fast` is set and the job is blocked. The job keeps running.
            BackendUnavailable: an outage outlasted the retry budget. The job keeps running.
            ConfigurationError: an option is given beside `options`.
        """
        each = {"queue_timeout": queue_timeout, "start_timeout": start_timeout, "run_timeout": run_timeout}
        each |= {"fail_fast": fail_fast or None, "fail_on_first_crash": fail_on_first_crash or None}
        if given := {name: value for name, value in each.items() if value is not None}:
            if options is not None:
                raise ConfigurationError(f"{', '.join(given)}: write it as an argument or in options, not as both")
            options = WaitOptions.parse(given)
        ref = self._ref(job)
        return self.call(
            lambda: waiting.wait(
                self.backend, ref, options, on_change=on_change, on_log=on_log, on_crash=on_crash, on_follow=on_follow
            )
        )

    def diagnose(self, job: JobRef | str) -> Report:
        """A report about any TrainJob: its state, diagnosis, ranks and events.

        Args:
            job: The job: its reference, name or key.

        Raises:
            NotFound: no such job.
        """
        try:
            ref = self._ref(job)
        except NotFound:  # its pods and Events may exist
            if not isinstance(job, str) or not names.JOB.fullmatch(job):
                raise
            ref = JobRef(self.namespace, job, "")
        return self.call(lambda: report.diagnose(self.backend, ref.namespace, ref.name))

    def export(
        self,
        job: JobRef | str,
        target: str | None = None,
        *,
        name: str,
        output: str = "model",
        source: str | None = None,
        **options: Any,
    ) -> Exported:
        """Export a model that a job wrote, with the job's metrics, provenance and base model.

        Args:
            job: The job: its reference, name or key.
            target: Directory of all models; on this machine, ``models`` in ``TRAINJOB_HOME`` if left out.
            name: Name of the model in the registry.
            output: Output of the job that is the model.
            source: The model's path on this machine, if the output is a path in the pods of a cluster.
            **options: Further arguments of `trainjob._jobs.models.export`.

        Raises:
            NotFound: no such job.
        """
        ref = self._ref(job)
        model = self.call(lambda: models.find(self.backend, ref, output, source=source))
        return models.export(model, target, name=name, **options)

    def cancel(self, job: JobRef | str, action: Literal["cancel", "suspend"] = "cancel") -> bool:
        """Stop a job, and wait until none of its ranks is running. A job that has ended is not changed.

        Args:
            job: The job: its reference, name or key. `cancel_key` stops all attempts of a key.
            action: ``cancel`` deletes the job; on this machine its logs and metrics are kept. ``suspend`` keeps it, and
                a launch of the same key resumes it.

        Returns:
            True once the last rank has ended; False if some were still ending after 60 s.
        """
        ref = self._ref(job)
        return self.call(lambda: cancellation.cancel(self.backend, ref, action))

    def cancel_key(self, key: str, action: Literal["cancel", "suspend"] = "cancel") -> Cancelled:
        """Stop all attempts of a key, also one whose launch is on its way, and wait until none of its ranks is running.

        Args:
            key: The key.
            action: ``cancel`` or ``suspend``, as for `cancel`.

        Returns:
            The attempts that were stopped, and whether their last ranks have ended within 60 s.

        Raises:
            InvalidSpec: the key is blank.
        """
        return self.call(lambda: cancellation.cancel_key(self.backend, key, namespace=self.namespace, action=action))

    def find(self, name: str) -> JobRef:
        """The job with that name or key; of a key the attempt that counts.

        Raises:
            InvalidSpec: the name is blank, or is the name of one job and the key of another one.
            NotFound: no such job.
        """
        return JobRef.of(self.call(lambda: named.find_job(self.backend, self.namespace, name)))

    def _ref(self, job: JobRef | str) -> JobRef:
        return self.find(job) if isinstance(job, str) else job

    def get(self, job: JobRef | str) -> TrainJob | None:
        """The TrainJob object, or None if no job has this name or key, or the one with this UID is gone.

        Raises:
            InvalidSpec: the text is blank, or is the name of one job and the key of another one.
        """
        try:
            ref = self._ref(job)
        except NotFound:
            return None
        trainjob = self.call(lambda: self.backend.get(ref.namespace, ref.name))
        return trainjob if trainjob is not None and trainjob["metadata"]["uid"] == ref.uid else None

    def list(self, labels: Mapping[str, str] | None = None) -> list[TrainJob]:
        """All jobs of the namespace that trainjob launched and that have all `labels`."""
        wanted = {MANAGED_BY: "trainjob", **(labels or {})}
        return self.call(lambda: self.backend.find(self.namespace, wanted))

    def logs(
        self, job: JobRef | str, *, ranks: Sequence[str] = (), follow: bool = False, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Log lines of a job's ranks.

        Args:
            job: The job: its reference, name or key.
            ranks: Only these ranks, such as ``node-1``; all if left out.
            follow: Continue until the job has ended.
            tail: Only the last lines of each rank.
        """
        self._running()  # after a fork, before the backend is used
        ref = self._ref(job)
        lines = self.backend.logs(ref, ranks=ranks, follow=follow, tail=tail)
        try:
            while (line := self.call(lambda: _next(lines))) is not None:
                yield line
        finally:
            self.call(lines.aclose)


async def _next(lines: AsyncGenerator[LogLine]) -> LogLine | None:
    return await anext(lines, None)
