"""Jobs that hang or have a slow rank, with real processes: that rank is named, and no rank of a healthy job.

The campaigns (`tests.campaigns`) draw the fault, the rank and step, and how the script counts its steps.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests import campaigns
from tests.contract.processes import marked
from tests.local import hanging
from tests.local.conftest import TORCH_PYTHON, Jobs, needs_torch, send

from trainjob import JobHung, JobRef, TrainJobFailed, progress
from trainjob.errors import Category, RetryVerdict

TIMEOUT = 5.0 if campaigns.FULL else 3.0
AT_ONCE = 6
SLACK = 30.0  # seconds that a loaded machine may add to the time until a hang is noticed
HANGS, HEALTHY, SLOW = campaigns.runs(200, 20), campaigns.runs(200, 8), campaigns.runs(50, 4)
SLOW_SECONDS = 7 * TIMEOUT  # ranks are compared once per timeout, and named after three comparisons

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def launch(jobs: Jobs, folder: Path, plan: dict[str, Any]) -> JobRef:
    hanging.prepare(folder, plan)
    hanging.Hub(folder / "hub", plan["world"], plan["at"] if plan["fault"] == "network" else None).start()
    command = [sys.executable, hanging.__file__, str(folder)]
    return jobs.launch(key=str(folder), command=command, num_nodes=plan["world"], stall_timeout=TIMEOUT)


def drawn(kind: str, run: int) -> random.Random:
    return random.Random(f"{kind}/{campaigns.SEED}/{run}")


def test_a_hang_is_noticed_and_the_right_rank_is_named(
    jobs: Jobs, tmp_path: Path, record_property: campaigns.Record
) -> None:
    def one(run: int) -> tuple[bool, float]:
        chance, folder = drawn("hang", run), tmp_path / f"hang-{run}"
        plan = hanging.planned(chance, fault=chance.choice(hanging.FAULTS))
        ref, description = launch(jobs, folder, plan), f"run {run} of seed {campaigns.SEED}: {plan}"
        try:
            with pytest.raises(JobHung) as caught:
                jobs.client.wait(ref)
            noticed = time.time() - max(path.stat().st_mtime for path in folder.glob("at-*"))
        finally:
            send(marked(ref.uid))  # a stopped rank would not react to SIGTERM
        diagnosis = caught.value.diagnosis
        assert diagnosis.category is Category.HANG
        assert diagnosis.rank in (hanging.expected(plan), ""), f"{description}: {diagnosis.summary}"
        assert noticed < 2 * TIMEOUT + SLACK, description
        if plan["fault"] in ("stop", "network"):
            assert diagnosis.retry is RetryVerdict.INFRASTRUCTURE, f"{description}: {diagnosis.summary}"
        campaigns.done(f"{plan['fault']} at {plan['world']}: {noticed:.1f} s: {diagnosis.summary}")
        return diagnosis.rank == hanging.expected(plan), noticed

    found = campaigns.at_once(record_property, HANGS, AT_ONCE, one)
    right = sum(each for each, _ in found)
    result, in_time = hanging.result_of(right, [each for _, each in found], TIMEOUT)
    record_property("result", result)
    campaigns.done(result)
    assert right >= 0.95 * HANGS, result
    assert in_time >= 0.95 * HANGS or not campaigns.FULL, result  # other lanes load the machine


def test_a_healthy_job_with_pauses_raises_no_alarm(
    jobs: Jobs, tmp_path: Path, record_property: campaigns.Record
) -> None:
    def one(run: int) -> None:
        plan = hanging.healthy(drawn("healthy", run), TIMEOUT)
        description = f"run {run} of seed {campaigns.SEED}: {plan}"
        try:
            result = jobs.client.wait(launch(jobs, tmp_path / f"healthy-{run}", plan))
        except TrainJobFailed as alarm:
            raise AssertionError(f"{description}: {alarm}") from None
        assert not result.stragglers, f"{description}: {result.stragglers}"
        pauses = f"{len(plan['pauses'])} pauses, {plan['steps']} steps"
        campaigns.done(f"run {run}: first step after {plan['first']:.1f} s, {pauses}")

    campaigns.at_once(record_property, HEALTHY, AT_ONCE, one)


def test_a_slow_rank_of_a_synchronous_training_is_named(
    jobs: Jobs, tmp_path: Path, record_property: campaigns.Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps take as long as those of all others, which wait for it."""
    monkeypatch.setattr("trainjob._jobs.stalls._COMPARED_PER_SECOND", 100.0)  # for short timeouts of several jobs

    def one(run: int) -> tuple[str, str]:
        plan = hanging.slow(drawn("slow", run), SLOW_SECONDS)
        notices: list[str] = []
        ref = launch(jobs, tmp_path / f"slow-{run}", plan)
        stragglers = jobs.client.wait(ref, on_change=lambda _, notice: notices.append(notice)).stragglers
        summaries = [each["summary"] for each in stragglers]
        campaigns.done(f"{plan['slower']:.1f} times slower, {plan['world']} ranks: {summaries}")
        assert set(summaries) <= set(notices)
        assert all(each["node"] for each in stragglers)
        slow = f"node-{plan['culprit']}" if plan["slower"] > 1 else ""
        return ",".join(each["rank"] for each in stragglers), slow

    found = campaigns.at_once(record_property, SLOW, AT_ONCE, one)
    right = sum(named == slow for named, slow in found)
    result = f"{right} of {SLOW} right, {sum(bool(slow) for _, slow in found)} of them with a slow rank"
    record_property("result", result)
    campaigns.done(result)
    assert all(named in (slow, "") for named, slow in found), found
    assert right >= 0.9 * SLOW, found


