"""Which versions an alias has pointed to, for MLflow, which stores only where an alias points now.

A promotion writes two tags of the version:

* ``trainjob.moving.<alias>``, before it moves the alias: ``from`` and the version that holds it, or ``from nothing``.
* ``trainjob.moved.<alias>``, after it has moved the alias: ``not settled``, then ``settled``. It is never removed.

A promotion first writes the second tag of the version that it takes the alias from. So a version has it once a later
promotion has moved the alias on, even if the promotion that gave the alias to this version was killed before it was
complete. If another program has moved the alias on, the first tag shows that: another version than the recorded one
holds it. The functions here are pure: they decide from the tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from trainjob.registry.base import ModelVersion, Promotion

MOVING, MOVED = "trainjob.moving.", "trainjob.moved."
NOT_SETTLED, SETTLED = "not settled", "settled"
_FROM = re.compile(r"from (\d+|nothing)")


def text(holder: ModelVersion | None) -> str:
    """The value of the first tag for a version that takes the alias from ``holder``."""
    return f"from {holder.version if holder else 'nothing'}"


def has_moved(version: ModelVersion, alias: str) -> bool:
    """Whether the second tag shows that the alias has pointed to the version."""
    return f"{MOVED}{alias}" in version.tags


def is_settled(version: ModelVersion, alias: str) -> bool:
    """Whether a promotion of the version is complete."""
    return version.tags.get(f"{MOVED}{alias}") == SETTLED


def refusal(
    candidate: ModelVersion,
    holder: ModelVersion | None,
    alias: str,
    *,
    metric: str | None,
    every: Callable[[], Sequence[ModelVersion]],
) -> Promotion | None:
    """Why the export of ``candidate`` must not move the alias from ``holder`` again; None if it may move it.

    An earlier try may have been killed between the first tag and the second. If the recorded version still holds the
    alias, it has not been moved. If not, somebody has moved it since. Without a metric it stays there. With a metric
    the rule decides if trainjob moved it from the recorded version to the holder without the candidate in between.

    Args:
        candidate: The version of the export.
        holder: The version that holds the alias.
        alias: The alias.
        metric: The metric of the rule.
        every: Returns all versions of the model.
    """
    if has_moved(candidate, alias):
        return repeated(alias, holder)
    before = _before(candidate, alias)
    if before is None or before == (holder.version if holder else ""):
        return None
    if metric is not None and holder is not None and before in passed(every(), holder, alias):
        return None
    who = f"version {holder.version} got it" if holder else "it was removed"
    reason = f"{alias!r} stays: {who} while an earlier try of this export was moving it"
    return Promotion(False, reason, holder.version if holder else None)


def repeated(alias: str, holder: ModelVersion | None) -> Promotion:
    """The result for an export that has moved the alias before."""
    who = f"version {holder.version}" if holder else "no version"
    reason = f"{alias!r} stays: this export has moved it before, and {who} holds it now"
    return Promotion(False, reason, holder.version if holder else None)


def followers(every: Iterable[ModelVersion], candidate: ModelVersion, alias: str, wrote: str) -> list[ModelVersion]:
    """The versions to which the alias was moved on from ``candidate``, directly or over other versions.

    Not those from which a later promotion has moved it back to the candidate: the first tag shows that one then, in
    place of the one that ``wrote`` is the value of.
    """
    versions = [*every]
    now = next((each for each in versions if each.version == candidate.version), candidate)
    back = [] if now.tags.get(f"{MOVING}{alias}") == wrote else passed(versions, now, alias)
    return [
        each
        for each in versions
        if each.version not in (candidate.version, *back) and candidate.version in passed(versions, each, alias)
    ]


def _before(version: ModelVersion, alias: str) -> str | None:
    """The version that the alias was taken from for this one; empty if no version held it, None if not recorded."""
    match = _FROM.fullmatch(version.tags.get(f"{MOVING}{alias}", ""))
    return None if match is None else match[1].replace("nothing", "")


def passed(every: Iterable[ModelVersion], version: ModelVersion, alias: str) -> list[str]:
    """The versions that the alias passed on its way to ``version``, last first; empty text for no version."""
    known = {each.version: each for each in every}
    passed: list[str] = []
    before = _before(version, alias)
    while before is not None and before not in passed:
        passed.append(before)
        before = _before(known[before], alias) if before in known else None
    return passed
