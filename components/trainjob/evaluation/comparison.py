"""Two evaluations on the same examples -> the evaluation report."""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainjob._support.formats import wrong_format
from trainjob.errors import ConfigurationError
from trainjob.evaluation.scores import Scores, Slice

VERSION = 1
LEVEL = 0.95
RESAMPLES = 2000
"""Resamples of the bootstrap. Fewer for many examples, see `MAX_DRAWS`, at least `MIN_RESAMPLES`."""
MIN_RESAMPLES = 200
MAX_DRAWS = 4_000_000
"""Draws of all resamples of one metric; they take less than a second."""
BOOTSTRAP_EXAMPLES = MAX_DRAWS // MIN_RESAMPLES


@dataclass(frozen=True)
class Compared:
    """One metric of both models.

    Attributes:
        candidate: Value of the candidate.
        champion: Value of the champion; None without a champion.
        difference: Candidate minus champion; None without a champion.
        interval: Limits of the confidence interval of the difference, level `LEVEL`; None without scores of examples.
        method: How the interval was computed; empty without an interval.
    """

    candidate: float
    champion: float | None = None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    method: str = ""


@dataclass(frozen=True)
class ComparedSlice:
    """One part of the examples.

    Attributes:
        metrics: Name -> both values; empty for a slice without examples.
        examples: Number of examples; None if unknown.
    """

    metrics: Mapping[str, Compared]
    examples: int | None = None


@dataclass(frozen=True)
class EvaluationReport:
    """The evaluation of a candidate, beside that of the champion on the same dataset with the same code.

    Attributes:
        candidate: ``uri``, ``digest`` of the evaluated model.
        champion: ``uri``, ``digest``, ``name``, ``version`` of the champion; None if no version holds the alias.
        dataset: ``uri``, ``digest`` of the held-out dataset.
        code: ``uri``, ``revision``, ``digest`` of the evaluation's code, as far as it is known.
        examples: Number of examples; None if unknown.
        metrics: Name -> both values.
        slices: Name -> both values of a part of the examples.
        confusion: Confusion matrix of the candidate; None if not reported.
        roc: ROC curve of the candidate; None if not reported.
    """

    candidate: Mapping[str, str]
    champion: Mapping[str, str] | None
    dataset: Mapping[str, str]
    code: Mapping[str, str]
    examples: int | None
    metrics: Mapping[str, Compared]
    slices: Mapping[str, ComparedSlice] = field(default_factory=dict)
    confusion: Mapping[str, Any] | None = None
    roc: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, with its ``version``."""
        value = asdict(self)
        for part in (value, *value["slices"].values()):
            for each in part["metrics"].values():
                each["interval"] = list(each["interval"]) if each["interval"] is not None else None
        return {"version": VERSION, "level": LEVEL, **value}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> EvaluationReport:
        """The report that `as_dict` made.

        Raises:
            ConfigurationError: The value is not an evaluation report, or a newer trainjob wrote it.
        """
        try:
            if problem := wrong_format("the evaluation report", value["version"], VERSION):
                raise ConfigurationError(problem)
            names = cls.__dataclass_fields__
            fields = {name: value[name] for name in names}
            fields["metrics"] = _restored(value["metrics"])
            fields["slices"] = {
                name: ComparedSlice(_restored(each["metrics"]), each["examples"])
                for name, each in value["slices"].items()
            }
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigurationError(f"not an evaluation report: {type(error).__name__}: {error}") from None

    @property
    def digest(self) -> str:
        """``sha256:<digest>`` of the report's canonical JSON."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _restored(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Compared]:
    return {
        name: Compared(**{**each, "interval": tuple(each["interval"]) if each["interval"] is not None else None})
        for name, each in metrics.items()
    }


