"""``trainjob cancel`` and ``trainjob resume``: stop jobs, print what a deletion would lose, and start ranks again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

import anyio
import click

from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs import cancellation
from trainjob._jobs.last_state import LAST_LINES, last_ranks, last_state, log_of
from trainjob._manifest.attempts import LAUNCHED, decide, may_run, version_of, work_of
from trainjob._support.kube_objects import mapping
from trainjob.cli import texts
from trainjob.errors import NotFound, TrainJobError
from trainjob.job import KEY, MANAGED_BY, JobRef, labels_of
from trainjob.status import CANCELLED, GIVEN_UP, Phase, observe

LAST_STATE_SECONDS = 4.0
"""Time limit for reading the last state of a job that is being cancelled."""
LAUNCH_SECONDS = 1.0
"""How long an interrupted launch is looked for: its request may be on the way."""
_RESUMES = 5  # times that a resume is repeated for a job that other clients change


class Session(Protocol):
    """What these commands need of the one that runs."""

    @property
    def backend(self) -> Backend:
        """The backend."""

    @property
    def namespace(self) -> str:
        """Namespace of jobs that are named without one."""

    def command(self, *words: str) -> str:
        """A command for the same backend, to be pasted."""

    def argument(self, ref: JobRef) -> str:
        """`ref` as the argument of the next command."""


async def cancel_job(commands: Session, ref: JobRef, *, suspend: bool) -> tuple[bool, str, dict[str, Any] | None]:
    """Whether all ranks of the job have ended, a message, and the last state of a job that is deleted."""
    backend = commands.backend
    reading = asyncio.create_task(_last_state(backend, ref))
    try:
        # The logs of a pod are gone soon after its deletion; a slow server must not delay the deletion for long.
        await asyncio.wait([reading], timeout=LAST_STATE_SECONDS / 2)
        before = observe(await backend.get(ref.namespace, ref.name)).phase
        stopped = await cancellation.cancel(backend, ref, "suspend" if suspend else "delete")
        phase = observe(await backend.get(ref.namespace, ref.name)).phase
        last = await reading if phase is Phase.DELETED else None
    finally:
        reading.cancel()
    if before.terminal or phase in (Phase.COMPLETE, Phase.FAILED):
        return True, f"{ref} has already ended: {phase}", None
    return stopped, _done(commands, ref, phase, suspend=suspend, stopped=stopped), last


async def cancel_work(
    commands: Session, key: str, *, suspend: bool = False, look_seconds: float = 0.0
) -> tuple[cancellation.Cancelled, str, dict[str, Any]]:
    """Cancel all attempts of a key, and a launch of it that is on its way.

    Args:
        commands: The backend and the namespace.
        key: The key.
        suspend: Suspend the jobs instead of deleting them.
        look_seconds: How long to look for the job of a launch that is on its way.

    Returns:
        What was stopped, a message, and the last states of the jobs that were deleted, by name.
    """
    backend, namespace = commands.backend, commands.namespace
    running = [JobRef.of(job) for job in await backend.find(namespace, labels_of(key)) if may_run(job)]
    reading = {} if suspend else {ref: asyncio.create_task(_last_state(backend, ref)) for ref in running}
    try:
        if reading:
            await asyncio.wait(reading.values(), timeout=LAST_STATE_SECONDS / 2)
        done = await cancellation.cancel_key(
            backend, key, namespace=namespace, action="suspend" if suspend else "delete", look_seconds=look_seconds
        )
        lines: list[str] = []
        last: dict[str, Any] = {}
        for ref in sorted(done.jobs, key=lambda job: job.attempt):
            phase = observe(await backend.get(ref.namespace, ref.name)).phase
            lines.append(_done(commands, ref, phase, suspend=suspend, stopped=done.ended))
            if phase is Phase.DELETED and ref in reading and (state := await reading[ref]):
                last[ref.name] = state
                lines.append(texts.last_text(state))
    finally:
        for each in reading.values():
            each.cancel()
    nothing = f"nothing runs under key {key}; a launch that began before now is cancelled, too"
    return done, "\n".join(lines) or nothing, last


def _done(commands: Session, ref: JobRef, phase: Phase, *, suspend: bool, stopped: bool) -> str:
    """What was done with a job that was running, as text."""
    why = ""
    if suspend and phase in (Phase.CANCELLED, Phase.DELETED):
        why = ": it cannot be suspended (managed by Kueue, or its runtime was deleted)"
    done = f"suspended {ref}" if suspend and not why else f"cancelled {ref}{why}"
    if phase is Phase.DELETED and why:
        done = f"deleted {ref}{why}"
    if not stopped:
        done += ", but its last ranks are still terminating"
    elif phase is Phase.CANCELLED:
        done += f"; its logs and metrics are kept: {commands.command('logs', commands.argument(ref))}"
    return done


async def _last_state(backend: Backend, ref: JobRef) -> dict[str, Any] | None:
    """The state that the deletion of the job would lose, as far as it can be read in time; None if it cannot."""
    with suppress(TrainJobError), anyio.move_on_after(LAST_STATE_SECONDS):
        trainjob = await backend.get(ref.namespace, ref.name)
        evidence = replace(await backend.evidence(ref), trainjob=trainjob)
        logs: dict[str, list[str]] = {}
        # Evidence has log tails of ranks that have failed only.
        if running := [rank for rank in last_ranks(evidence) if not log_of(evidence, rank)]:
            with suppress(TrainJobError):
                async with aclosing(backend.logs(ref, ranks=running, tail=LAST_LINES)) as lines:
                    async for line in lines:
                        logs.setdefault(line.rank, []).append(line.text)
        return last_state(evidence, logs)
    return None


async def resume_job(commands: Session, trainjob: TrainJob) -> tuple[bool, str]:
    """Start the ranks of a suspended job; whether that was done, and a message.

    Raises:
        UsageError: the job has ended, is in a queue, or another attempt of its key counts.
        NotFound: the job is gone, or other clients change it all the time.
    """
    ref = JobRef.of(trainjob)
    for _ in range(_RESUMES):
        now = observe(trainjob)
        if now.phase.terminal:
            raise click.UsageError(f"{ref} is {now.phase}; launch it again under its key instead")
        if now.phase is Phase.QUEUED:
            raise click.UsageError(f"{ref} is Queued: {now.message}; Kueue resumes it when there is room")
        if now.phase is not Phase.SUSPENDED:
            return False, f"{ref} is not suspended: {now.phase}"
        if (other := await _counts_instead(commands.backend, trainjob)) is not None:
            name = commands.argument(JobRef.of(other))
            raise click.UsageError(
                f"{ref} cannot be resumed: {JobRef.of(other)} ({observe(other).phase}) is the attempt of its key that "
                "counts, so the next launch or the reaper would delete the resumed one. To continue this attempt, "
                f"remove the other one first: {commands.command('cancel', name)}"
            )
        # Like a launch: cancels before it do not concern the job any more.
        annotations: dict[str, str | None] = {CANCELLED: None, GIVEN_UP: None}
        if work := work_of(ref.name):
            version, _ = await commands.backend.cancels(ref.namespace, work)
            annotations |= {} if version is None else {LAUNCHED: str(version)}
        try:
            metadata = {"annotations": annotations, **version_of(trainjob)}
            await commands.backend.patch(ref, {"metadata": metadata, "spec": {"suspend": False}})
        except NotFound:  # or changed since
            latest = await commands.backend.get(ref.namespace, ref.name)
            if latest is None or latest["metadata"]["uid"] != ref.uid:
                raise
            trainjob = latest
            continue
        return True, f"resumed {ref}"
    raise NotFound(f"TrainJob {ref} was not resumed: it was changed {_RESUMES} times at the same time; try again")


async def _counts_instead(backend: Backend, trainjob: TrainJob) -> TrainJob | None:
    """The attempt that would count if `trainjob` were resumed; None if that is `trainjob`."""
    metadata = trainjob["metadata"]
    work = mapping(trainjob, "metadata", "labels").get(KEY)
    if not work:
        return None
    attempts: Sequence[TrainJob] = await backend.find(metadata["namespace"], {MANAGED_BY: "trainjob", KEY: str(work)})
    others = [each for each in attempts if each["metadata"]["uid"] != metadata["uid"]]
    annotations = {name: text for name, text in mapping(metadata, "annotations").items() if name != GIVEN_UP}
    resumed = {**trainjob, "metadata": {**metadata, "annotations": annotations}}
    counts, _ = decide([*others, resumed])
    return None if counts is resumed else counts
