"""Evaluations of two models, their comparison, and the gate."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from trainjob.errors import ConfigurationError, InvalidGate
from trainjob.evaluation import EvaluationReport, Gate, Scores, compare
from trainjob.evaluation.comparison import BOOTSTRAP_EXAMPLES, interval_of

CANDIDATE = {"uri": "s3://b/candidate", "digest": "sha256:c"}
CHAMPION = {"uri": "s3://b/champion", "digest": "sha256:m", "version": "3"}
DATASET = {"uri": "s3://b/test", "digest": "sha256:d"}


def scores(right: float, count: int = 400, seed: int = 1, **more: Any) -> dict[str, Any]:
    rng = random.Random(seed)
    each = [int(rng.random() < right) for _ in range(count)]
    return {"metrics": {"accuracy": sum(each) / count}, "scores": {"accuracy": each}, **more}


def report(candidate: dict[str, Any], champion: dict[str, Any] | None = None) -> EvaluationReport:
    return compare(
        Scores.parse(candidate, "candidate"),
        Scores.parse(champion, "champion") if champion is not None else None,
        models=(CANDIDATE, CHAMPION if champion is not None else None),
        dataset=DATASET,
    )


def metrics(**values: float) -> dict[str, Any]:
    return {"metrics": values}


# ---------------------------------------------------------------- what an evaluation writes


CURVE = {"false_positive_rate": [0, 1], "true_positive_rate": [0.5, 1]}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "must be an object with named fields, not None"),
        ({}, "metrics is missing"),
        ({"metrics": {}}, "metrics is missing"),
        ({"metrics": {"a": math.nan}}, "metrics.a must be a finite number, not nan"),
        ({"metrics": {"a": 10**400}}, "metrics.a must be a finite number, not inf"),
        ({"metrics": {"a": "0.5"}}, "metrics.a must be a number, not '0.5'"),
        ({"metrics": {"": 1}}, "metrics must be an object with named fields"),
        ({"metrics": {"x" * 101: 1}}, "metrics has a name of 101 characters"),
        ({"metrics": {"a": 1}, "extra": 1}, "extra is not a field; known are metrics,"),
        ({"metrics": {"a": 1}, "examples": -1}, "examples must be a whole number"),
        ({"metrics": {"a": 1}, "scores": {"a": [1, 2]}, "examples": 3}, "scores.a has 2 values for 3 examples"),
        ({"metrics": {"a": 1}, "scores": {"b": [1]}}, "scores.b has no metric of the same name"),
        ({"metrics": {"a": 1}, "scores": {"a": []}}, "scores.a must be a list of numbers"),
        ({"metrics": {"a": 1}, "slice_of": {"d": ["x"]}}, "slice_of.d must be a list with a label for each example"),
        ({"metrics": {"a": 1}, "scores": {"a": [1]}, "slice_of": {"d": ["x", "y"]}}, "slice_of.d has 2 labels for 1"),
        ({"metrics": {"a": 1}, "scores": {"a": [1]}, "slice_of": {"d": [None]}}, r"slice_of.d\[0\] must be text"),
        ({"metrics": {"a": 1}, "slices": {"s": {"metric": 1}}}, "slices.s.metric is not a field"),
        ({"metrics": {"a": 1}, "confusion": {"labels": [], "counts": []}}, "confusion.labels must be a list of 1"),
        ({"metrics": {"a": 1}, "confusion": {"labels": ["x"], "counts": [[1, 2]]}}, r"counts\[0\] must have 1 counts"),
        ({"metrics": {"a": 1}, "roc": {"false_positive_rate": [0, 2]}}, "roc.true_positive_rate must be a list"),
        (
            {"metrics": {"a": 1}, "roc": {"false_positive_rate": [0, 2], "true_positive_rate": [0, 1]}},
            "roc has a rate that is not between 0 and 1",
        ),
        ({"metrics": {"a": 1}, "roc": CURVE | {"threshold": [0.9]}}, "roc must have lists of the same length, at most"),
    ],
)
def test_a_malformed_evaluation_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^the evaluation of the candidate.*{problem}"):
        Scores.parse(value, "candidate")


def test_a_curve_may_have_thresholds_and_a_slice_no_examples() -> None:
    curve = CURVE | {"threshold": [0.9, 0]}
    slices = {"s": {"metrics": {"a": math.nan}, "examples": 0}}
    found = Scores.parse(metrics(a=1) | {"roc": curve, "slices": slices}, "candidate")
    assert found.roc == curve
    assert (found.slices["s"].metrics, found.slices["s"].examples) == ({}, 0)


def test_slices_are_computed_from_labels() -> None:
    found = Scores.parse(
        {
            "metrics": {"a": 0.5},
            "scores": {"a": [1, 0, 1, 0]},
            "slice_of": {"digit": [3, 3, 5, 5], "pen": list("xyyy")},
        },
        "candidate",
    )
    assert {name: (each.metrics["a"], each.examples) for name, each in found.slices.items()} == {
        "digit=3": (0.5, 2),
        "digit=5": (0.5, 2),
        "pen=x": (1.0, 1),
        "pen=y": (1 / 3, 3),
    }


# ---------------------------------------------------------------- comparison


def test_both_models_are_compared_with_an_interval() -> None:
    found = report(scores(0.9, seed=1), scores(0.7, seed=2)).metrics["accuracy"]
    assert found.difference == pytest.approx(found.candidate - (found.champion or 0))
    assert found.interval is not None
    assert 0 < found.interval[0] < (found.difference or 0) < found.interval[1]
    assert found.method == "paired bootstrap, 2000 resamples"
    first = report(scores(0.9)).metrics["accuracy"]
    assert (first.champion, first.difference, first.interval) == (None, None, None)


def test_the_same_evaluation_is_the_same_report() -> None:
    first, second = (report(scores(0.9), scores(0.8, seed=2)) for _ in range(2))
    assert first == second
    assert first.digest == second.digest
    assert first.digest != report(scores(0.9), scores(0.8, seed=3)).digest


def test_json_and_back() -> None:
    more: dict[str, Any] = {
        "confusion": {"labels": [0, 1], "counts": [[1, 2], [3, 4]]},
        "slice_of": {"d": ["a", "b"] * 200},
    }
    made = report(scores(0.9, **more), scores(0.8, seed=2, **more))
    assert EvaluationReport.of(json.loads(json.dumps(made.as_dict(), allow_nan=False))) == made


@pytest.mark.parametrize("value", [{}, {"version": 1}, {"version": 2}, {"version": 1, "metrics": {"a": {"x": 1}}}])
def test_another_json_is_no_report(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="evaluation report"):
        EvaluationReport.of(value)


def in_slices(count: int) -> dict[str, Any]:
    """Scores of 400 examples, of which so many are in the slice ``d=a``."""
    return scores(0.9, slice_of={"d": ["a"] * count + ["b"] * (400 - count)})


@pytest.mark.parametrize(
    ("candidate", "champion", "problem"),
    [
        (scores(0.9), metrics(accuracy=1, loss=1), "metrics differ: only that of the champion has loss"),
        (scores(0.9), scores(0.9, count=300), "that of the candidate has 400 examples, that of the champion 300"),
        (scores(0.9), in_slices(400), "their slices differ: only that of the champion has d=a"),
        (scores(0.9), metrics(accuracy=1), "their scores differ: only that of the candidate has accuracy"),
        (in_slices(100), in_slices(200), "slice 'd=a' has 100 examples for the candidate and 200"),
    ],
)
def test_what_cannot_be_compared_is_refused(candidate: dict[str, Any], champion: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        report(candidate, champion)


def test_the_interval_contains_the_true_difference() -> None:
    """In 95 % of 40 experiments, give or take what chance explains (99.9 %: 33 to 40)."""
    inside = 0
    for seed in range(40):
        rng = random.Random(seed)
        differences = [float(rng.random() < 0.5) - float(rng.random() < 0.3) for _ in range(100)]
        (low, high), _ = interval_of(differences, str(seed))
        inside += low <= 0.2 <= high
    assert 33 <= inside <= 40


def test_many_examples_take_the_normal_approximation_and_one_has_no_width() -> None:
    rng = random.Random(1)
    differences = [rng.gauss(0.1, 1) for _ in range(BOOTSTRAP_EXAMPLES + 1)]
    (low, high), method = interval_of(differences, "x")
    assert method == "normal approximation"
    few, _ = interval_of(differences[:-1], "x")
    assert (low, high) == pytest.approx(few, abs=0.003)
    assert interval_of([1.0], "x")[0] == (1.0, 1.0)


# ---------------------------------------------------------------- gate


def gate(**rules: Any) -> Gate:
    return Gate.read(rules)


@pytest.mark.parametrize(
    ("rule", "candidate", "champion", "passed"),
    [
        ({"min_improvement": 0}, 0.8, 0.8, False),
        ({"min_improvement": 0.05}, 0.84, 0.8, False),
        ({"min_improvement": 0.05}, 0.86, 0.8, True),
        ({"min_improvement": 0.05}, 0.1, None, True),
        ({"min_improvement": 0, "mode": "min"}, 0.7, 0.8, True),
        ({"min_improvement": 0, "mode": "min"}, 0.9, 0.8, False),
        ({"min_improvement": -0.01}, 0.795, 0.8, True),
        ({"max_regression": 0.02}, 0.79, 0.8, True),
        ({"max_regression": 0.02}, 0.77, 0.8, False),
        ({"max_regression": 0}, 0.8, 0.8, True),
        ({"max_regression": 0.02, "mode": "min"}, 0.83, 0.8, False),
        ({"min": 0.9}, 0.89, None, False),
        ({"min": 0.9}, 0.9, None, True),
        ({"max": 0.5, "mode": "min"}, 0.6, 0.7, False),
    ],
)
def test_rules_of_a_metric(rule: dict[str, Any], candidate: float, champion: float | None, passed: bool) -> None:
    evaluated = report(metrics(m=candidate), metrics(m=champion) if champion is not None else None)
    decision = gate(metrics={"m": rule}).decide(evaluated)
    assert decision.passed == passed
    (name,) = [each for each in rule if each != "mode"]
    assert decision.rule == f"metrics.m.{name}"
    assert f"{candidate:g}" in decision.reason


@pytest.mark.parametrize(("candidate", "passed"), [(0.95, True), (0.72, False)])
def test_the_interval_must_be_above_zero(candidate: float, passed: bool) -> None:
    rules = gate(metrics={"accuracy": {"interval_above_zero": True}})
    decision = rules.decide(report(scores(candidate), scores(0.7, seed=2)))
    assert decision.passed == passed, decision
    assert "(95 %)" in decision.reason
    assert rules.decide(report(scores(0.1))).passed, "there is no champion yet"


def test_for_a_loss_the_interval_is_turned() -> None:
    made = {"metrics": {"loss": 0.5}, "scores": {"loss": [0.5 + 0.01 * (i % 5) for i in range(100)]}}
    better = {"metrics": {"loss": 0.3}, "scores": {"loss": [0.3 + 0.01 * (i % 7) for i in range(100)]}}
    rules = gate(metrics={"loss": {"interval_above_zero": True, "mode": "min"}})
    assert rules.decide(report(better, made)).passed
    assert not rules.decide(report(made, better)).passed


def test_slices_by_pattern() -> None:
    labels = {"digit": ["3"] * 200 + ["5"] * 200}
    one = {"metrics": {"a": 0.75}, "scores": {"a": [1] * 200 + [1, 0] * 100}, "slice_of": labels}
    champion = {"metrics": {"a": 0.95}, "scores": {"a": [1] * 200 + [1] * 180 + [0] * 20}, "slice_of": labels}
    rules = gate(slices={"digit=*": {"a": {"max_regression": 0.1}}})
    decision = rules.decide(report(one, champion))
    assert not decision.passed
    assert decision.rule == "slices.digit=5.a.max_regression"
    assert [(each.rule, each.passed) for each in decision.checks] == [
        ("slices.digit=3.a.max_regression", True),
        ("slices.digit=5.a.max_regression", False),
    ]


SLICE: dict[str, Any] = {"slices": {"rare": {"examples": 0}}}
RARE: dict[str, Any] = {"slices": {"rare": {"a": {"min": 0.5}}}}


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"metrics": {"other": {"min": 0}}}, "the evaluation does not report other"),
        ({"metrics": {"a": {"interval_above_zero": True}}}, "a has no interval: report scores of the examples"),
        ({"slices": {"none": {"a": {"min": 0}}}}, "the evaluation has no slice none"),
        (RARE, "rare has no examples"),
        ({"required": ["confusion"]}, "the evaluation has no confusion"),
        ({"min_examples": 10}, "0 examples; 10 are required"),
    ],
)
def test_a_missing_part_fails(rules: dict[str, Any], reason: str) -> None:
    evaluated = report(metrics(a=1) | SLICE, metrics(a=0.1) | SLICE)
    decision = gate(**rules).decide(evaluated)
    assert (decision.passed, decision.reason) == (False, reason)


def test_a_champion_can_be_required_and_small_slices_left_out() -> None:
    evaluated = report(metrics(a=1) | SLICE)
    assert gate(required=["champion"]).decide(evaluated).reason == "the evaluation has no champion"
    assert gate(**RARE, min_slice_examples=10).decide(evaluated).passed


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (None, "invalid gate: must be a mapping of rules"),
        ({}, "invalid gate: has no rule"),
        ({"metrics": {"a": {}}}, r"metrics.a.*has no rule"),
        ({"metrics": {"a": {"min": 2, "max": 1}}}, "min is 2, which is more than max, 1"),
        ({"metrics": {"a": {"max_regression": -1}}}, "metrics.a.max_regression"),
        ({"metrics": {"a": {"min": math.nan}}}, "metrics.a.min"),
        ({"metrics": {"a": {"min_improvment": 1}}}, "did you mean min_improvement"),
        ({"required": ["champions"]}, "required"),
    ],
)
def test_invalid_rules_are_refused(rules: Any, problem: str) -> None:
    with pytest.raises(InvalidGate, match=problem):
        Gate.read(rules)


def test_a_rule_about_all_examples_decides_if_all_rules_pass() -> None:
    made = metrics(m=0.9) | {"slices": {"part": {"metrics": {"m": 0.1}, "examples": 3}}}
    rules: dict[str, Any] = {"metrics": {"m": {"min": 0.8}}, "slices": {"*": {"m": {"min": 0.1}}}}
    assert gate(**rules).decide(report(made)).rule == "metrics.m.min"
    rules["slices"]["*"]["m"]["min"] = 0.2
    assert gate(**rules).decide(report(made)).rule == "slices.part.m.min"
    assert gate(slices={"*": {"m": {"min": 0.1}}}).decide(report(made)).rule == "slices.part.m.min"


def test_the_decision_is_json() -> None:
    decision = gate(metrics={"m": {"min": 1}}).decide(report(metrics(m=0.5)))
    assert json.loads(json.dumps(decision.as_dict())) == {
        "passed": False,
        "rule": "metrics.m.min",
        "reason": "m is 0.5; at least 1",
        "checks": [{"rule": "metrics.m.min", "passed": False, "reason": "m is 0.5; at least 1"}],
    }
