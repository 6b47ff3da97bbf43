"""What a model registry adds to the document of a training: the champion for comparison, links."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainjob.document import with_comparison, with_lineage
from trainjob.errors import ModelNotFound
from trainjob.registry import Registry
from trainjob.registry.base import ModelVersion
from trainjob.registry.provenance import PREFIX


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
