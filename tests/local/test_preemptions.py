"""Preemptions of a training at random instants: no step is lost twice, and the weights are those of no preemption.

A campaign (`tests.campaigns`) of 500 preemptions. `tests.local.preempted` is the training.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from tests import campaigns
from tests.local import preempted
from tests.local.conftest import Jobs, send
from tests.local.training_logs import Files, Life, Result, lives_of
from tests.processes import eventually

from trainjob import Phase, TrainJobClient, TrainJobFailed

pytestmark = pytest.mark.timeout(3600)

PER_RUN = 5
RUNS = campaigns.runs(500, 20) // PER_RUN
AT_ONCE = 4
INSTANTS = ("time", "step", "write", "write")
SAVERS = ("digits", "trainjob")
WAYS = ("SIGKILL", "SIGTERM", "suspend", "cancel", "machine")


class Training:
    """One training on the local backend.

    Args:
        jobs: Jobs of this thread.
        key: Key of the work.
        world: Number of ranks.
        directory: For its model and its checkpoints.
        saver: What saves the checkpoints: ``digits`` or ``trainjob``.
    """

    def __init__(self, jobs: Jobs, key: str, world: int, directory: Path, saver: str = "digits") -> None:
        self.jobs, self.key, self.world, self.saver = jobs, key, world, saver
        self.files = Files(directory)
        self.launch()

    def launch(self) -> None:
        self.suspended = 0
        self.ref = self.jobs.launch(
            key=self.key,
            runtime="jax-resilient",
            num_nodes=self.world,
            command=[sys.executable, preempted.__file__, self.saver],
            args=[f"--dataset={preempted.DATA}", f"--output={self.files.model}", "--epochs=3"],
            env={"OPENBLAS_NUM_THREADS": "1"},  # sums in one order
            checkpoints=self.files.checkpoints.as_uri(),
        )

    def life(self) -> Life:
        """The current life: the log since the last of `suspended` suspensions of this job."""
        lives = lives_of(self.jobs.lines(self.ref))
        return lives[self.suspended] if self.suspended < len(lives) else Life()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, or for the end of the training."""
        eventually(lambda: condition() or self.jobs.phase(self.ref).terminal, 300)
        assert self.jobs.phase(self.ref) in (Phase.RUNNING, Phase.COMPLETE), self.jobs.lines(self.ref)

    def wait_for(self, instant: str, chance: random.Random) -> None:
        """Wait for a random instant: at any time, in a step or while a checkpoint is written."""
        self.until(lambda: len(self.life().pids) == self.world)
        if instant == "write":
            earlier = self.files.unfinished()
            self.until(lambda: self.files.unfinished() - earlier)
        elif instant == "step":
            number = chance.randint(1, 12)
            self.until(lambda: len(self.life().steps) >= number)
        time.sleep(chance.uniform(0, 0.5 if instant == "time" else 0.03))

    def preempt(self, way: str, chance: random.Random) -> None:
        """Preempt it, and wait until its ranks have ended."""
        jobs, ref, pids = self.jobs, self.ref, list(self.life().pids.values())
        if way == "suspend":
            jobs.patch(ref, {"spec": {"suspend": True}})
            eventually(lambda: jobs.client.call(lambda: jobs.client.backend.stopped(ref)), 300)
            return
        if way == "cancel":
            jobs.client.cancel(ref)
        elif way == "machine":
            send([*(process.pid for process in jobs.supervisors(ref)), *pids])
        else:
            send([chance.choice(pids)], signal.Signals[way])
        with suppress(TrainJobFailed):
            jobs.client.wait(ref)

    def resume(self, way: str) -> None:
        """Start the ranks again: those of the same job, or of the next attempt."""
        if way == "suspend":
            self.suspended += 1
            self.jobs.patch(self.ref, {"spec": {"suspend": False}})
        else:
            self.launch()

    def result(self) -> Result:
        """Wait for its end; return the weights of the model, and their hashes on all ranks."""
        self.jobs.client.wait(self.ref)
        return self.files.result(self.jobs.lines(self.ref), self.world)


def one(run: int, home: Path, directory: Path, undisturbed: Mapping[int, Result]) -> Counter[str]:
    """Preempt a training `PER_RUN` times; count what happened."""
    chance, seen = random.Random(f"{campaigns.SEED}/{run}"), Counter[str]()
    with TrainJobClient("local") as client:
        saver, world = SAVERS[run % 2], chance.randint(1, 2)
        training = Training(Jobs(client, home), f"run-{run}", world, directory / str(run), saver)
        saved, left, description = 0, set[Path](), list[str]()
        while seen["preemptions"] < PER_RUN:
            instant, way = chance.choice(INSTANTS), chance.choice(WAYS)
            training.wait_for(instant, chance)
            training.preempt(way, chance)
            complete = training.jobs.phase(training.ref) is Phase.COMPLETE  # before
            if complete:
                assert training.result() == undisturbed[training.world]
            # Between the removal of its checkpoints and its end, nothing is left to resume from.
            if complete or (training.life().ended and not training.files.complete()):
                training.key += "-again"  # a launch of the same key would adopt the complete job
                training.launch()
                saved, left = 0, set()
                continue
            before, saved = saved, training.files.complete()
            repeated = training.life().check(saved, before)
            description.append(f"{way} at a {instant}: {repeated}")
            seen.update(preemptions=1, half_written=len(training.files.unfinished() - left), repeated=repeated)
            left = training.files.unfinished()
            training.resume(way)
        assert training.result() == undisturbed[training.world]
        assert training.life().resumed == saved
    campaigns.done(f"run {run}, checkpoints of {saver}, {world} rank(s): {', '.join(description)}")
    return seen


@pytest.mark.full
def test_a_preempted_training_repeats_at_most_one_interval_and_ends_with_the_same_weights(
    jobs: Jobs, tmp_path: Path, record_property: campaigns.Record
) -> None:
    undisturbed = {world: Training(jobs, f"{world}", world, tmp_path / f"of-{world}").result() for world in (1, 2)}
    counts = campaigns.at_once(record_property, RUNS, AT_ONCE, lambda run: one(run, jobs.home, tmp_path, undisturbed))
    total = sum(counts, Counter[str]())
    campaigns.done(f"{dict(total)}")
    assert total["preemptions"] == RUNS * PER_RUN
    assert total["half_written"] > 0
