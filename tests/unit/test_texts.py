"""Values that a run gives become text where a spec has text."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trainjob import TrainJobSpec
from trainjob._spec.reading import read_part
from trainjob._spec.texts import as_text, with_texts

TEXTS: list[tuple[Any, str]] = [
    ("torch==2.0", "torch==2.0"),
    (None, ""),
    (True, "true"),
    (3, "3"),
    (3.0, "3"),
    (0.1, "0.1"),
    (1e300, "1e+300"),
    (2.0**60, "1.152921504606847e+18"),
    (Decimal("1.10"), "1.10"),
    (date(2026, 3, 1), "2026-03-01"),
    (datetime(2026, 3, 1, 12, tzinfo=UTC), "2026-03-01T12:00:00+00:00"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (PurePosixPath("/a"), "/a"),
    (np.int64(3), "3"),
    (np.float32(0.5), "0.5"),
    (np.bool_(True), "true"),
    ({"a": [1, "ü", date(2026, 3, 1)]}, '{"a": [1, "ü", "2026-03-01"]}'),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_a_value_as_text(value: object, text: str) -> None:
    assert as_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**200), 2**200))
def test_a_number_loses_no_digits(number: float) -> None:
    assert json.loads(as_text(number)) == number


def test_other_objects_have_no_text() -> None:
    thing = object()
    assert as_text(thing) is thing
    assert as_text(np.ones(2)).shape == (2,)


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"command": ["x", 3], "args": [True]}, {"command": ["x", "3"], "args": ["true"]}),
    ({"env": {"A": 3, "B": {"valueFrom": {}}}}, {"env": {"A": "3", "B": {"valueFrom": {}}}}),
    ({"env": [{"name": 1, "value": None}]}, {"env": [{"name": "1", "value": ""}]}),
    ({"labels": {"a": 3}, "num_nodes": 3, "image": None}, {"labels": {"a": "3"}, "num_nodes": 3, "image": None}),
    ({"runtime": 3, "inputs": {"a": 1.5}}, {"runtime": "3", "inputs": {"a": "1.5"}}),
    ({"func_args": {"labels": {"a": 3}}}, {"func_args": {"labels": {"a": 3}}}),
    (
        {"runtimePatches": [{"x": {"nodeSelector": {"a": 1}}}]},
        {"runtimePatches": [{"x": {"nodeSelector": {"a": "1"}}}]},
    ),
    ({"tolerations": [{"key": 1, "tolerationSeconds": 3}]}, {"tolerations": [{"key": "1", "tolerationSeconds": 3}]}),
    (
        {"kind": "TrainJob", "spec": {"trainer": {"numNodes": 2, "env": [{"name": "A", "value": 2}]}}},
        {"kind": "TrainJob", "spec": {"trainer": {"numNodes": 2, "env": [{"name": "A", "value": "2"}]}}},
    ),
]


@pytest.mark.parametrize(("fields", "texts"), FIELDS)
def test_text_where_a_spec_has_text(fields: dict[str, Any], texts: dict[str, Any]) -> None:
    assert with_texts(fields, lambda _: True) == texts
    assert with_texts(fields, lambda _: False) == fields, "literals stay as they are"


def test_every_text_of_a_spec_is_known() -> None:
    """A field of a spec that is text, or has texts, takes numbers of a run."""
    numbers: dict[str, Any] = {
        "runtime": 1, "image": 1, "command": [1], "args": [1], "env": {"A": 1}, "labels": {"a": 1},
        "annotations": {"a": 1}, "inputs": {}, "outputs": {},
    }  # fmt: skip
    spec = TrainJobSpec.parse(with_texts(numbers, lambda _: True))
    assert (spec.image, spec.command, spec.env, spec.labels) == ("1", ["1"], {"A": "1"}, {"a": "1"})


PARTS: list[tuple[str, Any]] = [
    (json.dumps({"a": "🙂\n", "b": [True, None]}), {"a": "🙂\n", "b": [True, None]}),
    (str({"a": "it's", "b": [True, None], "c": ("x", 1)}), {"a": "it's", "b": [True, None], "c": ("x", 1)}),
    ("('x', 'y')", ["x", "y"]),
    ("a: 1\nb: [x]", {"a": 1, "b": ["x"]}),
    ("- x\n- 2", ["x", 2]),
    ("python train.py", None),
    ("3", None),
    ("", None),
    ("{'a': datetime.datetime(2026, 3, 1)}", None),
    ("[" * 100_000, None),
    ('{"a": ' + "9" * 400 + "}", None),
    ("[" + "0," * 60_000 + "]", None),
    *((text, None) for text in ('{"a": 1, "a": 2}', "{'a': 1, 'a': 2}", "{'b': {'a': 1, 'a': 2}}", "a: 1\na: 2")),
    *((text, None) for text in ('{"a": 1e999}', "{'a': 1e999}", '{"a": NaN}', "[-1e999]", "a: .inf")),
]


@pytest.mark.parametrize(("text", "part"), PARTS, ids=range(len(PARTS)))
def test_a_mapping_or_list_that_a_template_has_written(text: str, part: Any) -> None:
    assert read_part(text) == part


def test_numbers_of_pods_that_a_template_has_written_are_numbers() -> None:
    context = {"runAsUser": "1000", "run_as_non_root": "True", "seLinuxOptions": {"level": "1"}}
    given = {
        "pod": {"securityContext": context, "nodeSelector": {"a": "1"}, "tolerations": [{"tolerationSeconds": "5"}]}
    }
    typed = with_texts(given, lambda at: len(at) > 2)
    assert typed["pod"]["securityContext"] == {
        "runAsUser": 1000,
        "run_as_non_root": True,
        "seLinuxOptions": {"level": "1"},
    }
    assert typed["pod"]["nodeSelector"] == {"a": "1"}
    assert typed["pod"]["tolerations"] == [{"tolerationSeconds": 5}]
    assert with_texts(given, lambda at: False) == given
