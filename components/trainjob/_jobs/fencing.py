"""Keep an earlier attempt of a key from running beside the next one: both would write to the same checkpoints."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio

from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._jobs.cancellation import end_attempt
from trainjob._manifest.attempts import NOT_STARTED, is_deleting, may_come_back, recorded_failure, version_of
from trainjob._support.kube_objects import mapping, mappings, name_of, rank_of
from trainjob._support.numbers import count_of
from trainjob.errors import Diagnosis, NotFound, RanksRemain, Rejected
from trainjob.job import JobRef, job_name
from trainjob.status import GIVEN_UP, Phase, observe

_log = logging.getLogger(__name__)

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
"""Label of a pod: name of its JobSet, which is that of the TrainJob."""

_WINDOW = 32  # attempts before the next one whose pods are looked for: older pods have ended, or their node is lost
_BEYOND = 64  # numbers from the next one on: attempts whose objects are gone may have pods
_POLL = 2.0  # seconds between two looks at the ranks of earlier attempts
_GRACE = 30.0  # Kubernetes' default terminationGracePeriodSeconds
_LATE = 30.0  # seconds after the grace period until ranks are not waited for any more
_SHOWN = 4  # ranks in a message


async def failure_of(backend: Backend, trainjob: TrainJob, *, read: bool) -> Diagnosis | None:
    """Why an attempt failed, or did not start in time; None if it did neither, or that is unknown.

    The diagnosis of its waiter comes first: the evidence is deleted with the pods.

    Args:
        backend: Backend that runs the job.
        trainjob: The attempt.
        read: Read the evidence of a failed attempt whose diagnosis is not recorded.
    """
    why = recorded_failure(trainjob)
    if why is None and read and observe(trainjob).phase is Phase.FAILED:
        return diagnosis_of(await backend.evidence(JobRef.of(trainjob)))
    return why


async def lacks_capacity(backend: Backend, trainjob: TrainJob, failure: Diagnosis | None) -> bool:
    """Whether the job has still not started, after the timeout that its waiter recorded."""
    if failure is None or failure.failed or observe(trainjob).phase not in NOT_STARTED or is_deleting(trainjob):
        return False
    return not await backend.has_run(JobRef.of(trainjob))


async def suspend_failed(backend: Backend, trainjob: TrainJob) -> bool:
    """Keep a failed attempt from running again, with its diagnosis on it; False if it was changed meanwhile.

    Where a change is refused, because the runtime is gone, the job is deleted.
    """
    if not may_come_back(trainjob):
        return True
    why = await failure_of(backend, trainjob, read=True)
    annotations = {} if why is None else {GIVEN_UP: json.dumps(pack_diagnosis(why), ensure_ascii=False)}
    patch = {"metadata": {"annotations": annotations, **version_of(trainjob)}, "spec": {"suspend": True}}
    try:
        await backend.patch(JobRef.of(trainjob), patch)
    except NotFound:
        return False
    except Rejected:
        await end_attempt(backend, trainjob)
    return True


class EarlierRanks:
    """The pods of earlier attempts of a key, as one launch sees them.

    Args:
        backend: Backend that runs the jobs.
        key: The key.
        namespace: Namespace of the jobs.
        wait: Whether to wait for ranks that run.
    """

    def __init__(self, backend: Backend, key: str, namespace: str, *, wait: bool) -> None:
        self._backend = backend
        self._key = key
        self._namespace = namespace
        self._wait = wait
        self._until: dict[str, float] = {}  # pod, before or after its deletion -> when it is not waited for any more
        self._known: set[int] = set()
        self.highest = 0
        """Highest number of an attempt that has pods."""

    async def none_remain(self) -> bool:
        """Whether the key, of which no object is known, has no pods."""
        return not await self._backend.remaining_pods(self._namespace, self._names([]))

    async def ended(self, numbers: Iterable[int]) -> bool:
        """Whether the next attempt may start; False after a pause in which ranks may have ended.

        Also False, at once, if there are pods of an attempt without an object: it is gone, or was created since.

        Ranks are waited for as long as their grace period and 30 s, again from their termination.
        Pods of a node that does not answer are not waited for: nobody can tell when they end.

        Args:
            numbers: The attempts whose objects exist.

        Raises:
            RanksRemain: ranks run, and `wait` is False.
        """
        known = self._known.union(numbers)
        pods = await self._backend.remaining_pods(self._namespace, self._names(known))
        found = set(map(_attempt_of, pods))
        self.highest, self._known = max([self.highest, *found]), known | found
        if found - known:
            return False
        waited = [pod for pod in pods if not _is_lost(pod)]
        if waited and not self._wait:
            message = f"{_text(waited)}: the next attempt of {self._key} starts when they have ended"
            raise RanksRemain(message, max(map(_grace_of, waited)) + _LATE)
        now = time.monotonic()
        first = not self._until
        for pod in waited:
            self._until.setdefault(_state_of(pod), now + _grace_of(pod) + _LATE)
        if first and waited:
            _log.info("%s: the next attempt of %s starts when they have ended", _text(waited), self._key)
        if any(now < self._until[_state_of(pod)] for pod in waited):
            await anyio.sleep(_POLL)
            return False
        if pods:
            _log.warning(
                "%s, and may still write to the checkpoints: the next attempt of %s starts now", _text(pods), self._key
            )
        return True

    def _names(self, numbers: Iterable[int]) -> list[str]:
        """Names of jobs whose pods may run. The objects of some may be gone, so these names are guessed."""
        following = max([self.highest, *numbers]) + 1
        return [job_name(self._key, each) for each in range(max(1, following - _WINDOW), following + _BEYOND)]


def _attempt_of(pod: Mapping[str, Any]) -> int:
    number = str(mapping(pod, "metadata", "labels").get(JOBSET_NAME)).rpartition("-")[2]
    return count_of(number) or 0


def _state_of(pod: Mapping[str, Any]) -> str:
    """Identifies a pod and whether it is terminating: its grace period starts with its termination."""
    metadata = mapping(pod, "metadata")
    return f"{name_of(pod)} {metadata.get('deletionTimestamp')}"


def _is_lost(pod: Mapping[str, Any]) -> bool:
    """Whether the node of a pod does not answer: the node controller sets ``Ready`` to ``Unknown``."""
    ready = (each for each in mappings(pod, "status", "conditions") if each.get("type") == "Ready")
    return any(each.get("status") == "Unknown" for each in ready)


def _grace_of(pod: Mapping[str, Any]) -> float:
    """Seconds that a pod may take to end."""
    seconds = mapping(pod, "spec").get("terminationGracePeriodSeconds", _GRACE)
    return float(seconds) if isinstance(seconds, int | float) else _GRACE


def _text(pods: Sequence[Mapping[str, Any]]) -> str:
    """``node-1 of x-1 on node a, … have not ended``."""
    shown = [
        f"{rank_of(pod)} of {mapping(pod, 'metadata', 'labels').get(JOBSET_NAME)}"
        f" on node {mapping(pod, 'spec').get('nodeName') or '(none)'}"
        + (", which does not answer," if _is_lost(pod) else "")
        for pod in pods[:_SHOWN]
    ]
    more = f" and {len(pods) - _SHOWN} more" if len(pods) > _SHOWN else ""
    return f"{', '.join(shown)}{more} {'has' if len(pods) == 1 else 'have'} not ended"
