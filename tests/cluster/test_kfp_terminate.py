"""Terminate, a hundred times: is the request that stops the job answered in the time that KFP leaves a step?

Webhooks slow the changes of TrainJobs in some of the trials. The time was measured on idle machines, so no step is
terminated while others start. A campaign (`tests.campaigns`) runs alone on the machine. Beside other tests, a sample
only proves that a request is sent and that the exit component stops the other jobs, not how often the time is enough.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

import pytest
from tests import campaigns
from tests.certificates import Authority
from tests.cluster.kfp_steps import (
    DELETED,
    FORWARDED,
    KEPT,
    SUSPEND_REQUESTED,
    Execution,
    Steps,
    Try,
    create_account,
    suspended,
    time_left,
)
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.api import ApiError
from tests.testcluster.nodes import variable
from tests.testcluster.slow_webhook import slow_changes

pytestmark = pytest.mark.timeout(400)

DELAYS = (0, 100, 300, 1000)  # milliseconds by which a webhook slows each change of a TrainJob
RUNS = {delay: campaigns.runs(100, 2 if delay else 4) for delay in DELAYS}
STARTING = 4  # steps that start at the same time, each with a second of CPU for Python
AT_ONCE = 20  # steps that wait at the same time and are terminated shortly after one another
LOADED = 5.0  # seconds more for a sample, which runs beside other tests; the campaign has the machine for itself
LATE = 61  # seconds that late steps wait first: an idle connection is closed after 60 s


@dataclass
class Trial:
    """A step that is terminated."""

    execution: Execution
    left: float
    """Seconds that Python keeps running after SIGTERM."""
    late: bool
    """Whether it is terminated more than a minute after its job's creation, when idle connections are closed."""
    tried: Try | None = None
    deleted: bool = False
    """Whether the job was deleted because a suspend would have taken too long."""
    took: float | None = None
    """Seconds from SIGTERM to the answer to its request; None if Python ended before."""


def draw_trials(number: int, late: int, jobs: str) -> list[Trial]:
    """Create `number` trials; the times left have the measured distribution, so results vary little between seeds."""
    chance = random.Random(campaigns.SEED)
    shares = [(i + chance.random()) / number for i in range(number)]
    chance.shuffle(shares)
    parameters = {"runtime": "trainjob-step", "namespace": jobs, "env": {variable("run"): "never"}}
    parameters["command"] = ["train"]
    left = [time_left(share) + (0.0 if campaigns.FULL else LOADED) for share in shares]
    return [Trial(Execution("train", parameters), each, late=i < late) for i, each in enumerate(left)]


