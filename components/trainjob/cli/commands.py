"""The ``trainjob`` commands, over the flows that Airflow and KFP use, too."""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Self

import anyio
import click
from pydantic.alias_generators import to_camel

from trainjob import names
from trainjob._backends import connect
from trainjob._backends.base import Backend, TrainJob
from trainjob._backends.local.store import leftovers
from trainjob._jobs import cancellation, launching as flow, report, telemetry, waiting
from trainjob._jobs.cancellation import CrashAction
from trainjob._jobs.leftovers import Leftover, remove_leftovers
from trainjob._jobs.named import find_written
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.results import TrainJobResult
from trainjob._manifest import unattended
from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec
from trainjob._spec.reading import load_spec
from trainjob._support.display import short
from trainjob._support.kube_objects import rank_of
from trainjob._support.log_lines import STATE_SECONDS, TERMINAL_SECONDS, Throttle
from trainjob.cli import stops, texts
from trainjob.cli.output import echo, redrawn
from trainjob.cli.views import JsonView, PlainView, View, drop_stdout
from trainjob.data.program import STEP_RUNTIME
from trainjob.errors import ConfigurationError, NotFound, RankCrashed, TrainJobError, TrainJobFailed
from trainjob.job import MANAGED_BY, JobRef, labels_of
from trainjob.settings import Settings
from trainjob.status import observe
from trainjob.wait_options import WaitOptions

_DETAILS = ("spec", "ranks", "events", "running")
"""Fields that `diagnose` prints and `status` does not."""

_RANKS = 20
"""Most ranks that an error names."""

_PATHS = ("/", "file:", "pvc:")
"""Begins of a location that only pods of a cluster can read."""

PIPE_CLOSED = 128 + signal.SIGPIPE
STILL_STOPPING = 4


def perform(commands: Commands, action: Callable[[Commands], Awaitable[int]]) -> int:
    """Run one command and return its exit code."""

    async def session() -> int:
        try:
            return await action(commands)
        finally:
            await commands.aclose()

    try:
        return anyio.run(session)
    except BrokenPipeError:  # the reader of stdout has closed it, as in `trainjob logs NAME | head`
        drop_stdout()
        return PIPE_CLOSED


class Interrupts:
    """Ctrl-C and SIGTERM while a command runs: the first one ends its first stage, the second one its second stage.

    Raises nothing: the command continues after the stage. A signal between two stages ends the next one.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._stages: list[anyio.CancelScope] = []

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        self._received.append(number)
        for stage in self._stages[: len(self._received)]:
            stage.cancel()

    def stage(self) -> anyio.CancelScope:
        """The next stage, as a context manager."""
        self._stages.append(anyio.CancelScope())
        if len(self._received) >= len(self._stages):
            self._stages[-1].cancel()
        return self._stages[-1]

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for a program ended by the first signal; 0 without a signal."""
        return 128 + self._received[0] if self._received else 0


def parse_spec(source: IO[bytes] | None, fields: Mapping[str, Any]) -> TrainJobSpec:
    """The spec in the file `source`; `fields` add to its values, or replace them.

    Raises:
        InvalidSpec: the spec is invalid; lists every problem.
    """
    loaded = load_spec(source, name_of(source)) if source is not None else {}
    if source is None and "command" in fields:
        fields = {"runtime": STEP_RUNTIME, **fields}
    if fields and ("apiVersion" in loaded or "kind" in loaded):
        return TrainJobSpec.parse({"manifest": loaded, **fields})
    for name, value in fields.items():
        present = loaded.pop(to_camel(name), None) if to_camel(name) != name else loaded.get(name)
        loaded[name] = _merged(loaded.get(name, present), value) if name in _ADDED_TO else value
    if "command" in fields:
        loaded.pop("args", None)
    return TrainJobSpec.parse(loaded)


_ADDED_TO = ("env", "inputs", "outputs", "labels")


def _merged(present: Any, more: Mapping[str, str]) -> Any:
    if isinstance(present, list):  # environment as Kubernetes writes it
        kept = [item for item in present if not (isinstance(item, dict) and item.get("name") in more)]
        return [*kept, *({"name": name, "value": value} for name, value in more.items())]
    return {**present, **more} if isinstance(present, dict) else dict(more)


def name_of(source: IO[bytes]) -> str:
    """The name of a file, for errors and commands."""
    path = getattr(source, "name", None)
    return path if isinstance(path, str) and path not in ("-", "<stdin>") else "standard input"


