"""What an author asks for: the search space, the metric, the sampler, the pruner and the limits of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainjob._spec.base import Part
from trainjob._spec.validation import Validation
from trainjob.errors import InvalidStudy, Problem

Scalar = bool | int | float | str
Parameters = Mapping[str, Scalar]
"""Name -> value of the parameters of one trial. A conditional parameter that does not apply is left out."""

MAX_TRIALS = 10_000
_TYPED = re.compile(r"^(space\.[^.]+)\.(?:float|int|categorical)\b")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")  # a part of the name of an environment variable

Finite = Annotated[float, Field(allow_inf_nan=False)]


class _StudyPart(Part):
    @classmethod
    def refusal(cls, problems: Sequence[Problem]) -> InvalidStudy:
        """The error of the constructor."""
        return InvalidStudy(cls.within(cls.__name__, problems))


class _Parameter(_StudyPart):
    when: dict[str, list[Scalar] | Scalar] = Field(default_factory=dict)
    """Condition: other parameter -> value or values for which this parameter applies."""

    def applies(self, others: Parameters) -> bool:
        """Whether the parameter applies to a trial with these other parameters."""
        return all(name in others and others[name] in _values(wanted) for name, wanted in self.when.items())


class FloatParameter(_Parameter):
    """A number between two limits."""

    type: Literal["float"]
    low: Finite
    high: Finite
    log: bool = False
    step: Finite | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_range(self.low, self.high, self.step, log=self.log)
        return self


class IntParameter(_Parameter):
    """A whole number between two limits."""

    type: Literal["int"]
    low: int
    high: int
    log: bool = False
    step: int = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_range(self.low, self.high, self.step if self.step != 1 else None, log=self.log)
        return self


class CategoricalParameter(_Parameter):
    """One of several values."""

    type: Literal["categorical"]
    choices: Annotated[list[Scalar], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({*self.choices}) != len(self.choices):
            raise ValueError("choices has a value twice; true equals 1, and false equals 0")
        return self


Parameter = Annotated[FloatParameter | IntParameter | CategoricalParameter, Field(discriminator="type")]


class Sampler(_StudyPart):
    """A sampler of Optuna."""

    name: Literal["tpe", "random", "grid", "qmc"] = "tpe"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The same seed and the same results give the same parameters."""

    options: dict[str, Scalar | None] = Field(default_factory=dict)
    """Arguments of Optuna's class, such as ``n_startup_trials`` of ``TPESampler``."""


class Pruner(_StudyPart):
    """A pruner of Optuna: it stops trials that are worse than others at the same step."""

    name: Literal["none", "median", "percentile", "successive_halving", "hyperband", "threshold"] = "none"
    options: dict[str, Scalar | None] = Field(default_factory=dict)
    """Arguments of Optuna's class, such as ``min_resource`` of ``SuccessiveHalvingPruner`` (ASHA)."""


