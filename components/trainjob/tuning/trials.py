"""The trials of a study and its result, and how the journal keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trainjob._support.formats import wrong_format
from trainjob._support.numbers import json_values
from trainjob.errors import CorruptData
from trainjob.tuning.study import Scalar

FORMAT = 1
"""Number of the format of a journal, which is in its file ``study``."""
STATES = ("running", "complete", "pruned", "failed", "stopped")
_SUMMARY_TRIALS = 50


class Journal(Protocol):
    """Where the state of a study is kept."""

    @property
    def location(self) -> str:
        """Its location, for errors."""
        ...

    def create(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Store `value` under a name that is not in use; returns what stands there, perhaps by another launcher."""
        ...

    def read(self, name: str) -> dict[str, Any] | None:
        """What stands under a name; None if it is not in use."""
        ...

    def all(self, folder: str) -> dict[str, dict[str, Any]]:
        """Name without the folder -> what stands there."""
        ...


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: From 0.
        parameters: Name -> value.
        state: ``running``, ``complete``, ``pruned``, ``failed``, or ``stopped`` since the study ended.
        value: Value of the metric; for a pruned trial the latest one; None if it has none.
        reason: Why it failed, was pruned or stopped.
        job: Name of its TrainJob; empty until it is launched.
        metrics: All its metrics.
        outputs: Its outputs.
        values: Values during the trial: step, value.
        seconds: From launch to end, without the queue.
    """

    number: int
    parameters: Mapping[str, Scalar]
    state: str = "running"
    value: float | None = None
    reason: str = ""
    job: str = ""
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    outputs: Mapping[str, bool | float | str] = field(default_factory=dict)
    values: Sequence[tuple[int, float]] = ()
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the trial has ended."""
        return self.state != "running"

    def as_dict(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return {**asdict(self), "metrics": json_values(self.metrics), "values": [list(each) for each in self.values]}


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    Attributes:
        key: Key of the study.
        metric: Name of the metric.
        direction: ``minimize`` or ``maximize``.
        best: The best complete trial.
        trials: All trials, by number.
        importances: Parameter -> its importance, 0 to 1; empty with few trials.
        reason: Why the study ended.
    """

    key: str
    metric: str
    direction: str
    best: Trial
    trials: Sequence[Trial]
    importances: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "key": self.key,
            "metric": self.metric,
            "direction": self.direction,
            "best": self.best.as_dict(),
            "trials": [each.as_dict() for each in self.trials],
            "importances": dict(self.importances),
            "reason": self.reason,
        }

    def summary(self) -> dict[str, Any]:
        """The result as JSON values for other tasks: short, whatever the number of trials.

        ``counts`` has state -> number of trials; ``trials`` the best complete ones, at most 50, best first.
        """
        complete = [each for each in self.trials if each.state == "complete" and each.value is not None]
        complete.sort(key=lambda each: each.value or 0.0, reverse=self.direction == "maximize")
        best = self.best.as_dict()
        del best["values"]
        return {
            **self.as_dict(),
            "best": best,
            "counts": dict(Counter(each.state for each in self.trials)),
            "trials": [
                {"number": each.number, "value": each.value, "parameters": dict(each.parameters)}
                for each in complete[:_SUMMARY_TRIALS]
            ],
        }


@dataclass(frozen=True)
class StudyState:
    """A study as its journal has it, readable without its launcher.

    Attributes:
        key: Key of the study.
        namespace: Namespace of its trials.
        fields: Fields of the study, as in `Study`, with those limits that the latest launch had.
        trials: All trials, by number.
        ended: Whether a launch has ended the study, with the limits of the latest launch. False also if all of them
            were killed.
        reason: Why the study ended.
    """

    key: str
    namespace: str
    fields: Mapping[str, Any]
    trials: Sequence[Trial]
    ended: bool = False
    reason: str = ""


def read_study(journal: Journal) -> StudyState | None:
    """Read the state of a study; None if the journal has none.

    Raises:
        CorruptData: A file of the journal is damaged, or a newer trainjob wrote the journal.
    """
    header = journal.read("study")
    if header is None:
        return None
    check_format(journal, header)
    asked, ended, launches, ends = (journal.all(folder) for folder in ("asked", "ended", "launches", "ends"))
    latest = max(launches, default="")
    trials = []
    for number in range(len(asked)):
        if (name := name_of(number)) not in asked:
            break
        parameters = parameters_of(number, asked[name])
        trials.append(trial_of(number, parameters, ended[name]) if name in ended else Trial(number, parameters))
    try:
        fields = {**header["study"], **launches.get(latest, {})}
        key, namespace = str(header["key"]), str(header["namespace"])
    except (KeyError, TypeError) as error:
        raise damaged("study", error) from None
    # Of two launchers at once, the one that began first may end the study.
    end = max((name for name, limits in launches.items() if name in ends and limits == launches[latest]), default="")
    return StudyState(key, namespace, fields, trials, bool(end), str(ends.get(end, {}).get("reason", "")))


def check_format(journal: Journal, header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The header of a journal, whose number is that of all files of the journal.

    Raises:
        CorruptData: A newer trainjob wrote the journal.
    """
    if problem := wrong_format(f"{journal.location}: study.json", header.get("format"), FORMAT):
        raise CorruptData(problem)
    return header


def name_of(number: int) -> str:
    """Name of a trial in the journal."""
    return f"{number:05}"


def parameters_of(number: int, asked: Mapping[str, Any]) -> dict[str, Scalar]:
    """The parameters of a trial, as the journal has them.

    Raises:
        CorruptData: They are damaged.
    """
    parameters = asked.get("parameters")
    if not isinstance(parameters, dict) or not all(isinstance(each, Scalar) for each in parameters.values()):
        raise damaged(f"asked/{name_of(number)}", "it has no parameters")
    return parameters


def trial_of(number: int, parameters: Mapping[str, Scalar], ended: Mapping[str, Any]) -> Trial:
    """A trial with its outcome, as the journal has it.

    Raises:
        CorruptData: The outcome is damaged.
    """
    names = set(Trial.__dataclass_fields__) - {"number", "parameters", "values"}
    known = {name: value for name, value in ended.items() if name in names}
    try:
        values = [(int(step), float(value)) for step, value in ended.get("values") or ()]
        trial = Trial(number, parameters, values=values, **known)
        if trial.state not in STATES[1:] or not isinstance(trial.value, float | int | None):
            raise ValueError(f"its state is {trial.state!r} and its value {trial.value!r}")
    except (TypeError, ValueError, OverflowError) as error:
        raise damaged(f"ended/{name_of(number)}", error) from None
    return trial


def damaged(name: str, problem: object) -> CorruptData:
    """The error for a file of a journal that is JSON but has other content."""
    return CorruptData(
        f"{name}.json in the journal of the study is damaged ({problem}); remove the file to repeat what it records,"
        " or use another key"
    )