def slug_of(source: IO[bytes] | None, command: Sequence[str]) -> str:
    """A short name of the work: the name of the spec's file, or of the script."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))] or list(command[:1])
    path = getattr(source, "name", None)
    if isinstance(path, str) and path not in ("-", "<stdin>"):
        scripts = [path]
    return Path(scripts[0]).stem if scripts else "job"


class Commands:
    """The commands, for one backend and namespace.

    Args:
        backend: Name of the backend; ``TRAINJOB_BACKEND`` if left out.
        namespace: Namespace; ``TRAINJOB_NAMESPACE`` if left out.
        as_json: Whether answers are JSON.

    Attributes:
        many: Whether the command waits for many jobs at once; set it before the first use of `backend`.
    """

    def __init__(self, backend: str | None, namespace: str | None, *, as_json: bool) -> None:
        self.many = False
        self._namespace = namespace
        self.as_json = as_json
        self._backend_name = backend

    @cached_property
    def namespace(self) -> str:
        """Namespace of jobs that are named without one."""
        return self._namespace or self._default_namespace

    @cached_property
    def _default_namespace(self) -> str:
        return Settings().namespace or self.backend.default_namespace

    def _namespace_without_cluster(self) -> str:
        """The namespace, also without the packages that read a kubeconfig."""
        try:
            return self.namespace
        except ConfigurationError as error:
            if isinstance(error.__cause__, ImportError):
                return "default"
            raise

    @cached_property
    def backend(self) -> Backend:
        """The backend, opened at the first use. Makes no request."""
        return connect(self._backend_name, shared=self.many, attended=True)

    async def aclose(self) -> None:
        """Close the connections."""
        if "backend" in vars(self):
            await self.backend.aclose()

    async def _find(self, name: tuple[str, str]) -> TrainJob:
        return await find_written(self.backend, self.namespace, *name)

    async def _examine(self, name: tuple[str, str]) -> report.Report:
        """The report of a job; of one that is gone, what its pods and Events still show."""
        try:
            ref = JobRef.of(await self._find(name))
        except NotFound as missing:
            if not names.JOB.fullmatch(name[1]):
                raise
            try:
                return await report.diagnose(self.backend, name[0] or self.namespace, name[1])
            except NotFound:
                raise missing from None
        return await report.diagnose(self.backend, ref.namespace, ref.name)

    def argument(self, ref: JobRef) -> str:
        """`ref` as the argument of the next command."""
        return ref.name if ref.namespace == self._default_namespace else str(ref)

    def command(self, *words: str) -> str:
        """A command for the same backend, to be pasted."""
        backend = ["--backend", self._backend_name] if self._backend_name else []
        return shlex.join(["trainjob", *backend, *words])

    def _after_success(self, ref: JobRef, result: TrainJobResult) -> list[str]:
        """Commands about a job that is complete."""
        name, model = self.argument(ref), result.outputs.get("model")
        lines = [f"report: {self.command('report', name, '-o', f'{ref.name}.html')}"]
        on_cluster = self.backend.cluster is not None
        if isinstance(model, str) and model and not (on_cluster and model.startswith(_PATHS)):
            target = ["--target", "LOCATION"] if on_cluster else []
            work = re.sub(r"-[0-9a-z]{10}-[0-9]+$", "", ref.name)
            lines.append(f"export the model: {self.command('export', name, '--name', work, *target)}")
        return lines

    async def _after_failure(self, ref: JobRef, error: TrainJobFailed, on_crash: CrashAction) -> list[str]:
        """Commands about a job that has failed; none if it was deleted."""
        with suppress(TrainJobError):
            if await self.backend.get(ref.namespace, ref.name) is None:
                return []
            name, rank = self.argument(ref), error.diagnosis.rank
            lines = [f"report: {self.command('diagnose', name)}"]
            stopped = isinstance(error, RankCrashed) and on_crash != "keep"  # on a cluster, without its pods
            if rank and not (stopped and self.backend.cluster is not None):
                lines.append(f"logs: {self.command('logs', name, '--rank', rank)}")
            return lines
        return []

    def _view(self, hint: str, *, plain: bool, logs: bool) -> View:
        if self.as_json:
            return JsonView(logs=logs)
        if plain or not redrawn(sys.stdout):
            return PlainView(logs=logs)
        from trainjob.cli.live import LiveView

        return LiveView(hint, logs=logs)

    # --- commands that wait

    async def run(
        self,
        source: IO[bytes] | None,
        fields: Mapping[str, Any],
        key: str | None,
        *,
        detach: bool,
        options: WaitOptions,
        on_crash: CrashAction,
        plain: bool,
        logs: bool,
        cancels: bool,
    ) -> int:
        """Launch or adopt, then wait."""
        spec = parse_spec(source, fields)
        present: list[TrainJob] = await self.backend.find(self.namespace, labels_of(key)) if key else []
        is_new = key is None
        key = key or f"cli-{secrets.token_hex(6)}/{slug_of(source, spec.command)}"
        origin = {} if detach or not cancels else unattended.SUSPEND
        hint = "Ctrl-C cancels the job" if cancels else "Ctrl-C leaves the job running"
        show = self._view(hint, plain=plain or detach, logs=logs)
        ref = None

        def follow(job: JobRef) -> None:
            nonlocal ref
            ref = job

        with show, Interrupts() as interrupts:
            with interrupts.stage():
                ref = await flow.launch(self.backend, spec, key, namespace=self.namespace, is_new=is_new, origin=origin)
                adopted = any(job["metadata"]["uid"] == ref.uid for job in present)
                show.launched(ref, key, adopted=adopted, attach=self.command("wait", self.argument(ref)))
                if detach:
                    if not self.as_json:
                        echo(self.argument(ref))
                    return 0
                result = await self._wait(ref, options, on_crash, show, follow)
                show.result(result)
                try:
                    await mark_delivered(self.backend, ref)
                except TrainJobError as error:  # the training is complete, and its result was shown
                    show.notice(
                        "the TrainJob could not be marked as delivered, so the same key returns this result again:"
                        f" {error}"
                    )
                show.next_steps(self._after_success(ref, result))
                return 0
            if cancels:
                show.notice("cancelling the job; a second Ctrl-C exits without waiting")
                message = f"exited before the end: {ref or key!s} may still be stopping"
                with interrupts.stage():
                    message = await self._cancel_all(ref, key)
            elif ref:
                message = f"{ref} keeps running; wait for it: {self.command('wait', self.argument(ref))}"
            else:
                where = ["-n", self._namespace] if self._namespace else []
                message = (
                    f"exited during the launch; list the jobs of its key: {self.command('list', *where, '--key', key)}"
                )
            show.interrupted(message)
        return interrupts.exit_code

    async def wait(
        self, name: tuple[str, str], *, options: WaitOptions, on_crash: CrashAction, plain: bool, logs: bool
    ) -> int:
        """Wait for an existing job. Does not mark its result as delivered: only the launcher does."""
        ref = JobRef.of(await self._find(name))

        def follow(job: JobRef) -> None:
            nonlocal ref
            ref = job

        with self._view("Ctrl-C leaves the job running", plain=plain, logs=logs) as show, Interrupts() as interrupts:
            show.watching(ref)
            with interrupts.stage():
                result = await self._wait(ref, options, on_crash, show, follow)
                show.result(result)
                show.next_steps(self._after_success(ref, result))
                return 0
            again = self.command("wait", self.argument(ref))
            show.interrupted(f"{ref} keeps running; wait for it again: {again}")
        return interrupts.exit_code

    async def _wait(
        self, ref: JobRef, options: WaitOptions, on_crash: CrashAction, show: View, on_follow: Callable[[JobRef], None]
    ) -> TrainJobResult:
        on_log = show.log if show.logs else None

        def follow(job: JobRef) -> None:
            nonlocal ref
            show.follow(ref, job)
            ref = job
            on_follow(job)

        try:
            return await waiting.wait(
                self.backend,
                ref,
                options,
                on_change=show.change,
                on_log=on_log,
                on_crash=show.crash,
                on_follow=follow,
                state_seconds=show.state_seconds,
            )
        except TrainJobFailed as error:
            if isinstance(error, RankCrashed):
                show.notice(await cancellation.give_up(self.backend, ref, error.diagnosis, on_crash))
                if on_crash != "keep":
                    telemetry.record_goodput(ref, error.spent)
            if not self.as_json:
                for line in await self._after_failure(ref, error, on_crash):
                    error.add_note(line)  # printed after the error
            raise

    async def _cancel_all(self, ref: JobRef | None, key: str) -> str:
        """Cancel `ref`; after an interrupted launch, which may have succeeded, the jobs of `key`. Returns a message."""
        if ref is None:
            done, message, _ = await stops.cancel_work(self, key, look_seconds=stops.LAUNCH_SECONDS)
            return message if done.jobs else "nothing was launched"
        _, message, last = await stops.cancel_job(self, ref, suspend=False)
        return "\n".join([message, *([texts.last_text(last)] if last else [])])

    async def logs(
        self, name: tuple[str, str], *, follow: bool, ranks: Sequence[str], tail: int | None, timestamps: bool
    ) -> int:
        """Print log lines."""
        ref = JobRef.of(await self._find(name))
        show = JsonView() if self.as_json else PlainView(timestamps=timestamps)
        throttle = Throttle(show.log, TERMINAL_SECONDS if redrawn(sys.stdout) else STATE_SECONDS)
        written = False
        with Interrupts() as interrupts, interrupts.stage():
            async with aclosing(self.backend.logs(ref, ranks=ranks, follow=follow, tail=tail)) as lines:
                async for line in lines:
                    throttle.line(line)
                    written = True
                    if show.closed:
                        return PIPE_CLOSED
        throttle.end()
        if not written and not interrupts.exit_code:
            await self._check_ranks(ref, ranks)
            echo(f"no lines{' of ' + ', '.join(ranks) if ranks else ''} in the logs of {ref}", err=True)
        return interrupts.exit_code

    async def _check_ranks(self, ref: JobRef, ranks: Sequence[str]) -> None:
        """Refuse ranks that the job does not have."""
        if not ranks:
            return
        known = {rank_of(pod) for pod in (await self.backend.evidence(ref)).pods} - {""}
        if known and (unknown := [rank for rank in ranks if rank not in known]):
            shown = ", ".join(sorted(known)[:_RANKS]) + (", …" if len(known) > _RANKS else "")
            raise click.BadParameter(f"{ref} has no rank {' and no rank '.join(unknown)}; it has {shown}")

    # --- commands that look once

    async def status(self, name: tuple[str, str]) -> int:
        """Print the state of one job."""
        found = await self._examine(name)
        job = {each: value for each, value in found.as_dict().items() if each not in _DETAILS}
        self._answer(job, lambda: texts.status_text(found))
        return 0

    async def diagnose(self, name: tuple[str, str], exit_code: Callable[[TrainJobFailed], int]) -> int:
        """Print everything about one job. The exit code tells who has to act next."""
        found = await self._examine(name)
        self._answer(found.as_dict(), lambda: texts.report_text(found))
        ended = found.diagnosis.failed or found.given_up
        if found.observation.stuck and not ended:
            return 2
        return exit_code(TrainJobFailed(found.diagnosis)) if ended else 0

    async def list(self, phases: Sequence[str], key: str | None) -> int:
        """Print the jobs of the namespace."""
        found = await self.backend.find(self.namespace, labels_of(key) if key else {MANAGED_BY: "trainjob"})
        jobs = [texts.describe(trainjob) for trainjob in found]
        jobs = [job for job in jobs if not phases or job["phase"] in phases]
        jobs.sort(key=lambda job: job["created"] or "", reverse=True)
        if not jobs and not self.as_json:
            asked = "".join([f" with key {key!r}" if key else "", f" in phase {' or '.join(phases)}" if phases else ""])
            rest = f"; {len(found)} in other phases" if found else "; list all: trainjob list" if key else ""
            echo(f"no jobs in namespace {self.namespace}{asked}{rest}", err=True)
            return 0
        self._answer({"jobs": jobs}, lambda: texts.table(jobs))
        return 0

    async def render(
        self, source: IO[bytes] | None, fields: Mapping[str, Any], key: str | None, *, dry_run: bool
    ) -> int:
        """Print the manifest."""
        spec = parse_spec(source, fields)
        key = key or slug_of(source, spec.command)
        if dry_run:
            trainjob = await flow.dry_run(self.backend, spec, key, namespace=self.namespace)
        else:
            trainjob = render(spec, key, 1, self._namespace_without_cluster())
        self._answer(trainjob, lambda: texts.as_yaml(trainjob))
        return 0

    # --- commands that change a job

    async def cancel_work(self, key: str, *, suspend: bool) -> int:
        """Cancel or suspend all attempts of a key."""
        done: cancellation.Cancelled | None = None
        message, last = f"exited before the end: jobs of key {key} may still be stopping", dict[str, Any]()
        with Interrupts() as interrupts, interrupts.stage():
            done, message, last = await stops.cancel_work(self, key, suspend=suspend)
        jobs = [] if done is None else [vars(ref) for ref in done.jobs]
        stopped = done is not None and done.ended
        answer = {"key": key, "jobs": jobs, "stopped": stopped, **({"last": last} if last else {}), "message": message}
        self._answer(answer, lambda: message)
        return interrupts.exit_code or (0 if stopped else STILL_STOPPING)

    async def cancel(self, name: tuple[str, str], *, suspend: bool) -> int:
        """Cancel or suspend a job."""
        ref = JobRef.of(await self._find(name))
        stopped, message, last = False, f"exited before the end: {ref} may still be stopping", None
        with Interrupts() as interrupts, interrupts.stage():
            stopped, message, last = await stops.cancel_job(self, ref, suspend=suspend)
        if last and not self.as_json:
            message += f"\n{texts.last_text(last)}"
        self._report(ref, message, stopped=stopped, **({"last": last} if last else {}))
        return interrupts.exit_code or (0 if stopped else STILL_STOPPING)

    async def resume(self, name: tuple[str, str]) -> int:
        """Resume a suspended job."""
        trainjob = await self._find(name)
        resumed, message = await stops.resume_job(self, trainjob)
        self._report(JobRef.of(trainjob), message, resumed=resumed)
        return 0

    async def delete(self, name: tuple[str, str]) -> int:
        """Remove a job that has ended."""
        trainjob = await self._find(name)
        ref, phase = JobRef.of(trainjob), observe(trainjob).phase
        if not phase.terminal:
            raise click.UsageError(f"{ref} is {phase}; cancel it instead: trainjob cancel {self.argument(ref)}")
        await self.backend.delete(ref)
        self._report(ref, f"deleted {ref}", deleted=True)
        return 0

    async def gc(self, older_than: timedelta, *, dry_run: bool) -> int:
        """Remove old jobs: those of this machine that have ended, or those that were left suspended on a cluster."""
        home = self.backend.home
        if home is None:
            return await self._gc_cluster(older_than, dry_run=dry_run)
        removed = []
        for trainjob in await self.backend.find(self.namespace, {}):
            ref, now = JobRef.of(trainjob), observe(trainjob)
            ago = datetime.now(UTC) - now.finished if now.phase.terminal and now.finished else timedelta(0)
            if ago <= older_than:
                continue
            if not dry_run:
                await self.backend.delete(ref)
            removed.append(texts.describe(trainjob))
            if not self.as_json:
                done = "would remove" if dry_run else "removed"
                echo(f"{done} {ref}: {now.phase}, ended {short(ago.total_seconds())} ago")
        left = leftovers(home, self.namespace, time.time() - older_than.total_seconds())
        for path in left:
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
            if not self.as_json:
                done = "would remove" if dry_run else "removed"
                echo(f"{done} {path}, left by a launch or deletion that was killed")
        if self.as_json:
            found = {"removed": removed, "leftovers": [str(path) for path in left]}
            echo(texts.as_json({"dry_run": dry_run, **found}))
        elif not removed and not left:
            limit = short(older_than.total_seconds())
            echo(f"no job in namespace {self.namespace} ended more than {limit} ago", err=True)
        return 0

    async def _gc_cluster(self, older_than: timedelta, *, dry_run: bool) -> int:
        cluster = self.backend.cluster
        if cluster is None:
            raise click.UsageError("gc removes jobs of this machine (--backend local) or of a cluster")

        def show(found: Leftover) -> None:
            if not self.as_json:
                done = "would remove" if dry_run else "removed"
                echo(f"{done} {found.ref}: {found.reason}, {short(found.age.total_seconds())} ago")

        removed = await remove_leftovers(cluster, self.namespace, older_than, dry_run=dry_run, on_removed=show)
        if self.as_json:
            jobs = [texts.describe(found.trainjob) for found in removed]
            echo(texts.as_json({"dry_run": dry_run, "removed": jobs, "leftovers": []}))
        elif not removed:
            limit = short(older_than.total_seconds())
            echo(f"no job in namespace {self.namespace} was left suspended by trainjob for more than {limit}", err=True)
        return 0

    def _report(self, ref: JobRef, message: str, **facts: Any) -> None:
        job = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid}
        self._answer({**job, **facts, "message": message}, lambda: message)

    def _answer(self, answer: Mapping[str, Any], text: Callable[[], str]) -> None:
        echo(texts.as_json(answer) if self.as_json else text())
