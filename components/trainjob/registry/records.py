"""What a Kubeflow Model Registry keeps of a version, and what it says: pure functions over its JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainjob.errors import ConfigurationError
from trainjob.registry import alias_claims
from trainjob.registry.alias_claims import Claim
from trainjob.registry.base import ModelVersion

Json = dict[str, Any]

EXPORT_ID, DIGEST, METRIC, ALIAS = "trainjob.export_id", "trainjob.digest", "trainjob.metric.", "alias."
_UNUSABLE = frozenset({"PENDING", "MARKED_FOR_DELETION", "DELETED", "ABANDONED"})
_LONGEST_TAG = 250  # characters; the database has 255


@dataclass(frozen=True)
class Found:
    """A version as the server has it.

    Attributes:
        raw: Its JSON.
        version: What it says; without location and aliases, which are not in it.
        claims: Its claims, by alias.
    """

    raw: Json
    version: ModelVersion
    claims: Mapping[str, Claim]

    @property
    def archived(self) -> bool:
        """Whether a person has put it away."""
        return bool(self.raw.get("state") == "ARCHIVED")


def prefix(name: str) -> str:
    """How the external ids of a model's exports begin. No wildcard of SQL's ``LIKE`` is in it."""
    return f"trainjob-{hashlib.sha256(name.encode()).hexdigest()[:16]}-"


def external_id(name: str, export_id: str) -> str:
    """The external id of an export: for versions, and for artifacts, which are in another table."""
    return f"{prefix(name)}{hashlib.sha256(export_id.encode()).hexdigest()[:32]}"


def properties(export_id: str, digest: str, metrics: Mapping[str, float], tags: Mapping[str, str]) -> Json:
    """Custom properties of a new version.

    Raises:
        ConfigurationError: A tag has a name that the database could not hold.
    """
    for tag in tags:
        if not 0 < len(tag) <= _LONGEST_TAG or "\0" in tag:
            raise ConfigurationError(f"{tag!a} cannot be the name of a tag: use 1 to {_LONGEST_TAG} characters")
    kept = {tag: value for tag, value in tags.items() if not tag.startswith(ALIAS)}
    made = {tag: text(value) for tag, value in {**kept, EXPORT_ID: export_id, DIGEST: digest}.items()}
    return made | {f"{METRIC}{metric}": double(value) for metric, value in metrics.items()}


def read(name: str, raw: Json) -> Found:
    """What a version of model ``name`` says. Numbers that others recorded as doubles are metrics too."""
    metrics: dict[str, float] = {}
    tags: dict[str, str] = {}
    claimed: dict[str, Claim] = {}
    for each, value in (raw.get("customProperties") or {}).items():
        said = plain(value)
        if each.startswith(ALIAS):
            claimed[each.removeprefix(ALIAS)] = Claim.parse(said)
        elif each.startswith(METRIC):
            try:
                metrics[each.removeprefix(METRIC)] = float(said)
            except ValueError:
                continue  # edited by hand
        elif "double_value" in value:
            metrics.setdefault(each, float(said))
        else:
            tags[each] = said
    created = float(raw.get("createTimeSinceEpoch") or 0) / 1000
    return Found(raw, ModelVersion(name, raw["name"], "", tags.get(DIGEST, ""), metrics, (), tags, created), claimed)


def holders(every: Sequence[Found]) -> dict[str, ModelVersion]:
    """Who holds which alias, of versions in the order of registration. Archived ones hold none."""
    live = [found for found in every if not found.archived]
    held = {}
    for alias in {alias for found in live for alias in found.claims}:
        held[alias] = alias_claims.holder(
            (found.version, found.claims[alias]) for found in live if alias in found.claims
        )
    return {alias: version for alias, version in held.items() if version is not None}


def aliases(held: Mapping[str, ModelVersion], version: ModelVersion) -> tuple[str, ...]:
    """The aliases that a version holds, of what `holders` gave."""
    return tuple(sorted(alias for alias, holder in held.items() if holder.version == version.version))


def usable(artifact: Mapping[str, Any] | None) -> bool:
    """Whether an artifact can be fetched. Other clients leave the state ``UNKNOWN``."""
    return artifact is not None and artifact.get("state") not in _UNUSABLE


def text(value: str) -> Json:
    """A custom property of text. The server takes NUL in no text at all."""
    return {"metadataType": "MetadataStringValue", "string_value": str(value).replace("\0", "\ufffd")}


def double(value: float) -> Json:
    """A custom property of a number; NaN and infinity, which JSON has not, as text."""
    return {"metadataType": "MetadataDoubleValue", "double_value": value} if math.isfinite(value) else text(repr(value))


def plain(value: Mapping[str, Any]) -> str:
    """A custom property as text."""
    for kind in ("string_value", "int_value", "struct_value", "proto_value"):
        if kind in value:
            return str(value[kind])
    if "double_value" in value:
        return repr(float(value["double_value"]))
    return str(value.get("bool_value", "")).lower()
