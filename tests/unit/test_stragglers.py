"""Which ranks are slower than the others, from two readings of their markers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tests.unit.odd_objects import JSON

from trainjob._diagnosis.ranks import Process, Rank, ranks_in
from trainjob._diagnosis.stragglers import (
    FACTOR,
    SHARE,
    STRAGGLERS,
    WINDOWS,
    Straggler,
    Stragglers,
    annotation,
    compare,
    stragglers_of,
)

STEPS = 100  # between two readings
NODES = {f"node-{rank}": f"gpu-{rank}" for rank in range(64)}

Spent = Mapping[str, float]


def reading(done: int, *totals: Spent) -> dict[Process, Rank]:
    """A reading of ranks that have made so many steps, and have spent so many seconds in all."""
    ranks: dict[Process, Rank] = {}
    for rank, total in enumerate(totals):
        marker = {"rank": rank, "world": len(totals), "count": done, "step": done, "spent": total}
        ranks |= ranks_in(f"node-{rank}", [f"trainjob.rank {json.dumps(marker)}"])
    return ranks


def readings(*spent: Spent, steps: int = STEPS, times: int = 2) -> list[dict[Process, Rank]]:
    """Consecutive readings of ranks that spend the given seconds per step."""
    counts = [5 + number * steps for number in range(times)]
    return [
        reading(done, *({name: seconds * done for name, seconds in each.items()} for each in spent)) for done in counts
    ]


def found(*spent: Spent, steps: int = STEPS) -> list[Straggler]:
    before, after = readings(*spent, steps=steps)
    return compare(before, after, NODES)


FAST, SLOW = {"all": 2.0, "waiting": 1.5}, {"all": 2.0, "waiting": 0.1}
HALF = {"all": 2.0, "waiting": 1.0}
LOADS = {"all": 2.0, "waiting": 1.2, "loading": 0.1}
DEVICE = {"all": 2.0, "device": 1.8}


@pytest.mark.parametrize(
    ("spent", "slow"),
    [
        ([FAST, FAST, {"all": 2.0, "waiting": 0.0}, FAST], [2]),
        ([LOADS, {"all": 2.0, "waiting": 0.1, "loading": 1.5}, LOADS], [1]),
        # Ranks that do not wait for each other are compared by their step time.
        ([{"all": 1.0}, {"all": 1.0}, {"all": 1.8, "device": 1.2}], [2]),
        # Rank 0 waits for its device to log the loss; the others queue their work, and are not slower: of ranks that
        # wait for a device only the loading of data is compared.
        ([DEVICE, {"all": 2.0}], []),
        ([DEVICE | {"loading": 0.1}, {"all": 2.0, "device": 0.5, "loading": 1.4}], [1]),
        # A straggler needs the factor, and has to cost something.
        ([HALF, {"all": 2.0, "waiting": 2.0 - (FACTOR - 0.01)}, HALF], []),
        ([HALF, {"all": 2.0, "waiting": 2.0 - (FACTOR + 0.01)}, HALF], [1]),
        ([{"all": 10.0, "waiting": 9.5}] * 2 + [{"all": 10.0, "waiting": 10 - 0.5 - 10 * SHARE + 0.1}], []),
        ([SLOW, SLOW, SLOW, FAST], []),  # most ranks cannot be stragglers
        ([{"all": 1.0}], []),
        ([*[FAST] * 700, SLOW, *[FAST] * 299], [700]),
    ],
)
def test_a_rank_that_works_longer_than_the_others_is_a_straggler(spent: list[Spent], slow: list[int]) -> None:
    assert [each.number for each in found(*spent)] == slow


def test_a_straggler_in_words() -> None:
    fast = {"all": 2.0, "waiting": 1.1}
    (slow,) = found(fast, fast, {"all": 2.0, "waiting": 0.0}, fast)
    assert (slow.rank, slow.number, slow.node) == ("node-2", 2, "gpu-2")
    assert str(slow) == (
        "node-2 on gpu-2 is slower than the other ranks: 2 s of work per step, the median is 900 ms. Ranks that wait "
        "for it lose 55% of each step."
    )
    (loads,) = found(LOADS, {"all": 2.0, "waiting": 0.1, "loading": 1.5}, LOADS)
    assert str(loads).endswith(" It loads data for most of that.")
    (slow,) = found({"all": 1.0}, {"all": 1.0}, {"all": 1.8, "device": 1.2})
    assert slow.seconds == pytest.approx(1.8)


@pytest.mark.parametrize("steps", [0, 9])
def test_too_few_steps_show_nothing(steps: int) -> None:
    assert found({"all": 1.0}, {"all": 9.0}, steps=steps) == []


def test_a_rank_that_has_restarted_is_not_compared() -> None:
    before, after = readings({"all": 1.0}, {"all": 1.0}, {"all": 2.0})
    assert compare(before, after, NODES)
    assert compare(after, before, NODES) == [], "its counters went back"
    # As many steps as before, after a restart: less time has passed than before.
    restarted = readings({"all": 1.0}, {"all": 1.0}, {"all": 0.001})[1]
    assert compare(before, {**after, ("node-2", 2): restarted["node-2", 2]}, NODES) == []


@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={name: st.floats(0, 100) for name in ("all", "waiting", "device", "loading", "other")}
        ),
        max_size=6,
    )
)
@example([{"all": 5e-324, "waiting": 1.0}])  # a share of the smallest number is 0
def test_any_times_name_the_slowest_half_at_most(spent: list[dict[str, float]]) -> None:
    slow = found(*spent)
    assert 2 * len(slow) <= len(spent)
    for each in slow:
        assert each.seconds - each.median >= SHARE * each.step_seconds
        assert each.seconds > each.median
        assert each.step_seconds > 0
        assert "nan" not in str(each)


def windows(*slow: bool) -> list[dict[Process, Rank]]:
    """Readings of three ranks; in each window between two of them, rank 1 is slow or not."""
    totals = [{"all": 0.0, "waiting": 0.0} for _ in range(3)]
    found = [reading(0, *totals)]
    for number, is_slow in enumerate(slow, 1):
        for rank, total in enumerate(totals):
            spent = SLOW if is_slow and rank == 1 else FAST
            total.update({name: total[name] + STEPS * seconds for name, seconds in spent.items()})
        found.append(reading(number * STEPS, *totals))
    return found


@given(st.lists(st.booleans(), max_size=30))
@example([True] * 6)
def test_a_rank_is_named_at_its_third_slow_window_in_a_row(slow: list[bool]) -> None:
    watch = Stragglers()
    named = [[each.rank for each in watch.take(reading, NODES)] for reading in windows(*slow)]
    first = next((end for end in range(WINDOWS, len(slow) + 1) if all(slow[end - WINDOWS : end])), None)
    assert named == [["node-1"] if number == first else [] for number in range(len(slow) + 1)]


# ---------------------------------------------------------------- the annotation


def straggler(number: int, seconds: float = 2.0) -> Straggler:
    return Straggler(f"node-{number}", number, f"node-{number}", f"gpu-{number}", seconds, 1.0, seconds, 0.5)


def trainjob(text: object) -> dict[str, Any]:
    return {"metadata": {"annotations": {STRAGGLERS: text}}}


def test_the_annotation_keeps_the_stragglers_that_cost_most() -> None:
    known = [straggler(number, 2.0 + number) for number in range(8)]
    text = annotation(known, [straggler(3, 99.0), straggler(70, 50.0)])[STRAGGLERS]
    assert len(text) < 8 * 500
    kept = stragglers_of(trainjob(text))
    assert [each.number for each in kept] == [3, 70, 7, 6, 5, 4, 2, 1]
    assert kept[0] == straggler(3, 99.0)


@given(
    st.lists(
        JSON
        | st.fixed_dictionaries(
            dict.fromkeys(("rank", "number", "name", "node", "seconds", "median", "step_seconds", "loading"), JSON)
        )
    )
)
def test_an_annotation_that_a_person_has_edited_is_read_as_far_as_possible(values: list[Any]) -> None:
    good = straggler(1)
    text = json.dumps([*values, good.as_dict()])
    kept = stragglers_of(trainjob(text))
    assert kept[-1] == good
    for each in kept:
        assert all(map(math.isfinite, (each.seconds, each.median, each.step_seconds, each.loading)))
        assert str(each)


@pytest.mark.parametrize("text", ["", "{}", "null", "[" * 100_000, 3, None, ["x"]])
def test_an_annotation_that_cannot_be_read_has_no_stragglers(text: object) -> None:
    assert stragglers_of(trainjob(text)) == []
    assert stragglers_of(None) == []
