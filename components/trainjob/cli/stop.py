"""``trainjob cancel``, ``resume`` and ``delete``: stop jobs, print what a deletion loses, and start ranks again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import anyio
import click

from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs import cancellation
from trainjob._jobs.last_state import LAST_LINES, last_ranks, last_state, log_of
from trainjob._manifest.attempts import LAUNCHED, decide, may_run, version_of, work_of
from trainjob._support.kube_objects import mapping
from trainjob.cli import completion, texts
from trainjob.cli.command import command
from trainjob.cli.exits import STILL_STOPPING
from trainjob.cli.options import JOB, job_name, key_option
from trainjob.cli.session import Interrupts, Session
from trainjob.errors import NotFound, TrainJobError
from trainjob.job import KEY, MANAGED_BY, JobRef, labels_of
from trainjob.status import CANCELLED, GIVEN_UP, Phase, observe

LAST_STATE_SECONDS = 4.0
"""Time limit for reading the last state of a job that is being cancelled."""
LAUNCH_SECONDS = 1.0
"""How long an interrupted launch is looked for: its request may be on the way."""
_RESUMES = 5  # times that a resume is repeated for a job that other clients change


@command(
    click.argument("name", type=job_name, required=False, shell_complete=completion.jobs),
    key_option("Stop all attempts of this key instead, and a launch of it that is on its way."),
    click.option("--suspend", is_flag=True, help="Suspend the job instead; `trainjob resume` starts its ranks again."),
)
async def cancel(session: Session, *, name: tuple[str, str] | None, key: str | None, suspend: bool) -> int:
    """Stop a job, or all attempts of a key, and wait until no rank is running.

    On this machine the job's logs and metrics are kept; `trainjob gc` removes them later. On a cluster the job is
    deleted with its pods and logs; its phase, metrics and last log lines are printed.
    """
    stopped, last = False, None
    if key is not None and name is None:
        message, jobs = f"exited before the end: jobs of key {key} may still be stopping", tuple[JobRef, ...]()
        with Interrupts() as interrupts, interrupts.stage():
            done, message, last = await stop_key(session, key, suspend=suspend)
            jobs, stopped = done.jobs, done.ended
        answer = {"key": key, "jobs": [vars(ref) for ref in jobs]}
    elif name is not None and key is None:
        ref = JobRef.of(await session.find(name))
        message = f"exited before the end: {ref} may still be stopping"
        with Interrupts() as interrupts, interrupts.stage():
            stopped, message, last = await stop_job(session, ref, suspend=suspend)
        answer = {**_identity(ref)}
    else:
        raise click.UsageError("give either the NAME of a job or --key")
    text = message if key is not None or not last else f"{message}\n{texts.last_text(last)}"
    session.answer({**answer, "stopped": stopped, **({"last": last} if last else {}), "message": message}, text)
    return interrupts.exit_code or (0 if stopped else STILL_STOPPING)


@command(JOB)
async def resume(session: Session, *, name: tuple[str, str]) -> int:
    """Resume a suspended job: start its ranks again.

    Refuses to resume an attempt if another attempt of its key runs or has followed it: two of them would train at once.
    """
    trainjob = await session.find(name)
    resumed, message = await _resume(session, trainjob)
    session.answer({**_identity(JobRef.of(trainjob)), "resumed": resumed, "message": message}, message)
    return 0


@command(JOB)
async def delete(session: Session, *, name: tuple[str, str]) -> int:
    """Delete a job that has ended, with its logs."""
    trainjob = await session.find(name)
    ref, phase = JobRef.of(trainjob), observe(trainjob).phase
    if not phase.terminal:
        cancels = session.command("cancel", session.argument(ref))
        raise click.UsageError(f"{ref} is {phase}; cancel it instead: {cancels}")
    await session.backend.delete(ref)
    session.answer({**_identity(ref), "deleted": True, "message": f"deleted {ref}"}, f"deleted {ref}")
    return 0


def _identity(ref: JobRef) -> dict[str, Any]:
    return {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid}


async def stop_job(session: Session, ref: JobRef, *, suspend: bool) -> tuple[bool, str, dict[str, Any] | None]:
    """Whether all ranks of the job have ended, a message, and the last state of a job that is deleted."""
    backend = session.backend
    reading = asyncio.create_task(_last_state(backend, ref))
    try:
        # The logs of a pod are gone soon after its deletion; a slow server must not delay the deletion for long.
        await asyncio.wait([reading], timeout=LAST_STATE_SECONDS / 2)
        before = observe(await backend.get(ref.namespace, ref.name)).phase
        stopped = await cancellation.cancel(backend, ref, "suspend" if suspend else "cancel")
        phase = observe(await backend.get(ref.namespace, ref.name)).phase
        last = await reading if phase is Phase.DELETED else None
    finally:
        reading.cancel()
    if before.terminal or phase in (Phase.COMPLETE, Phase.FAILED):
        return True, f"{ref} has already ended: {phase}", None
    return stopped, _done(session, ref, phase, suspend=suspend, stopped=stopped), last


async def stop_key(
    session: Session, key: str, *, suspend: bool = False, look_seconds: float = 0.0
) -> tuple[cancellation.Cancelled, str, dict[str, Any]]:
    """Cancel all attempts of a key, and a launch of it that is on its way.

    Args:
        session: The backend and the namespace.
        key: The key.
        suspend: Suspend the jobs instead of deleting them.
        look_seconds: How long to look for the job of a launch that is on its way.

    Returns:
        What was stopped, a message, and the last states of the jobs that were deleted, by name.
    """
    backend, namespace = session.backend, session.namespace
    running = [JobRef.of(job) for job in await backend.find(namespace, labels_of(key)) if may_run(job)]
    reading = {} if suspend else {ref: asyncio.create_task(_last_state(backend, ref)) for ref in running}
    try:
        if reading:
            await asyncio.wait(reading.values(), timeout=LAST_STATE_SECONDS / 2)
        done = await cancellation.cancel_key(
            backend, key, namespace=namespace, action="suspend" if suspend else "cancel", look_seconds=look_seconds
        )
        lines: list[str] = []
        last: dict[str, Any] = {}
        for ref in sorted(done.jobs, key=lambda job: job.attempt):
            phase = observe(await backend.get(ref.namespace, ref.name)).phase
            lines.append(_done(session, ref, phase, suspend=suspend, stopped=done.ended))
            if phase is Phase.DELETED and ref in reading and (state := await reading[ref]):
                last[ref.name] = state
                lines.append(texts.last_text(state))
    finally:
        for each in reading.values():
            each.cancel()
    nothing = f"nothing runs under key {key}; a launch that began before now is cancelled, too"
    return done, "\n".join(lines) or nothing, last


def _done(session: Session, ref: JobRef, phase: Phase, *, suspend: bool, stopped: bool) -> str:
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
        done += f"; its logs and metrics are kept: {session.command('logs', session.argument(ref))}"
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


async def _resume(session: Session, trainjob: TrainJob) -> tuple[bool, str]:
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
            raise click.UsageError(f"{ref} is Queued: {now.message}; it starts by itself when there is room")
        if now.phase is not Phase.SUSPENDED:
            return False, f"{ref} is not suspended: {now.phase}"
        if (other := await _counts_instead(session.backend, trainjob)) is not None:
            name = session.argument(JobRef.of(other))
            raise click.UsageError(
                f"{ref} cannot be resumed: {JobRef.of(other)} ({observe(other).phase}) is the attempt of its key that "
                "counts, so the next launch or the reaper would delete the resumed one. To continue this attempt, "
                f"remove the other one first: {session.command('cancel', name)}"
            )
        # Like a launch: cancels before it do not concern the job any more.
        annotations: dict[str, str | None] = {CANCELLED: None, GIVEN_UP: None}
        if work := work_of(ref.name):
            version, _ = await session.backend.cancels(ref.namespace, work)
            annotations |= {} if version is None else {LAUNCHED: str(version)}
        try:
            metadata = {"annotations": annotations, **version_of(trainjob)}
            await session.backend.patch(ref, {"metadata": metadata, "spec": {"suspend": False}})
        except NotFound:  # or changed since
            latest = await session.backend.get(ref.namespace, ref.name)
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
