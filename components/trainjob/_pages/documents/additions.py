"""Add what other jobs report to the document of a training: another training, its lineage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainjob._goodput.history import MetricHistory, thinned
from trainjob._pages.documents import MAX_POINTS
from trainjob._support.display import short_text


def with_comparison(
    document: Mapping[str, Any], label: str, other: Mapping[str, Any], href: str = ""
) -> dict[str, Any]:
    """The document with another training for comparison, such as the ``previous run`` or the ``champion``."""
    entry = {
        "label": label,
        "name": other.get("name", ""),
        "href": href,
        "metrics": other.get("metrics") or {},
        "history": thinned(MetricHistory.of(other.get("history"), MAX_POINTS).points(), MAX_POINTS // 5),
    }
    return {**document, "compare": [*document["compare"], entry]}


def with_lineage(document: Mapping[str, Any], siblings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The document with the digests and the registered version that other jobs of its workflow have reported.

    Args:
        document: Of a training.
        siblings: ``outputs`` of the other jobs, as the initialize and export steps report them: ``uri``, ``digest``,
            of an export also ``name``, ``version`` and ``promoted``, of an evaluation ``passed``, ``rule``, ``reason``.
    """
    lineage = {**document["lineage"]}
    reported = [each for each in siblings if isinstance(each.get("uri"), str) and each["uri"]]
    digests = {each["uri"]: str(each.get("digest") or "") for each in reported}
    for part in ("datasets", "outputs"):
        lineage[part] = [each | {"digest": each["digest"] or digests.get(each["uri"], "")} for each in lineage[part]]
    if base := lineage["base_model"]:
        lineage["base_model"] = base | {"digest": base["digest"] or digests.get(base["uri"], "")}
    for each in reported:
        if isinstance(each.get("passed"), bool):
            summary = ": ".join(filter(None, (short_text(each.get("rule")), short_text(each.get("reason")))))
            lineage["evaluation"] = {"passed": each["passed"], "summary": summary}
        if each.get("name") and each.get("version"):
            model, version = short_text(each["name"]), short_text(each["version"])
            alias = "champion" if each.get("promoted") is True else ""
            uri = short_text(each["uri"])
            lineage["registered"] = {"registry": "", "model": model, "version": version, "alias": alias, "uri": uri}
    return {**document, "lineage": lineage}
