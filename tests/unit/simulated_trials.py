"""Trials in this process, for tests of the loop of a study: a cluster that trains, and a journal in a dictionary."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.kube.direct import DirectBackend, Store

from trainjob import JobRef, TrainJobSpec
from trainjob.errors import NotFound
from trainjob.job import labels_of
from trainjob.progress.message import RESERVED
from trainjob.status import observe
from trainjob.tuning import Study, StudyResult, read_study, tune
from trainjob.tuning.trials import StudyState

SPACE = {"x": {"type": "float", "low": -2, "high": 2}, "n": {"type": "int", "low": 1, "high": 3}}
TEMPLATE = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["train", "--x=$(KUBEFLOW_TRAINER_OPT_X)"]})
STEPS = 3


def study(**fields: Any) -> Study:
    given = {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 4, "parallel": 2}
    return Study.read(given | fields)


class Killed(BaseException):
    """The launcher was killed."""


class MemoryJournal:
    """A journal in a dictionary, which several launchers share."""

    location = "memory"

    def __init__(self, files: dict[str, str] | None = None) -> None:
        self.files: dict[str, str] = {} if files is None else files
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None

    def create(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        self.before(f"create {name}")
        text = self.files.setdefault(name, json.dumps(value, allow_nan=False))
        self.after(f"create {name}")
        found: dict[str, Any] = json.loads(text)
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        self.before(f"read {name}")
        return json.loads(self.files[name]) if name in self.files else None

    def all(self, folder: str) -> dict[str, dict[str, Any]]:
        self.before(f"all {folder}")
        names = [name for name in list(self.files) if name.startswith(f"{folder}/")]
        return {name.rpartition("/")[2]: json.loads(self.files[name]) for name in names}


def loss(values: Mapping[str, str], step: int) -> float:
    """What the training reports: it approaches (x - 1)^2 + n."""
    x, n = (float(values[f"KUBEFLOW_TRAINER_OPT_{name}"]) for name in ("X", "N"))
    return (x - 1) ** 2 + n + STEPS - step


class Trainings:
    """Trains the jobs of a cluster: one step of each job every 2 ms."""

    def __init__(self, backend: DirectBackend) -> None:
        self.backend = backend
        self.steps: dict[str, int] = {}
        self.started: list[tuple[str, int]] = []
        """Number of the trial and of the attempt of each job that was started, in order."""
        self.ended: list[str] = []
        """Numbers of the trials that trained to the end."""
        self.exits: Callable[[dict[str, str], JobRef], int] = lambda values, ref: 0
        self.name = "loss"
        self.metric: Callable[[dict[str, str], int], float | str] = loss

    def _train(self, job: dict[str, Any]) -> None:
        ref, values = JobRef.of(job), {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
        step = self.steps[ref.uid] = self.steps.get(ref.uid, 0) + 1
        if step == 1:
            self.started.append((values["TRAINJOB_TRIAL"], ref.attempt))
        if step > STEPS:
            metrics = [{"name": self.name, "value": str(self.metric(values, STEPS))}]
            code = self.exits(values, ref)
            self.backend.end(ref, code, json.dumps({"trainjob": 1, "metrics": metrics}) if not code else "")
            self.ended.append(values["TRAINJOB_TRIAL"])
            return
        metrics = [
            {"name": self.name, "value": str(self.metric(values, step))},
            {"name": f"{RESERVED}step", "value": str(step)},
        ]
        self.backend.running(ref)
        self.backend.status(ref, trainerStatus={"metrics": metrics})

    async def run(self) -> None:
        while True:
            for job in list(self.backend.jobs.values()):
                if not observe(job).phase.terminal:
                    with suppress(NotFound):
                        self._train(job)
            await asyncio.sleep(0.002)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Launcher(DirectBackend):
    """The connection of one launcher to the cluster that all share; it dies at a chosen request.

    Attributes:
        dead: Whether it has died: the test stops its tasks, since a process that is killed runs no code.
    """

    def __init__(self, store: Store, files: dict[str, str], dies_at: int = -1) -> None:
        super().__init__(store)
        self.journal = MemoryJournal(files)
        self.count, self.dies_at = 0, dies_at
        self.dead = False
        self.before = self.after = self.journal.before = self.journal.after = self._count

    def _count(self, _: str) -> None:
        self.count += 1
        if 0 <= self.dies_at <= self.count:
            self.dead = True
            raise Killed


@dataclass
class World:
    """A cluster that trains, and the journal of its study."""

    backend: DirectBackend = field(default_factory=DirectBackend)
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trainings = Trainings(self.backend)

    def launcher(self, dies_at: int = -1) -> Launcher:
        return Launcher(self.backend.store, self.files, dies_at)

    async def tune(
        self, launcher: Launcher | None = None, template: TrainJobSpec = TEMPLATE, key: str = "study", **fields: Any
    ) -> StudyResult:
        launcher = launcher or self.launcher()
        more = {name: fields.pop(name) for name in ("on_change", "options", "namespace") if name in fields}
        where: dict[str, Any] = {"namespace": "ns"} | more
        return await tune(launcher, study(**fields), template, key, launcher.journal, **where)

    def state(self) -> StudyState:
        found = read_study(MemoryJournal(self.files))
        assert found is not None
        return found

    def jobs(self, number: int) -> list[dict[str, Any]]:
        wanted = labels_of(f"study/{number}").items()
        return [job for job in self.backend.jobs.values() if wanted <= job["metadata"]["labels"].items()]

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    @staticmethod
    def at(request: str, action: Callable[[], object], number: int = 1) -> Callable[[str], None]:
        """A hook that acts before a request: the one of that name and number."""
        numbers = itertools.count(1)

        def before(name: str) -> None:
            if name == request and next(numbers) == number:
                action()

        return before

    async def interrupted(self, condition: Callable[[], bool], **fields: Any) -> None:
        """Call `tune`, and cancel the call when the condition holds."""
        task = asyncio.create_task(self.tune(**fields))
        await self.until(condition)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)

    async def killed(self, dies_at: int, **fields: Any) -> bool:
        """Whether a launcher was killed at its request of that number; raises what else it raises."""
        launcher = self.launcher(dies_at)
        task = asyncio.create_task(self.tune(launcher, **fields))
        await self.until(lambda: launcher.dead or task.done())
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if not launcher.dead and isinstance(outcome, BaseException):
            raise outcome
        return launcher.dead


def once(count: int) -> list[tuple[str, int]]:
    """The first attempt of each of these trials."""
    return [(str(number), 1) for number in range(count)]
