"""The attempts of a key: which one counts, which ones must end, and which cancels apply to which launch. Pure.

A cluster forgets the name of a deleted job, so a name alone does not exclude a second training of a key. Therefore each
launch looks at all attempts before it creates one, and once more after that. Everybody who looks decides by `decide`,
so that all agree on the attempt that counts.

The order of cancels and launches follows from versions, not from clocks: a cancel leaves a record (on a cluster a
Lease) whose version is the time of the cancel; a launch notes the version of these records when it begins.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from trainjob._diagnosis.serialization import unpack_diagnosis
from trainjob._manifest.retry_notice import RETRY_CHANGE
from trainjob._manifest.unattended import MARK
from trainjob._support.kube_objects import annotated, mapping
from trainjob._support.numbers import count_of
from trainjob.errors import Diagnosis
from trainjob.job import (
    API_VERSION,
    ATTEMPT,
    DELIVERED,
    FAILURE,
    FAILURE_OF,
    KEY,
    KIND,
    RESERVED_PREFIX,
    SPEC_HASH,
    TRY,
    JobRef,
    job_name,
    key_hash,
)
from trainjob.status import CANCELLED, GIVEN_UP, Observation, Phase, observe

LAUNCHED = RESERVED_PREFIX + "launched"
"""Annotation of a job: version of the records of cancels when its latest launch began, or a person resumed it; missing
if unknown."""
REPLACES = RESERVED_PREFIX + "replaces"
"""Annotation of a job: UIDs of the earlier attempts that it followed, separated by commas."""
ADOPTED = RESERVED_PREFIX + "adopted"
"""Annotation of a job: random text of the launch that created or adopted it last. A request with an earlier version of
the job loses."""

CancelAction = Literal["cancel", "suspend"]


CANCEL_KEPT = timedelta(hours=1)
"""How long the record of a cancel is kept: a launch that was frozen for longer does not obey it."""

_TRY_MARK = "try:"
_UNKNOWN_MARK = "unknown:"
_NAME = re.compile(rf".+-([0-9a-z]{{{len(key_hash('key'))}}})-[0-9]+")

NOT_STARTED = (Phase.QUEUED, Phase.NOT_STARTED, Phase.STARTING)
"""Phases of a job that waits for capacity."""


def stops_by(action: object) -> CancelAction:
    """What ``on_kill_action``, or the record of a cancel, does with a job that is not kept."""
    return "suspend" if action == "suspend" else "cancel"


@dataclass(frozen=True)
class Cancel:
    """A cancel of all attempts of a key or of one job, as its record says.

    Attributes:
        version: Version of the record: the time of the cancel among all cancels and launches.
        tried: The caller's try that was ended; None for a cancel that applies to every launch before it.
        uid: UID of the only job that was cancelled; empty for a cancel of all attempts.
        action: What happens to a job that was launched before.
        at: When the record was written; None if unknown.
        record: Name of the record.
    """

    version: int
    tried: int | None = None
    uid: str = ""
    action: CancelAction = "cancel"
    at: datetime | None = None
    record: str = ""

    @property
    def mark(self) -> str:
        """Value of the annotation `trainjob.status.CANCELLED` of a job that this cancel suspends.

        That of a kill names its try, and its version unless that is unknown.
        """
        if self.tried is None:
            return str(self.version)
        return f"{_TRY_MARK}{self.tried}" + (f"@{self.version}" if self.version else "")

    def applies(self, launched: int | None, tried: int, uid: str = "") -> bool:
        """Whether a launch obeys this cancel: it is newer than the launch's begin, and not of an earlier try.

        If the begin is unknown, it obeys the kill of its try or of a later one.

        Args:
            launched: Version of the records when the launch began; None if unknown.
            tried: The caller's try of the launch.
            uid: UID of the job that was launched; empty if there is none yet.
        """
        if self.uid not in ("", uid):
            return False
        if self.tried is not None and (self.tried < tried or launched is None):
            return self.tried >= tried
        return launched is not None and self.version > launched


def mark_without_version() -> str:
    """The mark of a cancel whose version is unknown, which no waiter undoes.

    Each differs, so that a launch can tell that a job which was suspended before was cancelled once more.
    """
    return f"{_UNKNOWN_MARK}{secrets.token_hex(4)}"


def recent(cancels: Iterable[Cancel], now: datetime) -> list[Cancel]:
    """The cancels that still concern somebody, also where nothing removes old records."""
    return [each for each in cancels if each.at is None or now - each.at <= CANCEL_KEPT]


def cancel_of(cancels: Iterable[Cancel], trainjob: Mapping[str, Any]) -> Cancel | None:
    """The cancel that applies to a job and its latest launch; None if there is none."""
    launched, tried, uid = launched_at(trainjob), try_of(trainjob), trainjob["metadata"]["uid"]
    return next((each for each in cancels if each.applies(launched, tried, uid)), None)


def work_of(name: str) -> str:
    """The key's hash in the name of a job, as in its labels; empty if trainjob did not launch it."""
    found = _NAME.fullmatch(name)
    return found[1] if found else ""


