"""What the next attempt of a piece of work changes, by the rules of `on_retry` and the failures before it. Pure.

The changes of an attempt are recorded on its TrainJob, so that they accumulate over attempts without other state. The
identity of the job stays that of the author's spec.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from pydantic import Field, ValidationError

from trainjob._diagnosis import ON_RETRY
from trainjob._manifest.retry_notice import RETRY_CHANGE, text_of
from trainjob._spec import Resources, TrainJobSpec, for_every_node
from trainjob._spec.base import Part
from trainjob._spec.on_retry import PRIORITY_LABEL, ExcludeNodes, MoreMemory, OtherCapacity, memory_of
from trainjob._spec.parts import Count
from trainjob._spec.pods import pod_patch
from trainjob._spec.quantities import canonical_quantity, quantity_value
from trainjob._support.control_characters import one_line
from trainjob._support.kube_objects import annotated, mapping, mappings
from trainjob.errors import Category, Diagnosis
from trainjob.job import RESERVED_PREFIX
from trainjob.status import QUEUE_LABEL

_MANAGER = RESERVED_PREFIX + "excluded-nodes"
_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_REASON = 500  # characters

Rule = MoreMemory | ExcludeNodes | OtherCapacity


class Changes(Part):
    """What an attempt changes of the author's spec."""

    memory: str | None = None
    num_nodes: Count | None = None
    queue: str | None = None
    priority_class: str | None = None
    excluded_nodes: tuple[str, ...] = ()
    reason: str = Field(default="", exclude=True)
    """The latest failure that changed something."""


def recorded(trainjob: Mapping[str, Any]) -> Changes:
    """The changes of an existing attempt; none if its annotation cannot be read."""
    found = mapping(annotated(trainjob, RETRY_CHANGE))
    try:
        return Changes.model_validate({**mapping(found, "changes"), "reason": str(found.get("reason") or "")})
    except (TypeError, ValueError, ValidationError):
        return Changes()


def changed(spec: TrainJobSpec, diagnosis: Diagnosis | None, previous: Changes) -> Changes:
    """The changes of the attempt after one that failed.

    Args:
        spec: The spec of the author.
        diagnosis: Why the previous attempt failed; None if that is unknown.
        previous: Changes of the previous attempt. They stay, within the bounds that the rules have now.
    """
    kept = _within_bounds(spec, previous)
    rule = _rule(spec, diagnosis.category) if diagnosis is not None else None
    if diagnosis is None or rule is None or (isinstance(rule, MoreMemory) and not diagnosis.node_memory):
        return kept
    after = _next(applied(spec, kept), rule, kept, diagnosis.node)
    if after == kept:
        return kept
    reason = one_line(f"{diagnosis.category}: {diagnosis.summary}", _REASON)
    return after.model_copy(update={"reason": reason})


def outlook(spec: TrainJobSpec, changes: Changes) -> dict[str, str]:
    """Category of a failure -> what the attempt after this one changes; without categories that change nothing."""
    found = {}
    now = applied(spec, changes)
    for category in Category:
        rule = _rule(spec, category)
        after = _next(now, rule, changes, "that of the failed rank") if rule is not None else changes
        if after != changes:
            found[category.value] = text_of(difference(spec, changes, after))
    return found


def difference(spec: TrainJobSpec, before: Changes, after: Changes) -> dict[str, list[Any]]:
    """Field -> its value with the changes `before` and `after`, of the fields that differ."""
    old, new = (
        {
            "memory": memory_of(effective.resources_per_node) or None,
            "num_nodes": effective.num_nodes,
            "queue": effective.labels.get(QUEUE_LABEL),
            "priority_class": effective.labels.get(PRIORITY_LABEL),
            "excluded_nodes": list(changes.excluded_nodes),
        }
        for changes, effective in ((before, applied(spec, before)), (after, applied(spec, after)))
    )
    return {name: [value, new[name]] for name, value in old.items() if value != new[name]}


def change_annotations(spec: TrainJobSpec, changes: Changes, digest: Callable[[TrainJobSpec], str]) -> dict[str, str]:
    """Annotations of an attempt: what it changes, and what the next one changes.

    Args:
        spec: The spec of the author.
        changes: Changes of this attempt.
        digest: Returns the hash of a spec.
    """
    found: dict[str, Any] = {}
    if diff := difference(spec, Changes(), changes):
        values = changes.model_dump(mode="json", exclude_defaults=True)
        digest_of_changed = digest(applied(spec, changes))
        found[RETRY_CHANGE] = {"reason": changes.reason, "diff": diff, "hash": digest_of_changed, "changes": values}
    if spec.on_retry is not None and (next_changes := outlook(spec, changes)):
        found[ON_RETRY] = next_changes
    return {name: json.dumps(value, ensure_ascii=False) for name, value in found.items()}


# ---------------------------------------------------------------- rules


def _rule(spec: TrainJobSpec, category: str) -> Rule | None:
    return getattr(spec.on_retry, category.replace(" ", "_"), None) if spec.on_retry is not None else None


