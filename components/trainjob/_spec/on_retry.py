"""Rules for retries: what the next attempt changes after a failure of a category (`retry_changes`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from trainjob._spec.base import Part
from trainjob._spec.parts import Count, Resources
from trainjob._spec.quantities import quantity_value
from trainjob.errors import Problem
from trainjob.status import QUEUE_LABEL

PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Label of a job with the name of its WorkloadPriorityClass."""

_MEMORY = re.compile(r"\d+(\.\d+)?([EPTGMK]i|[EPTGMk])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _is_memory(value: str) -> str:
    if len(value) > 40 or not _MEMORY.fullmatch(value):
        raise ValueError(f"{value!r} is not an amount of memory such as 64Gi")
    return value


def _is_label(value: str) -> str:
    if not _LABEL_VALUE.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: up to 63 letters, digits, '-', '_', '.'")
    return value


def _is_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a bool")
    return value


_Factor = Annotated[float, BeforeValidator(_is_number)]
_Name = Annotated[str, AfterValidator(_is_label)]


class MoreMemory(Part):
    """More memory for each node after a node ran out of it. Memory of GPUs and ``/dev/shm`` are other resources."""

    max_memory: Annotated[str, AfterValidator(_is_memory)]
    """Largest memory of a node, as ``64Gi``."""

    memory_factor: Annotated[_Factor, Field(gt=1, le=10)] = 1.5
    """Factor by which each such failure multiplies the memory in `resources_per_node`, of requests and limits alike."""


class ExcludeNodes(Part):
    """No pod on the node where the job failed. Without effect on the local backend."""

    max_excluded_nodes: Annotated[Count, Field(le=100)]
    """How many nodes a key excludes at most. After that, attempts change nothing."""


class OtherCapacity(Part):
    """Another place in the queue, or fewer nodes, for a job that gets no capacity."""

    queue: _Name | None = None
    """LocalQueue of Kueue."""

    priority_class: _Name | None = None
    """WorkloadPriorityClass of Kueue."""

    min_nodes: Count | None = None
    """Smallest number of nodes. If it is set, `num_nodes` is multiplied by `nodes_factor` for each such failure."""

    nodes_factor: Annotated[_Factor, Field(gt=0, lt=1)] = 0.5
    """Factor for `min_nodes`. The result is rounded down."""


class OnRetry(Part):
    """What the next attempt of the same work changes, by the category of the failure.

    Attempts that follow a failure of another category keep the changes. A job that gets no capacity has the category
    ``quota`` if its `queue_timeout` expires, and ``scheduling`` if its `start_timeout` expires.
    """

    out_of_memory: MoreMemory | None = None
    """After a failure for lack of memory."""

    node_lost: ExcludeNodes | None = None
    """After the loss of a node."""

    hang: ExcludeNodes | None = None
    """After a hang of a rank."""

    quota: OtherCapacity | None = None
    """After a failure for lack of quota, or the end of `queue_timeout`."""

    scheduling: OtherCapacity | None = None
    """After a failure to schedule pods, or the end of `start_timeout`."""

    def problems(
        self, resources: Resources | None, num_nodes: int | None, labels: Mapping[str, str], incomplete: Collection[str]
    ) -> Iterator[Problem]:
        """Rules that cannot change the job.

        Args:
            resources: ``resources_per_node`` of the spec.
            num_nodes: ``num_nodes`` of the spec.
            labels: Labels of the spec.
            incomplete: Fields of the spec of which invalid parts were removed.
        """
        if self.out_of_memory is not None and "resources_per_node" not in incomplete:
            yield from _memory_problems(self.out_of_memory.max_memory, memory_of(resources))
        for name, rule in (("quota", self.quota), ("scheduling", self.scheduling)):
            if rule is not None:
                if "on_retry" not in incomplete:
                    yield from _effect_problems(f"on_retry.{name}", rule)
                yield from _label_problems(f"on_retry.{name}", rule, labels)
                if rule.min_nodes is not None and "num_nodes" not in incomplete:
                    yield from _nodes_problems(f"on_retry.{name}.min_nodes", rule.min_nodes, num_nodes)


def memory_of(resources: Resources | None) -> str:
    """The memory of a node, the larger one of request and limit; empty if none is set, or one has an exponent."""
    kinds = (resources.limits, resources.requests) if resources is not None else ()
    amounts = {kind["memory"]: quantity_value(kind["memory"]) for kind in kinds if "memory" in kind}
    values = {amount: value for amount, value in amounts.items() if value is not None}
    return max(values, key=values.__getitem__) if values and len(values) == len(amounts) else ""


def _memory_problems(largest: str, memory: str) -> Iterator[Problem]:
    value, bound = quantity_value(memory) if memory else None, quantity_value(largest)
    if value is None:
        yield Problem(
            "on_retry.out_of_memory", "needs the memory of a node", "set memory in resources_per_node, as 16Gi"
        )
    elif bound is not None and bound <= value:
        where = "on_retry.out_of_memory.max_memory"
        yield Problem(where, f"is {largest}, and a node has {memory} already", "write more, or raise it by hand")


def _effect_problems(where: str, rule: OtherCapacity) -> Iterator[Problem]:
    if rule.queue is None and rule.priority_class is None and rule.min_nodes is None:
        yield Problem(where, "changes nothing", "set queue, priority_class or min_nodes")
    if rule.min_nodes is None and "nodes_factor" in rule.model_fields_set:
        yield Problem(f"{where}.nodes_factor", "has no effect without min_nodes")


def _label_problems(where: str, rule: OtherCapacity, labels: Mapping[str, str]) -> Iterator[Problem]:
    for name, value, label in (
        ("queue", rule.queue, QUEUE_LABEL),
        ("priority_class", rule.priority_class, PRIORITY_LABEL),
    ):
        if value is not None and labels.get(label) == value:
            yield Problem(f"{where}.{name}", f"is {value}, which the job has already", f"name another {name}")


def _nodes_problems(where: str, smallest: int, num_nodes: int | None) -> Iterator[Problem]:
    if num_nodes is None:
        yield Problem(where, "needs num_nodes", "set num_nodes")
    elif smallest >= num_nodes:
        yield Problem(where, f"is {smallest}, and the job has {num_nodes} nodes", "write a smaller number")
