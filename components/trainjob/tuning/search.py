"""The loop of a study: ask for parameters, launch a trial, watch it, prune it, record its outcome."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeGuard, TypeVar

from trainjob._backends.base import Backend, TrainJob
from trainjob._goodput import Goodput
from trainjob._goodput.history import thinned
from trainjob._jobs import cancellation, launching, telemetry
from trainjob._jobs.results import TrainJobResult
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import JobRef, check_key, differences, key_hash
from trainjob._manifest.workflow_labels import STUDY
from trainjob._spec import TrainJobSpec
from trainjob._spec.checks import RESERVED_PREFIX
from trainjob.errors import (
    InvalidStudy,
    Problem,
    RankCrashed,
    StoreUnavailable,
    StudyFailed,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.status import Observation, Phase, observe
from trainjob.tuning import template as templates
from trainjob.tuning.journal import Journal
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.study import Study
from trainjob.tuning.trials import StudyResult, Trial, damaged, name_of, parameters_of, trial_of
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)

TRIAL = RESERVED_PREFIX + "trial"
"""Label of a trial's job: its number."""

T = TypeVar("T")

_VALUES = 256  # of one trial, kept in its outcome; as many as the history of a job has
_SILENT = 3  # trials without the metric after which a study is given up
_REASON = 500  # characters
_LAUNCH_SECONDS = 1.0  # for which the job of an interrupted launch is looked for
_POLL_SECONDS = 10.0  # between two reads of the outcomes that other launchers recorded: one list request each


async def tune(
    backend: Backend,
    study: Study,
    template: TrainJobSpec,
    key: str,
    journal: Journal,
    *,
    namespace: str,
    origin: Mapping[str, str] | None = None,
    options: WaitOptions | None = None,
    on_change: Callable[[Sequence[Trial]], None] | None = None,
) -> StudyResult:
    """Run a study, or continue it where an earlier launcher of the same key was killed.

    If this call is cancelled, the running trials keep running, and the next call of the same key continues the study;
    `cancel_trials` cancels them. After an error of one trial's launch, no trial is launched any more; the error is
    raised once the running trials have ended.

    Args:
        backend: Backend of the trials. With many trials, one whose waiters share a watch (``shared=True``).
        study: What to search.
        template: Spec of the trials.
        key: Identity of the study; the key of trial n is ``<key>/<n>``.
        journal: State of the study.
        namespace: Namespace of the trials.
        origin: Labels of the trials' jobs.
        options: When to give up a trial before it has ended: it is cancelled and counts as failed.
        on_change: Called with all trials after each change.

    Raises:
        InvalidStudy: The study is invalid, or it began with another space, metric, sampler, pruner or template.
        StudyFailed: No trial has completed.
        TrainJobError: A trial cannot be launched, or the journal cannot be read or written.
    """
    check_key(key)
    templates.check_template(study, template)
    search = _Search(backend, study, template, key, journal, namespace, origin or {}, options, on_change)
    try:
        return await search.run()
    finally:
        search.thread.shutdown(wait=False, cancel_futures=True)


async def cancel_trials(backend: Backend, key: str, *, namespace: str, launching: Collection[int] = ()) -> int:
    """Cancel the running trials of a study whose launcher has ended; returns how many.

    They have no outcome: the next launch of the study runs them again.

    Args:
        backend: Backend of the trials.
        key: Identity of the study.
        namespace: Namespace of the trials.
        launching: Numbers of trials that were being launched: a request may be on its way that creates a job.
    """
    jobs = [job for job in await find_trials(backend, key, namespace=namespace) if not observe(job).phase.terminal]
    cancels = [cancellation.cancel(backend, JobRef.of(job), timeout_seconds=0) for job in jobs]
    found = {job["metadata"]["uid"] for job in jobs}
    late = [
        cancellation.cancel_key(
            backend, f"{key}/{number}", namespace=namespace, timeout_seconds=0, look_seconds=_LAUNCH_SECONDS
        )
        for number in launching
    ]
    _, cancelled = await asyncio.gather(asyncio.gather(*cancels), asyncio.gather(*late))
    return len(found | {ref.uid for each in cancelled for ref in each.jobs})


async def find_trials(backend: Backend, key: str, *, namespace: str) -> list[TrainJob]:
    """The jobs of the trials of a study, in no particular order."""
    return await backend.find(namespace, {STUDY: key_hash(key)})


