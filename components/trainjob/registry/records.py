"""Convert versions to and from the JSON of a Kubeflow Model Registry. Pure functions."""

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
_LONGEST_TAG = 250  # characters; the column has 255


@dataclass(frozen=True)
class Found:
    """A version, as stored by the server.

    Attributes:
        raw: Its JSON.
        version: The parsed version; without location and aliases, which the JSON does not contain.
        claims: Its claims, by alias.
    """

    raw: Json
    version: ModelVersion
    claims: Mapping[str, Claim]

    @property
    def archived(self) -> bool:
        """Whether a person has archived the version."""
        return bool(self.raw.get("state") == "ARCHIVED")


def prefix(name: str) -> str:
    """Prefix of the external IDs of a model's exports; contains no wildcard of SQL's ``LIKE``."""
    return f"trainjob-{hashlib.sha256(name.encode()).hexdigest()[:16]}-"


def external_id(name: str, export_id: str) -> str:
    """The external ID of an export, used for the version and, in another table, for its artifact."""
    return f"{prefix(name)}{hashlib.sha256(export_id.encode()).hexdigest()[:32]}"


def properties(export_id: str, digest: str, metrics: Mapping[str, float], tags: Mapping[str, str]) -> Json:
    """Make the custom properties of a new version.

    Raises:
        ConfigurationError: The database cannot store the name of a tag.
    """
    for tag in tags:
        if not 0 < len(tag) <= _LONGEST_TAG or "\0" in tag:
            raise ConfigurationError(
                f"{tag!a} is not a valid name of a tag: use 1 to {_LONGEST_TAG} characters, without NUL"
            )
    kept = {tag: value for tag, value in tags.items() if not tag.startswith(ALIAS)}
    made = {tag: text(value) for tag, value in {**kept, EXPORT_ID: export_id, DIGEST: digest}.items()}
    return made | {f"{METRIC}{metric}": double(value) for metric, value in metrics.items()}


def parse(name: str, raw: Json) -> Found:
    """Parse a version of model ``name``. Doubles that other programs recorded are metrics too."""
    metrics: dict[str, float] = {}
    tags: dict[str, str] = {}
    claimed: dict[str, Claim] = {}
    for each, value in (raw.get("customProperties") or {}).items():
        shown = plain(value)
        if each.startswith(ALIAS):
            claimed[each.removeprefix(ALIAS)] = Claim.parse(shown)
        elif each.startswith(METRIC):
            try:
                metrics[each.removeprefix(METRIC)] = float(shown)
            except ValueError:
                continue  # edited by hand
        elif "double_value" in value:
            metrics.setdefault(each, float(shown))
        else:
            tags[each] = shown
    created = float(raw.get("createTimeSinceEpoch") or 0) / 1000
    return Found(raw, ModelVersion(name, raw["name"], "", tags.get(DIGEST, ""), metrics, (), tags, created), claimed)


def holders(every: Sequence[Found]) -> dict[str, ModelVersion]:
    """The holder of each alias, from versions in registration order. Archived versions hold no alias."""
    live = [found for found in every if not found.archived]
    held = {}
    for alias in {alias for found in live for alias in found.claims}:
        held[alias] = alias_claims.holder(
            (found.version, found.claims[alias]) for found in live if alias in found.claims
        )
    return {alias: version for alias, version in held.items() if version is not None}


def aliases(held: Mapping[str, ModelVersion], version: ModelVersion) -> tuple[str, ...]:
    """The aliases of a version, from the result of `holders`."""
    return tuple(sorted(alias for alias, holder in held.items() if holder.version == version.version))


def usable(artifact: Mapping[str, Any] | None) -> bool:
    """Whether an artifact can be downloaded. Other clients leave its state ``UNKNOWN``."""
    return artifact is not None and artifact.get("state") not in _UNUSABLE


def text(value: str) -> Json:
    """A text as a custom property. The server does not accept NUL in any text."""
    return {"metadataType": "MetadataStringValue", "string_value": str(value).replace("\0", "\ufffd")}


def double(value: float) -> Json:
    """A number as a custom property; NaN and infinity, which JSON does not have, as text."""
    return {"metadataType": "MetadataDoubleValue", "double_value": value} if math.isfinite(value) else text(repr(value))


def plain(value: Mapping[str, Any]) -> str:
    """The text of a custom property."""
    for kind in ("string_value", "int_value", "struct_value", "proto_value"):
        if kind in value:
            return str(value[kind])
    if "double_value" in value:
        return repr(float(value["double_value"]))
    return str(value.get("bool_value", "")).lower()
