"""The format of recordings in JSON: a line for each recorded object, so that a diff shows which one has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def by_line(recording: Mapping[str, Any]) -> str:
    """The recording as JSON. An entry of a list, or of a mapping to lists or to mappings, is a line."""
    parts = [f"{json.dumps(name)}: {_entries(value)}" for name, value in recording.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _entries(value: Any) -> str:
    if value and isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(each, sort_keys=True) for each in value) + "\n]"
    if value and isinstance(value, dict) and all(isinstance(each, list | dict) for each in value.values()):
        entries = (f"{json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in value.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    return json.dumps(value, sort_keys=True)
