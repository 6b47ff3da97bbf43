"""Launch or adopt a TrainJob. Works with any `Backend`; all integrations use it.

The calling process may be killed at any instruction. The key is the only state between two calls: everything else is
read from the objects of the key. A launch looks at them, creates an attempt if none is to be adopted, and looks again:
of two processes that create an attempt at the same time, the second one sees both
(`trainjob._manifest.attempts.decide`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio

from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs.cancellation import end_attempt, request_cancel
from trainjob._jobs.creation import create
from trainjob._jobs.fencing import EarlierRanks, failure_of, lacks_capacity, suspend_failed
from trainjob._jobs.looks import Looks
from trainjob._jobs.records import keep_reason
from trainjob._manifest import checkpoint_directories, unattended
from trainjob._manifest.attempts import (
    ADOPTED,
    LAUNCHED,
    REPLACES,
    cancel_of,
    cancelled_since,
    decide,
    given_up,
    has_foreign_end,
    is_deleting,
    is_left_suspended,
    is_marked_after,
    killed_try,
    launched_at,
    mark_of,
    may_come_back,
    may_run,
    try_of,
    version_of,
)
from trainjob._manifest.render import check_same_spec, render
from trainjob._manifest.retry_changes import Changes, changed, recorded
from trainjob._spec import TrainJobSpec
from trainjob.errors import (
    AlreadyExists,
    BackendUnavailable,
    Category,
    Diagnosis,
    NotFound,
    RanksRemain,
    Rejected,
    RetryVerdict,
    TrainJobFailed,
)
from trainjob.job import TRY, JobRef, check_key, job_name, spec_hash
from trainjob.status import Phase, observe
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)

AfterFailure = Literal["retry", "verdict", "infrastructure"]
"""When a new attempt follows one that failed: always, unless its verdict is final, or only if the cause was outside the
training code."""

_REPLACED = 100  # attempts that a new one names: all annotations of an object have 256 KiB
_AGAIN = 0.05  # seconds until the next look after an attempt was ended


async def launch(
    backend: Backend,
    spec: TrainJobSpec,
    key: str,
    *,
    namespace: str,
    is_new: bool = False,
    tried: int | None = None,
    last_try: int | None = None,
    after_failure: AfterFailure = "retry",
    origin: Mapping[str, str] | None = None,
    wait_for_ranks: bool = True,
    began: int | None = None,
    on_adopt: Callable[[JobRef], object] | None = None,
    timeouts: WaitOptions | None = None,
) -> JobRef:
    """Create the job of `key`, or adopt the existing one.

    An attempt is adopted while it is active or suspended, and when it is complete but its result was not delivered. An
    attempt that a cancel before this launch suspended is resumed, or deleted if it has another spec; one that a person
    suspended stays suspended. After an attempt that failed, was given up, cancelled or deleted, or whose result was
    delivered, a new attempt is created, once no rank of an earlier attempt runs. Its name is one of which nothing is
    left.

    After a failure for which `on_retry` of the spec has a rule, the new attempt is changed, by what is recorded on the
    failed one; if that was deleted, by its `failure_record`, which a launch deletes.

    Args:
        backend: Backend that runs the job.
        spec: What to run.
        key: Identity of the work; the same on every try of the same work.
        namespace: Kubernetes namespace.
        is_new: Whether the key was generated for this launch, so that nothing of it can exist.
        tried: Number of the caller's try, from 1 (Airflow's ``try_number``); if None, one more than that of the attempt
            that failed.
        last_try: No new attempt follows once one of this try or a later one has failed, whatever `after_failure` says.
        after_failure: When a new attempt follows one that failed: always (``retry``), unless its verdict is final
            (``verdict``), or only if the cause was outside the training code (``infrastructure``).
        origin: Labels of a new job that record where it comes from, such as DAG, run and try. They replace labels of
            the spec with the same names and are not part of the spec: a job with other such labels is adopted, too.
        wait_for_ranks: Wait until no rank of an earlier attempt runs, at most their grace period and 30 s.
        began: That of `RanksRemain`, if an earlier call of the same try has raised it: cancels since then concern this
            launch, too.
        on_adopt: Called with the job before the launch returns, if another launch has created it.
        timeouts: Timeouts of the waiter: they count while the job is created, too.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout: the job could not be created in time, see `trainjob._jobs.creation`.
        SpecMismatch: the attempt to adopt was created from another spec, and runs, waits or is complete.
        TrainJobFailed: the earlier attempt failed, and `after_failure` or `last_try` rules out a new one; or the key
            was cancelled since this launch began.
        RanksRemain: ranks of an earlier attempt run, and `wait_for_ranks` is False.
        LaunchError: the job was refused.
        InvalidSpec: the spec is invalid, or the key is blank.
    """
    spec.check()
    check_key(key)
    ranks = EarlierRanks(backend, key, namespace, wait=wait_for_ranks)
    decides = spec.on_retry is not None or after_failure != "retry" or last_try is not None
    # The local backend keeps a job that is cancelled, with its reason.
    seen = Looks(backend, key, namespace, began, reads_records=decides and backend.cluster is not None)
    request = _Launch(
        backend, spec, key, namespace, is_new, tried, last_try, after_failure, origin, on_adopt, timeouts, ranks, seen
    )
    return await request.run()


@dataclass
class _Launch:
    """One call of `launch`; its arguments come first.

    Attributes:
        ranks: The ranks of earlier attempts.
        seen: What this launch has seen of the key.
        replacing: What the next attempt changes, after this launch has stopped one that got no capacity.
        lowest: Lowest number of a new attempt.
        created: UIDs of the attempts that this launch has created.
        started: Monotonic time at which the launch began.
        unused: Whether there was neither a pod nor a JobSet of the key at the first look.
    """

    backend: Backend
    spec: TrainJobSpec
    key: str
    namespace: str
    is_new: bool
    tried: int | None
    last_try: int | None
    after_failure: AfterFailure
    origin: Mapping[str, str] | None
    on_adopt: Callable[[JobRef], object] | None
    timeouts: WaitOptions | None
    ranks: EarlierRanks
    seen: Looks
    replacing: Changes = field(default_factory=Changes)
    lowest: int = 1
    created: set[str] = field(default_factory=set)
    started: float = 0.0
    unused: bool = False

    async def run(self) -> JobRef:
        self.started = time.monotonic()
        await self._begin()
        while True:
            counts, losers = decide(self.seen.attempts)
            delivered = self.seen.delivered_since()
            if delivered is not None and (counts is None or self.seen.is_own(counts)):
                counts, losers = delivered, [] if counts is None else [counts]  # this launch need not have created it
            await self._obey(counts)
            if losers:
                await self._end(losers)
            elif counts is None and (own := self.seen.own()) is not None:  # it has failed already, or was given up
                return await self._done(own)
            elif counts is not None and self.seen.is_own(counts):
                return await self._done(counts)
            elif (adopted := await self._continue(counts or self.seen.latest())) is not None:
                return await self._done(adopted)
            await self.seen.look()

    async def _begin(self) -> None:
        """Look for the first time. Most first tries find nothing of the key, and can create their attempt at once."""
        if self.is_new:  # each cancel is newer than this launch
            self.unused = True
        elif self.backend.cluster is None or (self.tried is not None and self.tried > 1):
            await self.seen.begin()  # on this machine no request takes a round trip, and a read may end a lost job
        else:
            is_free = self.backend.is_free(self.namespace, job_name(self.key, 1))
            self.unused = all(await self.seen.begin(self.ranks.none_remain(), is_free))

    async def _done(self, trainjob: TrainJob) -> JobRef:
        """The job of this launch. Deletes the records of failures, which the next attempt has taken into account."""
        await self.seen.delete_records()
        ref = JobRef.of(trainjob)
        if self.on_adopt is not None and ref.uid not in self.created:
            self.on_adopt(ref)
        return ref

    # --- what follows from an earlier attempt

    async def _continue(self, latest: TrainJob | None) -> TrainJob | None:
        """Adopt the latest attempt, replace it, or create the next one. Returns the adopted attempt.

        Raises:
            TrainJobFailed: no other attempt follows this one, or the key was cancelled since this launch began.
            SpecMismatch: the attempt to adopt was created from another spec.
        """
        changes = self.replacing
        if latest is not None:
            present = recorded(latest) if self._is_same_work(latest) else Changes()
            over = self.last_try is not None and try_of(latest) >= self.last_try
            read = over or self.after_failure != "retry" or self.spec.on_retry is not None
            why = await failure_of(self.backend, latest, read=read)
            changes = changed(self.spec, why, present)
            if why is not None and changes != present and await lacks_capacity(self.backend, latest, why):
                await self._replace(latest, why, changes)
                return None
            if self._adopts(latest, why, over=over):
                return latest if await self._adopt(latest) else None
            if observe(latest).phase is Phase.COMPLETE:  # what follows is new work
                changes = Changes()
        if await self._is_fenced():
            await self._create(latest, changes)
        return None

    async def _replace(self, latest: TrainJob, why: Diagnosis, changes: Changes) -> None:
        """Stop an attempt that got no capacity; the next one, which the next look leads to, has `changes`."""
        await keep_reason(self.backend, latest, why)
        await request_cancel(self.backend, latest)
        self.lowest = max(self.lowest, JobRef.of(latest).attempt + 1)
        self.replacing = changes
        await self.seen.read_records()

    def _is_same_work(self, latest: TrainJob) -> bool:
        """Whether an attempt was asked to do the same: its failure says something about the next one."""
        return spec_hash(latest) == spec_hash(self._rendered(1, Changes()))

    def _adopts(self, latest: TrainJob, failure: Diagnosis | None, *, over: bool) -> bool:
        phase = observe(latest).phase
        if is_deleting(latest) or phase is Phase.CANCELLED:
            return False
        if phase is Phase.COMPLETE:
            return latest["metadata"]["uid"] not in self.seen.delivered and not has_foreign_end(latest)
        if phase is not Phase.FAILED and given_up(latest) is None:
            return not self._takes_the_place_of(latest)
        if failure is not None and self._is_same_work(latest):
            final = not failure.retry.retried(user_errors=self.after_failure != "infrastructure")
            if over or (final and self.after_failure != "retry"):
                raise TrainJobFailed(failure)
        return False

    def _takes_the_place_of(self, latest: TrainJob) -> bool:
        """Whether a cancel, a kill or the reaper has suspended an attempt of another spec: it waits for a launch.

        Once the next attempt exists, which names it as replaced, it is deleted.

        Raises:
            TrainJobFailed: the key was cancelled since this launch began.
        """
        wanted = self._rendered(JobRef.of(latest).attempt, recorded(latest))
        if not is_left_suspended(latest) or spec_hash(latest) == spec_hash(wanted):
            return False
        if self._is_cancelled(latest):
            raise _cancelled(JobRef.of(latest))
        return True

    def _is_cancelled(self, latest: TrainJob) -> bool:
        """Whether an attempt carries the mark of a cancel since this launch began."""
        mark = self.seen.marks.get(latest["metadata"]["uid"])
        return cancelled_since(latest, self.seen.began, self._try_after(latest), mark)

    async def _adopt(self, latest: TrainJob) -> bool:
        """Continue with an attempt; False if it was changed since the look that showed it.

        Raises:
            SpecMismatch: it was created from another spec.
            TrainJobFailed: the key was cancelled since this launch began.
        """
        ref = JobRef.of(latest)
        check_same_spec(latest, self._rendered(ref.attempt, recorded(latest)))
        if self._is_cancelled(latest):
            raise _cancelled(ref)
        await self.backend.recover(ref)
        if observe(latest).phase is Phase.COMPLETE:
            return True
        patch = unattended.resuming(latest) if mark_of(latest) else {"metadata": {"annotations": {}}}
        patch["metadata"]["annotations"] |= self._launch_annotations(latest) | {ADOPTED: self.seen.nonce}
        patch["metadata"] |= version_of(latest)
        try:
            await self.backend.patch(ref, patch)
        except NotFound:
            return False
        except (Rejected, BackendUnavailable):
            # Trainer's webhook refuses every change of a job whose runtime was deleted. Such a job is adopted by the
            # Lease of its waiter, which the reaper reads before it ends a job.
            if "spec" in patch:
                raise
        if "spec" in patch:  # a cancel may have seen the suspended job, and left it alone
            await self.seen.read_cancels()
            await self._obey(latest, resumed=True)
        return True

    def _try_after(self, latest: TrainJob | None) -> int:
        """The caller's try with which an attempt is marked that is adopted or follows `latest`.

        A caller that does not count its tries is later than each try that was ended before.
        """
        if self.tried is not None:
            return self.tried
        before = 0 if latest is None or observe(latest).phase is Phase.COMPLETE else try_of(latest) - may_run(latest)
        return max(before, self.seen.killed, 0 if latest is None else killed_try(latest)) + 1

    def _launch_annotations(self, latest: TrainJob | None) -> dict[str, str]:
        """Annotations of the job by which cancels, waiters and reapers compare themselves with this launch."""
        tried, began = self._try_after(latest), self.seen.began
        if latest is not None and may_run(latest):  # adopted, perhaps from a launch that began later
            tried = max(tried, try_of(latest))
            began = max((each for each in (began, launched_at(latest)) if each is not None), default=None)
        return {TRY: str(tried), **({} if began is None else {LAUNCHED: str(began)})}

    # --- what must not run any more

    async def _end(self, losers: list[TrainJob]) -> None:
        """End attempts that do not count, unless they were changed since the look that showed them."""
        for loser in losers:
            _log.warning("TrainJob %s is deleted: another attempt of its key counts", JobRef.of(loser))
            await end_attempt(self.backend, loser)
        self.lowest = max([self.lowest, *(JobRef.of(loser).attempt + 1 for loser in losers)])
        await anyio.sleep(_AGAIN)

    async def _obey(self, counts: TrainJob | None, *, resumed: bool = False) -> None:
        """Stop the job of this launch if the key was cancelled since the launch began. A complete job is kept.

        Also if another launch has adopted it that began before the cancel, too: that one need not read the cancel. The
        job is suspended and not deleted, so that its name stays in use: a create whose reply was lost may still arrive.
        One that has failed already is suspended, too: it may come back.

        Args:
            counts: The attempt that counts.
            resumed: Whether this launch has resumed it.

        Raises:
            TrainJobFailed: the key was cancelled.
        """
        uid = "" if counts is None else counts["metadata"]["uid"]
        tried = self._try_after(counts)
        cancel = next((each for each in self.seen.cancels if each.applies(self.seen.began, tried, uid)), None)
        if cancel is None or (counts is not None and observe(counts).phase is Phase.COMPLETE):
            return
        for job in self.seen.attempts:
            if not may_run(job) and not may_come_back(job):
                continue
            own = self.seen.is_own(job) or (resumed and counts is job)
            if own or (cancel_of([cancel], job) is not None and not is_marked_after(job, cancel.version)):
                await request_cancel(self.backend, job, "suspend", cancel.mark)
        raise _cancelled(f"{self.namespace}/{job_name(self.key, self.lowest)}" if counts is None else JobRef.of(counts))

    async def _is_fenced(self) -> bool:
        """Whether no earlier attempt can run beside the next one; False if the attempts have to be decided again.

        Raises:
            RanksRemain: ranks still run, and this launch does not wait for them.
        """
        if self._nothing_exists:
            return True
        for job in self.seen.attempts if self.backend.cluster is not None else ():  # a local job never runs again
            if not await suspend_failed(self.backend, job):
                return False
        try:
            ended = await self.ranks.ended([*self.seen.numbers(), self.lowest - 1])
        except RanksRemain as error:
            error.began = self.seen.began
            raise
        self.lowest = max(self.lowest, self.ranks.highest + 1)
        return ended

    @property
    def _nothing_exists(self) -> bool:
        """Whether nothing of the key existed at the first look, nor has been created since."""
        return self.unused and not self.seen.numbers() and self.lowest == 1 and not self.created

    def _rendered(self, number: int, changes: Changes) -> dict[str, Any]:
        """The object of an attempt with that number."""
        earlier = self.seen.before(number)
        return render(self.spec, self.key, number, self.namespace, origin=self.origin, changes=changes, earlier=earlier)

    async def _create(self, latest: TrainJob | None, changes: Changes) -> None:
        """Create the next attempt, under a name of which nothing is left; do nothing if something of the name is left.

        Raises:
            LaunchError: the job was refused.
        """
        number = max([self.lowest, *(each + 1 for each in self.seen.numbers())])
        if not self._nothing_exists and not await self.backend.is_free(self.namespace, job_name(self.key, number)):
            self.lowest = number + 1
            return
        made = self._rendered(number, changes)
        earlier = [job["metadata"]["uid"] for job in self.seen.unsuccessful()]
        made["metadata"]["annotations"] |= self._launch_annotations(latest) | {ADOPTED: self.seen.nonce}
        made["metadata"]["annotations"] |= {REPLACES: ",".join(earlier[-_REPLACED:])} if earlier else {}
        if latest is not None and (notice := checkpoint_directories.notice(latest, made)):
            _log.log(logging.INFO if observe(latest).phase is Phase.COMPLETE else logging.WARNING, "%s", notice)
        try:
            stored = await create(self.backend, made, self.timeouts, self.started)
        except AlreadyExists:
            self.lowest = number + 1
        else:
            self.created.add(stored["metadata"]["uid"])


async def dry_run(backend: Backend, spec: TrainJobSpec, key: str, *, namespace: str) -> TrainJob:
    """The object that a first launch of `key` would store, with the defaults of the server and its webhooks.

    Creates nothing.

    Raises:
        LaunchError: the job would be refused.
    """
    spec.check()
    check_key(key)
    # Under a free name: an existing job must not make the server refuse this one.
    trainjob = render(spec, f"{key}/dry-run/{secrets.token_hex(6)}", 1, namespace)
    stored = await backend.create(trainjob, dry_run=True)
    wanted = render(spec, key, 1, namespace)["metadata"]
    return {**stored, "metadata": {**stored["metadata"], **wanted}}


def _cancelled(job: JobRef | str) -> TrainJobFailed:
    return TrainJobFailed(
        Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "its key was cancelled while it was launched",
            job=str(job),
            advice="if that was not intended, launch it again",
        )
    )
