"""The documents of the jobs of one namespace, each read once for all viewers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from trainjob import names
from trainjob._backends.base import TrainJob
from trainjob._goodput.history import MetricHistory
from trainjob._manifest.workflow_labels import STUDY, Study, latest_attempts, studies
from trainjob._pages.documents.jobs import list_document, workflow_document
from trainjob._pages.live import SECONDS, LiveReader
from trainjob._pages.study import document_of_study, find_study
from trainjob._support.control_characters import one_line
from trainjob.client import TrainJobClient
from trainjob.errors import ConfigurationError, NotFound, TrainJobError
from trainjob.status import Phase, observe

MAX_TRAININGS = 50
"""Trainings that one page compares, the newest."""

LINES = 200
"""Log lines of a page, of all shown ranks together."""

MESSAGE = 500
"""Characters of an error on a page."""

_ANSWER_SECONDS = 8.0  # after which a page is shown what was read last; the page itself waits for 15 s
_ENDED_SECONDS = 30.0  # age at which a job that has ended is read again
_SHARED_SECONDS = 0.2  # for which viewers share a document that was made from what has been read
_COLLECT_SECONDS = 10.0  # between two reads of the list for the history of metrics
_LOAD = 20  # a list whose read takes long is read less often: at most a twentieth of the time
_HISTORIES, _POINTS = 1000, 512  # jobs whose history is collected, and points of each: 25 KB
_AT_ONCE = 8  # reads for one workflow


@dataclass
class _Read:
    """The outcome of a read: the latest document, and why there is no newer one."""

    document: dict[str, Any] | None
    error: Exception | None
    until: float


class Documents:
    """The documents of the jobs of one namespace for any number of viewers, all on one event loop.

    Args:
        client: Client of the backend; stays open.
        seconds: Age in seconds at which a job is read again.
    """

    def __init__(self, client: TrainJobClient, seconds: float = SECONDS) -> None:
        self._namespace = client.namespace
        self._seconds = seconds
        self._reader = LiveReader(client.backend, seconds)
        self._reads: OrderedDict[tuple[str, ...], _Read] = OrderedDict()
        self._reading: dict[tuple[str, ...], asyncio.Task[_Read]] = {}
        self._histories: OrderedDict[str, tuple[str, MetricHistory]] = OrderedDict()  # by name, with the UID

    async def listed(self) -> dict[str, Any]:
        """The document of all jobs."""

        async def all_jobs() -> dict[str, Any]:
            jobs = await self._jobs()
            document = list_document(jobs, self._namespace, self._reader.now())
            runs = {name: study for study in studies(jobs) for name in study.names}
            for job in document["jobs"]:
                job["href"] = f"jobs/{job['name']}/"
                if (study := runs.get(job["name"])) is not None:
                    job["workflow"], job["workflow_href"] = one_line(study.title, MESSAGE), f"runs/{_id_of(study)}/"
            return document

        try:
            return await self._shared(("list",), all_jobs)
        except ConfigurationError:
            raise
        except TrainJobError as error:  # the page stays open until the jobs can be read
            return list_document([], self._namespace, self._reader.now(), [note_of(error)])

    async def training(self, name: str, rank: str = "", *, tail: int = LINES) -> dict[str, Any]:
        """The document of one job.

        Raises:
            NotFound: The job does not exist.
            TrainJobError: The job cannot be read.
        """

        async def one_job() -> dict[str, Any]:
            _, history = self._histories.get(name, ("", None))
            found = await self._reader.document(self._namespace, name, history=history, rank=rank, tail=tail)
            for each in found["compare"]:
                if each["label"] == "previous run" and names.JOB.fullmatch(each["name"]):
                    each["href"] = f"../{each['name']}/"
            return found

        return await self._shared(("job", name, rank, str(tail)), one_job)

    async def workflow(self, study_id: str) -> dict[str, Any]:
        """The document of the trainings of one workflow, or of the jobs whose keys have the same prefix.

        Raises:
            NotFound: No job belongs to it.
            TrainJobError: The jobs cannot be read.
        """

        async def one_workflow() -> dict[str, Any]:
            jobs = await self._jobs()
            study = next((each for each in studies(jobs) if _id_of(each) == study_id), None)
            if study is None:
                raise NotFound(f"no TrainJob in namespace {self._namespace} belongs to this workflow any more")
            members = [each for each in jobs if each["metadata"]["name"] in study.names]
            if (searched := await self._searched(members)) is not None:
                return searched
            return await compared(
                study.title,
                members,
                lambda each: self.training(each["metadata"]["name"], tail=0),
                lambda name: f"../../jobs/{name}/",
            )

        return await self._shared(("run", study_id), one_workflow)

    async def _searched(self, jobs: Sequence[TrainJob]) -> dict[str, Any] | None:
        """The document of a hyperparameter search, if the jobs are trials and its journal is in the workspace."""
        found = {str(each["metadata"].get("labels", {}).get(STUDY) or "") for each in jobs}
        if len(found) != 1 or not (key_hash := found.pop()):
            return None
        state = await anyio.to_thread.run_sync(find_study, key_hash)
        if state is None or state.namespace != self._namespace:
            return None
        present = {each["metadata"]["name"] for each in jobs}
        make = partial(
            document_of_study,
            state,
            importances=state.ended,  # takes too long for each read of a study that is running
            href=lambda trial: f"../../jobs/{trial.job}/" if trial.job in present else "",
        )
        return await anyio.to_thread.run_sync(make)

    async def collect(self) -> None:
        """Collect the metrics of running jobs until cancelled, also while no page is open."""
        while True:
            began = time.monotonic()
            with suppress(TrainJobError):
                await self._jobs()
            took = time.monotonic() - began
            await anyio.sleep(max(_COLLECT_SECONDS, _LOAD * took))

    async def _jobs(self) -> list[TrainJob]:
        jobs = await self._reader.jobs(self._namespace)
        now = self._reader.now().timestamp()
        for each in jobs:
            name, uid, observation = each["metadata"]["name"], each["metadata"]["uid"], observe(each)
            kept, history = self._histories.get(name, (uid, MetricHistory(_POINTS)))
            if kept != uid:  # another job has the name of a deleted one
                history = MetricHistory(_POINTS)
            if observation.metrics and not observation.phase.terminal:
                history.observe(observation, now)
                self._histories[name] = (uid, history)
            elif kept != uid:
                del self._histories[name]
        while len(self._histories) > _HISTORIES:
            self._histories.popitem(last=False)
        return jobs

    async def _shared(
        self, key: tuple[str, ...], read: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        """The document of `key`, read once for all viewers; what was read last, with a note, if that fails now."""
        kept = self._reads.get(key)
        if kept is None or time.monotonic() >= kept.until:
            task = self._reading.get(key)
            if task is None:
                task = self._reading[key] = asyncio.create_task(self._read(read, kept))
                task.add_done_callback(lambda _: self._reading.pop(key, None))
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    kept = await asyncio.shield(task)
                self._reads[key] = kept
                self._reads.move_to_end(key)
                while len(self._reads) > _HISTORIES:
                    self._reads.popitem(last=False)
            except TimeoutError:
                late = TrainJobError(f"no answer within {_ANSWER_SECONDS:.0f} s")
                kept = _Read(kept.document if kept else None, late, 0.0)
        if kept.error is None and kept.document is not None:
            return kept.document
        if kept.document is None:
            raise kept.error or NotFound("there is no document")
        if isinstance(kept.error, NotFound) and kept.document["kind"] == "training":
            notes = [*kept.document["notes"], "The TrainJob was deleted. This is the state that was read last."]
            ended = Phase(kept.document["phase"]).terminal
            return kept.document | {"notes": notes} | ({} if ended else {"phase": str(Phase.DELETED)})
        return kept.document | {"notes": [*kept.document["notes"], note_of(kept.error)]}

    async def _read(self, read: Callable[[], Coroutine[Any, Any, dict[str, Any]]], before: _Read | None) -> _Read:
        began = time.monotonic()
        try:
            document = await read()
            if document.get("phase") == Phase.DELETED and before is not None and before.document is not None:
                raise NotFound("only objects of the deleted TrainJob are left")  # what was read before has more
        except TrainJobError as error:
            return _Read(before.document if before else None, error, time.monotonic() + self._seconds)
        took = time.monotonic() - began
        ended = document["kind"] == "training" and Phase(document["phase"]).terminal
        seconds = max(_ENDED_SECONDS if ended else _SHARED_SECONDS, 2 * took)
        return _Read(document, None, time.monotonic() + seconds)


async def compared(
    title: str,
    jobs: Sequence[TrainJob],
    read: Callable[[TrainJob], Coroutine[Any, Any, dict[str, Any]]],
    href: Callable[[str], str] = lambda _: "",
) -> dict[str, Any]:
    """The document that compares jobs: the latest attempt of each key.

    Args:
        title: Name of the workflow.
        jobs: The jobs, with all attempts.
        read: Reads the document of a job.
        href: Address of the page of a job, by its name.

    Raises:
        TrainJobError: No job can be read.
    """
    chosen = latest_attempts(jobs)
    notes = []
    if len(chosen) > MAX_TRAININGS:
        notes.append(f"Only the latest {MAX_TRAININGS} of {len(chosen)} trainings are shown.")
        chosen = chosen[-MAX_TRAININGS:]
    found: dict[int, dict[str, Any]] = {}
    failed: list[TrainJobError] = []
    limit = asyncio.Semaphore(_AT_ONCE)

    async def add(number: int, job: TrainJob) -> None:
        async with limit:
            try:
                found[number] = await read(job) | {"href": href(job["metadata"]["name"])}
            except TrainJobError as error:
                failed.append(error)
                notes.append(f"{job['metadata']['name']} cannot be read: {one_line(str(error), MESSAGE)}")

    async with asyncio.TaskGroup() as tasks:
        for number, job in enumerate(chosen):
            tasks.create_task(add(number, job))
    if failed and not found:
        raise failed[0]
    return workflow_document(title, [found[number] for number in sorted(found)], notes)


def note_of(error: BaseException | None) -> str:
    """The note of a page whose document cannot be read."""
    return f"The jobs cannot be read now: {one_line(str(error), MESSAGE)}"


def _id_of(study: Study) -> str:
    return hashlib.sha256(study.identity.encode()).hexdigest()[:16]