def start_steps(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Start the steps, and wait until each of them waits for its job."""

    def one(trial: Trial) -> None:
        trial.tried = tried = steps.start(trial.execution, seconds_left=trial.left)
        known = f"TrainJob {jobs}/{trial.execution.job} (attempt 1"
        wait_until("the job exists", lambda: known in steps.log(tried), 120, poll=0.3, ignore=ApiError)

    with ThreadPoolExecutor(STARTING) as pool:
        list(pool.map(one, trials))


def terminate(steps: Steps, jobs: str, trials: Sequence[Trial]) -> None:
    """Terminate the steps shortly after one another, and record at once what happened to their jobs."""
    chance = random.Random(campaigns.SEED)
    time.sleep(5)  # after the last start, which takes a core, as do the controllers then
    for trial in trials:
        assert trial.tried
        steps.signal(trial.tried)
        time.sleep(chance.uniform(0.3, 0.8))
    for trial in trials:
        assert trial.tried
        ended = steps.end(trial.tried)
        assert ended.code == 143, ended.log
        trial.deleted = DELETED in ended.log
        expected = DELETED if trial.deleted else SUSPEND_REQUESTED
        if expected in ended.log and stopped(steps, jobs, trial):
            assert ended.message.startswith(expected), "the launcher is gone, so only the message is visible"
            trial.took = seconds_between(FORWARDED, expected, steps.log(trial.tried, timestamps="true"))
        steps.force_delete(trial.tried)  # ended pods cost the kubelet time
        last = ended.message or ended.log.splitlines()[-1]
        how = f"not answered: {last}" if trial.took is None else f"answered after {trial.took:.3f} s: {last}"
        campaigns.done(f"{trial.execution.job}: {trial.left:.3f} s left, {'late' if trial.late else 'soon'}, {how}")


def stopped(steps: Steps, jobs: str, trial: Trial) -> bool:
    """Whether the job of a trial, which existed, is suspended or deleted."""
    job = steps.job(trial.execution, jobs)
    return job is None or suspended(job)


def seconds_between(first: str, second: str, log: str) -> float:
    """Seconds between two messages in a log with containerd's times; a line can also contain other text."""
    began, ended = (
        datetime.fromisoformat(next(line for line in log.splitlines() if text in line).partition(" ")[0])
        for text in (first, second)
    )
    return (ended - began).total_seconds()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("delay", DELAYS)
def test_terminate_is_answered_in_time_and_the_exit_component_does_the_rest(
    kfp_steps: Steps, authority: Authority, record_property: campaigns.Record, delay: int
) -> None:
    runs = RUNS[delay]
    campaigns.begin(record_property, runs)
    cluster = kfp_steps.cluster
    # The jobs run on simulated nodes; only the steps are terminated.
    with cluster.namespace("jobs") as jobs, slow_changes(cluster.api, authority, jobs, delay / 1000):
        create_account(cluster, kfp_steps.namespace, jobs)
        trials = draw_trials(runs, -(-runs // 5) if campaigns.FULL or not delay else 0, jobs)
        late, soon = [each for each in trials if each.late], [each for each in trials if not each.late]
        start_steps(kfp_steps, jobs, late)
        waiting = time.monotonic()
        for some in (soon[i : i + AT_ONCE] for i in range(0, len(soon), AT_ONCE)):
            start_steps(kfp_steps, jobs, some)
            terminate(kfp_steps, jobs, some)
        if late:
            time.sleep(max(0.0, waiting + LATE - time.monotonic()))
            terminate(kfp_steps, jobs, late)
        left = [trial for trial in trials if not stopped(kfp_steps, jobs, trial)]
        result = summary(trials, len(left), delay)
        campaigns.done(result)
        record_property("result", result)
        with ThreadPoolExecutor(STARTING) as pool:
            runs_left = [trial.execution.run for trial in left]
            cleanups = [Execution("cleanup", {"run_id": run, "namespace": jobs}, run=run) for run in runs_left]
            assert [ended.log for ended in pool.map(kfp_steps.run, cleanups) if ended.code] == []

        def still_there() -> list[str]:
            found = cluster.api.find(TRAINER, "TrainJob", jobs)
            assert len(found) == runs - deleted, "one job a step"
            ended = ("Succeeded", "Failed")
            running = [pod for pod in cluster.api.find("v1", "Pod", jobs) if pod["status"]["phase"] not in ended]
            return [each["metadata"]["name"] for each in (*running, *(job for job in found if not suspended(job)))]

        deleted = sum(kfp_steps.job(trial.execution, jobs) is None for trial in trials)
        wait_until("no job runs", lambda: not still_there(), 60, poll=0.5)
        answered = sum(trial.took is not None for trial in trials)
        assert answered >= (0.99 * runs if campaigns.FULL else 1), result
        if delay and campaigns.FULL:
            assert deleted >= answered, "webhooks are too slow for a suspend"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_drained_step_keeps_its_job(kfp_steps: Steps, record_property: campaigns.Record, named: bool) -> None:
    """A step without the name of its pod cannot distinguish a drain from Terminate and stops its job."""
    runs = campaigns.runs(50 if named else 10, 2 if named else 1)
    campaigns.begin(record_property, runs)
    took: list[float] = []
    outcomes: list[str] = []
    kept = 0
    with kfp_steps.cluster.namespace("jobs") as jobs:
        create_account(kfp_steps.cluster, kfp_steps.namespace, jobs)
        for trial in draw_trials(runs, 0, jobs):
            execution = trial.execution
            # Beside other tests, a step can need the shortest times only to run again.
            left = trial.left if campaigns.FULL else max(trial.left, 0.5)
            tried = kfp_steps.start(execution, seconds_left=left, named=named)
            wait_until("the step waits", lambda tried=tried: "is Running" in kfp_steps.log(tried), 120, poll=0.3)  # type: ignore[misc]  # bound at once
            time.sleep(1)  # the start must not slow the request
            ended, timed = kfp_steps.evict(tried)
            job = kfp_steps.job(execution, jobs)
            stays = job is not None and not suspended(job)
            kept += stays and ended.message == KEPT
            if KEPT in timed:  # a kubelet can write the last lines late
                took = sorted([*took, seconds_between(FORWARDED, KEPT, timed)])
            how = "kept" if stays else "stopped"
            # No job keeps running by mistake: a step that keeps its job reports it, any other has stopped it.
            outcomes.append(how if stays == (ended.message == KEPT) else f"{how}, but reports {ended.message!r}")
            campaigns.done(f"{execution.job}: {left:.3f} s left, {how}; {ended.message or 'no message'}")
            kfp_steps.cluster.api.delete(TRAINER, "TrainJob", jobs, execution.job)
    who = "that knows its pod" if named else "that does not know its pod"
    result = f"drain of a step {who}: {kept} of {runs} jobs kept knowingly; SIGTERM to that: {percentiles(took)}"
    campaigns.done(result)
    record_property("result", result)
    if not named:
        assert not kept, result
    elif campaigns.FULL:
        assert kept >= 0.95 * runs, result
    else:  # the 20 ms for the read of the pod are not always enough beside other tests; test_kfp_steps.py keeps one
        assert all(outcome in ("kept", "stopped") for outcome in outcomes)


def summary(trials: list[Trial], left: int, delay: int) -> str:
    took = sorted(trial.took for trial in trials if trial.took is not None)
    deleted = sum(trial.deleted for trial in trials)
    return (
        f"webhooks {delay} ms slower: {len(took)} of {len(trials)} answered ({deleted} by a deletion); "
        f"SIGTERM to answer: {percentiles(took)}; left to the exit component: {left}"
    )


def percentiles(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    p95 = seconds[int(0.95 * (len(seconds) - 1))]
    shown = (statistics.median(seconds), p95, seconds[-1])
    return f"{len(seconds)}: median, p95, longest " + ", ".join(f"{1000 * each:.0f} ms" for each in shown)