def version_of(trainjob: Mapping[str, Any]) -> dict[str, str]:
    """The version of an object as metadata of a patch, which is refused if the object was changed since."""
    version = trainjob["metadata"].get("resourceVersion")
    return {} if version is None else {"resourceVersion": version}


def launched_at(trainjob: Mapping[str, Any]) -> int | None:
    """Version of the records of cancels when the latest launch of a job began; None if unknown."""
    return count_of(mapping(trainjob, "metadata", "annotations").get(LAUNCHED))


def try_of(trainjob: Mapping[str, Any]) -> int:
    """The caller's try that launched or adopted a job last."""
    return count_of(mapping(trainjob, "metadata", "annotations").get(TRY)) or 1


def adoption_of(trainjob: Mapping[str, Any]) -> str:
    """The latest adoption of a job, as random text; empty if it was not adopted."""
    return str(mapping(trainjob, "metadata", "annotations").get(ADOPTED) or "")


def cancelled_since(trainjob: Mapping[str, Any], launched: int | None, tried: int, mark: str | None) -> bool:
    """Whether a job carries the mark of a cancel that a launch obeys.

    Args:
        trainjob: The job.
        launched: Version of the records when the launch began; None if unknown.
        tried: The caller's try of the launch.
        mark: The job's mark when the launch began, by which a mark without a version is known as new; None if there
            was no such job.
    """
    if mark_of(trainjob).startswith(_UNKNOWN_MARK):
        return mark_of(trainjob) != mark
    killed, version = _killed(trainjob)
    if killed:
        return killed >= tried and (launched is None or version is None or version > launched)
    return launched is not None and is_marked_after(trainjob, launched)


def is_marked_after(trainjob: Mapping[str, Any], version: int) -> bool:
    """Whether a job carries the mark of a cancel of its key that is newer than a version of the records."""
    marked = count_of(mark_of(trainjob))
    return marked is not None and marked > version


def has_later_mark(trainjob: Mapping[str, Any], mark: str) -> bool:
    """Whether a job carries the mark of a cancel of its key that is newer than the one with that mark."""
    version = count_of(mark)
    return version is not None and is_marked_after(trainjob, version)


def killed_try(trainjob: Mapping[str, Any]) -> int:
    """The try whose end suspended a job, by its mark; 0 if it has no such mark."""
    return _killed(trainjob)[0]


def _killed(trainjob: Mapping[str, Any]) -> tuple[int, int | None]:
    """The try whose end suspended a job, and the version of that kill; 0 without such a mark, None if unknown."""
    mark = mark_of(trainjob)
    if not mark.startswith(_TRY_MARK):
        return 0, None
    tried, _, version = mark.removeprefix(_TRY_MARK).partition("@")
    return count_of(tried) or 0, count_of(version)


def is_resumed_since(trainjob: Mapping[str, Any], cancel: Cancel) -> bool:
    """Whether a person has resumed a job that a cancel had suspended: its mark is left, and the job is not suspended.

    A resume by trainjob itself removes the mark. That of a kill counts, too, if it is newer than the cancel.
    """
    if mapping(trainjob, "spec").get("suspend"):
        return False
    _, killed = _killed(trainjob)
    after_kill = killed is not None and killed > cancel.version
    return mark_of(trainjob) == cancel.mark or is_marked_after(trainjob, cancel.version) or after_kill


