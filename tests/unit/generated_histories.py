"""Histories of pieces of work with known truth: attempts, restarts, queues, checkpoints, evaluations, stalls.

A history is simulated step by step. From it come the truth, as seconds of each activity, and the objects and reports
that `trainjob.goodput` reads.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from tests import objects
from tests.objects import Object, ended, pod

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput import STALL_SECONDS, Attempt
from trainjob._goodput.history import CHECKPOINT
from trainjob.goodput import Activity
from trainjob.job import ATTEMPT, KEY
from trainjob.status import QUEUE_LABEL, Phase

BEGIN = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
GPUS = 8.0
START_SECONDS = 90.0
"""Longest time from the start of a process to its first step."""

Known = Literal["waiter", "pods", "both"]


def text(time: float) -> str:
    """A time as the API server writes it: whole seconds."""
    return datetime.fromtimestamp(int(time), UTC).isoformat().replace("+00:00", "Z")


@dataclass
class Run:
    """One process on rank 0: times of its container, and its reports (step, time, series)."""

    start: float
    end: float = 0.0
    failed: bool = False
    reports: list[tuple[int, float, str]] = field(default_factory=list)
    replaced: bool = False
    """Whether JobSet has deleted its pods."""


@dataclass
class History:
    """A simulated history.

    Attributes:
        truth: Activity -> seconds.
        attempts: What `trainjob.goodput` gets.
        now: End of the history.
        tolerance: Seconds by which each activity may differ: what the reports cannot tell.
        complete: Whether the sources tell the whole history, see `simulate`.
    """

    truth: dict[Activity, float]
    attempts: list[Attempt]
    now: float
    tolerance: float
    complete: bool


class _CrashedError(Exception):
    """The process ended with an error."""


class _Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.at = BEGIN + self.random.random()
        self.truth = dict.fromkeys(Activity, 0.0)
        self.step_time = self.random.choice((0.2, 1.0, 5.0))
        self.interval = self.random.randint(2, 20)
        self.jitter = self.random.choice((0.0, 0.01, 0.1))
        self.total = self.interval * self.random.randint(10, 60)
        self.saves = self.interval * self.random.randint(2, 8) if self.random.random() < 0.8 else 0
        self.save_seconds = self.random.choice((0.0, 5.0, 60.0)) * self.random.random() * 2
        self.evaluates = self.interval * self.random.randint(3, 9) if self.random.random() < 0.5 else 0
        self.evaluation_seconds = self.random.uniform(10, 120)
        self.apart = self.random.random() < 0.5  # the script reports an evaluation and a checkpoint by themselves
        self.queue = self.random.random() < 0.5
        self.restarts = 0
        self.silent = 0  # runs that reported nothing, so that their start counts as training
        self.highest = 0
        self.saved = self.step = 0
        self.until = math.inf

    def spend(self, activity: Activity, seconds: float) -> None:
        self.truth[activity] += seconds
        self.at += seconds

    def pauses_after(self, step: int) -> bool:
        """Whether the next report after `step` has an evaluation or a checkpoint."""
        reported = -(-step // self.interval) * self.interval
        return any(every and reported % every == 0 for every in (self.evaluates, self.saves))

    def run(self, first: Activity, crash: float | None) -> Run:
        """Train from the latest checkpoint until the end, or for `crash` seconds; `first` is the time until then."""
        run = Run(self.at)
        self.spend(first, self.random.uniform(2, START_SECONDS))  # imports, compilation, the restored checkpoint
        self.until = self.at + crash if crash is not None else math.inf
        self.step = self.saved
        stall = self.random.randint(0, self.total) if self.random.random() < 0.2 else -1
        try:
            while self.step < self.total:
                again = self.step < self.highest
                pace = self.step_time * max(0.1, self.random.gauss(1, self.jitter))
                self.spend_unless_crashed(Activity.REPEATED if again else Activity.TRAINING, pace)
                self.step += 1
                if self.step == stall and run.reports and not self.pauses_after(stall):
                    self.stall()
                if self.step % self.interval == 0:
                    self.report(run)
        except _CrashedError:
            run.failed = True
        self.highest = max(self.highest, self.step)
        self.silent += not run.reports
        run.end = self.at
        return run

    def spend_unless_crashed(self, activity: Activity, seconds: float) -> None:
        self.spend(activity, min(seconds, max(0.0, self.until - self.at)))
        if self.at >= self.until:
            raise _CrashedError

    def stall(self) -> None:
        begin = self.at
        try:
            self.spend_unless_crashed(Activity.STALLED, self.random.uniform(1000, 5000))
        finally:
            lasted = self.at - begin
            if lasted < STALL_SECONDS + self.interval * self.step_time:  # by definition, a shorter pause is none
                self.truth[Activity.STALLED] -= lasted
                self.truth[Activity.TRAINING] += lasted

    def report(self, run: Run) -> None:
        """Evaluate and save if it is time, and report that by itself or with the loss."""
        if self.apart:
            run.reports.append((self.step, self.at, "loss"))
        if self.evaluates and self.step % self.evaluates == 0:
            self.spend_unless_crashed(Activity.EVALUATING, self.evaluation_seconds)
            run.reports.append((self.step, self.at, "eval_loss"))
        if self.saves and self.step % self.saves == 0:
            self.spend_unless_crashed(Activity.CHECKPOINTING, self.save_seconds)
            self.saved = self.step
            run.reports.append((self.step, self.at, CHECKPOINT))
        if not self.apart:
            run.reports.append((self.step, self.at, "loss"))


def simulate(seed: int, known: Known, *, skew: float = 0.0) -> History:
    """A history.

    Args:
        seed: Of the random numbers.
        known: What is known besides the TrainJobs: observations of a waiter, the pods that still exist, or both. The
            pods do not know the runs that were replaced, so the history is complete only if there are none.
        skew: Largest difference of the clocks of nodes, in seconds.
    """
    new = _Simulation(seed)
    chance, attempts, complete = new.random, list[Attempt](), True
    count = chance.choice((1, 1, 2, 3))
    for ordinal in range(1, count + 1):
        created, phases, runs = new.at, list[tuple[float, Phase]](), list[Run]()
        admitted = None
        if new.queue:
            phases.append((new.at, Phase.QUEUED))
            new.spend(Activity.QUEUED, chance.uniform(1, 3000))
            admitted = new.at
        phases.append((new.at, Phase.STARTING))
        new.spend(Activity.STARTING, chance.uniform(1, 300))
        first = Activity.STARTING
        crashes = chance.choice((0, 0, 1, 1, 2)) + (ordinal < count)
        for number in range(crashes + 1):
            phases.append((new.at + chance.random(), Phase.RUNNING))
            last = number == crashes
            crash = None if last and ordinal == count else chance.uniform(1, 1.2 * new.total * new.step_time)
            run = new.run(first, crash)
            runs.append(run)
            if not run.failed:
                break
            new.restarts += 1
            phases.append((new.at + chance.random(), Phase.RESTARTING))
            first = Activity.RESTARTING
            new.spend(Activity.RESTARTING, chance.uniform(2, 120))
            run.replaced = not last and chance.random() < 0.5
        done = not runs[-1].failed
        complete = complete and (len(runs) <= 2 and not any(run.replaced for run in runs))
        offset = chance.uniform(-skew, skew)
        job = trainjob(created, ordinal, queue=new.queue, admitted=admitted, ended=new.at, done=done)
        pods = pods_of(runs, offset, chance) if known != "waiter" else []
        collected: dict[str, list[list[Any]]] = {}
        seen_at: dict[float, float] = {}  # a waiter gets the metrics of one report together
        seen = 0.0
        for run in runs if known != "pods" else ():
            for number, (step, time, name) in enumerate(run.reports):
                if name != "loss" or not number or chance.random() < 0.9:
                    seen = seen_at.setdefault(time, max(seen, time + chance.random()))
                    collected.setdefault(name, []).append([step, seen, float(step)])
        observed = phases if known != "pods" else []
        attempts.append(Attempt(Evidence(job, pods), observed, collected))
        if done:
            break
        new.spend(Activity.RESTARTING, chance.uniform(0, 600))
    # What a process did after its last report is unknown: some steps, a part of an evaluation or of a checkpoint.
    unreported = 3 * new.interval * new.step_time + new.save_seconds + (new.evaluation_seconds if new.evaluates else 0)
    runs_in_all = len(attempts) + new.restarts
    tolerance = 5 + runs_in_all * (unreported + 3 + 2 * skew) + new.silent * START_SECONDS
    tolerance += 0.01 * sum(new.truth.values())
    return History(new.truth, attempts, new.at, tolerance, complete or known != "pods")


def trainjob(
    created: float,
    ordinal: int = 1,
    *,
    queue: bool = False,
    admitted: float | None = None,
    ended: float | None = None,
    done: bool = True,
) -> Object:
    """The object of an attempt; it runs unless it has `ended`."""
    conditions = []
    if admitted is not None:
        conditions.append(objects.RESUMED | {"lastTransitionTime": text(admitted)})
    if ended is not None:
        conditions.append((objects.COMPLETE if done else objects.FAILED) | {"lastTransitionTime": text(ended)})
    return objects.trainjob(
        *conditions,
        name=f"train-{ordinal}",
        namespace="ml",
        labels={ATTEMPT: str(ordinal), **({QUEUE_LABEL: "gpu"} if queue else {})},
        annotations={KEY: "nightly/train"},
        metadata={"uid": f"uid-{ordinal}", "creationTimestamp": text(created)},
        spec={"trainer": {"numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": int(GPUS / 2)}}}},
        jobsStatus=[objects.counts(active=1, ready=1)],
    )


def pods_of(runs: Sequence[Run], offset: float, chance: random.Random) -> list[Object]:
    """The pods of two ranks: those of the latest restart by JobSet, with their last two runs."""
    generation = sum(run.replaced for run in runs)
    latest = max((number for number, run in enumerate(runs) if run.replaced), default=-1) + 1
    own, pods = runs[latest:], []
    created = runs[latest - 1].end + 1 if latest else runs[0].start - 1
    for rank in range(2):
        states: list[Object] = []
        for run in own[-2:]:
            began = {"startedAt": text(run.start + offset + (chance.random() if rank else 0.0))}
            told = {"message": "" if rank else message_of(run, offset), "finishedAt": text(run.end + offset)}
            states.append(ended(int(run.failed), **began, **told) if run.end else {"running": began})
        pods.append(pod(rank, states[-1], states[0] if len(states) > 1 else None, job="train"))
        pods[-1]["metadata"] |= {"creationTimestamp": text(created)}
        pods[-1]["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] = str(generation)
        pods[-1]["status"]["containerStatuses"][0]["restartCount"] = len(own) - 1
    return pods


def message_of(run: Run, offset: float = 0.0) -> str:
    """The termination message of a run, with at most as many points as `trainjob.progress` writes."""
    history: dict[str, list[list[Any]]] = {}
    for step, time, name in run.reports[-250:]:
        history.setdefault(name, []).append([step, round(time + offset, 1), step / 7])
    return json.dumps({"trainjob": 1, "history": history})
