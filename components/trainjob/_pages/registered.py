"""What a model registry adds to the document of a training: the champion for comparison, links."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from trainjob._pages.documents.additions import with_comparison, with_lineage
from trainjob._support.display import short_text
from trainjob.errors import ModelNotFound, TrainJobError
from trainjob.registry import Registry, connect
from trainjob.registry.base import ModelVersion, check_alias, check_name
from trainjob.registry.provenance import PREFIX

_SECONDS = 60.0  # age at which the registry is read again


class Champion:
    """Adds the champion of a model to documents. The registry is read at most once per minute for each training.

    Args:
        model: ``NAME`` or ``NAME@ALIAS``; the default alias is ``champion``.
        registry: Address of the registry; by default that of the settings (``TRAINJOB_REGISTRY``).

    Raises:
        ConfigurationError: No registry is set, or the name or alias is invalid.
        RegistryUnavailable: The registry cannot be reached.
    """

    def __init__(self, model: str, registry: str | None = None) -> None:
        name, _, alias = model.partition("@")
        self._model, self._alias = check_name(name), check_alias(alias or "champion")
        self._registry = connect(registry)
        self._known: dict[str, tuple[float, dict[str, Any]]] = {}

    def add(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """The document with the champion, as `with_registry`; with a note if the registry cannot be read. Blocks."""
        read_at, parts = self._known.get(document["uid"], (-math.inf, {}))
        if time.monotonic() - read_at > _SECONDS:
            try:
                made = with_registry({**document, "compare": []}, self._registry, self._model, self._alias)
                parts = {"compare": made["compare"], "lineage": made["lineage"]}
            except TrainJobError as error:
                return {**document, "notes": [*document["notes"], f"The registry cannot be read: {short_text(error)}"]}
            self._known[document["uid"]] = time.monotonic(), parts
        lineage = {**document["lineage"], "links": [*document["lineage"]["links"], *parts["lineage"]["links"]]}
        if parts["lineage"]["registered"] is not None:
            lineage["registered"] = parts["lineage"]["registered"]
        return {**document, "compare": [*document["compare"], *parts["compare"]], "lineage": lineage}


def with_registry(
    document: Mapping[str, Any], registry: Registry, model: str, alias: str = "champion"
) -> dict[str, Any]:
    """The document with the version that holds `alias` for comparison, and with links to the registered version.

    Args:
        document: Of a training.
        registry: The registry.
        model: Name of the model.
        alias: Alias of the version to compare with; without such a version the document stays without it.

    Raises:
        RegistryUnavailable: The registry cannot be reached.
        ConfigurationError: The registry refuses the credentials or the name.
    """
    made = dict(document)
    uid = document["uid"]
    registered = next((each for each in registry.list(model) if uid and _uid(each) == uid), None)
    if registered is not None:
        outputs = {"uri": registered.uri, "digest": registered.digest, "name": model, "version": registered.version}
        made = with_lineage(made, [outputs | {"promoted": alias in registered.aliases}], registry.pages(registered))
    try:
        champion = registry.resolve(model, alias)
    except ModelNotFound:
        return made
    if registered is not None and champion.version == registered.version:
        return made
    history = {name: [list(point) for point in points] for name, points in registry.history(champion).items()}
    other = {"name": f"{model} {champion.version}", "metrics": dict(champion.metrics), "history": history}
    return with_comparison(made, "champion", other)


def _uid(version: ModelVersion) -> str:
    """UID of the job that trained the version, from its provenance; empty if it is unknown."""
    try:
        job = json.loads(version.tags.get(f"{PREFIX}trainjob", ""))
    except ValueError:
        return ""
    return str(job.get("uid") or "") if isinstance(job, dict) else ""
