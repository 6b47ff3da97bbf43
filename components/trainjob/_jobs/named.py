"""Find the job that a person means: by its name, or by the key of its work."""

from __future__ import annotations

from trainjob import names
from trainjob._backends.base import Backend, TrainJob
from trainjob._manifest.attempts import decide
from trainjob._support.kube_objects import mapping
from trainjob._support.side_by_side import side_by_side
from trainjob.errors import BackendUnavailable, InvalidSpec, NotFound, Problem, TrainJobError
from trainjob.job import KEY, JobRef, labels_of

_Found = tuple[TrainJob | None, TrainJobError | None]
"""A job, or why this account may not look for it; neither if there is none."""


async def find_job(backend: Backend, namespace: str, text: str) -> TrainJob:
    """The job of that name, or of that key: the attempt that counts, or the latest one if none does. Two requests.

    Raises:
        InvalidSpec: the text is blank, or it is the name of a job and the key of another one.
        NotFound: no such job.
        TrainJobError: this account may not look for it.
    """
    if not text.strip():  # an API server would list all jobs
        raise InvalidSpec([Problem("name", "is blank", "give the name or the key of a TrainJob")])
    both = await side_by_side(_named(backend, namespace, text), _of_key(backend, namespace, text))
    return _one(f"{namespace}/{text}", text, *both)


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
        TrainJobError: this account may not look for it.
    """
    if not namespace:
        return await find_job(backend, default, text)
    key = f"{namespace}/{text}"
    there, of_key = await side_by_side(_named(backend, namespace, text), _of_key(backend, default, key))
    if there == (None, None):
        there = await _of_key(backend, namespace, text)
    return _one(key, key, there, of_key)


def _one(name: str, key: str, named: _Found, of_key: _Found) -> TrainJob:
    """Of a job with this name and one of this key, the one that exists."""
    one, other = named[0], of_key[0]
    if one is not None and other is not None and one["metadata"]["uid"] != other["metadata"]["uid"]:
        shown = [f"{job['metadata']['namespace']}/{job['metadata']['name']}" for job in (one, other)]
        what = f"{key!r} is the name of TrainJob {shown[0]} and the key of TrainJob {shown[1]}"
        raise InvalidSpec([Problem("name", what, "name the one that you mean as NAMESPACE/NAME")])
    found: TrainJob | None = one if one is not None else other
    if found is not None:
        return found
    raise named[1] or of_key[1] or NotFound(f"there is no TrainJob {name}, nor one of the key {key!r}")


async def _named(backend: Backend, namespace: str, text: str) -> _Found:
    if not names.JOB.fullmatch(text):
        return None, None
    try:
        return await backend.get(namespace, text), None
    except BackendUnavailable:
        raise
    except TrainJobError as error:
        return None, error


async def _of_key(backend: Backend, namespace: str, text: str) -> _Found:
    try:
        found = await backend.find(namespace, labels_of(text))
    except BackendUnavailable:
        raise
    except TrainJobError as error:  # this account may read single jobs only, or another job of this machine is damaged
        return None, error
    attempts = [job for job in found if mapping(job, "metadata", "annotations").get(KEY) == text]
    counts, _ = decide(attempts)
    return counts or max(attempts, key=lambda job: JobRef.of(job).attempt, default=None), None