def _next(now: TrainJobSpec, rule: Rule, changes: Changes, node: str) -> Changes:
    """The changes after one more failure; `changes` itself if the rule can change nothing more.

    Args:
        now: The spec with `changes`.
        rule: The rule for the failure.
        changes: Changes until now.
        node: Node of the failure; empty if it is unknown.
    """
    update: dict[str, Any] = {}
    if isinstance(rule, MoreMemory):
        if memory := _more(memory_of(now.resources_per_node), rule):
            update["memory"] = memory
    elif isinstance(rule, ExcludeNodes):
        excluded = changes.excluded_nodes
        if node and node not in excluded and len(excluded) < rule.max_excluded_nodes:
            update["excluded_nodes"] = (*excluded, node)
    else:
        if rule.queue is not None and rule.queue != now.labels.get(QUEUE_LABEL):
            update["queue"] = rule.queue
        if rule.priority_class is not None and rule.priority_class != now.labels.get(PRIORITY_LABEL):
            update["priority_class"] = rule.priority_class
        if rule.min_nodes is not None and now.num_nodes is not None:
            fewer = max(rule.min_nodes, math.floor(now.num_nodes * rule.nodes_factor))
            if fewer < now.num_nodes:
                update["num_nodes"] = fewer
    return changes.model_copy(update=update) if update else changes


def _more(memory: str, rule: MoreMemory) -> str:
    """More memory than `memory`, rounded up to MiB (MB for a decimal quantity); empty if the bound is reached."""
    value, bound = quantity_value(memory) if memory else None, quantity_value(rule.max_memory)
    if value is None or bound is None or value >= bound:
        return ""
    unit = "Mi" if memory.endswith("i") else "M"
    more = f"{math.ceil(value * Fraction(str(rule.memory_factor)) / _value(f'1{unit}'))}{unit}"
    return canonical_quantity(more if _value(more) < bound else rule.max_memory)


def _value(quantity: str) -> Fraction:
    return quantity_value(quantity) or Fraction()


def _within_bounds(spec: TrainJobSpec, changes: Changes) -> Changes:
    """Changes that the rules of `spec` allow: an author may have changed the rules since."""
    rules = spec.on_retry
    if rules is None:
        return Changes()
    capacity = [rule for rule in (rules.quota, rules.scheduling) if rule is not None]
    smallest = [rule.min_nodes for rule in capacity if rule.min_nodes is not None]
    excluded = [rule.max_excluded_nodes for rule in (rules.node_lost, rules.hang) if rule is not None]
    update: dict[str, Any] = {
        "memory": min(changes.memory, rules.out_of_memory.max_memory, key=_value)
        if changes.memory and rules.out_of_memory is not None
        else None,
        "num_nodes": max(changes.num_nodes, min(smallest)) if changes.num_nodes and smallest else None,
        "queue": changes.queue if changes.queue in [rule.queue for rule in capacity] else None,
        "priority_class": changes.priority_class
        if changes.priority_class in [rule.priority_class for rule in capacity]
        else None,
        "excluded_nodes": changes.excluded_nodes[: max(excluded, default=0)],
    }
    return changes.model_copy(update=update)


# ---------------------------------------------------------------- the changed spec


def applied(spec: TrainJobSpec, changes: Changes) -> TrainJobSpec:
    """The spec with the changes: never with less memory or more nodes than its author wrote."""
    update: dict[str, Any] = {}
    resources = spec.resources_per_node
    if changes.memory is not None and resources is not None:
        kinds = {"requests": resources.requests, "limits": resources.limits}
        update["resources_per_node"] = Resources(**{kind: _raised(kinds[kind], changes.memory) for kind in kinds})
    if changes.num_nodes is not None and spec.num_nodes is not None:
        update["num_nodes"] = min(spec.num_nodes, changes.num_nodes)
    given = {QUEUE_LABEL: changes.queue, PRIORITY_LABEL: changes.priority_class}
    if labels := {name: value for name, value in given.items() if value is not None}:
        update["labels"] = spec.labels | labels
    if changes.excluded_nodes and spec.runtime is not None:
        runtime, own = spec.runtime.name, [pod_patch(spec.runtime.name, spec.pod)] if spec.pod is not None else []
        patches = _excluding([*spec.runtime_patches, *own], runtime, changes.excluded_nodes)
        update |= {"runtime_patches": patches, "pod": None}
    return spec.model_copy(update=update) if update else spec


def _raised(amounts: Mapping[str, str], memory: str) -> dict[str, str]:
    return {name: max(amount, memory, key=_value) if name == "memory" else amount for name, amount in amounts.items()}


def _excluding(patches: Sequence[Mapping[str, Any]], runtime: str, nodes: Sequence[str]) -> list[Any]:
    """Patches that keep the pods of all nodes away from `nodes`.

    Of several patches of one pod the last list of terms counts (a strategic merge replaces it), so terms of the author
    are extended. Terms are alternatives; the expressions of a term have to be true together.
    """
    elsewhere = {"key": _HOSTNAME, "operator": "NotIn", "values": list(nodes)}
    affinity = {"affinity": {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}}}}
    own = for_every_node(runtime, affinity, _MANAGER)
    jobs = {job["name"] for job in _jobs(own)}
    written = copy.deepcopy([*patches])
    extended = set()
    for job in (job for patch in written for job in _jobs(patch) if job.get("name") in jobs):
        pod = mapping(job, "template", "spec", "template", "spec")
        for term in mappings(pod, "affinity", "nodeAffinity", _REQUIRED, "nodeSelectorTerms"):
            extended.add(job["name"])
            cast("dict[str, Any]", term)["matchExpressions"] = [*(term.get("matchExpressions") or []), elsewhere]
    _jobs(own)[:] = [job for job in _jobs(own) if job["name"] not in extended]
    return [*written, *([own] if _jobs(own) else [])]


def _jobs(patch: Mapping[str, Any]) -> list[Any]:
    found = mapping(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs")
    return found if isinstance(found, list) else []
