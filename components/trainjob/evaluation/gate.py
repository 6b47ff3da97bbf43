"""The gate: rules as data that decide whether a candidate may become the champion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainjob._spec.base import Part
from trainjob._spec.validation import Validation
from trainjob.errors import InvalidGate, Problem
from trainjob.evaluation.comparison import Compared, EvaluationReport

Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Required = Literal["champion", "confusion", "roc", "slices", "scores"]


class _GatePart(Part):
    @classmethod
    def refusal(cls, problems: Sequence[Problem]) -> InvalidGate:
        """The error of the constructor."""
        return InvalidGate(cls.within(cls.__name__, problems))


class MetricRule(_GatePart):
    """What one metric must fulfil. All rules that are set must pass.

    Without a champion, rules about the difference pass: the first model is judged by the bounds alone.
    """

    mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value is better."""

    min_improvement: Finite | None = None
    """The candidate must be better than the champion by at least this, in units of the metric; 0: better at all."""

    max_regression: NotNegative | None = None
    """The candidate may be worse than the champion by at most this."""

    min: Finite | None = None
    """Smallest value of the candidate."""

    max: Finite | None = None
    """Largest value of the candidate."""

    interval_above_zero: bool = False
    """The confidence interval of the improvement must lie above zero; it needs scores of the examples."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min:g}, which is more than max, {self.max:g}")
        named = ("min_improvement", "max_regression", "min", "max")
        if all(getattr(self, name) is None for name in named) and not self.interval_above_zero:
            raise ValueError(f"has no rule: set one of {', '.join(named)}, interval_above_zero")
        return self


@dataclass(frozen=True)
class Check:
    """The result of one rule.

    Attributes:
        rule: Path of the rule: ``metrics.accuracy.min_improvement``.
        passed: Whether it passed.
        reason: The values in one sentence.
    """

    rule: str
    passed: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """The decision of a gate.

    Attributes:
        passed: Whether all rules passed.
        rule: The rule that decided: the first that failed, else the last about a metric of all examples.
        reason: Why, in one sentence.
        checks: All rules.
    """

    passed: bool
    rule: str
    reason: str
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """The decision as JSON values."""
        return {**asdict(self), "checks": [asdict(each) for each in self.checks]}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Decision:
        """The decision that `as_dict` made.

        Raises:
            KeyError, TypeError: The value is not a decision.
        """
        checks = tuple(Check(**each) for each in value["checks"])
        if not isinstance(value["passed"], bool) or value["passed"] != all(each.passed for each in checks):
            raise TypeError("passed contradicts the checks")
        return cls(value["passed"], value["rule"], value["reason"], checks)


class Gate(_GatePart):
    """Rules that a candidate must pass to become the champion. All of them must pass."""

    metrics: dict[str, MetricRule] = Field(default_factory=dict)
    """Metric -> its rule."""

    slices: dict[str, dict[str, MetricRule]] = Field(default_factory=dict)
    """Name of a slice, or a shell pattern such as ``digit=*`` -> metric -> its rule."""

    min_examples: Annotated[int, Field(ge=1)] | None = None
    """Smallest number of examples of the evaluation."""

    min_slice_examples: Annotated[int, Field(ge=1)] | None = None
    """Slices with fewer examples are not judged; without it, a slice without examples fails its rules."""

    required: list[Required] = Field(default_factory=list)
    """Parts that the evaluation must have: ``champion``, ``confusion``, ``roc``, ``slices``, ``scores``."""

    @classmethod
    def read(cls, value: object) -> Gate:
        """Read the rules.

        Raises:
            InvalidGate: The rules are invalid; has all problems.
        """
        if not isinstance(value, Mapping):
            raise InvalidGate([Problem("", f"must be a mapping of rules, not {type(value).__name__}")])
        validation = Validation(cls, value)
        if validation.problems or validation.model is None:
            raise InvalidGate(cls.within("gate", validation.problems))
        gate = validation.model
        if gate == cls():
            raise InvalidGate([Problem("", "has no rule", "set metrics, such as {'accuracy': {'min': 0.9}}")])
        return gate

    def decide(self, report: EvaluationReport) -> Decision:
        """Apply all rules to an evaluation."""
        checks = tuple(self._checks(report))
        failed = [each for each in checks if not each.passed]
        about_all = [each for each in checks if each.rule.startswith("metrics.")] or checks
        deciding = failed[0] if failed else about_all[-1]
        return Decision(not failed, deciding.rule, deciding.reason, checks)

    def _checks(self, report: EvaluationReport) -> Iterator[Check]:
        has = {
            "champion": report.champion is not None,
            "confusion": report.confusion is not None,
            "roc": report.roc is not None,
            "slices": bool(report.slices),
            "scores": any(each.interval is not None for each in report.metrics.values()) or report.champion is None,
        }
        for part in self.required:
            yield Check(f"required.{part}", has[part], f"the evaluation has {'' if has[part] else 'no '}{part}")
        if self.min_examples is not None:
            count = report.examples or 0
            yield Check(
                "min_examples", count >= self.min_examples, f"{count} examples; {self.min_examples} are required"
            )
        for name, rule in self.metrics.items():
            yield from _judged(f"metrics.{name}", name, rule, report.metrics.get(name))
        for pattern, rules in self.slices.items():
            matching = [each for each in report.slices if each == pattern or fnmatchcase(each, pattern)]
            if not matching:
                yield Check(f"slices.{pattern}", False, f"the evaluation has no slice {pattern}")
            for slice_name in matching:
                found = report.slices[slice_name]
                path = f"slices.{slice_name}"
                if self.min_slice_examples is not None and (found.examples or 0) < self.min_slice_examples:
                    reason = f"{slice_name} has {found.examples or 0} examples and is not judged"
                    yield Check(f"{path}.min_slice_examples", True, reason)
                elif found.examples == 0:
                    yield Check(path, False, f"{slice_name} has no examples")
                else:
                    for name, rule in rules.items():
                        yield from _judged(f"{path}.{name}", f"{name} of {slice_name}", rule, found.metrics.get(name))


def _judged(path: str, name: str, rule: MetricRule, found: Compared | None) -> Iterator[Check]:
    """The checks of one metric."""
    if found is None:
        yield Check(path, False, f"the evaluation does not report {name}")
        return
    if rule.min is not None:
        yield Check(f"{path}.min", found.candidate >= rule.min, f"{name} is {found.candidate:g}; at least {rule.min:g}")
    if rule.max is not None:
        yield Check(f"{path}.max", found.candidate <= rule.max, f"{name} is {found.candidate:g}; at most {rule.max:g}")
    better, interval = _improvement(rule, found)
    values = f"{name}: candidate {found.candidate:g}" + (
        f", champion {found.champion:g}" if found.champion is not None else "; there is no champion"
    )
    if rule.min_improvement is not None:
        passed = better is None or (better >= rule.min_improvement and (better > 0 or rule.min_improvement < 0))
        yield Check(
            f"{path}.min_improvement", passed, f"{values}; an improvement of {rule.min_improvement:g} is required"
        )
    if rule.max_regression is not None:
        passed = better is None or -better <= rule.max_regression
        yield Check(f"{path}.max_regression", passed, f"{values}; {rule.max_regression:g} worse is allowed")
    if rule.interval_above_zero:
        if better is None:
            yield Check(f"{path}.interval_above_zero", True, values)
        elif interval is None:
            yield Check(f"{path}.interval_above_zero", False, f"{name} has no interval: report scores of the examples")
        else:
            text = f"{name}: the improvement is between {interval[0]:g} and {interval[1]:g} (95 %)"
            yield Check(f"{path}.interval_above_zero", interval[0] > 0, text)


def _improvement(rule: MetricRule, found: Compared) -> tuple[float | None, tuple[float, float] | None]:
    """By how much the candidate is better, and the interval of it."""
    if found.difference is None:
        return None, None
    if rule.mode == "max":
        return found.difference, found.interval
    low, high = found.interval or (0.0, 0.0)
    return -found.difference, (-high, -low) if found.interval else None
