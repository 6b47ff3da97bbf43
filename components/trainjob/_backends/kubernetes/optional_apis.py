"""APIs that a cluster may lack and that only pages use: the metrics API, and Kueue's visibility API.

They are read at most every few seconds, for one job. Without permission, without the API or without an answer in time
the result is None, and nothing is asked again for a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import anyio

from trainjob._backends.base import Usage
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import ApiError
from trainjob._backends.kubernetes.pods import JOBSET_NAME
from trainjob._support.kube_objects import mapping, mappings, rank_of
from trainjob.job import JobRef

_SECONDS = 1.0  # a page does not wait longer for what it can do without
_PENDING = 1000  # workloads of a queue, in their order
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal("1e3"),
    "M": Decimal("1e6"),
    "G": Decimal("1e9"),
    "T": Decimal("1e12"),
    **{f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)},
}


class OptionalApis:
    """Reads the optional APIs of one cluster."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def usage(self, ref: JobRef) -> list[Usage] | None:
        """CPU and memory of the job's pods, from metrics.k8s.io."""
        path = f"/apis/metrics.k8s.io/v1beta1/namespaces/{ref.namespace}/pods"
        found = await self._get(path, {"labelSelector": f"{JOBSET_NAME}={ref.name}"})
        # Empty for the first seconds of a pod, until it was measured twice.
        return None if found is None else [_usage(item) for item in mappings(found, "items")] or None

    async def queue_position(self, ref: JobRef, queue: str) -> int | None:
        """Number of workloads before the job in its LocalQueue, from visibility.kueue.x-k8s.io."""
        for version in _KUEUE_VERSIONS:
            path = f"/apis/visibility.kueue.x-k8s.io/{version}/namespaces/{ref.namespace}/localqueues/{queue}"
            found = await self._get(f"{path}/pendingworkloads", {"limit": str(_PENDING)})
            for item in mappings(found, "items") if found is not None else ():
                owners = mappings(item, "metadata", "ownerReferences")
                if any(owner.get("uid") == ref.uid for owner in owners):
                    position = item.get("positionInLocalQueue")
                    return position if isinstance(position, int) else None
            if found is not None:
                return None
        return None

    async def _get(self, path: str, params: Mapping[str, str]) -> dict[str, Any] | None:
        if self._client.lacks(path):
            return None
        try:
            with anyio.fail_after(_SECONDS):
                return await self._client.send(Request("GET", path, params))
        except (ApiError, TimeoutError):
            self._client.absent(path)
            return None


def _usage(item: Mapping[str, Any]) -> Usage:
    cpu = sum(amount(mapping(each, "usage").get("cpu")) for each in mappings(item, "containers"))
    memory = sum(amount(mapping(each, "usage").get("memory")) for each in mappings(item, "containers"))
    return Usage(rank_of(item), cpu, int(memory))  # the API copies the labels of the pods


def amount(quantity: object) -> float:
    """A quantity of Kubernetes as a number: ``250m`` is 0.25, ``1Ki`` is 1024; 0 if it is malformed."""
    text = str(quantity or "0")
    digits = text.rstrip("".join({letter for suffix in _SUFFIXES for letter in suffix}))
    try:
        return float(Decimal(digits) * _SUFFIXES[text[len(digits) :]])
    except (InvalidOperation, KeyError):
        return 0.0
