"""``trainjob run``, ``wait`` and ``render``: launch a job, and wait for jobs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any, Literal

import click

from trainjob._jobs import launching
from trainjob._jobs.cancellation import CrashAction
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.results import TrainJobResult
from trainjob._jobs.steps import KEEP, finish
from trainjob._manifest import unattended
from trainjob._manifest.render import render as manifest_of
from trainjob.cli import completion, texts
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES
from trainjob.cli.ignored import refuse_ignored
from trainjob.cli.job_options import chosen, shown_options, spec_options, wait_options
from trainjob.cli.many import wait_for_many
from trainjob.cli.options import WithCommand, job_name
from trainjob.cli.session import Interrupts, Session
from trainjob.cli.shown import Shown
from trainjob.cli.spec_files import fields_of, parse_spec, slug_of
from trainjob.cli.stop import LAUNCH_SECONDS, stop_job, stop_key
from trainjob.errors import RankCrashed, TimedOut, TrainJobError, TrainJobFailed
from trainjob.job import JobRef
from trainjob.wait_options import WaitOptions, option_names

_PATHS = ("/", "file:", "pvc:")
"""Begins of a location that only pods of a cluster can read."""


@command(
    spec_options,
    click.option("--detach", "-d", is_flag=True, help="Launch the job and print its name; do not wait."),
    wait_options,
    shown_options,
    click.option(
        "--on-interrupt",
        type=click.Choice(["cancel", "keep"]),
        default="cancel",
        show_default=True,
        help="Choose what the first Ctrl-C does to the job. A second one exits at once.",
    ),
    cls=WithCommand,
    epilog=EXIT_CODES,
)
async def run(
    session: Session,
    *,
    spec: IO[bytes] | None,
    key: str | None,
    detach: bool,
    on_crash_action: CrashAction | None,
    no_logs: bool,
    on_interrupt: Literal["cancel", "keep"],
    command: Sequence[str],
    **given: Any,
) -> int:
    """Launch a job and wait until it ends.

    With --key, adopts the job of that key if it has not ended; after a failure, or once its result was shown, launches
    the next attempt. Without --key, the job gets a new key, which is printed.

    If this command is killed and no process waits for the job within an hour, the job is suspended, unless it was
    launched with --detach or --on-interrupt keep, or its spec says otherwise (`unattended`, `unattended_after`).
    """
    options = chosen(given)
    if detach:
        ignored = (*option_names(), "on_crash_action", "no_logs")
        refuse_ignored(*ignored, because="has no effect with --detach, which does not wait: give it to `trainjob wait`")
    fields = fields_of(given, command)
    work = parse_spec(spec, fields)
    _require_crash(on_crash_action, options, may_hang=spec is not None or "stall_timeout" in fields)
    is_new = key is None
    key = key or f"cli-{secrets.token_hex(6)}/{slug_of(spec, work.command)}"
    cancels = on_interrupt == "cancel"
    origin = {} if detach or not cancels else unattended.SUSPEND
    ref, adopted = None, list[JobRef]()
    with Shown(session) as shown, Interrupts() as interrupts:
        with interrupts.stage():
            ref = await launching.launch(
                session.backend,
                work,
                key,
                namespace=session.namespace,
                is_new=is_new,
                origin=origin,
                on_adopt=adopted.append,
                timeouts=None if detach else options,
            )
            attach = session.command("wait", session.argument(ref))
            text = f"{'adopted' if adopted else 'launched'} {ref} (attempt {ref.attempt}, key {key})"
            stops = "" if detach else f"Ctrl-C {'cancels the job' if cancels else 'leaves the job running'}; "
            text += f"\n{stops}to wait for it elsewhere: {attach}"
            session.event("launched", text, err=True, **vars(ref), key=key, adopted=bool(adopted))
            if detach:
                if not session.as_json:
                    session.event("name", session.argument(ref))
                return 0
            waited = _Waited(shown, ref, options, on_crash_action or "suspend", logs=not no_logs)
            try:
                result = await waited.result()
            finally:
                ref = waited.ref
            shown.result(result)
            try:
                await mark_delivered(session.backend, ref)
            except TrainJobError as error:  # the training is complete, and its result was shown
                shown.notice(
                    f"the TrainJob could not be marked as delivered, so the same key returns this result again: {error}"
                )
            session.say(*_after_success(session, ref, result))
            return 0
        if cancels:
            shown.notice("cancelling the job; a second Ctrl-C exits without waiting")
            message = f"exited before the end: {ref or key!s} may still be stopping"
            with interrupts.stage():
                message = await _cancel(session, ref, key)
        elif ref:
            message = f"{ref} keeps running; wait for it: {session.command('wait', session.argument(ref))}"
        else:
            where = ["-n", session.given_namespace] if session.given_namespace else []
            message = (
                f"exited during the launch; list the jobs of its key: {session.command('list', *where, '--key', key)}"
            )
        shown.end()
        session.event("interrupted", message, err=True, message=message)
    return interrupts.exit_code


@command(
    click.argument("names", type=job_name, nargs=-1, required=True, metavar="NAME...", shell_complete=completion.jobs),
    wait_options,
    shown_options,
    epilog=EXIT_CODES,
)
async def wait(
    session: Session,
    *,
    names: Sequence[tuple[str, str]],
    on_crash_action: CrashAction | None,
    no_logs: bool,
    **given: Any,
) -> int:
    """Wait for existing jobs to finish. Ctrl-C leaves them running.

    Of several jobs, prints the NAME, a tab and the Unix time of each as soon as it has ended; logs are not shown. The
    exit code is the first that applies to any of them: 1, 4, 5.
    """
    options = chosen(given)
    if len(names) > 1:
        ignored = ("fail_on_first_crash", "on_crash_action", "no_logs")
        refuse_ignored(*ignored, because="cannot be combined with several jobs: give the NAME of one")
        return await wait_for_many(session, names, options)
    _require_crash(on_crash_action, options, may_hang=True)
    ref = JobRef.of(await session.find(names[0]))
    with Shown(session) as shown, Interrupts() as interrupts:
        waited = _Waited(shown, ref, options, on_crash_action or "keep", logs=not no_logs)
        with interrupts.stage():
            shown.result(result := await waited.result())
            session.say(*_after_success(session, waited.ref, result))
            return 0
        shown.end()
        again = session.command("wait", session.argument(waited.ref))
        message = f"{waited.ref} keeps running; wait for it again: {again}"
        session.event("interrupted", message, err=True, message=message)
    return interrupts.exit_code


@command(
    spec_options,
    click.option(
        "--dry-run", is_flag=True, help="Let the API server check the TrainJob, and print what it would store."
    ),
    cls=WithCommand,
)
async def render(
    session: Session, *, spec: IO[bytes] | None, key: str | None, dry_run: bool, command: Sequence[str], **given: Any
) -> int:
    """Print the TrainJob that `run` would create, as YAML. Needs a cluster only with --dry-run."""
    work = parse_spec(spec, fields_of(given, command))
    key = key or slug_of(spec, work.command)
    if dry_run:
        trainjob = await launching.dry_run(session.backend, work, key, namespace=session.namespace)
    else:
        trainjob = manifest_of(work, key, 1, session.namespace_without_cluster())
    session.answer(trainjob, lambda: texts.as_yaml(trainjob))
    return 0


def _require_crash(action: str | None, options: WaitOptions, *, may_hang: bool) -> None:
    """Refuse --on-crash-action where nothing ends the wait before the job; `may_hang`: it may have a stall timeout."""
    if action and not options.fail_on_first_crash and not may_hang:
        needed = "--fail-on-first-crash or --stall-timeout"
        raise click.UsageError(f"--on-crash-action needs {needed}: give one of them, too")


class _Waited:
    """A wait for one job.

    Args:
        shown: Shows its changes.
        ref: The job.
        options: When to stop waiting.
        on_crash: What becomes of a job that crashed or hangs. One that times out keeps running.
        logs: Whether its log lines are shown.

    Attributes:
        ref: The job, or the attempt that has replaced it.
    """

    def __init__(self, shown: Shown, ref: JobRef, options: WaitOptions, on_crash: CrashAction, *, logs: bool) -> None:
        self.ref = ref
        self._shown, self._options, self._logs = shown, options, logs
        self._policy = replace(KEEP, on_crash=on_crash)

    async def result(self) -> TrainJobResult:
        """Wait; the errors of `trainjob._jobs.steps.finish` have a note for each command that shows more."""
        session = self._shown.session

        def follow(job: JobRef) -> None:
            self._shown.follow(self.ref, job)
            self.ref = job

        try:
            return await finish(
                session.backend,
                self.ref,
                self._options,
                self._policy,
                on_change=self._shown.change,
                on_log=self._shown.log if self._logs else None,
                on_crash=self._shown.crash,
                on_follow=follow,
                state_seconds=self._shown.state_seconds,
            )
        except TimedOut as error:
            vars(error).pop("__notes__", None)  # it keeps running, as the exit code says
            raise
        except TrainJobFailed as error:
            for done in vars(error).pop("__notes__", ()):
                self._shown.notice(done)
            if not session.as_json:
                for line in await _after_failure(session, self.ref, error, self._policy.on_crash):
                    error.add_note(line)  # printed after the error
            raise


def _after_success(session: Session, ref: JobRef, result: TrainJobResult) -> list[str]:
    """Commands about a job that is complete."""
    name, model = session.argument(ref), result.outputs.get("model")
    lines = [f"report: {session.command('report', name, '-o', f'{ref.name}.html')}"]
    on_cluster = session.backend.cluster is not None
    if isinstance(model, str) and model and not (on_cluster and model.startswith(_PATHS)):
        target = ["--target", "LOCATION"] if on_cluster else []
        work = re.sub(r"-[0-9a-z]{10}-[0-9]+$", "", ref.name)
        lines.append(f"export the model: {session.command('export', name, '--name', work, *target)}")
    return lines


async def _after_failure(session: Session, ref: JobRef, error: TrainJobFailed, on_crash: CrashAction) -> list[str]:
    """Commands about a job that has failed; none if it was deleted."""
    with suppress(TrainJobError):
        if await session.backend.get(ref.namespace, ref.name) is None:
            return []
        name, rank = session.argument(ref), error.diagnosis.rank
        lines = [f"report: {session.command('diagnose', name)}"]
        stopped = isinstance(error, RankCrashed) and on_crash != "keep"  # on a cluster, without its pods
        if rank and not (stopped and session.backend.cluster is not None):
            lines.append(f"logs: {session.command('logs', name, '--rank', rank)}")
        return lines
    return []


async def _cancel(session: Session, ref: JobRef | None, key: str) -> str:
    """Cancel `ref`; after an interrupted launch, which may have succeeded, the jobs of `key`. Returns a message."""
    if ref is None:
        done, message, _ = await stop_key(session, key, look_seconds=LAUNCH_SECONDS)
        return message if done.jobs else "nothing was launched"
    _, message, last = await stop_job(session, ref, suspend=False)
    return "\n".join([message, *([texts.last_text(last)] if last else [])])
