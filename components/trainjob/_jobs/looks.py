"""What a launch sees of its key: the attempts, the cancels and the records of failures, read anew at each look."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainjob._backends.base import Backend, TrainJob
from trainjob._manifest.attempts import Cancel, adoption_of, is_deleting, is_delivered, is_record, mark_of
from trainjob._support.side_by_side import side_by_side
from trainjob.errors import TrainJobError
from trainjob.job import FAILURE_OF, JobRef, key_hash, labels_of
from trainjob.status import Phase, observe


@dataclass
class Looks:
    """The objects of a key, as one launch has seen them at its looks.

    Attributes:
        backend: Backend of the jobs.
        key: The key.
        namespace: Namespace of the jobs.
        since: Version of the records when an earlier launch of the same try began; None if this is the first one.
        reads_records: Whether records of failures matter to the launch.
        began: Version of the records of cancels at its start; None if they cannot be read.
        attempts: The objects of the key at the latest look.
        cancels: The cancels of the key at the latest look.
        records: Records of failures of deleted attempts at the first look.
        delivered: UIDs of the attempts whose results were delivered at the first look. The launch adopts another
            complete one even if it was delivered since: a process that was frozen for hours must not train again.
        marks: UID -> the mark with which this package had suspended that attempt at the first look; empty without one.
        killed: Latest try of the callers that was ended, by the records at the first look.
        nonce: Identifies the launch on the job that it has created, also if no reply has told about it.
    """

    backend: Backend
    key: str
    namespace: str
    since: int | None
    reads_records: bool
    began: int | None = 0
    attempts: list[TrainJob] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    records: list[TrainJob] = field(default_factory=list)
    delivered: frozenset[str] = frozenset()
    marks: Mapping[str, str] = field(default_factory=dict)
    killed: int = 0
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    async def begin(self, *beside: Awaitable[Any]) -> list[Any]:
        """Look for the first time. Returns the results of other requests, which are sent with those of the look."""
        records = [self.read_records()] if self.reads_records else []
        version, *others = await self._look(*beside, *records)
        self.began = version if self.since is None else self.since
        self.delivered = frozenset(job["metadata"]["uid"] for job in self.attempts if is_delivered(job))
        self.marks = {job["metadata"]["uid"]: mark_of(job) for job in self.attempts}
        self.killed = max((cancel.tried or 0 for cancel in self.cancels), default=0)
        return others[: len(beside)]

    async def look(self) -> None:
        """Read all attempts of the key and its cancels, side by side; never from a cache."""
        await self._look()

    async def _look(self, *beside: Awaitable[Any]) -> list[Any]:
        """The version of the records of cancels, and the results of other requests."""
        (version, self.cancels), self.attempts, *others = await side_by_side(
            self.backend.cancels(self.namespace, key_hash(self.key)),  # first: its version is the start of the launch
            self.backend.find(self.namespace, labels_of(self.key)),
            *beside,
        )
        return [version, *others]

    async def read_cancels(self) -> None:
        """Read only the cancels again."""
        _, self.cancels = await self.backend.cancels(self.namespace, key_hash(self.key))

    async def read_records(self) -> None:
        """Read only the records of failures again."""
        self.records = await self.backend.find(self.namespace, {FAILURE_OF: key_hash(self.key)})

    async def delete_records(self) -> None:
        """Delete the records of failures, which the next attempt has taken into account."""
        for record in self.records:
            with suppress(TrainJobError):  # a record that stays is older than the next attempt, and changes nothing
                await self.backend.delete(JobRef.of(record))

    def is_own(self, trainjob: TrainJob) -> bool:
        """Whether the launch has created or adopted this attempt, and no later one has adopted it."""
        return adoption_of(trainjob) == self.nonce

    def own(self) -> TrainJob | None:
        """The attempt that the launch has created, if it exists."""
        return next((job for job in self.attempts if self.is_own(job) and not is_deleting(job)), None)

    def delivered_since(self) -> TrainJob | None:
        """The latest complete attempt that was delivered since the first look."""
        found = [job for job in self.attempts if observe(job).phase is Phase.COMPLETE and not is_deleting(job)]
        found = [job for job in found if is_delivered(job) and job["metadata"]["uid"] not in self.delivered]
        return max(found, key=_age, default=None)

    def latest(self) -> TrainJob | None:
        """The latest attempt, or its record."""
        return max([*self.records, *self.attempts], key=_age, default=None)

    def numbers(self) -> list[int]:
        """Numbers of the known attempts."""
        return [JobRef.of(job).attempt for job in [*self.records, *self.attempts]]

    def before(self, number: int) -> list[TrainJob]:
        """The known attempts with lower numbers, and their records."""
        return [job for job in [*self.records, *self.attempts] if JobRef.of(job).attempt < number]

    def unsuccessful(self) -> list[TrainJob]:
        """The attempts that are not complete, the oldest first."""
        return sorted((job for job in self.attempts if observe(job).phase is not Phase.COMPLETE), key=_age)


def _age(trainjob: TrainJob) -> tuple[int, bool]:
    """Orders attempts; the record of one is older than it, unless it is being deleted."""
    return JobRef.of(trainjob).attempt, not is_record(trainjob) and not is_deleting(trainjob)
