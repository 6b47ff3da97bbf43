"""Documents of running jobs for any number of viewers: one bounded read of a job serves all of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

import anyio

from trainjob._backends.base import Backend, TrainJob, Usage
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.last_state import last_ranks
from trainjob._jobs.report import examine
from trainjob._jobs.results import result_of
from trainjob._manifest.workflow_labels import run_labels, task_labels
from trainjob._pages.documents.additions import with_comparison, with_lineage
from trainjob._pages.documents.jobs import list_document
from trainjob._pages.documents.training import training_document
from trainjob._support.kube_objects import mapping, rank_of
from trainjob.errors import NotFound, TrainJobError
from trainjob.job import KEY, MANAGED_BY, JobRef, labels_of
from trainjob.status import QUEUE_LABEL, Phase, observe

SECONDS = 2.0
"""Age at which a document is read again."""
FULL_SECONDS = 15.0
"""Age at which Events and earlier attempts of a running job are read again, which take more requests."""
_WAITING_SECONDS = 5.0  # the same for a job that waits or starts, with its blockers
_USAGE_SECONDS = 10.0  # metrics-server measures every 15 s by default
_LINES = 200  # of all shown ranks together
_RANKS = 4  # whose lines are shown if none is chosen
T = TypeVar("T")

_ATTEMPTS = 5  # whose pods are read and kept
_SIBLINGS = 20  # jobs of one workflow
_JOBS = 500  # kept; the one not viewed for the longest time is dropped


async def take_document(
    backend: Backend,
    namespace: str,
    name: str,
    *,
    history: MetricHistory | None = None,
    tail: int = _LINES,
    rank: str = "",
    task: str = "",
) -> dict[str, Any]:
    """Read one job and everything about it, for its page.

    Args:
        backend: Backend of the job.
        namespace: Namespace of the job.
        name: Name of the job.
        history: Metrics that a waiter has collected.
        tail: Log lines, 0 for none.
        rank: Show lines of this rank only; of failed ranks and rank 0 if left out.
        task: Name of the task of a workflow.

    Raises:
        NotFound: The job and its related objects do not exist.
        TrainJobError: The backend cannot be read.
    """
    job = _Job(namespace, name)
    await job.read(backend, full=True)
    lines = await _lines(backend, job.ref, job.evidence, rank, tail) if tail else []
    return job.document(history, lines, task)


async def read_attempts(
    backend: Backend, ref: JobRef, key: str, ended: dict[str, Evidence] | None = None
) -> list[Evidence]:
    """All attempts of a key that still exist, the latest five that have ended with their pods.

    Args:
        backend: Backend of the jobs.
        ref: The attempt whose pods the caller reads.
        key: The key.
        ended: UID -> attempt that was read with its pods before; is completed.
    """
    known = ended if ended is not None else {}
    jobs = await backend.find(ref.namespace, labels_of(key))
    for each in sorted(jobs, key=_created)[-_ATTEMPTS:]:
        other = JobRef.of(each)
        if other.uid != ref.uid and other.uid not in known and observe(each).phase.terminal:
            known[other.uid] = replace(await backend.state(other), trainjob=each)
    return [known.get(each["metadata"]["uid"], Evidence(each)) for each in jobs]


@dataclass
class _Job:
    """What was read of one job."""

    namespace: str
    name: str
    evidence: Evidence = field(default_factory=lambda: Evidence(None))
    ref: JobRef = field(init=False)
    attempts: Sequence[Evidence] = ()
    ended: dict[str, Evidence] = field(default_factory=dict)  # of other attempts, by UID
    used: Sequence[Usage] | None = None
    position: int | None = None
    previous: Mapping[str, Any] | None = None
    siblings: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    history: MetricHistory = field(default_factory=MetricHistory)
    taken: datetime = field(init=False)
    read_at: float = -math.inf
    full_at: float = -math.inf
    used_at: float = -math.inf
    documents: dict[object, dict[str, Any]] = field(default_factory=dict)  # made since the last read

    def __post_init__(self) -> None:
        self.ref = JobRef(self.namespace, self.name, "")

    async def read(self, backend: Backend, *, full: bool = False) -> None:
        """Read the state, and with `full`, when it is due or when the phase has changed, everything."""
        began = time.monotonic()
        before = observe(self.evidence.trainjob).phase if self.evidence.trainjob is not None else None
        full = full or before is None or time.monotonic() - self.full_at >= self._full_seconds(before)
        if not full:
            state = await backend.state(self.ref)  # two requests, in a queue three; what else was read stays
            full = observe(state.trainjob).phase is not before
            self.evidence = replace(
                self.evidence,
                trainjob=state.trainjob,
                pods=state.pods,
                pods_visible=state.pods_visible,
                reported=state.reported,
            )
        if full:
            await self._read_all(backend)
        await self._read_cluster(backend)
        self.taken = backend.now()
        self.history.observe(observe(self.evidence.trainjob), self.taken.timestamp())
        self.read_at = began  # a slow read is as old as its beginning
        self.documents.clear()

    @staticmethod
    def _full_seconds(phase: Phase) -> float:
        return FULL_SECONDS if phase is Phase.RUNNING or phase.terminal else _WAITING_SECONDS

    async def _read_all(self, backend: Backend) -> None:
        trainjob = await backend.get(self.namespace, self.name)
        if trainjob is not None:
            if self.ref.uid not in ("", trainjob["metadata"]["uid"]):  # another job has the name of a deleted one
                self.history = MetricHistory()
            self.ref = JobRef.of(trainjob)
        self.evidence = await backend.evidence(self.ref)
        if trainjob is None and not (self.evidence.pods or self.evidence.events):
            raise NotFound(f"there is no TrainJob {self.namespace}/{self.name}")
        key = mapping(trainjob, "metadata", "annotations").get(KEY)
        await self._read_attempts(backend, str(key or ""))
        if trainjob is not None:
            await self._read_workflow(backend, trainjob)
        self.full_at = time.monotonic()

    async def _read_attempts(self, backend: Backend, key: str) -> None:
        """Read all attempts of the key, and the pods of the latest ones once, after their end: for the goodput."""
        self.attempts = await read_attempts(backend, self.ref, key, self.ended) if key else []

    async def _read_workflow(self, backend: Backend, trainjob: TrainJob) -> None:
        """Read the previous run of the task once, and each other job of the workflow once it is complete."""
        if self.previous is None and (labels := task_labels(trainjob)):
            found = [each for each in await backend.find(self.namespace, labels) if _before(each, trainjob)]
            self.previous = await _result(backend, max(found, key=_created)) if found else {}
        if labels := run_labels(trainjob):
            for each in (await backend.find(self.namespace, labels))[:_SIBLINGS]:
                uid = each["metadata"]["uid"]
                if uid != self.ref.uid and uid not in self.siblings and observe(each).phase is Phase.COMPLETE:
                    self.siblings[uid] = await _result(backend, each)

    async def _read_cluster(self, backend: Backend) -> None:
        phase = observe(self.evidence.trainjob).phase
        if phase is not Phase.RUNNING:
            self.used, self.used_at = None, -math.inf
        if phase is not Phase.QUEUED:
            self.position = None
        if (cluster := backend.cluster) is None:
            return
        if phase is Phase.RUNNING and time.monotonic() - self.used_at >= _USAGE_SECONDS:
            self.used = await cluster.usage(self.ref)
            self.used_at = time.monotonic()
        elif phase is Phase.QUEUED:
            queue = mapping(self.evidence.trainjob, "metadata", "labels").get(QUEUE_LABEL)
            self.position = await cluster.queue_position(self.ref, str(queue))

    def document(
        self, history: MetricHistory | None, lines: Sequence[Mapping[str, str]], task: str = ""
    ) -> dict[str, Any]:
        collected = MetricHistory()
        for each in (self.history, history):
            if each is not None:
                collected.merge(each.points())
                collected.merge_phases(each.phases)
        document = training_document(
            examine(self.ref, self.evidence, self.taken),
            history=collected,
            attempts=self.attempts,
            logs=lines,
            used=self.used,
            position=self.position,
            task=task,
        )
        if self.previous:
            document = with_comparison(document, "previous run", self.previous)
        return with_lineage(document, [each["outputs"] for each in self.siblings.values()])


def _created(trainjob: TrainJob) -> str:
    return str(trainjob["metadata"].get("creationTimestamp"))


def _before(other: TrainJob, trainjob: TrainJob) -> bool:
    """Whether the other job is complete, of another key, and older."""
    key, own = (mapping(each, "metadata", "annotations").get(KEY) for each in (other, trainjob))
    return key != own and _created(other) < _created(trainjob) and observe(other).phase is Phase.COMPLETE


async def _result(backend: Backend, trainjob: TrainJob) -> Mapping[str, Any]:
    """The result of a complete job, as far as its pods still report it."""
    ref = JobRef.of(trainjob)
    evidence = await backend.state(ref)
    return result_of(ref, evidence, observe(evidence.trainjob), backend.now()).as_dict()


class LiveReader:
    """Reads jobs of one backend for viewers, all on one event loop. Concurrent viewers of a job share each read.

    Args:
        backend: The backend; the reader does not close it.
        seconds: Age in seconds at which a job is read again.
    """

    def __init__(self, backend: Backend, seconds: float = SECONDS) -> None:
        self._backend = backend
        self._seconds = seconds
        self._jobs: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._logs: OrderedDict[tuple[str, str, str], tuple[float, list[dict[str, str]]]] = OrderedDict()
        self._lists: dict[str, tuple[float, list[TrainJob]]] = {}
        self._reading: dict[object, asyncio.Task[Any]] = {}

    def now(self) -> datetime:
        """See `Backend.now`."""
        return self._backend.now()

    async def document(
        self,
        namespace: str,
        name: str,
        *,
        history: MetricHistory | None = None,
        rank: str = "",
        tail: int = _LINES,
        task: str = "",
    ) -> dict[str, Any]:
        """The document of a job, at most `seconds` old.

        Args:
            namespace: Namespace of the job.
            name: Name of the job.
            history: Metrics that were collected elsewhere; those that this reader has seen are added.
            rank: Show log lines of this rank only.
            tail: Log lines, 0 for none.
            task: Name of the task of a workflow.

        Raises:
            NotFound: The job and its related objects do not exist.
            TrainJobError: The backend cannot be read.
        """
        where = (namespace, name)
        job = self._jobs.setdefault(where, _Job(namespace, name))
        if job.full_at < 0:
            await self._refresh(where, job)
        _keep(self._jobs, where, job)
        (lines_at, lines), _ = await asyncio.gather(self._lines(job, rank, tail), self._refresh(where, job))
        if history is not None:
            return job.document(history, lines, task)
        shown = (rank, tail, task, lines_at)
        if shown not in job.documents:  # takes 6 ms, with many points 30 ms
            job.documents[shown] = job.document(None, lines, task)
        return {**job.documents[shown]}

    async def _refresh(self, where: tuple[str, str], job: _Job) -> None:
        if time.monotonic() - job.read_at < self._seconds:
            return
        try:
            await self._once(where, lambda: job.read(self._backend))
        except TrainJobError:
            if job.full_at < 0:  # it was never read
                self._jobs.pop(where, None)
            raise

    async def jobs(self, namespace: str) -> list[TrainJob]:
        """The jobs of a namespace that trainjob launched, at most `seconds` old.

        Raises:
            TrainJobError: The backend cannot be read.
        """
        read_at, found = self._lists.get(namespace, (-math.inf, []))
        if time.monotonic() - read_at < self._seconds:
            return found
        found = await self._once(namespace, lambda: self._backend.find(namespace, {MANAGED_BY: "trainjob"}))
        self._lists[namespace] = (time.monotonic(), found)
        return found

    async def listed(self, namespace: str) -> dict[str, Any]:
        """The document of the jobs of a namespace.

        Raises:
            TrainJobError: The backend cannot be read.
        """
        return list_document(await self.jobs(namespace), namespace, self.now())

    async def _lines(self, job: _Job, rank: str, tail: int) -> tuple[float, list[dict[str, str]]]:
        """The last lines, and when they were read."""
        where = (job.namespace, job.name, rank)
        read_at, lines = self._logs.get(where, (-math.inf, [])) if tail else (0.0, [])

        async def timed_lines() -> tuple[float, list[dict[str, str]]]:
            began = time.monotonic()
            return began, await _lines(self._backend, job.ref, job.evidence, rank, tail)

        if tail and time.monotonic() - read_at >= self._seconds:
            read_at, lines = await self._once(where, timed_lines)
            _keep(self._logs, where, (read_at, lines))
        return read_at, lines

    async def _once(self, where: object, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a read, shared by all that ask while it lasts; a viewer that leaves does not end it."""
        task: asyncio.Task[T] | None = self._reading.get(where)
        if task is None:
            task = self._reading[where] = asyncio.create_task(read())
            task.add_done_callback(lambda _: self._reading.pop(where, None))
        return await asyncio.shield(task)


def _keep(kept: OrderedDict[Any, Any], name: object, value: object) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > _JOBS:
        kept.popitem(last=False)


async def _lines(backend: Backend, ref: JobRef, evidence: Evidence, rank: str, tail: int) -> list[dict[str, str]]:
    """The last lines of one rank, or of the failed ranks and of rank 0; fewer if they cannot be read in time."""
    ranks = [rank] if rank else sorted({*last_ranks(evidence), *_first(evidence)})[:_RANKS]
    found: list[dict[str, str]] = []
    if not ranks:
        return found
    with suppress(TrainJobError), anyio.move_on_after(SECONDS):
        async with aclosing(backend.logs(ref, ranks=ranks, tail=max(1, tail // len(ranks)))) as lines:
            async for line in lines:
                found.append({"rank": line.rank, "time": line.time, "text": line.text})  # noqa: PERF401 - kept at a timeout
    return found


def _first(evidence: Evidence) -> list[str]:
    return sorted({rank_of(pod) for pod in evidence.pods} & {"node-0", "launcher-0"})[:1]