def is_stale(trainjob: Mapping[str, Any]) -> bool:
    """Whether the job's mark is older than its latest launch, so that a waiter resumes the job.

    Marks of kills, of cancels of a key and of the reaper can be older. A job that its step gave up has no such mark,
    and neither has one that a person suspended.
    """
    mark = mark_of(trainjob)
    if observe(trainjob).phase.terminal or is_deleting(trainjob):
        return False
    if mark == MARK:
        return True
    known = mark.startswith(_TRY_MARK) or (count_of(mark) is not None and launched_at(trainjob) is not None)
    return known and not cancelled_since(trainjob, launched_at(trainjob), try_of(trainjob), mark)


def mark_of(trainjob: Mapping[str, Any]) -> str:
    """The mark with which this package suspended or cancelled a job; empty without one."""
    return str(mapping(trainjob, "metadata", "annotations").get(CANCELLED) or "")


def is_left_suspended(trainjob: Mapping[str, Any]) -> bool:
    """Whether this package has suspended a job, and no launch since then waits for it."""
    if observe(trainjob).phase is not Phase.SUSPENDED or is_deleting(trainjob) or not (mark := mark_of(trainjob)):
        return False
    return mark == MARK or not is_stale(trainjob)  # a launch removes the mark of the reaper


def is_deleting(trainjob: Mapping[str, Any]) -> bool:
    """Whether the deletion of a job was requested."""
    return "deletionTimestamp" in mapping(trainjob, "metadata")


def is_delivered(trainjob: Mapping[str, Any]) -> bool:
    """Whether the result of a job was delivered: the next launch of its key is new work."""
    return DELIVERED in mapping(trainjob, "metadata", "annotations")


