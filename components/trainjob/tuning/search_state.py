"""The trials of a search, kept alike in memory, in the journal and in the sampler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from trainjob._manifest.render import differences
from trainjob._spec import TrainJobSpec
from trainjob._support.numbers import is_finite
from trainjob.errors import InvalidStudy, Problem
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.study import Study
from trainjob.tuning.trials import (
    FORMAT,
    Journal,
    Trial,
    check_format,
    damaged,
    name_of,
    parameters_of,
    trial_of,
)

T = TypeVar("T")


@dataclass
class SearchState:
    """The trials of a study that is being searched: in memory, in the journal and in the sampler alike.

    Attributes:
        study: What to search.
        template: Spec of the trials.
        key: Identity of the study.
        journal: State of the study.
        namespace: Namespace of the trials.
        trials: Number -> trial.
        began: Unix time at which the study began.
        polled: Time of the latest read of the journal, as `time.monotonic` has it.
    """

    study: Study
    template: TrainJobSpec
    key: str
    journal: Journal
    namespace: str

    def __post_init__(self) -> None:
        # All calls of Optuna, one after the other: they take up to 0.1 s with 1,000 trials. A change of `trials` and
        # the call that adds it to the sampler are made without an await between them, so both have the same order.
        self._thread = ThreadPoolExecutor(1, "trainjob-tune")
        self._sampling: Sampling
        self._rungs: dict[int, Mapping[str, float]] = {}
        self._launch = 0
        self.trials: dict[int, Trial] = {}
        self.began = self.polled = 0.0

    def close(self) -> None:
        """Start no further call of the sampler."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def ordered(self) -> list[Trial]:
        """The trials by their number."""
        return [self.trials[number] for number in sorted(self.trials)]

    def best(self) -> Trial | None:
        """The best complete trial, of equal ones the first; None if none has completed."""
        complete = [each for each in self.ordered() if each.state == "complete" and each.value is not None]
        best = complete[0] if complete else None
        for each in complete[1:]:
            if best is not None and self.study.better(each.value or 0.0, best.value or 0.0):
                best = each
        return best

    # --- the journal

    async def load(self, now: datetime) -> None:
        """Read the journal, and compare the study with what it was when it began.

        Args:
            now: The current time, at which a new study begins.
        """
        await self._sampled(lambda: self._rebuild([]))  # before the journal: Optuna may refuse an option
        identity = {"study": self.study.identity(), "template": self._template()}
        where = {"key": self.key, "namespace": self.namespace}
        made = {"format": FORMAT, **identity, **where, "began": now.timestamp()}
        header = check_format(self.journal, await asyncio.to_thread(self.journal.create, "study", made))
        if present := {name: header.get(name) for name in where if header.get(name) != where[name]}:
            found = ", ".join(f"{name} {value}" for name, value in present.items())
            raise InvalidStudy([Problem("", f"the journal is that of another study, with {found}", "use another one")])
        if changes := differences({"spec": identity}, {"spec": {name: header.get(name) for name in identity}}):
            problems = [Problem("", change.replace("spec.", "", 1)) for change in changes]
            problems.append(Problem("", f"study {self.key} began with another space or template", "use another key"))
            raise InvalidStudy(problems)
        if not is_finite(header.get("began")):
            raise damaged("study", "it has no time at which the study began")
        self.began = header["began"]

        def record() -> None:
            self._launch = len(self.journal.all("launches"))
            self.journal.create(f"launches/{name_of(self._launch)}", self.study.limits())

        await asyncio.to_thread(record)
        await self.read_journal()
        self.trials = dict(sorted(self.trials.items()))

    def _template(self) -> dict[str, Any]:
        return self.template.model_dump(mode="json", exclude_defaults=True, exclude={"unattended", "unattended_after"})

    async def read_journal(self) -> None:
        """Take the trials that other launchers asked for or ended: earlier ones, and those that run now."""

        def asked_and_ended() -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
            return self.journal.all("asked"), self.journal.all("ended")

        self.polled = time.monotonic()
        asked, ended = await asyncio.to_thread(asked_and_ended)
        added: list[Awaitable[None]] = []
        while (name := name_of(len(self.trials))) in asked:
            added.append(self._take_asked(Trial(len(self.trials), parameters_of(len(self.trials), asked[name]))))
        running = [number for number, trial in self.trials.items() if not trial.ended]
        added += [self._take_outcome(number, ended[name_of(number)]) for number in running if name_of(number) in ended]
        await asyncio.gather(*added)

    def _take_asked(self, trial: Trial) -> asyncio.Future[None]:
        """Take a trial from the journal."""
        self.trials[trial.number] = trial
        return self._sampled(lambda: self._sampling.resume(trial.number, trial.parameters))

    def _take_outcome(self, number: int, stored: Mapping[str, Any]) -> asyncio.Future[None]:
        """Take an outcome from the journal; the result is done once the sampler has it, too."""
        if self.trials[number].ended:
            return self._sampled(lambda: None)
        self.trials[number] = trial = trial_of(number, self.trials[number].parameters, stored)
        self._rungs[number] = rungs = stored.get("rungs") or {}
        return self._sampled(lambda: self._sampling.end(trial, rungs))

    async def ended_elsewhere(self, number: int) -> bool:
        """Whether another launcher has recorded the outcome of a trial."""
        if not self.trials[number].ended:
            stored = await asyncio.to_thread(self.journal.read, f"ended/{name_of(number)}")
            if stored is not None:
                await self._take_outcome(number, stored)
        return self.trials[number].ended

    async def record_outcome(self, trial: Trial) -> None:
        """Record the outcome of a trial; of two launchers the first one decides."""
        rungs = await self._sampled(lambda: self._sampling.rungs(trial.number))
        stored = await asyncio.to_thread(
            self.journal.create, f"ended/{name_of(trial.number)}", {**trial.as_dict(), "rungs": rungs}
        )
        await self._take_outcome(trial.number, stored)

    async def record_end(self, reason: str) -> None:
        """Record why this launch of the study has ended."""
        await asyncio.to_thread(self.journal.create, f"ends/{name_of(self._launch)}", {"reason": reason})

    # --- the sampler

    async def ask(self) -> int:
        """Ask for the parameters of the next trial; returns its number."""
        number = len(self.trials)
        wanted = await self._sampled(lambda: self._sampling.ask(number))
        stored = await asyncio.to_thread(self.journal.create, f"asked/{name_of(number)}", {"parameters": wanted})
        self.trials[number] = Trial(number, parameters_of(number, stored))
        if stored["parameters"] != wanted:  # by another launcher, which has seen other results
            trials = self.ordered()
            await self._sampled(lambda: self._rebuild(trials))
        return number

    def report(self, number: int, step: int, value: float) -> asyncio.Future[bool]:
        """Report a value of a running trial; the result is whether to prune it."""
        return self._sampled(lambda: self._sampling.report(number, step, value))

    async def importances(self) -> dict[str, float]:
        """The importance of each parameter."""
        return await self._sampled(self._importances)

    def _importances(self) -> dict[str, float]:
        return self._sampling.importances()

    def update(self, number: int, **changes: Any) -> None:
        """Change a trial that has not ended."""
        if not self.trials[number].ended:
            self.trials[number] = replace(self.trials[number], **changes)

    def _rebuild(self, trials: Sequence[Trial]) -> None:
        """Make the sampler anew, with these trials."""
        sampling = Sampling(self.study)
        for trial in trials:
            sampling.resume(trial.number, trial.parameters)
            if trial.ended:
                sampling.end(trial, self._rungs.get(trial.number, {}))
            else:
                for step, value in trial.values:
                    sampling.report(trial.number, step, value)
        self._sampling = sampling

    def _sampled(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)
