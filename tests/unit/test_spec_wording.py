"""No message about a spec, a study, a gate or a part of them has the words of pydantic, whatever the value is."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import trainjob
from trainjob import InvalidSpec, TrainJobSpec
from trainjob._spec import OnRetry, Resources
from trainjob._spec.base import Part
from trainjob.errors import InvalidGate, InvalidStudy
from trainjob.evaluation import Gate
from trainjob.evaluation.gate import MetricRule
from trainjob.tuning import Study
from trainjob.tuning.study import CategoricalParameter, FloatParameter, IntParameter, Pruner, Sampler

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


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        (spec, {"command": "python train.py --lr '0.1 0.2'"},
         'write a list: ["python", "train.py", "--lr", "0.1 0.2"]'),
        (spec, {"command": "python train.py --token hunter2"},
         'write a list: ["python", "train.py", "--token", "***"]'),
        (TrainJobSpec, {"command": "python train.py"},
         'command: must be a list, not text (write a list: ["python", "train.py"])'),
        (spec, {"num_nodes": "two"}, "num_nodes: must be a whole number, not 'two'"),
        (spec, {"num_nodes": 2.5}, "num_nodes: must be a whole number, not 2.5"),
        (spec, {"env": {"DB_PASSWORD": {"secretKeyRef": "hunter2"}}}, "secretKeyRef: must be a mapping, not text"),
        (TrainJobSpec, {"runtme": "torch-distributed"}, "runtme: no such field (did you mean runtime?)"),
        (TrainJobSpec, {"func": len}, "func: must be a function defined with def"),
        (TrainJobSpec, {"num_nodes": 0, "args": "x"}, "num_nodes: must be greater"),
        (OnRetry, {"out_of_memory": {"max_memory": 3}},
         "OnRetry.out_of_memory.max_memory: must be text, not int (write '3')"),
        (OnRetry, {"oom": {}}, "OnRetry.oom: no such field (fields: out_of_memory, "),
        (spec, {"runtime_patches": [{"manager": "x"}]}, "runtime_patches[0].manager: must be a domain-prefixed path"),
        (Resources, {"cpu": "many"}, "Resources.cpu: 'many' is not a Kubernetes quantity"),
        (spec, {"pod": {"tolerations": [{"operator": "Equal"}]}},
         "pod.tolerations[0]: without a key it needs operator: Exists"),
        (study, {"space": {"lr": {"low": 0, "high": 1}}}, "space.lr.type: is missing"),
        *((each, {**STUDY, "space": {"lr": {"type": "floot"}}},
           "space.lr: is 'floot' (use one of: float, int, categorical)") for each in (study, Study)),
        *((each, {**STUDY, "space": {"lr": {"type": "int", "low": 2, "high": 1}}},
           "space.lr: low is 2, which is more than high, 1") for each in (study, Study)),
        (IntParameter, {"type": "int", "low": "a", "high": 0}, "IntParameter.low: must be a whole number, not 'a'"),
        (MetricRule, {"min": 1, "max": 0}, "MetricRule: min is 1, which is more than max, 0"),
        (Gate, {"metrics": {"f1": {}}}, "Gate.metrics.f1: has no rule: set one of"),
    ],
)  # fmt: skip
def test_readers_and_constructors_say_what_to_write(made: Any, fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        made(fields) if made in READERS else made(**fields)
    assert message in str(error.value)
    assert type(error.value) is (InvalidStudy if made is study else ERRORS.get(made, InvalidSpec))


# ---------------------------------------------------------------- constructors


def models() -> Iterator[type[Part]]:
    for each in pkgutil.walk_packages(trainjob.__path__, "trainjob."):
        if each.name.startswith(("trainjob._spec.", "trainjob.tuning.", "trainjob.evaluation.", "trainjob._manifest.")):
            importlib.import_module(each.name)
    found = [Part]
    for model in found:
        found += model.__subclasses__()
    return (each for each in found if each.model_fields and not each.__name__.startswith("_"))


MODELS = sorted({*models()}, key=lambda each: each.__name__)
VALID: dict[str, Any] = {
    "api_version": "v1",
    "choices": [1],
    "direction": "minimize",
    "field_path": "metadata.name",
    "high": 1,
    "key": "k",
    "kind": "Workflow",
    "low": 0,
    "max_excluded_nodes": 2,
    "max_memory": "64Gi",
    "max_trials": 3,
    "metric": "loss",
    "mount_path": "/a",
    "name": "a",
    "resource": "limits.memory",
    "source": "def f(): 0",
    "space": SPACE,
    "storage_uri": "hf://a/b",
    "training_runtime_spec": {},
    "type": "float",
    "uid": "u",
}
PARTS_OF_STUDIES = (Study, FloatParameter, IntParameter, CategoricalParameter, Sampler, Pruner)
ERRORS: dict[Any, type[InvalidSpec]] = {**dict.fromkeys(PARTS_OF_STUDIES, InvalidStudy), Gate: InvalidGate}
ERRORS[MetricRule] = InvalidGate


def refused(made: Any, fields: Mapping[str, Any]) -> InvalidSpec | None:
    try:
        made(fields) if made in READERS else made(**fields)
    except InvalidSpec as error:
        return error
    return None


READERS: dict[Any, type[Part]] = {spec: TrainJobSpec, study: Study, gate: Gate}
MADE: list[tuple[Any, type[Part]]] = [*((each, each) for each in MODELS), *READERS.items()]


@pytest.mark.parametrize(("made", "model"), MADE, ids=[made.__name__ for made, _ in MADE])
def test_no_message_has_the_words_of_pydantic(made: Any, model: type[Part]) -> None:
    fields = {name: VALID[name] for name, field in model.model_fields.items() if field.is_required()}
    fields |= {IntParameter: {"type": "int"}, CategoricalParameter: {"type": "categorical"}}.get(model, {})
    values = [*VALUES, timedelta(days=-1), {"y": object()}, [[]], float("nan")]
    count = 0
    for name, value in itertools.product([*model.model_fields, "unknown"], values):
        if (error := refused(made, {**fields, name: value})) is not None:
            count += 1
            assert type(error) is ERRORS.get(model, InvalidSpec)
            assert error.problems
            assert error.__suppress_context__ or error.__context__ is None
            texts = [f"{each.message} {each.instead.partition('fields: ')[0]}" for each in error.problems]
            assert not [each for each in texts if PYDANTIC.search(each)], (name, value)
    assert count > len(values) / 2


def test_a_function_that_is_too_long_is_a_problem_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long_function.py").write_text("def f():\n    return '" + "x" * (96 << 10) + "'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidSpec, match=r"func: the source of f\(\) has [\d,]+ characters; at most"):
        spec({"command": None, "func": importlib.import_module("long_function").f})
