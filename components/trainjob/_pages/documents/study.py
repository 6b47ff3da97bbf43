"""The document of a study, with as many details of its trials as a page can have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from trainjob._goodput.history import METHOD, thinned_values
from trainjob._pages.documents import MAX_POINTS, VERSION
from trainjob._pages.documents.values import finite, shortened
from trainjob._support.display import iso, short_text
from trainjob._support.kube_objects import mapping

_TRIALS = 2000  # of a study
_PARAMETERS = 100
_STUDY_BYTES = 900_000  # of all trials of a study, as JSON


def study_document(
    title: str,
    namespace: str,
    key: str,
    study: Mapping[str, Any],
    trials: Iterable[Mapping[str, Any]],
    *,
    importances: Mapping[str, float] | None = None,
    ended: bool = False,
    reason: str = "",
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a study: a hyperparameter search.

    Args:
        title: Name of the study for readers.
        namespace: Namespace of the trials.
        key: Key of the study.
        study: ``metric``, ``direction``, ``max_trials``, ``parallel``, and ``space``: the fields of a study as it was
            given to `tune`.
        trials: Of each trial the fields of `Trial.as_dict`, and ``href``: the address of its page.
        importances: Parameter -> its importance, 0 to 1.
        ended: Whether the study has ended.
        reason: Why it ended.
        notes: What is missing in the document, and why.
    """
    found = sorted(trials, key=lambda each: int(each["number"]))
    maximize = study["direction"] == "maximize"
    complete = [each for each in found if each.get("state") == "complete" and finite(each.get("value")) is not None]
    ranked = sorted(complete, key=lambda each: -each["value"] if maximize else each["value"])
    notes = list(notes)
    shown = found
    if len(found) > _TRIALS:
        kept = {each["number"] for each in (*ranked[: _TRIALS // 2], *found[-_TRIALS // 2 :])}
        shown = [each for each in found if each["number"] in kept]
        notes.append(f"{len(shown)} of {len(found)} trials are shown: the {_TRIALS // 2} best and the latest")
    made, thinner = _trials(shown)
    notes += thinner
    return {
        "version": VERSION,
        "kind": "study",
        "taken": iso(datetime.now(UTC)),
        "notes": notes,
        "title": short_text(title),
        "namespace": short_text(namespace),
        "key": short_text(key),
        "metric": short_text(study["metric"]),
        "direction": "maximize" if maximize else "minimize",
        "state": "ended" if ended else "running",
        "reason": short_text(reason),
        "limits": {name: study.get(name) for name in ("max_trials", "parallel")},
        "space": {
            short_text(name): {"type": short_text(mapping(each).get("type")), "log": mapping(each).get("log") is True}
            for name, each in list((study.get("space") or {}).items())[:_PARAMETERS]
        },
        "best": ranked[0]["number"] if ranked else None,
        "importances": {
            short_text(name): shortened(each)
            for name, each in list((importances or {}).items())[:_PARAMETERS]
            if finite(each) is not None
        },
        "counts": dict(Counter(short_text(each.get("state")) for each in found)),
        "method": METHOD,
        "trials": made,
    }


def _trials(trials: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The trials with as many details as a page can have, and notes of what is left out."""
    texts: dict[str, str] = {}
    share = max(4, MAX_POINTS // max(1, len(trials)))
    series = [(each, each.get("values") or ()) for each in trials]
    trials = [{**each, "values": thinned_values(values, share), "given": len(values)} for each, values in series]
    for limits in _LIMITS:
        made = _Details(limits, share, texts)
        shown = [made.trial(each) for each in trials]
        if len(json.dumps(shown, separators=(",", ":"))) <= _STUDY_BYTES:
            break
    return shown, made.notes


class _Limits(NamedTuple):
    """Limits of one trial of a study."""

    length: int  # of a text
    parameters: int
    fields: int  # metrics, and outputs
    points: int  # values during the trial


_LIMITS = (
    _Limits(2000, _PARAMETERS, 20, 1000),
    _Limits(300, _PARAMETERS, 20, 40),
    _Limits(80, 50, 8, 20),
    _Limits(60, 30, 4, 10),
    _Limits(24, 8, 2, 4),
)
"""The first with which all trials fit into `_STUDY_BYTES` are used."""


class _Details:
    """Makes trials of a study with bounded texts, parameters, metrics and values.

    Args:
        limits: Limits of one trial.
        points: Values of one trial so that all trials have at most `MAX_POINTS`.
        texts: Text -> the same without secrets; names and many values repeat.
    """

    def __init__(self, limits: _Limits, points: int, texts: dict[str, str]) -> None:
        self._length, self._parameters, self._fields, self._points = limits
        self._points = min(self._points, points)
        self._texts = texts
        self._left_out: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What is left out."""
        return list(self._left_out.values())

    def trial(self, trial: Mapping[str, Any]) -> dict[str, Any]:
        if trial["given"] > self._points:
            self._left_out["values"] = f"the values during a trial are thinned to {self._points} points: {METHOD}"
        return {
            "number": int(trial["number"]),
            "parameters": self._scalars(trial, "parameters", self._parameters),
            "state": self._text(trial.get("state")),
            "value": shortened(trial.get("value")),
            "reason": self._text(trial.get("reason"), 3 * self._length),
            "job": short_text(trial.get("job")),
            "href": short_text(trial.get("href")),
            "metrics": self._scalars(trial, "metrics", self._fields),
            "outputs": self._scalars(trial, "outputs", self._fields),
            "values": [[step, shortened(each)] for step, each in thinned_values(trial["values"], self._points)],
            "seconds": shortened(trial.get("seconds")),
        }

    def _scalars(self, trial: Mapping[str, Any], part: str, limit: int) -> dict[str, Any]:
        found = list((trial.get(part) or {}).items())
        if len(found) > limit:
            self._left_out[part] = f"{limit} {part} of each trial are shown"
        return {self._text(name): self._scalar(value) for name, value in found[:limit]}

    def _scalar(self, value: object) -> bool | float | str:
        if isinstance(value, bool):
            return value
        number = shortened(value)
        return self._text(value) if number is None else number

    def _text(self, value: object, length: int | None = None) -> str:
        given, length = "" if value is None else str(value), length or self._length
        if (found := self._texts.get(given)) is None:
            found = self._texts[given] = short_text(given)
        if len(found) > length:
            self._left_out["texts"] = f"texts of a trial are cut to {self._length} characters"
            return f"{found[: length - 1]}…"
        return found