# ---------------------------------------------------------------- PyTorch

TORCH = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from trainjob import progress

fault, begin = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))

class Examples(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if rank == 1 and os.path.exists(begin):
            if fault == "stop":
                os.kill(os.getpid(), 19)
            while fault == "loop":
                time.sleep(0.01)
        time.sleep(0.05 if rank == 2 else 0.005)
        return torch.ones(4)

for step, batch in enumerate(DataLoader(Examples())):
    if rank == 1 and fault == "collective" and os.path.exists(begin):
        dist.barrier()
    model(batch).sum().backward()
    dist.all_reduce(torch.ones(1))
    progress.step(step)
"""


@needs_torch
@pytest.mark.parametrize("fault", ["stop", "loop", "collective"] if campaigns.FULL else ["loop"])
def test_a_slow_and_a_hanging_rank_of_pytorch_with_gloo(jobs: Jobs, tmp_path: Path, fault: str) -> None:
    """Three processes of torchrun in one pod: rank 2 loads data slowly, then rank 1 hangs.

    The others wait for the slow rank in the backward pass, in which DistributedDataParallel reduces the gradients. A
    rank that ends closes its connections, so that gloo fails the others.
    """
    script = tmp_path / "train.py"
    script.write_text(TORCH)
    begin = tmp_path / "begin"
    components = str(Path(progress.__file__).parents[2])
    ref = jobs.launch(
        command=[TORCH_PYTHON, "-m", "torch.distributed.run", str(script), fault, str(begin)],
        runtime="torch-distributed",
        num_proc_per_node=3,
        env={"PYTHONPATH": components, "OMP_NUM_THREADS": "1"},
        stall_timeout=4,
    )
    slow: list[str] = []

    def change(_: object, notice: str) -> None:
        if "slower" in notice:
            slow.append(notice)
            begin.touch()

    try:
        with pytest.raises(JobHung) as caught:
            jobs.client.wait(ref, on_change=change)
    finally:
        send(marked(ref.uid))
    diagnosis = caught.value.diagnosis
    if fault == "collective":
        assert "rank 1 (node-0)" in diagnosis.summary or diagnosis.rank == "", diagnosis.text()
    else:
        assert "rank 1 (node-0)" in diagnosis.summary
        assert diagnosis.rank == "node-0"
    campaigns.done(diagnosis.text())
    assert len(slow) == 1
    assert slow[0].startswith("rank 2 (node-0) on ")
    assert slow[0].endswith("It loads data for most of that.")
