"""Campaigns: tests that draw many schedules at random, of which `make test` runs a sample and `make campaign` all.

``TRAINJOB_RUNS`` sets how many schedules are drawn, ``TRAINJOB_SEED`` repeats what was drawn: each schedule draws from
the seed and its own number. A seed is new in every run of the tests and is printed; `make test` shows it in its table.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

FULL = "TRAINJOB_CAMPAIGN" in os.environ
"""Whether this is `make campaign`."""

SEED = int(os.environ.get("TRAINJOB_SEED") or secrets.randbelow(1_000_000))

Record = Callable[[str, object], None]
"""pytest's fixture ``record_property``: what it takes is in the table of `make test`."""


def runs(full: int, sample: int) -> int:
    """How many schedules are drawn: ``TRAINJOB_RUNS``, else `full` by `make campaign`, else `sample`."""
    return int(os.environ.get("TRAINJOB_RUNS") or (full if FULL else sample))


def begin(record: Record, number: int) -> None:
    """Print and record how this campaign is repeated."""
    print(f"{number} schedules, TRAINJOB_SEED={SEED}", flush=True)
    record("seed", SEED)
    record("schedules", number)


def done(what: str) -> None:
    """Print the line of one schedule; `make campaign` shows it at once, pytest shows it where the test fails."""
    print(what, flush=True)
