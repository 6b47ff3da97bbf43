"""Reads versions of the Kubeflow Model Registry, also after manual edits."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob.registry.records import METRIC, double, parse, plain, text


def test_manual_edits_do_not_hide_other_properties() -> None:
    properties = {
        f"{METRIC}a": text("edited by hand"),
        f"{METRIC}b": double(0.5),
        "recall": {"metadataType": "MetadataDoubleValue", "double_value": 0.25},
        "b": double(0.75),
        "stage": text("trial"),
    }
    version = parse("digits", {"name": "1", "customProperties": properties, "createTimeSinceEpoch": "1000"}).version
    assert version.metrics == {"b": 0.5, "recall": 0.25}, "prefixed metrics have priority"
    assert version.tags == {"stage": "trial"}
    assert version.created == 1.0
    assert parse("digits", {"name": "1"}).version.created == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"string_value": "a"}, "a"),
        ({"int_value": "7"}, "7"),
        ({"struct_value": "eyJhIjogMX0="}, "eyJhIjogMX0="),
        ({"double_value": 1}, "1.0"),
        ({"bool_value": True}, "true"),
        ({}, ""),
    ],
)
def test_properties_of_every_kind_are_tags(value: dict[str, Any], expected: str) -> None:
    assert plain(value) == expected
    if "double_value" not in value:
        assert parse("m", {"name": "1", "customProperties": {"note": value}}).version.tags == {"note": expected}
