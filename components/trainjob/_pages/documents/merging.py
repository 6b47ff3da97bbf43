"""Complete the document of a training with one that was kept of the same work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._goodput.history import MetricHistory, thinned
from trainjob._pages.documents import MAX_POINTS
from trainjob._pages.documents.attempts import LATEST, goodput_of, order
from trainjob._support.kube_objects import mapping
from trainjob.status import Phase

_ENDED = frozenset(str(phase) for phase in Phase if phase.terminal)


def merge_documents(kept: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """`newer`, completed by what only the `kept` document of the same work has: parts, history, attempts.

    Both may be documents of different attempts of one key: then the older attempt becomes one of ``attempts``.
    """
    same = kept.get("uid") == newer.get("uid") or not newer.get("uid")
    document = {name: newer.get(name) or (kept.get(name) if same else None) or newer.get(name) for name in newer}
    document["source"], document["notes"] = newer["source"], newer["notes"]
    if same:
        history = MetricHistory.of(kept.get("history"), MAX_POINTS // 2)
        history.merge(MetricHistory.of(newer.get("history"), MAX_POINTS // 2).points())
        document["history"] = history.points()
        evaluated, lineage = mapping(kept, "lineage").get("evaluation"), mapping(document, "lineage")
        if evaluated and lineage and not lineage.get("evaluation"):
            document["lineage"] = {**lineage, "evaluation": evaluated}
    known = {each["uid"]: each for each in kept.get("attempts") or ()}
    if not same and kept.get("uid") in known:
        known[kept["uid"]] |= {"history": thinned(kept.get("history") or {}, MAX_POINTS // 10)}
    for each in newer.get("attempts") or ():
        before = known.get(each["uid"], {})
        known[each["uid"]] = {name: value or before.get(name) or value for name, value in each.items()}
        if _knows_more(before, each):
            known[each["uid"]]["goodput"] = before["goodput"]
    attempts = sorted(known.values(), key=order)[-LATEST:]
    return {**document, "attempts": attempts, "goodput": goodput_of(attempts)}


def _knows_more(kept: Mapping[str, Any], newer: Mapping[str, Any]) -> bool:
    """Whether more is known of a kept attempt, which had ended: a waiter has seen it, and its pods are gone."""
    before, now = kept.get("goodput"), newer.get("goodput")
    return bool(before and now and kept["phase"] in _ENDED and before["assumed"] < now["assumed"])
