"""SIGKILL at random times: never two jobs for one attempt, never an orphan, always a result.

A campaign (`tests.campaigns`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests import campaigns
from tests.contract.processes import marked
from tests.local.conftest import Jobs, send
from tests.local.forks import FORKS
from tests.processes import eventually

from trainjob import JobRef, TrainJobClient, TrainJobFailed, TrainJobResult
from trainjob.job import labels_of
from trainjob.status import observe

RUNS = campaigns.runs(100, 12)
AT_ONCE = 5
RANKS = 2
LONGEST = 0.9  # seconds from the start of the launchers to the last kill: longer than a launch and the job take

VICTIMS = ("launcher", "launchers", "supervisor", "guard", "both", "both, guard first", "rank", "nobody")


def spec(run: int, marks: Path) -> dict[str, object]:
    """A job of 0.4 s that writes a line for every rank that starts: attempt, rank, UID."""
    script = 'echo "$POD $TRAINJOB_LOCAL_UID" >> $MARKS; sleep 0.4'
    env = {"MARKS": str(marks / str(run)), "POD": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return {"runtime": "trainjob-step", "command": ["sh", "-c", script], "num_nodes": RANKS, "env": env}


def launcher(run: int, marks: Path, home: Path) -> None:
    """One of several processes that launch the same work; it may be killed at any instruction."""
    os.environ["TRAINJOB_HOME"] = str(home)
    with TrainJobClient("local") as client:
        to_the_end(client, run, marks)


def to_the_end(client: TrainJobClient, run: int, marks: Path) -> TrainJobResult:
    """Launch, wait, and retry after failures that the kills caused."""
    while True:
        ref = client.launch(spec(run, marks), f"chaos/{run}")
        try:
            return client.wait(ref)
        except TrainJobFailed as failed:
            if not failed.retry.retryable:
                raise


def attempts_of(jobs: Jobs, run: int) -> list[Any]:
    return jobs.client.call(lambda: jobs.client.backend.find("default", labels_of(f"chaos/{run}")))


def strike(victim: str, jobs: Jobs, run: int, launchers: Sequence[BaseProcess], chance: random.Random) -> None:
    if victim in ("launcher", "launchers"):
        send(each.pid for each in (launchers[:1] if victim == "launcher" else launchers) if each.pid)
    elif victim != "nobody":
        for ref in [JobRef.of(job) for job in attempts_of(jobs, run) if not observe(job).phase.terminal]:
            pids = [process.pid for process in jobs.supervisors(ref)]
            of = {"supervisor": pids[:1], "guard": pids[1:], "both": pids, "both, guard first": pids[::-1]}
            send(of[victim] if victim in of else list(marked(ref.uid))[: chance.randint(1, RANKS)])


def one(jobs: Jobs, run: int, marks: Path) -> str:
    chance = random.Random(f"{campaigns.SEED}/{run}")
    number = chance.randint(1, 3)
    launchers = [FORKS.Process(target=launcher, args=(run, marks, jobs.home), daemon=True) for _ in range(number)]
    for process in launchers:
        process.start()
    struck = []
    began = time.monotonic()
    for moment in sorted(chance.uniform(0, LONGEST) for _ in range(chance.randint(1, 3))):
        time.sleep(max(0, began + moment - time.monotonic()))
        struck.append(chance.choice(VICTIMS))
        strike(struck[-1], jobs, run, launchers, chance)
    if chance.random() < 0.5:
        send(each.pid for each in launchers if each.pid)

    with TrainJobClient("local") as client:
        result = to_the_end(client, run, marks)
    for process in launchers:
        process.join(30)
        # 255: killed before the fork server had recorded its process id.
        assert process.exitcode in (0, -signal.SIGKILL, 255), f"a launcher of run {run} ended with {process.exitcode}"

    description = f"run {run} of seed {campaigns.SEED}: {number} launcher(s), {', '.join(struck)}"
    begun = (marks / str(run)).read_text().splitlines()
    assert len(begun) == len(set(begun)), f"{description}: a rank was started twice: {begun}"
    uid_of = {(pod.rpartition("-node-")[0], uid) for pod, uid in map(str.split, begun)}
    attempts = {attempt for attempt, _ in uid_of}
    assert len(uid_of) == len(attempts), f"{description}: two jobs for one attempt: {uid_of}"
    assert result.name in attempts, description
    assert [marked(uid) for _, uid in uid_of] == [{}] * len(uid_of), f"{description}: processes were left"
    for job in attempts_of(jobs, run):
        assert observe(job).phase.terminal, f"{description}: {job['metadata']['name']} never ended"
        eventually(lambda job=job: jobs.supervisors(JobRef.of(job)) == [], 10)  # type: ignore[misc]
    campaigns.done(f"{description}: {len(attempts)} attempt(s)")
    return f"{len(attempts)} attempt(s)"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_chaos(jobs: Jobs, tmp_path: Path, record_property: campaigns.Record) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    print(Counter(campaigns.at_once(record_property, RUNS, AT_ONCE, lambda run: one(jobs, run, marks))))
    eventually(lambda: not marked(under=tmp_path), 10)


def test_many_processes_launch_one_key_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """Ten processes that start together create one job, and all get its result."""
    launchers = [FORKS.Process(target=launcher, args=(0, tmp_path, jobs.home), daemon=True) for _ in range(10)]
    for process in launchers:
        process.start()
    for process in launchers:
        process.join(60)
    assert [process.exitcode for process in launchers] == [0] * 10
    assert len(jobs.client.list()) == 1
    assert len((tmp_path / "0").read_text().splitlines()) == RANKS
