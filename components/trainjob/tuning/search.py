"""The loop of a study: ask for parameters, launch a trial, watch it, prune it, tell its outcome."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from trainjob import lifecycle
from trainjob.backends.base import Backend
from trainjob.errors import InvalidStudy, Problem, StudyFailed, TrainJobError, TrainJobFailed
from trainjob.manifest import JobRef, differences, key_hash
from trainjob.spec import TrainJobSpec
from trainjob.spec.checks import RESERVED_PREFIX
from trainjob.status import Observation, observe
from trainjob.tuning import template as templates
from trainjob.tuning.journal import Journal
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.study import Scalar, Study
from trainjob.waiting import TrainJobResult, wait

STUDY, TRIAL = RESERVED_PREFIX + "study", RESERVED_PREFIX + "trial"
"""Labels of a trial's job: hash of the study's key, and number of the trial."""

_VALUES = 200  # of one trial, kept in its outcome
_SILENT = 3  # complete trials without the metric after which a study is given up
_REASON = 500  # characters


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: From 0.
        parameters: Name -> value.
        state: ``running``, ``complete``, ``pruned``, ``failed``, or ``stopped`` since the study ended.
        value: Value of the metric; for a pruned trial the latest one; None if it has none.
        reason: Why it failed, was pruned or stopped.
        job: Name of its TrainJob; empty until it is launched.
        metrics: All its metrics.
        outputs: Its outputs.
        values: Values during the trial: step, value.
        seconds: From launch to end, without the queue.
    """

    number: int
    parameters: Mapping[str, Scalar]
    state: str = "running"
    value: float | None = None
    reason: str = ""
    job: str = ""
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    outputs: Mapping[str, bool | float | str] = field(default_factory=dict)
    values: Sequence[tuple[int, float]] = ()
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the trial has ended."""
        return self.state != "running"

    def as_dict(self) -> dict[str, Any]:
        """The trial as JSON values."""
        finite = {
            name: each if not isinstance(each, float) or math.isfinite(each) else str(each)
            for name, each in self.metrics.items()
        }
        return {**asdict(self), "metrics": finite, "values": [list(each) for each in self.values]}


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    Attributes:
        key: Key of the study.
        metric: Name of the metric.
        direction: ``minimize`` or ``maximize``.
        best: The best complete trial.
        trials: All trials, by number.
        importances: Parameter -> its importance, 0 to 1; empty with few trials.
        reason: Why the study ended.
    """

    key: str
    metric: str
    direction: str
    best: Trial
    trials: Sequence[Trial]
    importances: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "key": self.key,
            "metric": self.metric,
            "direction": self.direction,
            "best": self.best.as_dict(),
            "trials": [each.as_dict() for each in self.trials],
            "importances": dict(self.importances),
            "reason": self.reason,
        }


async def tune(
    backend: Backend,
    study: Study,
    template: TrainJobSpec,
    key: str,
    journal: Journal,
    *,
    namespace: str,
    origin: Mapping[str, str] | None = None,
    on_change: Callable[[Sequence[Trial]], None] | None = None,
) -> StudyResult:
    """Run a study, or continue it where an earlier launcher of the same key was killed.

    Args:
        backend: Backend of the trials. With many trials, one whose waiters share a watch (``shared=True``).
        study: What to search.
        template: Spec of the trials.
        key: Identity of the study; the key of trial n is ``<key>/<n>``.
        journal: State of the study.
        namespace: Namespace of the trials.
        origin: Labels of the trials' jobs.
        on_change: Called with all trials after each change.

    Raises:
        InvalidStudy: The study is invalid, or it began with another space, metric, sampler, pruner or template.
        StudyFailed: No trial has completed.
        TrainJobError: A trial cannot be launched.
    """
    templates.check(study, template)
    return await _Search(backend, study, template, key, journal, namespace, origin or {}, on_change).run()


