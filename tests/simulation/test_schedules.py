"""Random schedules of each mix. TRAINJOB_SIMULATION sets their number, TRAINJOB_SEED the first seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from tests.simulation.schedules import run, shrink
from tests.simulation.settings import MIXES

SCHEDULES = int(os.environ.get("TRAINJOB_SIMULATION", "60"))
SEED = int(os.environ.get("TRAINJOB_SEED") or random.randrange(1_000_000))


@pytest.mark.timeout(300 + 5 * SCHEDULES)
@pytest.mark.parametrize("mix", MIXES)
def test_random_schedules(mix: str, record_property: Callable[[str, object], None]) -> None:
    record_property("seed", SEED)
    print(f"TRAINJOB_SEED={SEED}")
    for seed in range(SEED, SEED + SCHEDULES):
        outcome = run(seed, mix)
        for kind, text in outcome.found.items():
            script = shrink(outcome, kind) or outcome.script
            pytest.fail(f"mix {mix}, seed {seed}: {kind} {text}\n\n{script}")


@pytest.mark.parametrize("mix", MIXES)
def test_a_seed_repeats_its_schedule(mix: str) -> None:
    first, second = run(1, mix), run(1, mix)
    assert first.script == second.script
    assert first.world.server.log == second.world.server.log
