"""Find the job that a person means: by its name, or by the key of its work."""

from __future__ import annotations

from trainjob import names
from trainjob._backends.base import Backend, TrainJob
from trainjob._manifest.attempts import decide
from trainjob._support.kube_objects import mapping
from trainjob._support.side_by_side import side_by_side
from trainjob.errors import InvalidSpec, NotFound, Problem, TrainJobError
from trainjob.job import KEY, JobRef, labels_of


async def find_job(backend: Backend, namespace: str, text: str) -> TrainJob:
    """The job of that name, or of that key: the attempt that counts, or the latest one if none does. Two requests.

    Raises:
        InvalidSpec: the text is blank, or it is the name of a job and the key of another one.
        NotFound: no such job.
    """
    if not text.strip():  # an API server would list all jobs
        raise InvalidSpec([Problem("name", "is blank", "give the name or the key of a TrainJob")])
    named, of_key = await side_by_side(_named(backend, namespace, text), _of_key(backend, namespace, text))
    if named is not None and of_key is not None and named["metadata"]["uid"] != of_key["metadata"]["uid"]:
        other = of_key["metadata"]["name"]
        raise _ambiguous(text, f"{namespace}/{text}", f"{namespace}/{other}")
    found: TrainJob | None = named if named is not None else of_key
    if found is None:
        raise NotFound(f"there is no TrainJob {namespace}/{text}, nor one of the key {text!r}")
    return found


async def find_written(backend: Backend, default: str, namespace: str, text: str) -> TrainJob:
    """The job that a person wrote as ``NAMESPACE/NAME``, or without a namespace; the whole may be a key, too.

    Args:
        backend: Backend of the jobs.
        default: Namespace of jobs that are named without one.
        namespace: The part before the last slash; empty if there is none.
        text: The rest.

    Raises:
        InvalidSpec: the text means two jobs.
        NotFound: no such job.
    """
    if not namespace:
        return await find_job(backend, default, text)
    key = f"{namespace}/{text}"
    of_key = await _of_key(backend, default, key)
    try:
        there = await find_job(backend, namespace, text)
    except TrainJobError:  # also if the first part of a key is a namespace that this account may not read
        if of_key is None:
            raise
        return of_key
    if of_key is not None and there["metadata"]["uid"] != of_key["metadata"]["uid"]:
        raise _ambiguous(key, *(f"{job['metadata']['namespace']}/{job['metadata']['name']}" for job in (there, of_key)))
    return there


def _ambiguous(text: str, name: str, of_key: str) -> InvalidSpec:
    what = f"{text!r} is the name of TrainJob {name} and the key of TrainJob {of_key}"
    return InvalidSpec([Problem("name", what, "name the one that you mean by its namespace and name")])


async def _named(backend: Backend, namespace: str, text: str) -> TrainJob | None:
    return await backend.get(namespace, text) if names.JOB.fullmatch(text) else None


async def _of_key(backend: Backend, namespace: str, text: str) -> TrainJob | None:
    found = await backend.find(namespace, labels_of(text))
    attempts = [job for job in found if mapping(job, "metadata", "annotations").get(KEY) == text]
    counts, _ = decide(attempts)
    return counts if counts is not None else max(attempts, key=lambda job: JobRef.of(job).attempt, default=None)
