"""The sampler and the pruner: the same trials after a restart, whatever the sampler."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trainjob.errors import InvalidStudy
from trainjob.tuning import Study, Trial
from trainjob.tuning.sampling import Sampling
from trainjob.tuning.study import Scalar

pytestmark = pytest.mark.timeout(120)

SPACE: dict[str, Any] = {
    "momentum": {"type": "float", "low": 0, "high": 1, "when": {"optimizer": "sgd"}},
    "optimizer": {"type": "categorical", "choices": ["sgd", "adam", "lion"]},
    "lr": {"type": "float", "low": 1e-5, "high": 1, "log": True},
    "layers": {"type": "int", "low": 1, "high": 9, "step": 2},
    "dropout": {"type": "float", "low": 0, "high": 0.7, "step": 0.1},
}
GRID = {name: SPACE[name] for name in ("optimizer", "layers", "dropout")}


def study(sampler: str = "tpe", seed: int = 0, **fields: Any) -> Study:
    space = GRID if sampler == "grid" else SPACE
    options = {"n_startup_trials": 3} if sampler == "tpe" else {}
    made = {"space": space, "metric": "m", "direction": "minimize", "max_trials": 99}
    return Study.read({**made, "sampler": {"name": sampler, "seed": seed, "options": options}, **fields})


def value_of(parameters: dict[str, Scalar]) -> float:
    text = json.dumps(parameters, sort_keys=True)
    return math.sin(sum(map(ord, text))) + len(text) / 100


def ended(number: int, parameters: dict[str, Scalar], state: str) -> Trial:
    value = None if state == "failed" else value_of(parameters)
    return Trial(number, parameters, state, value, values=[] if value is None else [(1, value + 1), (2, value)])


class Run:
    """A search whose launcher may be replaced before each trial."""

    def __init__(self, made: Study) -> None:
        self.study = made
        self.sampling = Sampling(made)
        self.trials: list[Trial] = []
        self.rungs: list[dict[str, float]] = []
        self.decisions: list[bool] = []

    def trial(self, state: str) -> None:
        number = len(self.trials)
        parameters = self.sampling.ask(number)
        trial = ended(number, parameters, state)
        for step, value in trial.values:
            self.decisions.append(self.sampling.report(number, step, value))
        self.rungs.append(self.sampling.rungs(number))
        self.sampling.end(trial, self.rungs[-1])
        self.trials.append(trial)

    def restart(self) -> None:
        self.sampling = Sampling(self.study)
        for trial, rungs in zip(self.trials, self.rungs, strict=True):
            kept = json.loads(json.dumps(dict(trial.parameters)))
            self.sampling.resume(trial.number, kept)
            self.sampling.end(trial, rungs)


STATES = st.sampled_from(["complete", "complete", "complete", "pruned", "failed", "stopped"])
PRUNERS = [
    {"name": "median", "options": {"n_startup_trials": 1}},
    {"name": "successive_halving", "options": {"min_resource": 1, "reduction_factor": 2}},
    {"name": "hyperband", "options": {"min_resource": 1, "max_resource": 4, "reduction_factor": 2}},
]


@settings(max_examples=12)
@given(
    sampler=st.sampled_from(["tpe", "random", "grid", "qmc"]),
    pruner=st.sampled_from(PRUNERS),
    seed=st.integers(0, 2**32 - 1),
    states=st.lists(STATES, min_size=1, max_size=10),
    restarts=st.sets(st.integers(0, 9)),
)
def test_a_restarted_search_asks_for_the_same_trials(
    sampler: str, pruner: dict[str, Any], seed: int, states: list[str], restarts: set[int]
) -> None:
    undisturbed, restarted = (Run(study(sampler, seed, pruner=pruner)) for _ in range(2))
    for number, state in enumerate(states):
        undisturbed.trial(state)
        if number in restarts:
            restarted.restart()
        restarted.trial(state)
    assert [dict(each.parameters) for each in restarted.trials] == [dict(e.parameters) for e in undisturbed.trials]
    assert restarted.decisions == undisturbed.decisions
    assert restarted.rungs == undisturbed.rungs


@settings(max_examples=15)
@given(sampler=st.sampled_from(["tpe", "random", "grid", "qmc"]), seed=st.integers(0, 2**32 - 1))
def test_parameters_are_in_the_space_and_survive_json(sampler: str, seed: int) -> None:
    made = study(sampler, seed)
    sampling = Sampling(made)
    for number in range(6):  # all at once
        parameters = sampling.ask(number)
        assert json.loads(json.dumps(parameters)) == parameters
        applying = [name for name in made.space if made.space[name].applies(parameters)]
        assert list(parameters) == applying
        for name, value in parameters.items():
            parameter = made.space[name]
            if parameter.type == "categorical":
                assert value in parameter.choices
            else:
                assert isinstance(value, int if parameter.type == "int" else float)
                assert parameter.low <= float(value) <= parameter.high + 1e-9


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "qmc"])
def test_trials_that_are_asked_for_at_once_differ(sampler: str) -> None:
    sampling = Sampling(study(sampler, 3))
    asked = [json.dumps(sampling.ask(number)) for number in range(8)]
    assert len(set(asked)) >= 7


def test_a_grid_has_each_combination_once() -> None:
    made = study("grid", 1)
    sampling = Sampling(made)
    asked = set()
    for number in range(made.combinations()):
        parameters = sampling.ask(number)
        asked.add(json.dumps(parameters))
        sampling.end(ended(number, parameters, "complete"), {})
    assert len(asked) == made.combinations() == 3 * 5 * 8


def test_running_trials_are_compared_after_a_restart() -> None:
    """The first rung of a trial that is still running counts, too; a report after the end changes nothing."""
    pruner = {"name": "successive_halving", "options": {"min_resource": 1, "reduction_factor": 2}}
    sampling = Sampling(study("random", pruner=pruner))
    parameters = Sampling(study("random")).ask(0)
    sampling.resume(0, parameters)
    assert not sampling.report(0, 1, 0.1)
    sampling.ask(1)
    assert sampling.report(1, 1, 0.9)
    sampling.end(ended(0, parameters, "complete"), {})
    assert sampling.report(0, 9, 5.0) is False


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"sampler": {"name": "tpe", "options": {"startup": 3}}},
            "sampler.options.startup: is no option of TPESampler (use",
        ),
        ({"sampler": {"name": "random", "options": {"seed": 3}}}, "sampler.options.seed: is no option of"),
        ({"pruner": {"name": "successive_halving", "options": {"reduction_factor": 1}}}, "pruner.options: is refused"),
        ({"pruner": {"name": "median", "options": {"n_startup_trials": "x"}}}, "pruner.options: is refused"),
        ({"pruner": {"name": "threshold"}}, "pruner.options: is refused by ThresholdPruner"),
    ],
)
def test_options_that_optuna_refuses(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidStudy) as caught:
        Sampling(Study.read(study().model_dump() | fields))
    assert problem in str(caught.value)


def test_importances_name_the_parameter_that_matters() -> None:
    sampling = Sampling(study("random", space={name: {"type": "float", "low": 0, "high": 1} for name in "xy"}))
    for number in range(20):
        if number < 2:
            assert sampling.importances() == {}
        parameters = sampling.ask(number)
        sampling.end(Trial(number, parameters, "complete", float(parameters["x"])), {})
    importances = sampling.importances()
    assert importances["x"] > importances["y"]
    assert sum(importances.values()) == pytest.approx(1)
