"""SIGKILL at random times: never two jobs for one attempt, never an orphan, always a result.

A campaign (`tests.campaigns`); ``TRAINJOB_CHAOS_ONLY`` repeats the run with that number.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests import campaigns
from tests.contract.processes import marked
from tests.local.conftest import Jobs
from tests.local.forks import FORKS
from tests.processes import eventually

from trainjob import JobRef, TrainJobClient, TrainJobFailed, TrainJobResult
from trainjob.job import labels_of
from trainjob.status import observe

RUNS = campaigns.runs(100, 12)
ONLY = os.environ.get("TRAINJOB_CHAOS_ONLY")
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


def killed(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            if process.pid:
                os.kill(process.pid, signal.SIGKILL)


def strike(victim: str, jobs: Jobs, run: int, launchers: Sequence[BaseProcess], chance: random.Random) -> None:
    if victim == "launcher":
        killed(launchers[:1])
    elif victim == "launchers":
        killed(launchers)
    elif victim != "nobody":
        for job in jobs.client.call(lambda: jobs.client.backend.find("default", labels_of(f"chaos/{run}"))):
            if observe(job).phase.terminal:
                continue
            ref = JobRef.of(job)
            if victim == "rank":
                targets = list(marked(ref.uid))[: chance.randint(1, RANKS)]
            else:
                pids = [process.pid for process in jobs.supervisors(ref)]
                targets = {"supervisor": pids[:1], "guard": pids[1:], "both": pids}.get(victim, pids[::-1])
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


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
        killed(launchers)

    with TrainJobClient("local") as client:
        result = to_the_end(client, run, marks)
    for process in launchers:
        process.join(30)
        # 255: killed before the fork server had recorded its process id.
        assert process.exitcode in (0, -signal.SIGKILL, 255), f"a launcher of run {run} ended with {process.exitcode}"

    description = f"run {run} of seed {campaigns.SEED}: {number} launcher(s), {', '.join(struck)}"
    begun = Counter((marks / str(run)).read_text().split("\n")[:-1])
    assert begun.most_common(1)[0][1] == 1, f"{description}: a rank was started twice: {begun}"
    of_attempts: dict[str, set[str]] = {}
    for mark in begun:
        pod, uid = mark.split()
        of_attempts.setdefault(pod.rpartition("-node-")[0], set()).add(uid)
    assert all(len(uids) == 1 for uids in of_attempts.values()), (
        f"{description}: two jobs for one attempt: {of_attempts}"
    )
    assert result.name in of_attempts, description
    uids = {uid for found in of_attempts.values() for uid in found}
    for uid in uids:
        assert marked(uid) == {}, f"{description}: processes were left"
    for job in jobs.client.call(lambda: jobs.client.backend.find("default", labels_of(f"chaos/{run}"))):
        assert observe(job).phase.terminal, f"{description}: {job['metadata']['name']} never ended"
        eventually(lambda job=job: jobs.supervisors(JobRef.of(job)) == [], 10)  # type: ignore[misc]
    campaigns.done(f"{description}: {len(of_attempts)} attempt(s)")
    return f"{len(of_attempts)} attempt(s)"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_chaos(jobs: Jobs, tmp_path: Path, record_property: campaigns.Record) -> None:
    campaigns.begin(record_property, RUNS)
    marks = tmp_path / "marks"
    marks.mkdir()
    runs = [int(ONLY)] if ONLY else range(RUNS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda run: one(jobs, run, marks), runs))
    print(Counter(ended))
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
