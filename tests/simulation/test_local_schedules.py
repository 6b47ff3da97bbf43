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


def test_the_same_seed_gives_the_same_schedule(tmp_path: Path) -> None:
    first, second = (run(partial(world, directory=tmp_path), 7) for _ in range(2))
    assert first.trace == second.trace
    steps = [[process.steps for process in each.machine.processes] for each in (first, second)]
    assert steps[0] == steps[1]


FOUND = {
    # They may ignore SIGTERM for seconds, and write to the checkpoints of the next attempt.
    "a launch waits for ranks of a cancelled attempt": (
        25,
        "run a; launch a; end run0; launch a; step launch1 8; cancel a; step supervisor1 8",
    ),
    "a launch waits for ranks that a supervisor is about to start": (
        900222,
        "run a; step run0 20; run a; step run1 20; step supervisor1 8; cancel a; cancel a; step cancel1 8",
    ),
    # The launch began before the cancel, whose look was before the job was stored; nobody is left to obey it.
    "a job of a dead launch does not run after a cancel": (
        296726000019,
        "cancel b; run b; step run0 1; step cancel0 4; step run0 2; step cancel0 8; step run0 10; kill run0",
    ),
    "a cancelled job ends although its supervisor was killed before it began": (
        662744000236,
        "cancel b; run b; end run0; step supervisor0 3; kill run0; step cancel0 8; kill supervisor0",
    ),
    # Who waits for the end of a cancelled job is often the only one left that can end it.
    "a cancel that waits ends the job whose supervisor and guard are killed": (
        549750000037,
        "launch a; launch a; end launch0; end launch1; suspend a; step supervisor1 20; kill launch0; cancel a; "
        "end launch1; step cancel0 8; step cancel0 2; step cancel0 8; end suspend0; kill supervisor1; kill guard1",
    ),
}
"""Schedules that once broke a property: the seed of their world, and their actions."""


@pytest.mark.parametrize(("seed", "script"), FOUND.values(), ids=FOUND)
def test_a_fault_that_was_fixed_stays_fixed(seed: int, script: str, tmp_path: Path) -> None:
    assert run(partial(world, directory=tmp_path), seed, script.split("; ")).violations == {}