@dataclass
class _Watched:
    """What was observed of one trial."""

    values: list[tuple[int, float]] = field(default_factory=list)
    latest: Observation | None = None

    @property
    def seconds(self) -> float:
        """From its admission to its end, or until now."""
        if self.latest is None or self.latest.admitted is None:
            return 0.0
        return max(0.0, ((self.latest.finished or datetime.now(UTC)) - self.latest.admitted).total_seconds())


@dataclass
class _Search:
    backend: Backend
    study: Study
    template: TrainJobSpec
    key: str
    journal: Journal
    namespace: str
    origin: Mapping[str, str]
    options: WaitOptions | None
    on_change: Callable[[Sequence[Trial]], None] | None

    def __post_init__(self) -> None:
        # All calls of Optuna, one after the other: they take up to 0.1 s with 1,000 trials. A change of `trials` and
        # the call that adds it to the sampler are made without an await between them, so both have the same order.
        self.thread = ThreadPoolExecutor(1, "trainjob-tune")
        self.sampling: Sampling
        self.trials: dict[int, Trial] = {}
        self.rungs: dict[int, Mapping[str, float]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.watched: dict[int, _Watched] = {}
        self.refs: dict[int, JobRef] = {}  # without those that are being launched
        self.present: dict[int, TrainJob] = {}
        self.uncancelled: list[JobRef] = []
        self.error: TrainJobError | None = None
        self.began = self.polled = 0.0
        self.launch = 0

    def _sampled(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.thread, call)

    async def run(self) -> StudyResult:
        await self._load()
        try:
            reason = await self._loop()
        finally:
            for task in self.running.values():
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)
        await self._cancel_again()
        if self.error is not None:
            raise self.error
        await asyncio.to_thread(self.journal.create, f"ends/{name_of(self.launch)}", {"reason": reason})
        complete = [each for each in self._sorted() if each.state == "complete" and each.value is not None]
        if not complete:
            failed = [each for each in self._sorted() if each.state == "failed"]
            first = f"; trial {failed[0].number} of job {failed[0].job}: {failed[0].reason}" if failed else ""
            raise StudyFailed(f"no trial of study {self.key} has completed: {reason}{first}")
        best = complete[0]
        for each in complete[1:]:
            if self.study.better(each.value or 0.0, best.value or 0.0):
                best = each
        importances = await self._sampled(self._importances)
        return StudyResult(self.key, self.study.metric, self.study.direction, best, self._sorted(), importances, reason)

    def _importances(self) -> dict[str, float]:
        return self.sampling.importances()

    def _sorted(self) -> list[Trial]:
        return [self.trials[number] for number in sorted(self.trials)]

    # --- the journal

    async def _load(self) -> None:
        """Read the journal, and compare the study with what it was when it began."""
        await self._sampled(lambda: self._rebuild([]))  # before the journal: Optuna may refuse an option
        identity = {"study": self.study.identity(), "template": self._template()}
        where = {"key": self.key, "namespace": self.namespace}
        header = await asyncio.to_thread(self.journal.create, "study", {**identity, **where, "began": time.time()})
        if present := {name: header.get(name) for name in where if header.get(name) != where[name]}:
            found = ", ".join(f"{name} {value}" for name, value in present.items())
            raise InvalidStudy([Problem("", f"the journal is that of another study, with {found}", "use another one")])
        if changes := differences({"spec": identity}, {"spec": {name: header.get(name) for name in identity}}):
            problems = [Problem("", change.replace("spec.", "", 1)) for change in changes]
            problems.append(Problem("", f"study {self.key} began with another space or template", "use another key"))
            raise InvalidStudy(problems)
        if not _is_value(header.get("began")):
            raise damaged("study", "it has no time at which the study began")
        self.began = header["began"]

        def record() -> None:
            self.launch = len(self.journal.all("launches"))
            self.journal.create(f"launches/{name_of(self.launch)}", self.study.limits())

        await asyncio.to_thread(record)
        await self._read_journal()
        self.trials = dict(sorted(self.trials.items()))
        if self.trials:
            await self._take_present()

    def _template(self) -> dict[str, Any]:
        return self.template.model_dump(mode="json", exclude_defaults=True, exclude={"unattended", "unattended_after"})

    def _rebuild(self, trials: Sequence[Trial]) -> None:
        """Make the sampler anew, with these trials."""
        sampling = Sampling(self.study)
        for trial in trials:
            sampling.resume(trial.number, trial.parameters)
            if trial.ended:
                sampling.end(trial, self.rungs.get(trial.number, {}))
            else:
                for step, value in trial.values:
                    sampling.report(trial.number, step, value)
        self.sampling = sampling

    async def _read_journal(self) -> None:
        """Take the trials that other launchers asked for or ended: earlier ones, and those that run now."""

        def read() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
            return self.journal.all("asked"), self.journal.all("ended")

        self.polled = time.monotonic()
        asked, ended = await asyncio.to_thread(read)
        added: list[Awaitable[None]] = []
        while (name := name_of(len(self.trials))) in asked:
            added.append(self._take_asked(Trial(len(self.trials), parameters_of(len(self.trials), asked[name]))))
        running = [number for number, trial in self.trials.items() if not trial.ended]
        added += [self._take_outcome(number, ended[name_of(number)]) for number in running if name_of(number) in ended]
        await asyncio.gather(*added)

    def _take_asked(self, trial: Trial) -> asyncio.Future[None]:
        """Take a trial from the journal."""
        self.trials[trial.number] = trial
        return self._sampled(lambda: self.sampling.resume(trial.number, trial.parameters))

    def _take_outcome(self, number: int, stored: Mapping[str, Any]) -> asyncio.Future[None]:
        """Take an outcome from the journal; the result is done once the sampler has it, too."""
        if self.trials[number].ended:
            return self._sampled(lambda: None)
        self.trials[number] = trial = trial_of(number, self.trials[number].parameters, stored)
        self.rungs[number] = rungs = stored.get("rungs") or {}
        return self._sampled(lambda: self.sampling.end(trial, rungs))

    async def _ended_elsewhere(self, number: int) -> bool:
        """Whether another launcher has recorded the outcome of a trial."""
        if not self.trials[number].ended:
            stored = await asyncio.to_thread(self.journal.read, f"ended/{name_of(number)}")
            if stored is not None:
                await self._take_outcome(number, stored)
        return self.trials[number].ended

    async def _take_present(self) -> None:
        """Cancel jobs that a launcher could not cancel before it was killed; keep the others for `_run_trial`."""
        for job in await find_trials(self.backend, self.key, namespace=self.namespace):
            number = str(job["metadata"]["labels"].get(TRIAL, ""))
            trial = self.trials.get(int(number)) if number.isdecimal() else None
            if trial is None:
                continue
            if not trial.ended:
                known = self.present.get(trial.number)
                if known is None or JobRef.of(known).attempt < JobRef.of(job).attempt:
                    self.present[trial.number] = job
            elif not observe(job).phase.terminal:
                await self._cancel(JobRef.of(job))

    # --- the loop

    async def _loop(self) -> str:
        while True:
            if self.error is None:
                for number in [n for n, each in self.trials.items() if not each.ended and n not in self.running]:
                    self._start(number)
            reason = await self._fill()
            if reason == _REACHED:
                await self._stop_running()
                return f"{self.study.metric} has reached {self.study.stop_at:g}"
            self._changed()
            if not self.running:
                return reason
            left = self.polled + _POLL_SECONDS - time.monotonic()
            done, _ = await asyncio.wait(
                self.running.values(), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
            for number in [number for number, task in self.running.items() if task in done]:
                task = self.running.pop(number)
                try:
                    task.result()
                except TrainJobError as error:
                    self._failed(error)
            if time.monotonic() - self.polled >= _POLL_SECONDS:
                await self._poll()

    async def _fill(self) -> str:
        """Launch trials while there is room; returns why no trial is launched any more, or an empty text."""
        while not (reason := self._reason_to_end()) and len(self.running) < self.study.parallel:
            try:
                await self._ask()
            except TrainJobError as error:
                self._failed(error)
        return reason

    def _failed(self, error: TrainJobError) -> None:
        if self.error is None:
            self.error = error
            _log.warning("study %s launches no further trial and waits for the running ones: %s", self.key, error)

    async def _poll(self) -> None:
        """Take what other launchers recorded, and cancel the jobs of the trials that they ended."""
        try:
            await self._read_journal()
        except StoreUnavailable as error:
            _log.debug("the journal of study %s cannot be read now: %s", self.key, error)
        except TrainJobError as error:
            self._failed(error)
        for number, task in list(self.running.items()):
            if self.trials[number].ended and (ref := self.refs.get(number)) is not None and not task.done():
                task.cancel()
                del self.running[number]
                await asyncio.gather(task, return_exceptions=True)
                await self._cancel(ref)
        await self._cancel_again()

    def _reason_to_end(self) -> str:
        """Why no trial is launched any more; empty if one may be."""
        every, study = list(self.trials.values()), self.study
        failed = [each for each in every if each.state == "failed"]
        silent = [each for each in failed if each.reason.startswith(_NO_METRIC)]
        ended = [each for each in every if each.ended]
        seconds = time.time() - self.began
        reasons = {
            f"an error: {self.error}": self.error is not None,
            _REACHED: any(self._reaches(each) for each in every),
            f"the first {len(silent)} trials reported no metric {study.metric!r}": len(silent) >= _SILENT
            and silent == ended,
            f"{len(failed)} trials have failed, more than max_failed_trials": study.max_failed_trials is not None
            and len(failed) > study.max_failed_trials,
            f"max_trials of {study.max_trials} is reached": len(every) >= study.max_trials,
            "the grid has no further combination": study.sampler.name == "grid" and len(every) >= study.combinations(),
            f"max_seconds of {study.max_seconds} have passed": study.max_seconds is not None
            and seconds >= study.max_seconds,
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _reaches(self, trial: Trial) -> bool:
        """Whether the trial is as good as `stop_at`."""
        if self.study.stop_at is None or trial.state != "complete" or trial.value is None:
            return False
        return not self.study.better(self.study.stop_at, trial.value)

    async def _ask(self) -> None:
        number = len(self.trials)
        wanted = await self._sampled(lambda: self.sampling.ask(number))
        stored = await asyncio.to_thread(self.journal.create, f"asked/{name_of(number)}", {"parameters": wanted})
        self.trials[number] = Trial(number, parameters_of(number, stored))
        if stored["parameters"] != wanted:  # by another launcher, which has seen other results
            trials = self._sorted()
            await self._sampled(lambda: self._rebuild(trials))
        self._start(number)

    # --- one trial

    def _start(self, number: int) -> None:
        self.running[number] = asyncio.create_task(self._run_trial(number), name=f"trial {number}")

    async def _run_trial(self, number: int) -> None:
        present = self.present.pop(number, None)
        self.watched[number] = _Watched(latest=None if present is None else observe(present))
        spec = templates.spec_of(self.template, number, self.trials[number].parameters)
        labels = {**self.origin, STUDY: key_hash(self.key), TRIAL: str(number)}
        ref = None
        if present is not None and observe(present).phase is Phase.COMPLETE:
            ref = JobRef.of(present)  # `launch` would start another attempt if a person has fetched its result
        tries = 0  # of this launcher; those of its predecessor are counted on the job
        while True:
            tries += 1
            try:
                # A launcher that starts again finds the failure of an attempt that its predecessor did not record.
                ref = ref or await launching.launch(
                    self.backend,
                    spec,
                    f"{self.key}/{number}",
                    namespace=self.namespace,
                    origin=labels,
                    last_try=self.study.retries + 1,
                    after_failure="infrastructure",
                )
            except TrainJobFailed as error:
                self._update(number, job=error.diagnosis.job.rpartition("/")[2])
                await self._end(number, "failed", None, error.diagnosis.summary)
                return
            self.refs[number] = ref
            self._update(number, job=ref.name)
            self._changed()
            # Another launcher may have pruned the trial and cancelled its job just before this launch.
            if await self._ended_elsewhere(number):
                await self._cancel(ref)
                return
            try:
                await self._watch(number, ref)
            except TrainJobFailed as error:
                again = error.diagnosis.retry.retried(user_errors=False) and tries <= self.study.retries
                if isinstance(error, RankCrashed):  # its job keeps running
                    await self._end(number, "failed", None, error.diagnosis.summary)
                    await self._cancel(self.refs[number], error.spent)
                elif not again:
                    await self._end(number, "failed", None, error.diagnosis.summary)
                elif not await self._ended_elsewhere(number):
                    del self.refs[number]
                    self._update(number, job="")  # it is being launched again, which `on_change` shows
                    self._changed()
                    ref = None
                    continue
            except TimedOut as error:
                await self._end(number, "failed", None, str(error))
                await self._cancel(self.refs[number], error.spent)
            return

    async def _watch(self, number: int, ref: JobRef) -> None:
        """Wait for the end of a trial, or prune it; record its outcome."""
        pruned: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def decided(done: asyncio.Future[bool]) -> None:
            if done.cancelled() or pruned.done():
                return
            if (error := done.exception()) is not None:
                pruned.set_exception(error)
            elif done.result():
                pruned.set_result(True)

        def change(now: Observation, _: str) -> None:
            self.watched[number].latest = now
            if (decision := self._take_value(number, now)) is not None and not now.phase.terminal:
                decision.add_done_callback(decided)

        def follow(job: JobRef) -> None:
            self.refs[number] = job
            self._update(number, job=job.name)
            self._changed()

        waiting = asyncio.create_task(wait(self.backend, ref, self.options, on_change=change, on_follow=follow))
        try:
            both: set[asyncio.Future[Any]] = {waiting, pruned}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and pruned.result():
                await self._end(number, "pruned", self.watched[number].values[-1][1], "worse than other trials")
                await self._cancel(self.refs[number])
            else:
                await self._complete(number, await waiting)
        finally:
            pruned.cancel()
            waiting.cancel()
            await asyncio.gather(waiting, pruned, return_exceptions=True)

    def _take_value(self, number: int, now: Observation) -> asyncio.Future[bool] | None:
        """Take a value that a running trial reported; returns whether to prune the trial, None without a new value."""
        value, values = now.metrics.get(self.study.metric), self.watched[number].values
        if not _is_value(value) or self.trials[number].ended:
            return None
        step = now.step if now.step is not None else values[-1][0] + 1 if values else 1
        if values and (step <= values[-1][0] or (now.step is None and value == values[-1][1])):
            return None  # the same report again
        values.append((step, float(value)))
        if len(values) > 2 * _VALUES:
            values[:] = _thinned(values)
        self._update(number, value=float(value), values=tuple(values))
        decision = self._sampled(lambda: self.sampling.report(number, step, float(value)))
        self._changed()
        return decision

    async def _complete(self, number: int, result: TrainJobResult) -> None:
        value = result.metrics.get(self.study.metric)
        problem = ""
        if value is None:
            names = ", ".join(sorted(result.metrics)) or "none"
            problem = f"{_NO_METRIC} {self.study.metric!r}; it reported: {names}"
        elif not _is_value(value):
            problem = f"{self.study.metric} is {value!r}, which is not a finite number"
        # The training's own history has the steps between those that this waiter has seen.
        seen = self.watched[number].values
        known = {step: each for step, _, each in result.history.get(self.study.metric, ())} | dict(seen)
        seen[:] = sorted(known.items())
        more = {"metrics": dict(result.metrics), "outputs": dict(result.outputs)}
        if problem:
            await self._end(number, "failed", None, problem, **more)
        else:
            await self._end(number, "complete", float(value or 0), "", **more)

    async def _end(self, number: int, state: str, value: float | None, reason: str, **more: Any) -> None:
        """Record the outcome of a trial; of two launchers the first one decides."""
        trial, watched = self.trials[number], self.watched.get(number) or _Watched()
        if trial.ended:
            return
        values, seconds = _thinned(watched.values), round(watched.seconds, 3)
        made = Trial(
            number, trial.parameters, state, value, reason[:_REASON], trial.job, values=values, seconds=seconds, **more
        )
        rungs = await self._sampled(lambda: self.sampling.rungs(number))
        stored = await asyncio.to_thread(
            self.journal.create, f"ended/{name_of(number)}", {**made.as_dict(), "rungs": rungs}
        )
        await self._take_outcome(number, stored)
        self._changed()

    async def _stop_running(self) -> None:
        """End the running trials of a study that has ended, and cancel their jobs."""
        for number in list(self.running):
            await self._end(number, "stopped", self.trials[number].value, "the study has ended")
        for number, task in self.running.items():
            if number in self.refs:
                task.cancel()
        # A trial that is being launched finds its outcome, and cancels its job.
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        for number in self.running:
            if number in self.refs:
                await self._cancel(self.refs[number])
        self.running.clear()

    async def _cancel(self, ref: JobRef, spent: Goodput | None = None) -> None:
        """Cancel the job of an ended trial; after an outage, with the next poll. Record how its time was `spent`.

        Leaves no record of the cancel, which for 1,000 pruned trials would be 1,000 Leases: launchers of the trial read
        its outcome in the journal after their launch.
        """
        telemetry.record_goodput(ref, spent)
        try:
            job = await self.backend.get(ref.namespace, ref.name)
            if job is not None and job["metadata"]["uid"] == ref.uid and not observe(job).phase.terminal:
                await cancellation.request_cancel(self.backend, job)
        except TrainJobError as error:
            _log.warning("TrainJob %s of an ended trial cannot be cancelled now: %s", ref, error)
            self.uncancelled.append(ref)

    async def _cancel_again(self) -> None:
        refs, self.uncancelled = self.uncancelled, []
        for ref in refs:
            await self._cancel(ref)

    def _update(self, number: int, **changes: Any) -> None:
        if not self.trials[number].ended:
            self.trials[number] = replace(self.trials[number], **changes)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self._sorted())


_REACHED = "reached"
_NO_METRIC = "the trial reported no metric"


def _is_value(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _thinned(values: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    points = thinned({"": [(step, 0.0, value) for step, value in values]}, _VALUES).get("", [])
    return [(int(step), float(value)) for step, _, value in points]
