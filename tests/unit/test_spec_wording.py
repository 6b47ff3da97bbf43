"""No message about a spec, a study or a gate has the words of pydantic, whatever the value is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from trainjob import InvalidSpec, TrainJobSpec
from trainjob.evaluation import Gate
from trainjob.tuning import Study

SPEC = {"runtime": "torch-distributed", "command": ["python", "train.py"]}
SPACE = {"lr": {"type": "float", "low": 0, "high": 1}}
STUDY = {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 3}
VALUES: list[Any] = ["x", "", 3, -1, 2.5, True, None, [], ["x"], [3], [{}], [{"x": 1}], {}, {"x": "y"}, {"x": {}}]
VALUES += [{"lr": each} for each in (3, {}, {"type": "floot"}, {"type": "int"}, {"type": "float", "low": "a"})]
VALUES += [object()]
PYDANTIC = re.compile(r"(?i)input|pydantic|discriminator|tag\b|instance|extract|unable|dictionary|valid |parse|https?:")


def spec(fields: Mapping[str, Any]) -> object:
    return TrainJobSpec.parse({**SPEC, **fields})


def study(fields: Mapping[str, Any]) -> object:
    return Study.read({**STUDY, **fields})


def gate(fields: Mapping[str, Any]) -> object:
    return Gate.read({"metrics": {"accuracy": {"min": 0.5}}, **fields})


KINDS: dict[str, tuple[Callable[[Mapping[str, Any]], object], list[str]]] = {
    "spec": (spec, sorted(TrainJobSpec.model_fields)),
    "study": (study, sorted(Study.model_fields)),
    "gate": (gate, sorted(Gate.model_fields)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_has_the_words_of_pydantic(kind: str) -> None:
    read, names = KINDS[kind]
    refused = 0
    for name, value in itertools.product(names, VALUES):
        try:
            read({name: value})
        except InvalidSpec as error:
            refused += 1
            for problem in error.problems:
                assert not PYDANTIC.search(problem.message), (name, value, problem)
    assert refused > 20


@pytest.mark.parametrize(
    ("read", "fields", "message"),
    [
        (
            spec,
            {"command": "python train.py --lr '0.1 0.2'"},
            'write a list: ["python", "train.py", "--lr", "0.1 0.2"]',
        ),
        (spec, {"num_nodes": "two"}, "num_nodes: must be a whole number, not 'two'"),
        (spec, {"num_nodes": 2.5}, "num_nodes: must be a whole number, not 2.5"),
        (study, {"space": {"lr": {"type": "floot"}}}, "space.lr: is 'floot' (use one of: float, int, categorical)"),
        (study, {"space": {"lr": {"low": 0, "high": 1}}}, "space.lr.type: is missing"),
        (study, {"space": {"lr": {"type": "float", "low": 1, "high": 0}}}, "low is 1, which is more than high, 0"),
        (
            spec,
            {"command": "python train.py --token hunter2"},
            'write a list: ["python", "train.py", "--token", "***"]',
        ),
        (spec, {"env": {"DB_PASSWORD": {"secretKeyRef": "hunter2"}}}, "secretKeyRef: must be a mapping, not text"),
        (study, {"direction": "down"}, "direction: must be 'minimize' or 'maximize'"),
    ],
)
def test_a_message_says_what_to_write(
    read: Callable[[Mapping[str, Any]], object], fields: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSpec) as refused:
        read(fields)
    assert message in str(refused.value)
