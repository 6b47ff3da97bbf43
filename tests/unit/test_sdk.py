"""The calls of docs/how-to/kubeflow-sdk.md: what the Kubeflow SDK sent for each, and the TrainJob of the spec."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tests.conformance.page import fields, recorded, rows, sdk_calls

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render

RECORDED = recorded()
DIFFERS = {
    "(1)": ["trainer.command", "trainer.args"],
    "(2)": ["*env.*", "*.secretRef.name"],
    "(3)": ["trainer"],
    "(4)": ["trainer.args"],
    "(5)": ["trainer.args"],
}
"""Number of a difference that the page explains -> paths in the TrainJob."""
DEFAULTS = {"runtimeRef.apiGroup": "trainer.kubeflow.org"}
PATCHES = "runtimePatches.trainingRuntimeSpec"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path -> value; list items with names by their name, other lists as one value, quantities as text."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {each["name"]: {k: v for k, v in each.items() if k != "name"} or True for each in value}
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}".lstrip("."))
    elif value != []:
        yield path, str(value).removesuffix(".0") if "resourcesPerNode" in path else value


def described(job: dict[str, Any]) -> dict[str, Any]:
    """The spec of a TrainJob by paths, with the server's defaults, without the name of who patches."""
    patches = [patch["trainingRuntimeSpec"] for patch in job["spec"].get("runtimePatches", [])]
    assert len(patches) <= 1
    spec = {**job["spec"], "runtimePatches": {"trainingRuntimeSpec": patches[0]} if patches else []}
    return DEFAULTS | dict(leaves(spec))


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The paths whose values differ."""
    first, second = described(one), described(other)
    return {path for path in first | second if first.get(path) != second.get(path)}


def rendered(ours: str) -> dict[str, Any]:
    return render(TrainJobSpec.parse(fields(ours)), "key", 1, "namespace")


def named(row: list[str]) -> str:
    return row[0][-80:]


@pytest.mark.parametrize("row", rows("calls"), ids=named)
def test_both_send_the_same_but_for_the_listed_differences(row: list[str]) -> None:
    sdk, ours, differs = row
    theirs, job = RECORDED["calls"][sdk]["request"], rendered(ours)
    listed = [path for number in filter(None, differs.split(", ")) for path in DIFFERS[number]]
    found = differing(theirs, job)
    assert {path for path in found if not any(fnmatchcase(path, each) for each in listed)} == set()
    assert bool(found) == bool(listed)
    for kind in ("labels", "annotations"):
        assert (theirs["metadata"].get(kind) or {}).items() <= job["metadata"][kind].items()


@pytest.mark.parametrize("row", rows("refusals"), ids=named)
def test_both_refuse(row: list[str]) -> None:
    sdk, ours, refused, here = row
    call = RECORDED["calls"][sdk]
    assert refused in call["refused"]
    if here == "the same":  # by the server, which gets the same TrainJob
        assert differing(call["request"], rendered(ours)) == {"trainer"}
    else:
        with pytest.raises(InvalidSpec, match=re.escape(here)):
            TrainJobSpec.parse(fields(ours))


def test_the_page_has_all_arguments_of_the_sdk() -> None:
    listed = {owner: re.findall(r"\w+", names) for owner, names, _ in rows("arguments")}
    assert listed == RECORDED["arguments"]


def test_each_call_is_recorded() -> None:
    assert sdk_calls() == list(RECORDED["calls"]), "run make record-sdk"


def test_the_calls_use_each_argument() -> None:
    """So each has a field. Initializers of datasets and of models have the same ones, as the next test shows."""
    used = {("S3DatasetInitializer", "ignore_patterns")}  # in the next test
    for node in ast.walk(ast.parse("\n".join(f"train({call})" for call in sdk_calls()))):
        if isinstance(node, ast.Call):
            owner = ast.unparse(node.func).replace("Model", "Dataset")
            positional = RECORDED["arguments"].get(owner, [])[: len(node.args)]
            used |= {(owner, name) for name in [*positional, *(each.arg for each in node.keywords if each.arg)]}
    for owner, names in RECORDED["arguments"].items():
        assert {(owner.rpartition(".")[2].replace("Model", "Dataset"), name) for name in names} <= used


TOKEN = {"secretKeyRef": {"name": "a", "key": "b"}}
S3 = {"storage_uri": "s3://a/b", "ignore_patterns": ["*"]}


@pytest.mark.parametrize(
    "given",
    [
        {"storage_uri": "hf://a/b", "ignore_patterns": ["*"], "access_token": TOKEN},
        S3 | {"endpoint": "https://s3.example", "secret_ref": "keys"},
        S3 | {"region": "eu-west-1", "role_arn": "arn:aws:iam::1:role/a"},
    ],
    ids=["Hugging Face", "S3 with keys", "S3 with a role"],
)
def test_datasets_and_models_have_the_same_arguments(given: dict[str, Any]) -> None:
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "initializer": {"dataset": given, "model": given}})
    initializer = render(spec, "key", 1, "namespace")["spec"]["initializer"]
    assert initializer["dataset"] == initializer["model"]
