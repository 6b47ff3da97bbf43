"""Each TrainJob argument of the Kubeflow SDK has a field in the spec."""

from __future__ import annotations

from typing import Any

import pytest
from tests.conformance.names import PLACES, place
from tests.conformance.row import Row
from tests.conformance.table import TABLE, recorded

from trainjob import InvalidSpec, TrainJobSpec

RECORDED = recorded()
SCHEMA = TrainJobSpec.model_json_schema()
ARGUMENTS = [(owner, name) for owner, names in RECORDED["arguments"].items() for name in names]


def parts(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema, its references, and the members of its unions and lists."""
    if "$ref" in schema:
        return parts(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    inner = [*schema.get("anyOf", []), *([schema["items"]] if isinstance(schema.get("items"), dict) else [])]
    return [schema, *(part for each in inner for part in parts(each))]


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(each.title() for each in others)


@pytest.mark.parametrize(("owner", "name"), ARGUMENTS)
def test_each_sdk_argument_has_a_field(owner: str, name: str) -> None:
    path = place(owner, name)
    at = [SCHEMA]
    for step in path.split(".") if path else ():
        at = [
            part
            for each in at
            for found in [each.get("properties", {}).get(camel(step))]
            if found
            for part in parts(found)
        ]
        assert at, f"{path} of {owner}.{name} is not a field of a spec"


def test_all_listed_arguments_exist_in_the_sdk() -> None:
    assert set(PLACES) == set(RECORDED["arguments"])
    for owner, (_, others) in PLACES.items():
        assert set(others) <= set(RECORDED["arguments"][owner])


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_row_is_recorded_and_is_a_spec(row: Row) -> None:
    call = RECORDED["calls"][row.name]
    assert call["call"] == row.sdk, "run make record-sdk"
    assert bool(row.refused) == bool(call["refused"])
    if row.sooner:
        with pytest.raises(InvalidSpec):
            TrainJobSpec.parse(row.fields())
    else:
        TrainJobSpec.parse(row.fields())


def test_the_table_is_complete() -> None:
    assert len(TABLE) >= 25
    assert [row.name for row in TABLE] == list(RECORDED["calls"])
    classes = {name for name in RECORDED["arguments"] if name[0].isupper() and "." not in name}
    calls = " ".join(row.sdk for row in TABLE)
    assert [name for name in sorted(classes) if f"{name}(" not in calls] == [], "no row of the table uses these classes"
