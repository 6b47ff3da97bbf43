"""The names of a job: its reference, its labels and annotations, and how its name follows from its key.

Identity: the caller names a piece of work with a *key*. The job's name, labels and annotations depend only on the key
and the attempt number, so that a later caller with the same key finds the job without any state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainjob import names
from trainjob._support.numbers import count_of
from trainjob.errors import InvalidSpec, Problem

API_VERSION, KIND = "trainer.kubeflow.org/v1alpha1", "TrainJob"

RESERVED_PREFIX = "trainjob.dev/"
"""Prefix of the labels and annotations of this package."""

SHORTEST_UNATTENDED, LONGEST_UNATTENDED = timedelta(minutes=1), timedelta(days=7)
"""Limits of `unattended_after`."""

MAX_NAME = 33
"""JobSet's webhook limits ``<name>-dataset-initializer-0-0-abcde`` to 63 characters. Trainer admits a job with a longer
name, and the job then never gets a JobSet (Trainer 1.5, kubeflow/trainer#2735)."""

_HASH = 10  # characters of 36 each: 51 bits; 10^6 keys in a namespace collide with a probability of 2e-4
_SLUG = MAX_NAME - _HASH - len("999") - 2  # shorter from attempt 1,000 on

MANAGED_BY = "app.kubernetes.io/managed-by"
KEY = RESERVED_PREFIX + "key"
ATTEMPT = RESERVED_PREFIX + "attempt"
SPEC_HASH = RESERVED_PREFIX + "spec-hash"
DELIVERED = RESERVED_PREFIX + "delivered"
"""Annotation: the job's result was delivered; launching the same key again starts the next attempt."""
FAILURE = RESERVED_PREFIX + "failure"
"""Annotation of a job with `on_retry`, with a diagnosis as JSON: why it failed, or did not start in time."""

TRY = RESERVED_PREFIX + "try"
"""Annotation: number of the caller's try that launched or adopted the job last, from 1."""

FAILURE_OF = RESERVED_PREFIX + "failure-of"
"""Label of a `failure_record`: the hash of the key."""


@dataclass(frozen=True)
class JobRef:
    """One attempt of a piece of work, found or created.

    Attributes:
        namespace: Kubernetes namespace.
        name: Name of the TrainJob.
        uid: Its UID, fixed by the first response; an object of the same name with another UID is another job.
        attempt: Number of the attempt, from 1.
    """

    namespace: str
    name: str
    uid: str
    attempt: int = 1

    @classmethod
    def of(cls, trainjob: Mapping[str, Any]) -> JobRef:
        """The reference of an existing TrainJob object."""
        metadata = trainjob["metadata"]
        attempt = count_of((metadata.get("labels") or {}).get(ATTEMPT)) or 1  # a person may have edited the label
        return cls(metadata["namespace"], metadata["name"], metadata["uid"], attempt)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_hash(key: str) -> str:
    """`key` as labels and names contain it: 10 lower-case letters and digits."""
    return names.digest(key, _HASH)


def job_name(key: str, attempt: int) -> str:
    """Name of an attempt: the last part of `key` as a slug, the key's hash, the number; at most 33 characters.

    Raises:
        ValueError: `attempt` is less than 1.
    """
    if attempt < 1:
        raise ValueError(f"attempt {attempt} of {key!r} is less than 1")
    longest = MAX_NAME - _HASH - len(str(attempt)) - 2
    return f"{work_name(key, max(1, min(_SLUG, longest)))}-{attempt}"


def work_name(key: str, longest: int = _SLUG) -> str:
    """What the names of all attempts of `key` have in common, with a slug of at most so many characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", key.rstrip("/").rpartition("/")[2].lower()).lstrip("-0123456789")
    return f"{(slug or 'job')[:longest].rstrip('-')}-{key_hash(key)}"


def check_key(key: str) -> None:
    """Refuse a blank key, since all callers with a blank key would share one job.

    Raises:
        InvalidSpec: The key is blank or not text.
    """
    if not isinstance(key, str) or not key.strip():
        what = "is blank" if isinstance(key, str) else f"must be text, not {type(key).__name__}"
        raise InvalidSpec([Problem("key", what, "name the piece of work, such as nightly/train")])


def labels_of(key: str) -> dict[str, str]:
    """Labels of all attempts of `key`, to find them.

    Raises:
        InvalidSpec: See `check_key`.
    """
    check_key(key)
    return {MANAGED_BY: "trainjob", KEY: key_hash(key)}


def spec_hash(trainjob: Mapping[str, Any]) -> str:
    """Hash of the spec, from the object's annotation; empty for jobs that trainjob did not create."""
    return str((trainjob["metadata"].get("annotations") or {}).get(SPEC_HASH, ""))
