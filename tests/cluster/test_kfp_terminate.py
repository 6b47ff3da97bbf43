"""Terminate, a hundred times: is the request that stops the job answered in the time that KFP leaves a step?

That time was measured on machines that had little else to do, and steps are not terminated while others start. A
campaign (`tests.campaigns`), which has the machine for itself; beside other tests a sample shows that the request is
sent and that the exit component stops the jobs of the others, and not in how many trials there was time for it.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

import pytest
from tests import campaigns
from tests.cluster.kfp_steps import ASKED, PASSED_ON, Execution, Steps, Try, admit, suspended, time_left
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.api import ApiError
from tests.testcluster.nodes import variable

pytestmark = pytest.mark.timeout(400)

RUNS = campaigns.runs(100, 10)
STARTING = 4  # steps that start at the same time: a second of Python each
AT_ONCE = 20  # that wait at the same time, and are terminated one soon after the other
LATE = 61  # seconds that some of them wait first: a connection that nobody uses is closed after 60 s


@dataclass
class Trial:
    """A step that is terminated.

    Attributes:
        execution: What it runs.
        left: Seconds that Python lives on then.
        late: Whether that is more than a minute after its job's creation: idle connections are closed by then.
        tried: Its pod.
        answered: Whether Python had the answer to its request before it died.
        took: Seconds from SIGTERM to that.
        said: How it ended, by its log.
    """

    execution: Execution
    left: float
    late: bool
    tried: Try | None = None
    answered: bool = False
    took: float | None = None
    said: str = ""


def draw(number: int, jobs: str) -> list[Trial]:
    """As many trials; the times that are left are spread as the measured ones are, so that chance decides little."""
    chance = random.Random(campaigns.SEED)
    shares = [(i + chance.random()) / number for i in range(number)]
    chance.shuffle(shares)
    parameters = {"runtime": "trainjob-step", "namespace": jobs, "env": {variable("run"): "never"}}
    parameters["command"] = ["train"]
    return [
        Trial(Execution("train", parameters), time_left(share), late=i < number / 5) for i, share in enumerate(shares)
    ]


def begin(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Start the steps, and wait until all of them wait for their jobs."""

    def one(trial: Trial) -> None:
        trial.tried = tried = steps.start(trial.execution, seconds_left=trial.left)
        known = f"TrainJob {jobs}/{trial.execution.job} (attempt 1"
        wait_until("its job is there", lambda: known in steps.log(tried), 120, poll=0.3, ignore=ApiError)

    with ThreadPoolExecutor(STARTING) as pool:
        list(pool.map(one, trials))


