"""`TrainJobClient`: a synchronous client for scripts, notebooks and signal handlers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from trainjob import names
from trainjob._backends import connect
from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs import cancellation, launching as flow, models, report, waiting
from trainjob._jobs.cancellation import Cancelled
from trainjob._jobs.launching import AfterFailure
from trainjob._jobs.report import Report
from trainjob._jobs.results import TrainJobResult
from trainjob._spec import TrainJobSpec
from trainjob._support.log_lines import LogLine
from trainjob.errors import InvalidSpec, NotFound, Problem
from trainjob.job import MANAGED_BY, JobRef
from trainjob.settings import Settings
from trainjob.status import Observation
from trainjob.verdicts import Diagnosis
from trainjob.wait_options import WaitOptions

if TYPE_CHECKING:
    from trainjob.data import Exported

T = TypeVar("T")


class TrainJobClient:
    """Launches, waits for and cancels TrainJobs. Runs an event loop in a thread.

    It therefore works inside another event loop (a notebook), and `start` can be called from a signal handler while
    another call is blocked. Use it as a context manager, or call `close`.

    Args:
        backend: A backend or its name; ``TRAINJOB_BACKEND`` if left out.
        namespace: Namespace of the jobs; ``TRAINJOB_NAMESPACE`` if left out.

    Raises:
        ConfigurationError: the backend is unknown, or the namespace's name is invalid.
    """

    def __init__(self, backend: Backend | str | None = None, namespace: str | None = None) -> None:
        self.backend: Backend = connect(backend) if backend is None or isinstance(backend, str) else backend
        self.namespace = names.namespace(namespace or Settings().namespace or self.backend.default_namespace)
        self._portal: BlockingPortal | None = None
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._starting = RLock()  # several threads may use one client; reentrant, since signal handlers use it, too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Jobs keep running."""
        portal, thread, self._portal, self._thread = self._portal, self._thread, None, None
        if portal is None or thread is None:
            return
        try:
            portal.call(self.backend.aclose)
        finally:  # also if a signal interrupts the line above
            # A call that Ctrl-C or a signal interrupted still runs in the thread; without this, the next line waits.
            portal.call(portal.stop, True)
            thread.__exit__(None, None, None)

    def _loop(self) -> BlockingPortal:
        with self._starting:
            if self._portal is None:
                thread = start_blocking_portal()
                self._portal, self._thread = thread.__enter__(), thread
            return self._portal

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function without arguments on the event loop, and return its result."""
        return self._loop().call(function)

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments in the background. Works while another call is blocked."""
        return self._loop().start_task_soon(function)

    def launch(
        self,
        spec: TrainJobSpec | Mapping[str, Any] | str | Path,
        key: str,
        *,
        tried: int | None = None,
        after_failure: AfterFailure = "retry",
        origin: Mapping[str, str] | None = None,
    ) -> JobRef:
        """Create the job of `key`, or adopt the existing one, as `trainjob.launch` does.

        Args:
            spec: What to run: a `TrainJobSpec`, a mapping, YAML text or the path of a YAML file.
            key: Identity of the work. The same key adopts the same job.
            tried: Number of the caller's try, for callers that count them.
            after_failure: When a new attempt follows one that failed: always (``retry``), unless its verdict is final
                (``verdict``), or only if the cause was outside the training code (``infrastructure``).
            origin: Labels of a new job that record where it comes from, such as DAG, run and try.

        Raises:
            InvalidSpec: the spec is invalid, or the key is blank.
            SpecMismatch: the job of this key was launched from another spec.
            TrainJobFailed: the earlier attempt failed, and `after_failure` rules out a new one.
            LaunchError: the job was refused.
        """
        parsed = TrainJobSpec.parse(spec)
        return self.call(
            lambda: flow.launch(
                self.backend,
                parsed,
                key,
                namespace=self.namespace,
                tried=tried,
                after_failure=after_failure,
                origin=origin,
            )
        )

    def dry_run(self, spec: TrainJobSpec | Mapping[str, Any] | str | Path, key: str) -> TrainJob:
        """The TrainJob that the server would store, with its defaults. Creates nothing.

        Raises:
            LaunchError: the job would be refused.
        """
        parsed = TrainJobSpec.parse(spec)
        return self.call(lambda: flow.dry_run(self.backend, parsed, key, namespace=self.namespace))

    def wait(
        self,
        ref: JobRef,
        options: WaitOptions | None = None,
        *,
        on_change: Callable[[Observation, str], None] | None = None,
        on_log: Callable[[LogLine], None] | None = None,
        on_crash: Callable[[Diagnosis], None] | None = None,
        on_follow: Callable[[JobRef], None] | None = None,
    ) -> TrainJobResult:
        """Wait until a job ends, and return its result, as `trainjob.wait` does.

        If the job is gone or was given up, and another attempt of its key counts, that one is waited for.

        Args:
            ref: The job.
            options: When to stop waiting before the job has ended; never if left out.
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
        """
        return self.call(
            lambda: waiting.wait(
                self.backend, ref, options, on_change=on_change, on_log=on_log, on_crash=on_crash, on_follow=on_follow
            )
        )

    def diagnose(self, name: str) -> Report:
        """A report about any TrainJob of the namespace: its state, diagnosis, ranks and events.

        Raises:
            NotFound: no such job.
        """
        _check_name(name)
        return self.call(lambda: report.diagnose(self.backend, self.namespace, name))

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
            job: The job, or its name in this client's namespace.
            target: Directory of all models; on this machine, ``models`` in ``TRAINJOB_HOME`` if left out.
            name: Name of the model in the registry.
            output: Output of the job that is the model.
            source: The model's path on this machine, if the output is a path in the pods of a cluster.
            **options: Further arguments of `trainjob._jobs.models.export`.

        Raises:
            NotFound: no such job.
        """
        ref = JobRef(self.namespace, job, "") if isinstance(job, str) else job
        model = self.call(lambda: models.find(self.backend, ref, output, source=source))
        return models.export(model, target, name=name, **options)

    def cancel(self, ref: JobRef, action: Literal["delete", "suspend"] = "delete") -> bool:
        """Stop a job, and wait until none of its ranks is running. A job that has ended is not changed.

        Args:
            ref: The job.
            action: ``delete`` deletes the job; on this machine its logs and metrics are kept. ``suspend`` keeps it, and
                a launch of the same key resumes it.

        Returns:
            True once the last rank has ended; False if some were still ending after 60 s.
        """
        return self.call(lambda: cancellation.cancel(self.backend, ref, action))

    def cancel_key(self, key: str, action: Literal["delete", "suspend"] = "delete") -> Cancelled:
        """Stop all attempts of a key, also one whose launch is on its way, and wait until none of its ranks is running.

        Args:
            key: The key.
            action: ``delete`` or ``suspend``, as for `cancel`.

        Returns:
            The attempts that were stopped, and whether their last ranks have ended within 60 s.

        Raises:
            InvalidSpec: the key is blank.
        """
        return self.call(lambda: cancellation.cancel_key(self.backend, key, namespace=self.namespace, action=action))

    def find(self, name: str) -> JobRef:
        """The job with that name.

        Raises:
            InvalidSpec: the name is blank.
            NotFound: no such job.
        """
        _check_name(name)
        trainjob = self.call(lambda: self.backend.get(self.namespace, name))
        if trainjob is None:
            raise NotFound(f"there is no TrainJob {self.namespace}/{name}")
        return JobRef.of(trainjob)

    def get(self, ref: JobRef) -> TrainJob | None:
        """The TrainJob object, or None if the job with this UID is gone."""
        trainjob = self.call(lambda: self.backend.get(ref.namespace, ref.name))
        return trainjob if trainjob is not None and trainjob["metadata"]["uid"] == ref.uid else None

    def list(self, labels: Mapping[str, str] | None = None) -> list[TrainJob]:
        """All jobs of the namespace that trainjob launched and that have all `labels`."""
        wanted = {MANAGED_BY: "trainjob", **(labels or {})}
        return self.call(lambda: self.backend.find(self.namespace, wanted))

    def logs(
        self, ref: JobRef, *, ranks: Sequence[str] = (), follow: bool = False, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Log lines of a job's ranks.

        Args:
            ref: The job.
            ranks: Only these ranks, such as ``node-1``; all if left out.
            follow: Continue until the job has ended.
            tail: Only the last lines of each rank.
        """
        lines = self.backend.logs(ref, ranks=ranks, follow=follow, tail=tail)
        try:
            while (line := self.call(lambda: _next(lines))) is not None:
                yield line
        finally:
            self.call(lines.aclose)


def _check_name(name: str) -> None:
    if not name.strip():  # an API server would list all jobs
        raise InvalidSpec([Problem("name", "is blank", "give the name of a TrainJob")])


async def _next(lines: AsyncGenerator[LogLine]) -> LogLine | None:
    return await anext(lines, None)
