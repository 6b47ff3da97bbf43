"""`TrainJobClient`: the synchronous face of `trainjob.lifecycle`, for scripts, notebooks and signal handlers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from trainjob import lifecycle as flow
from trainjob import names, report, trained, waiting
from trainjob.backends import connect
from trainjob.backends.base import Backend, TrainJob
from trainjob.diagnosis import Diagnosis
from trainjob.errors import InvalidSpec, NotFound, Problem
from trainjob.lifecycle import AfterFailure
from trainjob.logs import LogLine
from trainjob.manifest import MANAGED_BY, JobRef
from trainjob.report import Report
from trainjob.settings import Settings
from trainjob.spec import TrainJobSpec
from trainjob.status import Observation
from trainjob.wait_options import WaitOptions
from trainjob.waiting import TrainJobResult

if TYPE_CHECKING:
    from trainjob.data import Exported

T = TypeVar("T")


class TrainJobClient:
    """Runs the flows of `trainjob.lifecycle` on an event loop of its own, in a thread.

    It therefore works inside another event loop (a notebook), and `start` can be called from a signal handler while
    another call is blocked. Use it as a context manager, or call `close`.

    Args:
        backend: A backend or its name; ``TRAINJOB_BACKEND`` if left out.
        namespace: Namespace of the jobs; ``TRAINJOB_NAMESPACE`` if left out.

    Raises:
        ConfigurationError: no such backend, or no namespace can have this name.
    """

    def __init__(self, backend: Backend | str | None = None, namespace: str | None = None) -> None:
        self.backend: Backend = connect(backend) if backend is None or isinstance(backend, str) else backend
        self.namespace = names.namespace(namespace or Settings().namespace or self.backend.default_namespace)
        self._portal: BlockingPortal | None = None
        self._thread: AbstractContextManager[BlockingPortal] | None = None
        self._starting = RLock()  # several threads may use one client; reentrant, because signal handlers do, too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections and of the thread; jobs are not touched."""
        portal, thread, self._portal, self._thread = self._portal, self._thread, None, None
        if portal is None or thread is None:
            return
        try:
            portal.call(self.backend.aclose)
        finally:  # also where a signal interrupts that
            # A call that Ctrl-C or a signal interrupted is still going on there; without this it would be waited for.
            portal.call(portal.stop, True)
            thread.__exit__(None, None, None)

    def _loop(self) -> BlockingPortal:
        with self._starting:
            if self._portal is None:
                thread = start_blocking_portal()
                self._portal, self._thread = thread.__enter__(), thread
            return self._portal

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function of no arguments on the loop and return its result."""
        return self._loop().call(function)

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function of no arguments in the background; works while another call is blocked."""
        return self._loop().start_task_soon(function)

    def launch(
        self,
        spec: TrainJobSpec | Mapping[str, Any] | str | Path,
        key: str,
        *,
        first_attempt: int = 1,
        after_failure: AfterFailure = "retry",
        origin: Mapping[str, str] | None = None,
    ) -> JobRef:
        """See `trainjob.lifecycle.launch`."""
        parsed = TrainJobSpec.parse(spec)
        return self.call(
            lambda: flow.launch(
                self.backend,
                parsed,
                key,
                namespace=self.namespace,
                first_attempt=first_attempt,
                after_failure=after_failure,
                origin=origin,
            )
        )

    def dry_run(self, spec: TrainJobSpec | Mapping[str, Any] | str | Path, key: str) -> TrainJob:
        """See `trainjob.lifecycle.dry_run`."""
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
    ) -> TrainJobResult:
        """See `trainjob.waiting.wait`."""
        return self.call(
            lambda: waiting.wait(self.backend, ref, options, on_change=on_change, on_log=on_log, on_crash=on_crash)
        )

    def diagnose(self, name: str) -> Report:
        """See `trainjob.report.take`."""
        _check_name(name)
        return self.call(lambda: report.take(self.backend, self.namespace, name))

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
        """Export a model that a job has made: see `trainjob.trained.find` and `trainjob.trained.export`.

        Args:
            job: The job, or its name in this client's namespace.
            target: Directory of all models; on this machine, ``models`` in ``TRAINJOB_HOME`` if left out.
            name: Model in the registry.
            output: Which output of the job is the model.
            source: The model as this machine sees it, where the output is a path in the pods of a cluster.
            **options: Of `trainjob.trained.export`.

        Raises:
            NotFound: There is no such job (any more).
        """
        ref = JobRef(self.namespace, job, "") if isinstance(job, str) else job
        model = self.call(lambda: trained.find(self.backend, ref, output, source=source))
        return trained.export(model, target, name=name, **options)

    def cancel(self, ref: JobRef, action: Literal["delete", "suspend"] = "delete") -> bool:
        """See `trainjob.lifecycle.cancel`."""
        return self.call(lambda: flow.cancel(self.backend, ref, action))

    def find(self, name: str) -> JobRef:
        """The job of that name.

        Raises:
            InvalidSpec: the name is blank.
            NotFound: there is none.
        """
        _check_name(name)
        trainjob = self.call(lambda: self.backend.get(self.namespace, name))
        if trainjob is None:
            raise NotFound(f"there is no TrainJob {self.namespace}/{name}")
        return JobRef.of(trainjob)

    def get(self, ref: JobRef) -> TrainJob | None:
        """The TrainJob object, or None if the job of this UID is gone."""
        trainjob = self.call(lambda: self.backend.get(ref.namespace, ref.name))
        return trainjob if trainjob is not None and trainjob["metadata"]["uid"] == ref.uid else None

    def list(self, labels: Mapping[str, str] | None = None) -> list[TrainJob]:
        """All jobs of the namespace that were launched here and have all `labels`."""
        wanted = {MANAGED_BY: "trainjob", **(labels or {})}
        return self.call(lambda: self.backend.find(self.namespace, wanted))

    def logs(
        self, ref: JobRef, *, ranks: Sequence[str] = (), follow: bool = False, tail: int | None = None
    ) -> Iterator[LogLine]:
        """See `Backend.logs`."""
        lines = self.backend.logs(ref, ranks=ranks, follow=follow, tail=tail)
        try:
            while (line := self.call(lambda: _next(lines))) is not None:
                yield line
        finally:
            self.call(lines.aclose)


def _check_name(name: str) -> None:
    if not name.strip():  # for an API server, the request would be one for all jobs
        raise InvalidSpec([Problem("name", "is blank", "give the name of a TrainJob")])


async def _next(lines: AsyncGenerator[LogLine]) -> LogLine | None:
    return await anext(lines, None)
