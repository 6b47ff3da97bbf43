"""Add the evaluation of a model, and the decision of its gate, to the document of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._pages.documents.values import finite, shortened
from trainjob._support.display import short_text
from trainjob._support.kube_objects import mapping
from trainjob._support.masking import public

_SLICES = 200  # of an evaluation
_LABELS = 100  # of a confusion matrix
_METRICS = 100  # of an evaluation
_COMPARED = 4000  # metrics of all slices together: 600 KB
_CHECKS = 1000


def with_evaluation(document: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The document with an evaluation of its model, which becomes a part of ``lineage``, too.

    Args:
        document: Of a training.
        evaluation: ``report``, an evaluation report as JSON values; ``decision``, that of the gate, or None; ``uri``
            of the report.
    """
    report, decision = evaluation["report"], evaluation.get("decision")
    notes: list[str] = []
    judged = _decision(decision, notes) if decision else None
    shown = {
        "report": _evaluation_report(report, notes),
        "decision": judged,
        "uri": short_text(public(str(evaluation.get("uri") or ""))),
    }
    verdict = judged or {"passed": None, "reason": "not judged: the evaluation has no gate"}
    lineage = {**document["lineage"], "evaluation": {"passed": verdict["passed"], "summary": verdict["reason"]}}
    new = [each for each in notes if each not in document["notes"]]
    return {**document, "notes": [*document["notes"], *new], "evaluation": shown, "lineage": lineage}


def _evaluation_report(report: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    slices = mapping(report, "slices")
    shown = dict(list(slices.items())[:_SLICES])
    if len(slices) > _SLICES:
        notes.append(f"{_SLICES} of {len(slices)} slices of the evaluation are shown")
    limit = max(1, _COMPARED // max(1, len(shown)))
    if any(len(mapping(each, "metrics")) > limit for each in shown.values()):
        notes.append(f"{limit} metrics of each slice of the evaluation are shown")
    return {
        "version": report.get("version"),
        "level": finite(report.get("level")),
        **{name: _texts(report.get(name)) for name in ("candidate", "dataset", "code")},
        "champion": _texts(report.get("champion")) if report.get("champion") is not None else None,
        "examples": report.get("examples"),
        "metrics": _compared(mapping(report, "metrics"), _METRICS),
        "slices": {
            short_text(name): {"examples": each.get("examples"), "metrics": _compared(mapping(each, "metrics"), limit)}
            for name, each in shown.items()
        },
        "confusion": _confusion(report.get("confusion"), notes),
        "roc": {name: [shortened(rate) for rate in rates] for name, rates in (report.get("roc") or {}).items()} or None,
    }


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    return {short_text(name): short_text(public(str(each))) for name, each in (values or {}).items()}


def _compared(metrics: Mapping[str, Mapping[str, Any]], limit: int) -> dict[str, dict[str, Any]]:
    return {
        short_text(name): {
            **{part: shortened(each.get(part)) for part in ("candidate", "champion", "difference")},
            "interval": [shortened(end) for end in each["interval"]] if each.get("interval") else None,
            "method": short_text(each.get("method")),
        }
        for name, each in list(metrics.items())[:limit]
    }


def _confusion(confusion: Mapping[str, Any] | None, notes: list[str]) -> dict[str, Any] | None:
    if not confusion:
        return None
    labels = confusion["labels"]
    if len(labels) > _LABELS:
        notes.append(f"{_LABELS} of {len(labels)} labels of the confusion matrix are shown")
    return {
        "labels": [short_text(each) for each in labels[:_LABELS]],
        "counts": [[shortened(count) for count in counts[:_LABELS]] for counts in confusion["counts"][:_LABELS]],
    }


def _decision(decision: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    checks = decision.get("checks") or ()
    if len(checks) > _CHECKS:
        notes.append(f"{_CHECKS} of {len(checks)} checks of the gate are shown, those that failed first")
        checks = sorted(checks, key=lambda each: bool(each["passed"]))[:_CHECKS]
    return {
        "passed": decision["passed"] is True,
        "rule": short_text(decision.get("rule")),
        "reason": short_text(decision.get("reason")),
        "checks": [
            {"rule": short_text(each["rule"]), "passed": each["passed"] is True, "reason": short_text(each["reason"])}
            for each in checks
        ],
    }
