"""Studies as authors write them, and the specs of their trials."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob import TrainJobSpec
from trainjob.errors import InvalidStudy
from trainjob.tuning import Study
from trainjob.tuning.template import check_template, spec_of, unused

X = {"type": "float", "low": 0, "high": 1}
COLOR = {"type": "categorical", "choices": ["red", "blue"]}
SIZE = {"type": "categorical", "choices": [1, 2]}


def study(**fields: Any) -> Study:
    return Study.read({"space": {"x": X}, "metric": "loss", "direction": "minimize", "max_trials": 4} | fields)


def space(**parameters: Any) -> dict[str, Any]:
    return {"space": parameters}


GRID = {"sampler": {"name": "grid"}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (space(), "space: "),
        (space(x={"type": "float", "low": 2, "high": 1}), "space.x: low is 2, which is more than high, 1"),
        (space(x={"type": "float", "low": 0, "high": 1, "log": True}), "low must be above 0 with log, not 0"),
        (space(x=X | {"step": 0}), "step must be above 0, not 0"),
        (space(x={"type": "float", "low": 1, "high": 2, "step": 0.1, "log": True}), "step cannot be combined with log"),
        (space(x=X | {"high": float("inf")}), "space.x"),
        (space(x={"type": "real", "low": 0, "high": 1}), "space.x"),
        (space(x={"type": "categorical", "choices": []}), "space.x"),
        (space(x={"type": "categorical", "choices": ["a", "a"]}), "choices has a value twice"),
        (space(x={"type": "categorical", "choices": [1, True]}), "true equals 1"),
        ({"space": {"learning rate": X}}, "space.learning rate: is not a valid name (use letters, digits and"),
        (space(lr=X, LR=X), "has two names that differ only in case"),
        (space(x=X | {"when": {"y": 1}}), "space.x.when.y: is not another parameter of the space"),
        (space(x=X | {"when": {"c": "green"}}, c=COLOR), "c is never 'green', so the parameter would never apply"),
        (space(x=X | {"when": {"c": True}}, c=SIZE), "c is never True"),
        (space(x=X | {"when": {"n": 2}}, n={"type": "int", "low": 1, "high": 5, "step": 2}), "n is never 2"),
        (space(x=X | {"when": {"n": 1.5}}, n={"type": "int", "low": 1, "high": 5}), "n is never 1.5"),
        (space(x=X | {"when": {"y": 0.5}}, y=X), "y has any value of its range"),
        (
            space(x=X | {"when": {"c": "red", "y": 0.5}}, c=COLOR, y=X | {"step": 0.5, "when": {"c": "blue"}}),
            "space.x.when: needs several values of c, so it would never apply",
        ),
        (space(x=X | {"when": {"c": "red"}}, c=COLOR | {"when": {"x": 1}}), "has conditions in a circle"),
        (GRID, "space.x: has no step, so a grid has no end (set step, or use another sampler)"),
        (GRID | space(x={"type": "int", "low": 1, "high": 8, "log": True}), "has no step"),
        (GRID | space(c=COLOR, n=SIZE | {"when": {"c": "red"}}), "space.n.when: cannot be combined with a grid"),
        (GRID | space(n={"type": "int", "low": 0, "high": 10**12}), "has 1000000000001 combinations"),
        *(({"direction": value}, "direction: must be 'minimize' or 'maximize'") for value in ("max", "min")),
        *(({"direction": value}, "direction") for value in ("minimise", None)),
        *(({name: 0}, name) for name in ("max_trials", "parallel", "max_seconds")),
        *(({name: value}, name) for name, value in (("metric", ""), ("max_trials", 10_001), ("stop_at", float("nan")))),
        ({"sampler": {"name": "cmaes"}}, "sampler.name"),
        ({"sampler": {"seed": -1}}, "sampler.seed"),
        ({"pruner": "median"}, "pruner"),
    ],
)
def test_bad_studies_are_refused_with_the_field(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidStudy) as caught:
        study(**fields)
    assert problem in str(caught.value)


def test_what_is_no_mapping_is_refused_and_all_problems_are_listed_at_once() -> None:
    wrong: list[object] = [None, [], "study.yaml", 3]
    for value in wrong:
        with pytest.raises(InvalidStudy, match="must be a mapping, not"):
            Study.read(value)
    with pytest.raises(InvalidStudy) as caught:
        study(space={"a b": X, "x": X | {"when": {"y": 1}}}, sampler={"name": "grid"})
    assert len(caught.value.problems) >= 4


def test_conditions_may_be_nested_and_in_any_order() -> None:
    made = study(
        space={
            "momentum": X | {"when": {"nesterov": True}},
            "nesterov": {"type": "categorical", "choices": [True, False], "when": {"optimizer": ["sgd", "rmsprop"]}},
            "optimizer": {"type": "categorical", "choices": ["sgd", "adam", "rmsprop"]},
        }
    )
    assert made.order() == ["optimizer", "nesterov", "momentum"]
    assert made.space["momentum"].applies({"optimizer": "sgd", "nesterov": True})
    assert not made.space["momentum"].applies({"optimizer": "adam"})


def test_a_grid_has_all_combinations() -> None:
    tenths = {"type": "float", "low": 0, "high": 0.3, "step": 0.1}
    made = study(space={"c": COLOR, "n": {"type": "int", "low": 1, "high": 6, "step": 2}, "x": tenths}, **GRID)
    assert made.grid() == {"c": ["red", "blue"], "n": [1, 3, 5], "x": [0, 0.1, 0.2, 0.3]}
    assert made.combinations() == 24


def test_limits_are_no_part_of_the_identity() -> None:
    one, two = study(), study(max_trials=9, parallel=3, stop_at=1.0, retries=0, max_seconds=9, max_failed_trials=2)
    assert one.identity() == two.identity()
    assert one.limits() != two.limits()
    assert {**one.identity(), **one.limits()} == one.model_dump(mode="json")


# ---------------------------------------------------------------- templates

VARIABLE = "$(KUBEFLOW_TRAINER_OPT_X)"


def template(**fields: Any) -> TrainJobSpec:
    given = {} if "manifest" in fields else {"runtime": "trainjob-step", "command": ["train"]}
    return TrainJobSpec.parse(given | fields)


MANIFEST: dict[str, Any] = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
MANIFEST |= {"metadata": {"name": "x"}, "spec": {"runtimeRef": {"name": "torch-distributed"}}}
OPTION = "KUBEFLOW_TRAINER_OPT_"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"command": ["train", f"--y=$({OPTION}Y)"]}, f"template.command[1]: uses {OPTION}Y, but the space has no such"
         f" parameter (use {OPTION}X)"),
        ({"args": [f"$({OPTION}x)"]}, f"template.args[0]: uses {OPTION}x"),
        ({"env": {"Y": f"$({OPTION}Y)"}}, f"template.env.Y: uses {OPTION}Y"),
        ({"env": {f"{OPTION}X": "1"}}, f"template.env.{OPTION}X: is set by the study (remove"),
        ({"env": {"TRAINJOB_TRIAL": "1"}}, "template.env.TRAINJOB_TRIAL: is set by the study"),
        ({"manifest": MANIFEST}, "template.manifest: cannot be a template"),
    ],
)  # fmt: skip
def test_bad_templates_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidStudy) as caught:
        check_template(study(), template(**fields))
    assert problem in str(caught.value)


def test_unused_parameters_are_a_hint_if_the_template_uses_others() -> None:
    two = study(**space(x=X, lr=X))
    check_template(two, template(args=["$$(KUBEFLOW_TRAINER_OPT_Y)", "$(HOME)"]))  # no use of a parameter
    check_template(two, template(args=[VARIABLE]))
    assert unused(two, template(args=[VARIABLE])) == (
        "the template does not use KUBEFLOW_TRAINER_OPT_LR: the script must read that from its environment"
    )
    assert unused(two, template()) == "", "the script reads its environment"
    assert unused(two, template(args=[VARIABLE], env={"A": "$(KUBEFLOW_TRAINER_OPT_LR)"})) == ""


def test_the_spec_of_a_trial() -> None:
    spec = spec_of(
        template(
            command=["train", f"--x={VARIABLE}", "--y=$(KUBEFLOW_TRAINER_OPT_Y)", "--z", "1"],
            env={"A": "1", "B": f"x is {VARIABLE}", "C": "$(KUBEFLOW_TRAINER_OPT_Y)"},
            outputs={"model": "s3://bucket/models/"},
        ),
        7,
        {"x": 0.1 + 0.2, "flag": True, "n": 3, "name": "a b"},
    )
    assert list(spec.command) == ["train", f"--x={VARIABLE}", "--z", "1"], "the word of a parameter left out"
    parameters = {"FLAG": "true", "N": "3", "NAME": "a b", "X": "0.30000000000000004"}
    assert {k.removeprefix("KUBEFLOW_TRAINER_OPT_"): v for k, v in spec.env.items()} == parameters | {
        "TRAINJOB_TRIAL": "7",
        "A": "1",
        "B": f"x is {VARIABLE}",
    }
    names = list(spec.env)
    assert names.index("KUBEFLOW_TRAINER_OPT_X") < names.index("B"), "Kubernetes expands earlier variables only"
    assert spec.outputs == {"model": "s3://bucket/models/7"}
    spec.check()
