"""Campaigns: tests that run many random schedules. `make test-all` runs a sample, `make campaign` runs all.

``TRAINJOB_RUNS`` sets the number of schedules. ``TRAINJOB_SEED`` repeats the same schedules: each is derived from the
seed and its number. Every run of the tests has a new seed and prints it; the commands show it in their tables.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FULL = "TRAINJOB_CAMPAIGN" in os.environ
"""Whether `make campaign` runs."""

_T = TypeVar("_T")

SEED = int(os.environ.get("TRAINJOB_SEED") or secrets.randbelow(1_000_000))

Record = Callable[[str, object], None]
"""pytest's fixture ``record_property``; the commands show the properties in their tables."""


def runs(full: int, sample: int) -> int:
    """The number of schedules: ``TRAINJOB_RUNS``, otherwise `full` in `make campaign` and `sample` in other runs."""
    return int(os.environ.get("TRAINJOB_RUNS") or (full if FULL else sample))


def begin(record: Record, number: int) -> None:
    """Print and record the seed that repeats this campaign."""
    print(f"{number} schedules, TRAINJOB_SEED={SEED}", flush=True)
    record("seed", SEED)
    record("schedules", number)


def at_once(record: Record, number: int, workers: int, run: Callable[[int], _T]) -> list[_T]:
    """Run the schedules 0 to `number` - 1, as many at once as there are workers; return their results."""
    begin(record, number)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(number)))


def done(result: str) -> None:
    """Print the result of one schedule. `make campaign` shows it at once; pytest shows it if the test fails."""
    print(result, flush=True)
