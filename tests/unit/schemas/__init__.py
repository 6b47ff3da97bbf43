"""Schemas of a TrainJob's spec from API servers with Trainer 2.1.0, 2.2.1 and 2.3.0, reduced to their fields.

`tests/cluster/test_trainer_versions.py` compares them with the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KEPT = ("type", "items", "additionalProperties", "x-kubernetes-preserve-unknown-fields")


def recorded(release: str) -> dict[str, Any]:
    """The schema of one release, e.g. ``2.1``."""
    schema: dict[str, Any] = json.loads((Path(__file__).parent / f"trainjob-spec-{release}.json").read_text())
    return schema


def cut(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without descriptions, defaults and limits."""
    kept = {name: cut(part) if isinstance(part, Mapping) else part for name, part in schema.items() if name in _KEPT}
    fields = {name: cut(part) for name, part in schema.get("properties", {}).items()}
    return {**kept, **({"properties": fields} if fields else {})}