class Study(Part):
    """A hyperparameter search."""

    space: Annotated[dict[str, Parameter], Field(min_length=1, max_length=100)]
    """Name -> parameter."""

    metric: Annotated[str, Field(min_length=1, max_length=64)]
    """The metric that trials report with `trainjob.progress`; also its values during the trial, for the pruner."""

    direction: Literal["minimize", "maximize"]
    sampler: Sampler = Field(default_factory=Sampler)
    pruner: Pruner = Field(default_factory=Pruner)

    max_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)]
    """Trials of the study, also over several launches. A study can be continued with more."""

    parallel: Annotated[int, Field(ge=1, le=1000)] = 1
    """Trials that run at the same time."""

    max_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Time after which no trial is launched any more, from the start of the study."""

    max_failed_trials: Annotated[int, Field(ge=0)] | None = None
    """Failed trials after which no trial is launched any more."""

    stop_at: Finite | None = None
    """Value of the metric at which the study ends; running trials are cancelled."""

    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """New attempts of a trial after failures of the infrastructure."""

    @classmethod
    def read(cls, value: object) -> Study:
        """Read a study.

        Raises:
            InvalidStudy: The study is invalid; has all problems.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidStudy([Problem("", f"must be a mapping, not {type(value).__name__}")])
        validation = Validation(cls, value)
        if validation.problems or validation.model is None:
            raise cls.refusal(validation.problems)
        if problems := [*validation.model.problems()]:
            raise InvalidStudy(problems)
        return validation.model

    @classmethod
    def refusal(cls, problems: Sequence[Problem]) -> InvalidStudy:
        """The error of the constructor."""
        # Without the type of a parameter, which pydantic adds to the path.
        return InvalidStudy([replace(each, path=_TYPED.sub(r"\1", each.path)) for each in problems])

    def problems(self) -> Iterator[Problem]:
        """Problems between several fields."""
        for name, parameter in self.space.items():
            if not _NAME.fullmatch(name):
                yield Problem(f"space.{name}", "is not a valid name", "use letters, digits and underscores")
            for other, wanted in parameter.when.items():
                path = f"space.{name}.when.{other}"
                if other not in self.space or other == name:
                    yield Problem(path, "is not another parameter of the space")
                elif _count(self.space[other]) is None and isinstance(self.space[other], FloatParameter):
                    yield Problem(path, f"{other} has any value of its range", "use a parameter with single values")
                elif missing := [each for each in _values(wanted) if not _can_be(self.space[other], each)]:
                    yield Problem(path, f"{other} is never {missing[0]!r}, so the parameter would never apply")
        if len({name.upper() for name in self.space}) != len(self.space):
            yield Problem("space", "has two names that differ only in case, which give one environment variable")
        if self.order() is None:
            yield Problem("space", "has conditions in a circle")
        else:
            yield from self._never_applying()
        if self.sampler.name == "grid":
            yield from self._grid_problems()

    def _never_applying(self) -> Iterator[Problem]:
        """Parameters whose condition contradicts the conditions of the parameters that it names."""
        needed: dict[str, dict[str, list[Scalar]]] = {}
        for name in self.order() or ():
            needed[name] = {}
            for other, wanted in self.space[name].when.items():
                for each, values in {**needed[other], other: _values(wanted)}.items():
                    known = needed[name].get(each)
                    needed[name][each] = values if known is None else [value for value in values if value in known]
            if empty := [other for other, values in needed[name].items() if not values]:
                yield Problem(f"space.{name}.when", f"needs several values of {empty[0]}, so it would never apply")

    def _grid_problems(self) -> Iterator[Problem]:
        for name, parameter in self.space.items():
            if _count(parameter) is None:
                yield Problem(f"space.{name}", "has no step, so a grid has no end", "set step, or use another sampler")
            if parameter.when:
                yield Problem(f"space.{name}.when", "cannot be combined with a grid", "use another sampler")
        if (count := self.combinations()) > MAX_TRIALS:
            yield Problem("space", f"has {count} combinations; a grid has at most {MAX_TRIALS}", "use another sampler")

    def order(self) -> list[str] | None:
        """The parameters, each after those of its condition; None if the conditions form a circle."""
        ordered: list[str] = []
        while len(ordered) < len(self.space):
            ready = [name for name, p in self.space.items() if name not in ordered and {*p.when} <= {*ordered}]
            if not ready:
                return None
            ordered += ready
        return ordered

    def grid(self) -> dict[str, list[Scalar]]:
        """Name -> all values of the parameters, for a grid."""
        return {name: _grid(parameter) for name, parameter in self.space.items()}

    def combinations(self) -> int:
        """Number of combinations of a grid."""
        return math.prod(_count(parameter) or 0 for parameter in self.space.values())

    def identity(self) -> dict[str, Any]:
        """What must not change when a study is continued: all but limits and parallelism."""
        return self.model_dump(mode="json", include={"space", "metric", "direction", "sampler", "pruner"})

    def limits(self) -> dict[str, Any]:
        """What may change when a study is continued."""
        return self.model_dump(mode="json", exclude={"space", "metric", "direction", "sampler", "pruner"})

    def better(self, value: float, other: float) -> bool:
        """Whether `value` is better than `other`."""
        return value < other if self.direction == "minimize" else value > other


def _values(wanted: list[Scalar] | Scalar) -> list[Scalar]:
    return wanted if isinstance(wanted, list) else [wanted]


def _check_range(low: float, high: float, step: float | None, *, log: bool) -> None:
    if low > high:
        raise ValueError(f"low is {low:g}, which is more than high, {high:g}")
    if log and low <= 0:
        raise ValueError(f"low must be above 0 with log, not {low:g}")
    if step is not None and step <= 0:
        raise ValueError(f"step must be above 0, not {step:g}")
    if step is not None and log:
        raise ValueError("step cannot be combined with log")


def _can_be(parameter: FloatParameter | IntParameter | CategoricalParameter, value: Scalar) -> bool:
    if isinstance(parameter, CategoricalParameter):
        return any(type(each) is type(value) and each == value for each in parameter.choices)
    if not isinstance(value, int | float) or isinstance(value, bool) or not parameter.low <= value <= parameter.high:
        return False
    steps = (value - parameter.low) / (parameter.step or 1)
    return abs(steps - round(steps)) < _ROUNDING


_ROUNDING = 1e-8  # as in Optuna


def _count(parameter: FloatParameter | IntParameter | CategoricalParameter) -> int | None:
    """Number of values of a parameter; None if it has any value of a range."""
    if isinstance(parameter, CategoricalParameter):
        return len(parameter.choices)
    if parameter.step is None or parameter.log:
        return None
    return math.floor((parameter.high - parameter.low) / parameter.step + _ROUNDING) + 1


def _grid(parameter: FloatParameter | IntParameter | CategoricalParameter) -> list[Scalar]:
    if isinstance(parameter, CategoricalParameter):
        return list(parameter.choices)
    numbers = range(_count(parameter) or 0)
    if isinstance(parameter, IntParameter):
        return [parameter.low + number * parameter.step for number in numbers]
    low, step = Decimal(str(parameter.low)), Decimal(str(parameter.step))  # 7 * 0.1 is more than 0.7
    return [float(low + number * step) for number in numbers]
