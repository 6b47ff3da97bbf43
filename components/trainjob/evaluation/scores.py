"""What an evaluation writes about one model: a JSON object.

::

    {"metrics": {"accuracy": 0.95, "loss": 0.2},
     "examples": 360,
     "scores": {"accuracy": [1, 0, 1, ...]},
     "slice_of": {"digit": ["3", "5", "3", ...]},
     "slices": {"digit=3": {"metrics": {"accuracy": 0.9}, "examples": 40}},
     "confusion": {"labels": ["0", "1"], "counts": [[170, 10], [8, 172]]},
     "roc": {"false_positive_rate": [0, 0.1, 1], "true_positive_rate": [0, 0.8, 1]}}

Only ``metrics`` is required. ``scores`` has one value for each example, in the order of the dataset: the value of the
metric is their mean. ``slice_of`` names the slices of each example; slices of metrics with ``scores`` are computed.
``roc`` may also have ``threshold``, a value for each point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainjob.errors import ConfigurationError

MAX_METRICS = 100
MAX_EXAMPLES = 1_000_000
MAX_SLICES = 200
MAX_LABELS = 100
MAX_POINTS = 1000  # of a ROC curve
_NAME = 100  # characters

_FIELDS = ("metrics", "examples", "scores", "slice_of", "slices", "confusion", "roc")


@dataclass(frozen=True)
class Slice:
    """A part of the examples.

    Attributes:
        metrics: Name -> value.
        examples: Number of examples; None if unknown.
        scores: Metric -> values of the examples; empty if they were not reported.
    """

    metrics: Mapping[str, float]
    examples: int | None = None
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """The evaluation of one model.

    Attributes:
        metrics: Name -> value.
        examples: Number of examples; None if unknown.
        scores: Metric -> values of the examples, in the order of the dataset.
        slices: Name -> a part of the examples.
        confusion: ``labels`` and ``counts``, with a row for each true label; None if not reported.
        roc: ``false_positive_rate``, ``true_positive_rate`` and, if reported, ``threshold``; None if not reported.
    """

    metrics: Mapping[str, float]
    examples: int | None = None
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    slices: Mapping[str, Slice] = field(default_factory=dict)
    confusion: Mapping[str, Any] | None = None
    roc: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, value: object, of: str) -> Scores:
        """Read what an evaluation wrote.

        Args:
            value: The JSON object.
            of: What was evaluated, for errors: ``candidate`` or ``champion``.

        Raises:
            ConfigurationError: The value is malformed, or has a metric that is not a finite number.
        """
        return _Reader(of).scores(value)


class _Reader:
    def __init__(self, of: str) -> None:
        self._of = of

    def scores(self, value: object) -> Scores:
        given = self._mapping("", value, len(_FIELDS))
        if unknown := sorted(given.keys() - {*_FIELDS}):
            raise self._error(unknown[0], f"is not a field; known are {', '.join(_FIELDS)}")
        if not given.get("metrics"):
            raise self._error("metrics", "is missing: report at least one metric")
        metrics = self._metrics("metrics", given["metrics"])
        examples = self._count("examples", given.get("examples"))
        scores = {
            name: self._numbers(f"scores.{name}", each)
            for name, each in self._mapping("scores", given.get("scores", {}), MAX_METRICS).items()
        }
        for name, each in scores.items():
            if examples is None:
                examples = len(each)
            if len(each) != examples:
                raise self._error(f"scores.{name}", f"has {len(each)} values for {examples} examples")
            if name not in metrics:
                raise self._error(f"scores.{name}", "has no metric of the same name in metrics")
        slices = {
            name: self._slice(f"slices.{name}", each)
            for name, each in self._mapping("slices", given.get("slices", {}), MAX_SLICES).items()
        }
        computed = self._computed(given.get("slice_of", {}), scores, examples)
        return Scores(
            metrics,
            examples,
            scores,
            {**slices, **computed},
            self._confusion(given.get("confusion")),
            self._roc(given.get("roc")),
        )

    def _slice(self, path: str, value: object) -> Slice:
        given = self._mapping(path, value, 2)
        if unknown := sorted(given.keys() - {"metrics", "examples"}):
            raise self._error(f"{path}.{unknown[0]}", "is not a field; known are metrics, examples")
        examples = self._count(f"{path}.examples", given.get("examples"))
        metrics = self._metrics(f"{path}.metrics", given.get("metrics", {}), empty=examples == 0)
        return Slice({} if examples == 0 else metrics, examples)

    def _computed(self, value: object, scores: Mapping[str, Sequence[float]], examples: int | None) -> dict[str, Slice]:
        """The slices by the labels of the examples."""
        members: dict[str, list[int]] = {}
        for name, labels in self._mapping("slice_of", value, MAX_METRICS).items():
            path = f"slice_of.{name}"
            if not isinstance(labels, list) or not scores:
                raise self._error(path, "must be a list with a label for each example, beside scores")
            if len(labels) != examples:
                raise self._error(path, f"has {len(labels)} labels for {examples} examples")
            for number, label in enumerate(labels):
                if not isinstance(label, str | int):
                    raise self._error(f"{path}[{number}]", f"must be text or a whole number, not {label!r}")
                members.setdefault(f"{name}={label}"[:_NAME], []).append(number)
        if len(members) > MAX_SLICES:
            raise self._error("slice_of", f"makes {len(members)} slices; at most {MAX_SLICES} are supported")
        return {
            name: Slice(
                {metric: math.fsum(each[i] for i in numbers) / len(numbers) for metric, each in scores.items()},
                len(numbers),
                {metric: [each[i] for i in numbers] for metric, each in scores.items()},
            )
            for name, numbers in members.items()
        }

    def _confusion(self, value: object) -> dict[str, Any] | None:
        if value is None:
            return None
        given = self._mapping("confusion", value, 2)
        labels, counts = given.get("labels"), given.get("counts")
        if not isinstance(labels, list) or not 0 < len(labels) <= MAX_LABELS:
            raise self._error("confusion.labels", f"must be a list of 1 to {MAX_LABELS} labels")
        if not isinstance(counts, list) or len(counts) != len(labels):
            raise self._error("confusion.counts", f"must have {len(labels)} rows")
        rows = [self._numbers(f"confusion.counts[{number}]", each) for number, each in enumerate(counts)]
        if wrong := [number for number, each in enumerate(rows) if len(each) != len(labels) or min(each) < 0]:
            raise self._error(f"confusion.counts[{wrong[0]}]", f"must have {len(labels)} counts, 0 or more")
        return {"labels": [str(label) for label in labels], "counts": rows}

    def _roc(self, value: object) -> dict[str, Any] | None:
        if value is None:
            return None
        given = self._mapping("roc", value, 3)
        names = ("false_positive_rate", "true_positive_rate")
        rates = {name: self._numbers(f"roc.{name}", given.get(name)) for name in names}
        if any(not 0 <= rate <= 1 for each in rates.values() for rate in each):
            raise self._error("roc", "has a rate that is not between 0 and 1")
        if "threshold" in given:
            rates["threshold"] = self._numbers("roc.threshold", given["threshold"])
        if len({len(each) for each in rates.values()}) != 1 or len(rates[names[0]]) > MAX_POINTS:
            raise self._error("roc", f"must have lists of the same length, at most {MAX_POINTS}")
        return rates

    def _metrics(self, path: str, value: object, *, empty: bool = False) -> dict[str, float]:
        given = self._mapping(path, value, MAX_METRICS)
        if empty:  # a metric of no examples has no value
            return {}
        return {name: self._number(f"{path}.{name}", each) for name, each in given.items()}

    def _mapping(self, path: str, value: object, limit: int) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or any(not isinstance(name, str) or not name for name in value):
            raise self._error(path, f"must be an object with named fields, not {_short(value)}")
        if len(value) > limit:
            raise self._error(path, f"has {len(value)} entries; at most {limit} are supported")
        if long := [name for name in value if len(name) > _NAME]:
            raise self._error(path, f"has a name of {len(long[0])} characters; at most {_NAME} are supported")
        return value

    def _numbers(self, path: str, value: object) -> list[float]:
        if not isinstance(value, list) or not value:
            raise self._error(path, f"must be a list of numbers, not {_short(value)}")
        if len(value) > MAX_EXAMPLES:
            raise self._error(path, f"has {len(value)} values; at most {MAX_EXAMPLES} are supported")
        return [self._number(f"{path}[{number}]", each) for number, each in enumerate(value)]

    def _number(self, path: str, value: object) -> float:
        if isinstance(value, bool):
            return float(value)  # of a score: whether the prediction was right
        if not isinstance(value, int | float):
            raise self._error(path, f"must be a number, not {_short(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._error(path, f"must be a finite number, not {number}")
        return number

    def _count(self, path: str, value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
            raise self._error(path, f"must be a whole number, 0 or more, not {_short(value)}")
        return value

    def _error(self, path: str, problem: str) -> ConfigurationError:
        where = f": {path}" if path else ""
        return ConfigurationError(f"the evaluation of the {self._of}{where} {problem}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