def compare(
    candidate: Scores,
    champion: Scores | None,
    *,
    models: tuple[Mapping[str, str], Mapping[str, str] | None],
    dataset: Mapping[str, str],
    code: Mapping[str, str] | None = None,
) -> EvaluationReport:
    """Make the evaluation report.

    Args:
        candidate: Evaluation of the candidate.
        champion: Evaluation of the champion on the same examples; None if there is none.
        models: ``uri`` and ``digest`` of candidate and champion.
        dataset: ``uri`` and ``digest`` of the dataset.
        code: ``uri``, ``revision``, ``digest`` of the code.

    Raises:
        ConfigurationError: The two evaluations have different metrics, slices or numbers of examples, so that they
            cannot be compared.
    """
    if champion is not None:
        _check_same("metrics", candidate.metrics, champion.metrics)
        _check_same("scores", candidate.scores, champion.scores)
        _check_same("slices", candidate.slices, champion.slices)
        if candidate.examples != champion.examples:
            raise ConfigurationError(
                f"the evaluations cannot be compared: that of the candidate has {candidate.examples} examples, that of "
                f"the champion {champion.examples}; evaluate both on the same dataset"
            )
    seed = "/".join(str(each.get("digest", "")) for each in (models[0], models[1] or {}, dataset))
    slices = {}
    for name, each in candidate.slices.items():
        other = champion.slices[name] if champion is not None else None
        if other is not None and each.examples != other.examples:
            raise ConfigurationError(
                f"the evaluations cannot be compared: slice {name!r} has {each.examples} examples for the candidate and"
                f" {other.examples} for the champion"
            )
        slices[name] = ComparedSlice(_compared(each, other, f"{seed}/{name}"), each.examples)
    return EvaluationReport(
        dict(models[0]),
        dict(models[1]) if models[1] is not None else None,
        dict(dataset),
        dict(code or {}),
        candidate.examples,
        _compared(candidate, champion, seed),
        slices,
        candidate.confusion,
        candidate.roc,
    )


def _check_same(what: str, one: Mapping[str, object], other: Mapping[str, object]) -> None:
    if one.keys() != other.keys():
        only = [
            f"only that of the {name} has {', '.join(sorted(found))}"
            for name, found in (("candidate", one.keys() - other.keys()), ("champion", other.keys() - one.keys()))
            if found
        ]
        raise ConfigurationError(f"the evaluations cannot be compared: their {what} differ: {'; '.join(only)}")


def _compared(candidate: Scores | Slice, champion: Scores | Slice | None, seed: str) -> dict[str, Compared]:
    if champion is None:
        return {name: Compared(value) for name, value in candidate.metrics.items()}
    found = {}
    for name, value in candidate.metrics.items():
        other = champion.metrics[name]
        interval, method = None, ""
        if name in candidate.scores and name in champion.scores:
            pairs = zip(candidate.scores[name], champion.scores[name], strict=True)
            interval, method = interval_of([a - b for a, b in pairs], f"{seed}/{name}")
        found[name] = Compared(value, other, value - other, interval, method)
    return found


def interval_of(differences: Sequence[float], seed: str) -> tuple[tuple[float, float], str]:
    """The confidence interval of the mean of paired differences, and how it was computed.

    By the percentile bootstrap: each resample draws as many examples as there are, with replacement, and both models
    have the same ones (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13). Beyond `BOOTSTRAP_EXAMPLES`
    by the normal approximation, from which the bootstrap then hardly differs. The same differences and seed give the
    same interval.

    Args:
        differences: Candidate minus champion of each example, at least one.
        seed: Any text.
    """
    count = len(differences)
    if count > BOOTSTRAP_EXAMPLES:
        mean = statistics.fmean(differences)
        margin = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2) * statistics.stdev(differences, mean) / count**0.5
        return (mean - margin, mean + margin), "normal approximation"
    resamples = max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // count))
    generator = random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8]))
    means = sorted(sum(generator.choices(differences, k=count)) / count for _ in range(resamples))
    tail = (1 - LEVEL) / 2
    return (_quantile(means, tail), _quantile(means, 1 - tail)), f"paired bootstrap, {resamples} resamples"


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
