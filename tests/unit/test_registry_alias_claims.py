"""Selection of the version that holds an alias among all claims."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from trainjob.registry.alias_claims import Claim, holder
from trainjob.registry.base import ModelVersion


def _claimed(number: int, claim: str, **metrics: float) -> tuple[ModelVersion, Claim]:
    return ModelVersion("m", str(number), "s3://b/m", metrics=metrics), Claim.parse(claim)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("7", Claim(7)),
        ("7 max acc", Claim(7, "acc")),
        ("7 min val/loss 2", Claim(7, "val/loss 2", "min")),
        ("yes", Claim(0)),
        ("", Claim(0)),
        ("7 best acc", Claim(0)),
        ("-1", Claim(0)),
    ],
)
def test_claims_are_parsed(text: str, claim: Claim) -> None:
    assert Claim.parse(text) == claim


@given(st.integers(0, 10**17), st.none() | st.from_regex(r"[\w.\-/][\w.\- /]{0,50}", fullmatch=True), st.booleans())
def test_text_of_a_claim_parses_to_the_same_claim(order: int, metric: str | None, more: bool) -> None:
    claim = Claim(order, metric.strip() if metric else None, "max" if more or not metric else "min")
    assert Claim.parse(str(claim)) == claim


@pytest.mark.parametrize(
    ("claims", "held"),
    [
        ([], None),
        ([_claimed(1, "yes")], "1"),
        ([_claimed(1, "2"), _claimed(2, "1")], "1"),
        ([_claimed(1, "yes"), _claimed(2, "no")], "2"),
        ([_claimed(1, "1 max acc", acc=0.5), _claimed(2, "2 max acc", acc=0.9)], "2"),
        # Its writer had not read the better version.
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "3 max acc", acc=0.5)], "1"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max acc", acc=0.5)], "1"),
        ([_claimed(1, "2 min acc", acc=0.9), _claimed(2, "2 min acc", acc=0.5)], "2"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max acc", acc=0.9)], "1"),
        ([_claimed(1, "2 min acc", acc=0.9), _claimed(2, "2 min acc", acc=0.9)], "1"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max acc", acc=math.nan), _claimed(3, "2 max acc")], "1"),
        ([_claimed(1, "2 max acc", acc=0.9), _claimed(2, "2 max f1", acc=0.5)], "1"),
        # A person moves the alias to a worse version; later versions are compared with that one.
        ([_claimed(1, "3", acc=0.5), _claimed(2, "2 max acc", acc=0.9)], "1"),
        ([_claimed(1, "3", acc=0.5), _claimed(2, "2 max acc", acc=0.9), _claimed(3, "4 max acc", acc=0.6)], "3"),
    ],
)
def test_the_holder_is_selected(claims: list[tuple[ModelVersion, Claim]], held: str | None) -> None:
    found = holder(claims)
    assert (found.version if found else None) == held


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=False)), min_size=1, max_size=6))
def test_the_best_version_by_metric_holds_in_any_order(merits: list[tuple[int, float]]) -> None:
    found = holder(_claimed(number, f"{order} max acc", acc=acc) for number, (order, acc) in enumerate(merits))
    assert found is not None
    assert found.metrics["acc"] == max(acc for _, acc in merits)