@dataclass
class _Search:
    backend: Backend
    study: Study
    template: TrainJobSpec
    key: str
    journal: Journal
    namespace: str
    origin: Mapping[str, str]
    on_change: Callable[[Sequence[Trial]], None] | None

    def __post_init__(self) -> None:
        self.sampling = Sampling(self.study)
        self.trials: dict[int, Trial] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        self.refs: dict[int, JobRef] = {}
        self.began = time.time()

    async def run(self) -> StudyResult:
        await self._load()
        try:
            reason = await self._loop()
        finally:
            for task in self.running.values():
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)
        complete = [each for each in self.trials.values() if each.state == "complete" and each.value is not None]
        if not complete:
            failed = [each for each in self.trials.values() if each.state == "failed"]
            first = f"; trial {failed[0].number} of job {failed[0].job}: {failed[0].reason}" if failed else ""
            raise StudyFailed(f"no trial of study {self.key} has completed: {reason}{first}")
        best = complete[0]
        for each in complete[1:]:
            if self.study.better(each.value or 0.0, best.value or 0.0):
                best = each
        importances = await asyncio.to_thread(self.sampling.importances)
        trials = [self.trials[number] for number in sorted(self.trials)]
        return StudyResult(self.key, self.study.metric, self.study.direction, best, trials, importances, reason)

    async def _load(self) -> None:
        """Read the journal, and compare the study with what it was when it began."""
        identity = {"study": self.study.identity(), "template": self._template()}
        header = await asyncio.to_thread(
            self.journal.create, "study", {**identity, "key": self.key, "began": self.began}
        )
        if changes := differences({"spec": identity}, {"spec": {name: header.get(name) for name in identity}}):
            problems = [Problem("", change.replace("spec.", "", 1)) for change in changes]
            problems.append(Problem("", f"study {self.key} began with another space or template", "use another key"))
            raise InvalidStudy(problems)
        self.began = float(header["began"])
        await self._rebuild()

    def _template(self) -> dict[str, Any]:
        return self.template.model_dump(mode="json", exclude_defaults=True, exclude={"unattended", "unattended_after"})

    async def _rebuild(self) -> None:
        """Add the trials of the journal to the sampler, in their order."""

        def read() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
            return self.journal.all("asked"), self.journal.all("ended")

        asked, ended = await asyncio.to_thread(read)
        self.sampling = await asyncio.to_thread(Sampling, self.study)
        for number in range(len(asked)):
            name = _name(number)
            if name not in asked:
                break
            parameters = asked[name]["parameters"]
            if name in ended:
                self.sampling.add(number, parameters, ended[name])
                self.trials[number] = _trial(number, parameters, ended[name])
            else:
                self.sampling.resume(number, parameters)
                self.trials.setdefault(number, Trial(number, parameters))

    async def _loop(self) -> str:
        await self._cancel_leftovers()
        for number in [number for number, each in self.trials.items() if not each.ended]:
            self._start(number)
        while True:
            reason = self._reason_to_end()
            if reason == _REACHED:
                await self._stop_running()
                return f"{self.study.metric} has reached {self.study.stop_at:g}"
            while not reason and len(self.running) < self.study.parallel:
                await self._ask()
                reason = self._reason_to_end()
            self._changed()
            if not self.running:
                return reason
            done, _ = await asyncio.wait(self.running.values(), return_when=asyncio.FIRST_COMPLETED)
            for number in [number for number, task in self.running.items() if task in done]:
                self.running.pop(number).result()

    def _reason_to_end(self) -> str:
        """Why no trial is launched any more; empty if one may be."""
        every, study = list(self.trials.values()), self.study
        failed = [each for each in every if each.state == "failed"]
        silent = [each for each in failed if each.reason.startswith(_NO_METRIC)]
        ended = [each for each in every if each.ended]
        seconds = time.time() - self.began
        reasons = {
            _REACHED: any(self._reaches(each) for each in every),
            f"the first {len(silent)} trials reported no metric {study.metric!r}": len(silent) >= _SILENT
            and silent == ended,
            f"{len(failed)} trials have failed, more than max_failed_trials": study.max_failed_trials is not None
            and len(failed) > study.max_failed_trials,
            f"max_trials of {study.max_trials} is reached": len(every) >= study.max_trials,
            "the grid has no further combination": self.sampling.exhausted(len(every)),
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
        wanted = await asyncio.to_thread(self.sampling.ask, number)
        stored = await asyncio.to_thread(self.journal.create, f"asked/{_name(number)}", {"parameters": wanted})
        if stored["parameters"] != wanted:  # by another launcher, which has seen other results
            running = {number: each for number, each in self.trials.items() if number in self.running}
            await self._rebuild()
            self.trials |= running
            for each in [number for number in self.trials if number not in self.running]:
                if not self.trials[each].ended:
                    self._start(each)
            return
        self.trials[number] = Trial(number, wanted)
        self._start(number)

    def _start(self, number: int) -> None:
        self.running[number] = asyncio.create_task(self._run_trial(number), name=f"trial {number}")

    async def _run_trial(self, number: int) -> None:
        trial = self.trials[number]
        spec = templates.spec_of(self.template, number, trial.parameters)
        values: list[tuple[int, float]] = []
        labels = {**self.origin, STUDY: key_hash(self.key), TRIAL: str(number)}
        key = f"{self.key}/{number}"
        while True:
            try:
                # A launcher that starts again finds the failure of an attempt that its predecessor did not record.
                ref = await lifecycle.launch(
                    self.backend, spec, key, namespace=self.namespace, origin=labels, after_failure="infrastructure"
                )
            except TrainJobFailed as error:
                await self._end(number, "failed", None, error.diagnosis.summary, values=values)
                return
            self.refs[number] = ref
            self._update(number, job=ref.name)
            try:
                if await self._watch(number, ref, values):
                    return
            except TrainJobFailed as error:
                if not error.diagnosis.retry.retried(user_errors=False) or ref.attempt > self.study.retries:
                    await self._end(number, "failed", None, error.diagnosis.summary, values=values)
                    return

    async def _watch(self, number: int, ref: JobRef, values: list[tuple[int, float]]) -> bool:
        """Wait for the end of a trial, or prune it. Returns True once its outcome is recorded."""
        began, pruned = time.monotonic(), asyncio.Event()

        def change(now: Observation, _: str) -> None:
            if self._takes(number, now, values):
                pruned.set()

        waiting = asyncio.create_task(wait(self.backend, ref, on_change=change))
        stopping = asyncio.create_task(pruned.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if pruned.is_set() and not waiting.done():
                await self._end(number, "pruned", values[-1][1], "worse than other trials", values=values)
                await self._cancel(ref)
            else:
                await self._complete(number, await waiting, values, time.monotonic() - began)
            return True
        finally:
            for task in (waiting, stopping):
                task.cancel()
            await asyncio.gather(waiting, stopping, return_exceptions=True)

    def _takes(self, number: int, now: Observation, values: list[tuple[int, float]]) -> bool:
        """Take a value that a running trial reported; returns whether to prune the trial."""
        value = now.metrics.get(self.study.metric)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        step = now.step if now.step is not None else len(values) + 1
        if values and (step <= values[-1][0] or (now.step is None and value == values[-1][1])):
            return False  # the same report again
        values.append((step, float(value)))
        self._update(number, value=float(value), values=tuple(values[-_VALUES:]))
        worse = self.sampling.report(number, step, float(value))
        self._changed()
        return worse and not now.phase.terminal

    async def _complete(
        self, number: int, result: TrainJobResult, values: list[tuple[int, float]], seconds: float
    ) -> None:
        value = result.metrics.get(self.study.metric)
        problem = ""
        if value is None:
            names = ", ".join(sorted(result.metrics)) or "none"
            problem = f"{_NO_METRIC} {self.study.metric!r}; it reported: {names}"
        elif isinstance(value, bool | str) or not math.isfinite(value):
            problem = f"{self.study.metric} is {value!r}, which is not a finite number"
        more: dict[str, Any] = {"metrics": dict(result.metrics), "outputs": dict(result.outputs), "seconds": seconds}
        if problem:
            await self._end(number, "failed", None, problem, values=values, **more)
        else:
            await self._end(number, "complete", float(value or 0), "", values=values, **more)

    async def _end(
        self, number: int, state: str, value: float | None, reason: str, *, values: list[tuple[int, float]], **more: Any
    ) -> None:
        """Record the outcome of a trial; of two launchers the first one decides."""
        trial = self.trials[number]
        made = Trial(
            number, trial.parameters, state, value, reason[:_REASON], trial.job, values=values[-_VALUES:], **more
        ).as_dict()
        stored = await asyncio.to_thread(self.journal.create, f"ended/{_name(number)}", made)
        self.trials[number] = _trial(number, trial.parameters, stored)
        await asyncio.to_thread(self.sampling.tell, number, stored["state"], stored["value"])
        self._changed()

    async def _stop_running(self) -> None:
        """Cancel the running trials of a study that has ended."""
        for number in list(self.running):
            self.running.pop(number).cancel()
            trial = self.trials[number]
            if not trial.ended:
                values = [(int(step), value) for step, value in trial.values]
                await self._end(number, "stopped", trial.value, "the study has ended", values=values)
            if number in self.refs:
                await self._cancel(self.refs[number])

    async def _cancel_leftovers(self) -> None:
        """Cancel jobs of trials that have ended: a launcher was killed before it could."""
        if not self.trials:
            return
        for job in await self.backend.find(self.namespace, {STUDY: key_hash(self.key)}):
            number = str(job["metadata"]["labels"].get(TRIAL, ""))
            trial = self.trials.get(int(number)) if number.isdecimal() else None
            if trial is not None and trial.ended and trial.state != "complete" and not observe(job).phase.terminal:
                await self._cancel(JobRef.of(job))

    async def _cancel(self, ref: JobRef) -> None:
        with suppress(TrainJobError):
            await lifecycle.cancel(self.backend, ref, timeout_seconds=0)

    def _update(self, number: int, **changes: Any) -> None:
        if not self.trials[number].ended:
            self.trials[number] = Trial(**{**vars(self.trials[number]), **changes})

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change([self.trials[number] for number in sorted(self.trials)])


_REACHED = "reached"
_NO_METRIC = "the trial reported no metric"


def _name(number: int) -> str:
    return f"{number:05}"


def _trial(number: int, parameters: Mapping[str, Scalar], ended: Mapping[str, Any]) -> Trial:
    names = set(Trial.__dataclass_fields__) - {"number", "parameters", "values"}
    known = {name: value for name, value in ended.items() if name in names}
    return Trial(number, parameters, values=[(int(s), float(v)) for s, v in ended.get("values") or ()], **known)
