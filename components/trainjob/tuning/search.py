"""The loop of a study: ask for parameters, launch a trial, watch it, prune it, record its outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainjob._backends.base import Backend, TrainJob
from trainjob._goodput.history import thinned_values
from trainjob._jobs import launching
from trainjob._jobs.results import TrainJobResult
from trainjob._jobs.waiting import wait
from trainjob._manifest.workflow_labels import STUDY
from trainjob._spec import TrainJobSpec
from trainjob._support.numbers import is_finite
from trainjob.errors import RankCrashed, StoreUnavailable, StudyFailed, TimedOut, TrainJobError, TrainJobFailed
from trainjob.job import JobRef, check_key, key_hash
from trainjob.status import Observation, Phase, observe
from trainjob.tuning import template as templates
from trainjob.tuning.limits import NO_METRIC, REACHED, reason_to_end
from trainjob.tuning.search_state import SearchState
from trainjob.tuning.study import Study
from trainjob.tuning.trial_jobs import TRIAL, EndedJobs, find_trials
from trainjob.tuning.trials import Journal, StudyResult, Trial
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)

_VALUES = 256  # of one trial, kept in its outcome; as many as the history of a job has
_REASON = 500  # characters
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
    state = SearchState(study, template, key, journal, namespace)
    search = _Search(backend, state, origin or {}, options, on_change)
    try:
        return await search.run()
    finally:
        state.close()


@dataclass
class _Watched:
    """What was observed of one trial."""

    values: list[tuple[int, float]] = field(default_factory=list)
    latest: Observation | None = None

    def seconds(self, now: datetime) -> float:
        """From its admission to its end, or until now."""
        if self.latest is None or self.latest.admitted is None:
            return 0.0
        return max(0.0, ((self.latest.finished or now) - self.latest.admitted).total_seconds())


@dataclass
class _Search:
    backend: Backend
    state: SearchState
    origin: Mapping[str, str]
    options: WaitOptions | None
    on_change: Callable[[Sequence[Trial]], None] | None

    def __post_init__(self) -> None:
        self.study, self.key, self.namespace = self.state.study, self.state.key, self.state.namespace
        self.ended_jobs = EndedJobs(self.backend)
        self.running: dict[int, asyncio.Task[None]] = {}
        self.watched: dict[int, _Watched] = {}
        self.refs: dict[int, JobRef] = {}  # without those that are being launched
        self.present: dict[int, TrainJob] = {}
        self.error: TrainJobError | None = None

    async def run(self) -> StudyResult:
        # Before the journal, which records when the study began: a reply brings the time of the cluster.
        jobs = await find_trials(self.backend, self.key, namespace=self.namespace)
        await self.state.load(self.backend.now())
        await self._take_present(jobs)
        try:
            reason = await self._loop()
        finally:
            for task in self.running.values():
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)
        await self.ended_jobs.cancel_again()
        if self.error is not None:
            raise self.error
        await self.state.record_end(reason)
        return await self._result(reason)

    async def _result(self, reason: str) -> StudyResult:
        trials, best = self.state.ordered(), self.state.best()
        if best is None:
            failed = [each for each in trials if each.state == "failed"]
            first = f"; trial {failed[0].number} of job {failed[0].job}: {failed[0].reason}" if failed else ""
            raise StudyFailed(f"no trial of study {self.key} has completed: {reason}{first}")
        importances = await self.state.importances()
        return StudyResult(self.key, self.study.metric, self.study.direction, best, trials, importances, reason)

    async def _take_present(self, jobs: Sequence[TrainJob]) -> None:
        """Cancel jobs that a launcher could not cancel before it was killed; keep the others for `_run_trial`."""
        for job in jobs:
            number = str(job["metadata"]["labels"].get(TRIAL, ""))
            trial = self.state.trials.get(int(number)) if number.isdecimal() else None
            if trial is None:
                continue
            if not trial.ended:
                known = self.present.get(trial.number)
                if known is None or JobRef.of(known).attempt < JobRef.of(job).attempt:
                    self.present[trial.number] = job
            elif not observe(job).phase.terminal:
                await self.ended_jobs.cancel(JobRef.of(job))

    # --- the loop

    async def _loop(self) -> str:
        while True:
            if self.error is None:
                for number in [n for n, each in self.state.trials.items() if not each.ended and n not in self.running]:
                    self._start(number)
            reason = await self._fill()
            if reason == REACHED:
                await self._stop_running()
                return f"{self.study.metric} has reached {self.study.stop_at:g}"
            self._changed()
            if not self.running:
                return reason
            left = self.state.polled + _POLL_SECONDS - time.monotonic()
            done, _ = await asyncio.wait(
                self.running.values(), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
            for number in [number for number, task in self.running.items() if task in done]:
                task = self.running.pop(number)
                try:
                    task.result()
                except TrainJobError as error:
                    self._failed(error)
            if time.monotonic() - self.state.polled >= _POLL_SECONDS:
                await self._poll()

    async def _fill(self) -> str:
        """Launch trials while there is room; returns why no trial is launched any more, or an empty text."""
        while not (reason := self._reason_to_end()) and len(self.running) < self.study.parallel:
            try:
                self._start(await self.state.ask())
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
            await self.state.read_journal()
        except StoreUnavailable as error:
            _log.debug("the journal of study %s cannot be read now: %s", self.key, error)
        except TrainJobError as error:
            self._failed(error)
        for number, task in list(self.running.items()):
            if self.state.trials[number].ended and (ref := self.refs.get(number)) is not None and not task.done():
                task.cancel()
                del self.running[number]
                await asyncio.gather(task, return_exceptions=True)
                await self.ended_jobs.cancel(ref)
        await self.ended_jobs.cancel_again()

    def _reason_to_end(self) -> str:
        """Why no trial is launched any more; empty if one may be."""
        if self.error is not None:
            return f"an error: {self.error}"
        seconds = self.backend.now().timestamp() - self.state.began
        return reason_to_end(self.study, list(self.state.trials.values()), seconds)

    # --- one trial

    def _start(self, number: int) -> None:
        self.running[number] = asyncio.create_task(self._run_trial(number), name=f"trial {number}")

    async def _run_trial(self, number: int) -> None:
        present = self.present.pop(number, None)
        self.watched[number] = _Watched(latest=None if present is None else observe(present))
        spec = templates.spec_of(self.state.template, number, self.state.trials[number].parameters)
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
                self.state.update(number, job=error.diagnosis.job.rpartition("/")[2])
                await self._end(number, "failed", None, error.diagnosis.summary)
                return
            self.refs[number] = ref
            self.state.update(number, job=ref.name)
            self._changed()
            # Another launcher may have pruned the trial and cancelled its job just before this launch.
            if await self.state.ended_elsewhere(number):
                await self.ended_jobs.cancel(ref)
                return
            try:
                await self._watch(number, ref)
            except TrainJobFailed as error:
                again = error.diagnosis.retry.retried(user_errors=False) and tries <= self.study.retries
                if isinstance(error, RankCrashed):  # its job keeps running
                    await self._end(number, "failed", None, error.diagnosis.summary)
                    await self.ended_jobs.cancel(self.refs[number], error.spent)
                elif not again:
                    await self._end(number, "failed", None, error.diagnosis.summary)
                elif not await self.state.ended_elsewhere(number):
                    del self.refs[number]
                    self.state.update(number, job="")  # it is being launched again, which `on_change` shows
                    self._changed()
                    ref = None
                    continue
            except TimedOut as error:
                await self._end(number, "failed", None, str(error))
                await self.ended_jobs.cancel(self.refs[number], error.spent)
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
            self.state.update(number, job=job.name)
            self._changed()

        waiting = asyncio.create_task(wait(self.backend, ref, self.options, on_change=change, on_follow=follow))
        try:
            both: set[asyncio.Future[Any]] = {waiting, pruned}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and pruned.result():
                await self._end(number, "pruned", self.watched[number].values[-1][1], "worse than other trials")
                await self.ended_jobs.cancel(self.refs[number])
            else:
                await self._complete(number, await waiting)
        finally:
            pruned.cancel()
            waiting.cancel()
            await asyncio.gather(waiting, pruned, return_exceptions=True)

    def _take_value(self, number: int, now: Observation) -> asyncio.Future[bool] | None:
        """Take a value that a running trial reported; returns whether to prune the trial, None without a new value."""
        value, values = now.metrics.get(self.study.metric), self.watched[number].values
        if not is_finite(value) or self.state.trials[number].ended:
            return None
        step = now.step if now.step is not None else values[-1][0] + 1 if values else 1
        if values and (step <= values[-1][0] or (now.step is None and value == values[-1][1])):
            return None  # the same report again
        values.append((step, float(value)))
        if len(values) > 2 * _VALUES:
            values[:] = thinned_values(values, _VALUES)
        self.state.update(number, value=float(value), values=tuple(values))
        decision = self.state.report(number, step, float(value))
        self._changed()
        return decision

    async def _complete(self, number: int, result: TrainJobResult) -> None:
        value = result.metrics.get(self.study.metric)
        problem = ""
        if value is None:
            names = ", ".join(sorted(result.metrics)) or "none"
            problem = f"{NO_METRIC} {self.study.metric!r}; it reported: {names}"
        elif not is_finite(value):
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
        trial, watched = self.state.trials[number], self.watched.get(number) or _Watched()
        if trial.ended:
            return
        values, seconds = thinned_values(watched.values, _VALUES), round(watched.seconds(self.backend.now()), 3)
        made = Trial(
            number, trial.parameters, state, value, reason[:_REASON], trial.job, values=values, seconds=seconds, **more
        )
        await self.state.record_outcome(made)
        self._changed()

    async def _stop_running(self) -> None:
        """End the running trials of a study that has ended, and cancel their jobs."""
        for number in list(self.running):
            await self._end(number, "stopped", self.state.trials[number].value, "the study has ended")
        for number, task in self.running.items():
            if number in self.refs:
                task.cancel()
        # A trial that is being launched finds its outcome, and cancels its job.
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        for number in self.running:
            if number in self.refs:
                await self.ended_jobs.cancel(self.refs[number])
        self.running.clear()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self.state.ordered())
