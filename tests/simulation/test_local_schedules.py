"""Random schedules of the local backend, see `tests.simulation.local_world`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from tests import campaigns
from tests.simulation.local_processes import explore, run
from tests.simulation.local_world import world

SCHEDULES = int(os.environ.get("TRAINJOB_SIMULATION") or 100)

pytestmark = pytest.mark.timeout(120 + 2 * SCHEDULES)


def test_random_schedules(tmp_path: Path, record_property: campaigns.Record) -> None:
    """Set ``TRAINJOB_SIMULATION`` for more schedules, and ``TRAINJOB_SEED`` for the same ones."""
    campaigns.begin(record_property, SCHEDULES)
    first = campaigns.SEED * 1_000_000
    done = explore(
        partial(world, directory=tmp_path),
        range(first, first + SCHEDULES),
        lambda seed: f"TRAINJOB_SEED={campaigns.SEED}, world {seed}",
    )
    print(done)


def test_a_launch_waits_for_ranks_of_a_cancelled_attempt(tmp_path: Path) -> None:
    """They may ignore SIGTERM for seconds, and write to the checkpoints of the next attempt."""
    script = ["run a", "launch a", "end run0", "launch a", "step launch1 8", "cancel a", "step supervisor1 8"]
    assert run(partial(world, directory=tmp_path), 25, script).violations == {}


def test_the_same_seed_gives_the_same_schedule(tmp_path: Path) -> None:
    first, second = (run(partial(world, directory=tmp_path), 7) for _ in range(2))
    assert first.trace == second.trace
    assert [process.steps for process in first.machine.processes] == [
        process.steps for process in second.machine.processes
    ]


def test_a_launch_waits_for_ranks_that_a_supervisor_is_about_to_start(tmp_path: Path) -> None:
    script = [
        "run a",
        "step run0 20",
        "run a",
        "step run1 20",
        "step supervisor1 8",
        "cancel a",
        "cancel a",
        "step cancel1 8",
    ]
    assert run(partial(world, directory=tmp_path), 900222, script).violations == {}


def test_a_job_of_a_dead_launch_does_not_run_after_a_cancel(tmp_path: Path) -> None:
    """The launch began before the cancel, whose look was before the job was stored; nobody is left to obey it."""
    script = [
        "cancel b",
        "run b",
        "step run0 1",
        "step cancel0 4",
        "step run0 2",
        "step cancel0 8",
        "step run0 10",
        "kill run0",
    ]
    assert run(partial(world, directory=tmp_path), 296726000019, script).violations == {}


def test_a_cancelled_job_ends_although_its_supervisor_was_killed_before_it_began(tmp_path: Path) -> None:
    script = [
        "cancel b",
        "run b",
        "end run0",
        "step supervisor0 3",
        "kill run0",
        "step cancel0 8",
        "kill supervisor0",
    ]
    assert run(partial(world, directory=tmp_path), 662744000236, script).violations == {}