def has_foreign_end(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job ended before its creation: Trainer took the JobSet of an earlier job of the name for its own."""
    return ended_before_creation(observe(trainjob))


def ended_before_creation(observation: Observation) -> bool:
    """Whether the end of a job is older than the job."""
    finished, created = observation.finished, observation.created
    return finished is not None and created is not None and finished < created


def failure_record(trainjob: Mapping[str, Any], diagnosis: str) -> dict[str, Any]:
    """An object that keeps why an attempt failed after its deletion, until the next launch of its key.

    A suspended TrainJob that counts as given up. It has neither the labels of the attempts of its key, so nothing but a
    launch finds it, nor that of a queue, so nothing starts it. If a person resumes it, it fails.

    Args:
        trainjob: The attempt.
        diagnosis: Its diagnosis as JSON.
    """
    metadata, attempt = trainjob["metadata"], JobRef.of(trainjob).attempt
    annotations = metadata.get("annotations") or {}
    kept = {name: annotations[name] for name in (RETRY_CHANGE, SPEC_HASH, TRY) if name in annotations}
    owners = {"ownerReferences": metadata["ownerReferences"]} if metadata.get("ownerReferences") else {}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": job_name(f"{annotations[KEY]}/failure", attempt),
            "namespace": metadata["namespace"],
            "labels": {FAILURE_OF: key_hash(annotations[KEY]), ATTEMPT: str(attempt)},
            "annotations": {**kept, GIVEN_UP: diagnosis},
            **owners,
        },
        "spec": {
            "suspend": True,
            "runtimeRef": dict(trainjob["spec"]["runtimeRef"]),
            "trainer": {"numNodes": 1, "command": ["false"]},
        },
    }


def is_record(trainjob: Mapping[str, Any]) -> bool:
    """Whether an object is the record of a failure (`failure_record`), not an attempt."""
    return FAILURE_OF in mapping(trainjob, "metadata", "labels")


def may_run(trainjob: Mapping[str, Any]) -> bool:
    """Whether an attempt runs, or a launch or Kueue may let it run: it waits, or is suspended and not given up."""
    ended = observe(trainjob).phase.terminal or is_deleting(trainjob) or is_record(trainjob)
    return not ended and given_up(trainjob) is None


def may_come_back(trainjob: Mapping[str, Any]) -> bool:
    """Whether a failed attempt may run again unless it is suspended: Trainer up to 2.3 can take ``Failed`` back.

    It does so, and trains again, if the JobSet is deleted (kubeflow/trainer#3891). For a suspended TrainJob it creates
    a suspended JobSet.
    """
    ended = is_deleting(trainjob) or is_record(trainjob)
    return not ended and observe(trainjob).phase is Phase.FAILED and not mapping(trainjob, "spec").get("suspend")


def decide(
    attempts: Collection[Mapping[str, Any]],
) -> tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]:
    """The attempt that counts, and the other ones that may run, which must end. All that see the same agree.

    A complete attempt whose result was not delivered comes first. Then an attempt that no other one replaced: a failed
    attempt may come back (Trainer up to 2.3 takes ``Failed`` back when the JobSet is deleted; a person resumes it) and
    must not end the training that followed, unless a launch that began later has adopted it. Then the oldest, which has
    trained for longer. Of two of the same second the lower number counts, then the lower UID.

    Args:
        attempts: All attempts of a key that exist.
    """
    replaced = {uid for each in attempts for uid in _replaced_by(each, attempts)}

    def is_result(trainjob: Mapping[str, Any]) -> bool:
        complete = observe(trainjob).phase is Phase.COMPLETE and not is_deleting(trainjob)
        counts = complete and not is_delivered(trainjob) and not has_foreign_end(trainjob)
        return counts and trainjob["metadata"]["uid"] not in replaced

    def order(trainjob: Mapping[str, Any]) -> tuple[bool, bool, str, int, str]:
        metadata, number = trainjob["metadata"], JobRef.of(trainjob).attempt
        uid, created = metadata["uid"], metadata["creationTimestamp"]
        return (not is_result(trainjob), uid in replaced, created, number, uid)

    active = [each for each in attempts if may_run(each)]
    first = min([*active, *filter(is_result, attempts)], key=order, default=None)
    if first is not None and first["metadata"]["uid"] in replaced:
        return None, active  # each of them came back after another one had followed, which is gone
    return first, [each for each in active if each is not first]


def _replaced_by(trainjob: Mapping[str, Any], attempts: Collection[Mapping[str, Any]]) -> Iterator[str]:
    """UIDs of those of `attempts` that an attempt has replaced, and that no later launch has adopted."""
    uids = str(mapping(trainjob, "metadata", "annotations").get(REPLACES) or "").split(",")
    launched = launched_at(trainjob)
    for each in attempts:
        adopted = launched_at(each)
        is_later = launched is not None and adopted is not None and adopted > launched
        if each["metadata"]["uid"] in uids and not is_later:
            yield each["metadata"]["uid"]


def given_up(trainjob: Mapping[str, Any]) -> Diagnosis | None:
    """The diagnosis with which a step gave up a job; None if none did, or the job was resumed since."""
    return diagnosis_in(trainjob, GIVEN_UP) if observe(trainjob).phase is Phase.SUSPENDED else None


def recorded_failure(trainjob: Mapping[str, Any]) -> Diagnosis | None:
    """The recorded reason why an attempt failed, or did not start in time; None if it did neither, or has no record."""
    phase = observe(trainjob).phase
    if phase is Phase.COMPLETE:
        return None
    recorded = diagnosis_in(trainjob, FAILURE)
    if phase is Phase.FAILED:
        recorded = diagnosis_in(trainjob, GIVEN_UP) or recorded
        return recorded if recorded is not None and recorded.failed else None
    return given_up(trainjob) or recorded


def is_replaced(trainjob: Mapping[str, Any]) -> bool:
    """Whether the next launch of its key replaces a job that has not started in time, unless it starts before."""
    why = diagnosis_in(trainjob, FAILURE)
    return why is not None and not why.failed and bool(why.change) and observe(trainjob).phase in NOT_STARTED


def diagnosis_in(trainjob: Mapping[str, Any], annotation: str) -> Diagnosis | None:
    """The diagnosis in an annotation; None without one. One that cannot be read is of unknown category."""
    why = mapping(trainjob, "metadata", "annotations").get(annotation)
    if not isinstance(why, str):
        return None
    return unpack_diagnosis(annotated(trainjob, annotation))
