"""Numbers and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob._support.numbers import is_finite, json_values

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda part: st.lists(part) | st.dictionaries(st.text(max_size=5), part), max_leaves=8)


@given(VALUES)
def test_every_value_becomes_strict_json(value: Any) -> None:
    assert json.loads(json.dumps(json_values(value), allow_nan=False)) == json_values(value)
    if "NaN" not in (text := json.dumps(value)) and "Infinity" not in text:
        assert json_values(value) == value


@pytest.mark.parametrize("value", [0, -1.5, 10**300, 5e-324])
def test_finite(value: object) -> None:
    assert is_finite(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, True, None, "1", [1]])
def test_not_finite(value: object) -> None:
    assert not is_finite(value)


def test_not_a_number_becomes_text() -> None:
    assert json_values({"loss": math.nan, "all": (1, -math.inf, "x")}) == {"loss": "nan", "all": [1, "-inf", "x"]}