def terminate(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Terminate them, one soon after the other, and look at once what has become of their jobs."""
    chance = random.Random(campaigns.SEED)
    time.sleep(5)  # not beside the last one's start and what the controllers do then, which take a core each
    for trial in trials:
        assert trial.tried
        steps.signal(trial.tried)
        time.sleep(chance.uniform(0.3, 0.8))
    for trial in trials:
        assert trial.tried
        ended = steps.end(trial.tried)
        assert ended.code == 143, ended.log
        trial.said = ended.log.splitlines()[-1]
        trial.answered = ASKED in ended.log and suspended(steps.job(trial.execution, jobs))
        if trial.answered:
            trial.took = seconds_between(PASSED_ON, ASKED, steps.log(trial.tried, timestamps="true"))
        steps.vanish(trial.tried)  # the kubelet looks after all that are there
        how = f"answered after {trial.took:.3f} s" if trial.took is not None else f"not answered: {trial.said}"
        campaigns.done(f"{trial.execution.job}: {trial.left:.3f} s left, {'late' if trial.late else 'soon'}, {how}")


def seconds_between(first: str, second: str, log: str) -> float:
    """What is between two messages in a log with containerd's times; something else may stand in the same line."""
    began, ended = (
        datetime.fromisoformat(next(line for line in log.splitlines() if text in line).partition(" ")[0])
        for text in (first, second)
    )
    return (ended - began).total_seconds()


def exits(steps: Steps, jobs: str, trial: Trial) -> None:
    """What the run's exit handler does, which comes after Terminate as well."""
    cleanup = {"run_id": trial.execution.run, "namespace": jobs}
    ended = steps.run(Execution("cleanup", cleanup, run=trial.execution.run))
    assert ended.code == 0, ended.log


def test_the_time_left_is_spread_as_it_was_measured() -> None:
    found = [time_left((i + 0.5) / 24) for i in range(24)]
    assert found[:5] == pytest.approx([0.027, 0.09, 0.12, 0.12, 0.17])
    assert statistics.median(found) == pytest.approx(0.44, abs=0.02)
    assert (found[-1], time_left(0), time_left(1)) == pytest.approx((1.72, 0.027, 1.72))


@pytest.mark.timeout(600)
def test_terminate_is_answered_in_time_and_the_exit_component_does_the_rest(
    kfp_steps: Steps, record_property: campaigns.Record
) -> None:
    campaigns.begin(record_property, RUNS)
    cluster = kfp_steps.cluster
    with cluster.namespace("jobs") as jobs:  # on simulated nodes: what runs there is not what is terminated
        admit(cluster, kfp_steps.namespace, jobs)
        trials = draw(RUNS, jobs)
        late, soon = [each for each in trials if each.late], [each for each in trials if not each.late]
        began = time.monotonic()
        begin(kfp_steps, jobs, late)
        waiting = time.monotonic()
        for some in (soon[i : i + AT_ONCE] for i in range(0, len(soon), AT_ONCE)):
            begin(kfp_steps, jobs, some)
            terminate(kfp_steps, jobs, some)
        time.sleep(max(0.0, waiting + LATE - time.monotonic()))
        terminate(kfp_steps, jobs, late)
        tell(trials, time.monotonic() - began)
        left = [trial for trial in trials if not suspended(kfp_steps.job(trial.execution, jobs))]
        with ThreadPoolExecutor(STARTING) as pool:
            for _ in pool.map(lambda trial: exits(kfp_steps, jobs, trial), left):
                pass
        print(f"stopped by the exit component: {len(left)}")

        def still_there() -> list[str]:
            found = cluster.api.find(TRAINER, "TrainJob", jobs)
            assert len(found) == RUNS, "one job a step"
            ended = ("Succeeded", "Failed")
            running = [pod for pod in cluster.api.find("v1", "Pod", jobs) if pod["status"]["phase"] not in ended]
            return [each["metadata"]["name"] for each in (*running, *(job for job in found if not suspended(job)))]

        wait_until("no job runs", lambda: not still_there(), 60, poll=0.5)
        answered = sum(trial.answered for trial in trials)
        assert answered >= (0.95 * RUNS if campaigns.FULL else 1), f"{answered} of {RUNS}"


def tell(trials: list[Trial], seconds: float) -> None:
    """Print what was drawn, and what became of it."""
    left = sorted(trial.left for trial in trials)
    took = sorted(trial.took for trial in trials if trial.took is not None)
    print(f"{len(trials)} trials in {seconds:.0f} s, load average {os.getloadavg()[0]:.1f}")
    print(f"Python lives on for {left[0]:.3f} to {left[-1]:.2f} s, median {statistics.median(left):.2f}")
    print(f"SIGTERM to answer: {spread(took)}")
    for name, late in (("soon", False), ("late", True)):
        some = sorted(each.took for each in trials if each.took is not None and each.late is late)
        print(f"  terminated {name} after the launch: {spread(some)}")
    print(f"answered: {len(took)} of {len(trials)}; not:")
    for trial in trials:
        if not trial.answered:
            print(f"  {trial.left:.3f} s left, {'late' if trial.late else 'soon'} after the launch: {trial.said}")


def spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    p95 = seconds[int(0.95 * (len(seconds) - 1))]
    shown = (statistics.median(seconds), p95, seconds[-1])
    return f"{len(seconds)}: median, p95, longest " + ", ".join(f"{1000 * each:.0f} ms" for each in shown)
