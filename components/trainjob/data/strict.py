"""Strict JSON. Parsers differ for anything else, such as which of two equal keys they use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainjob.errors import ConfigurationError


def loads(data: bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: The data is not JSON, not UTF-8, or has a key twice, NaN, an infinity or a lone surrogate.
        RecursionError: The data is nested too deep.
    """
    value = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # finds NaN, infinities and lone surrogates
    return value


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the value of a command's option: a JSON object, or ``@path`` of a file with one.

    Raises:
        ConfigurationError: The value is not a JSON object.
    """
    try:
        value = json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{option} is neither JSON nor @file with JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option} must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise ValueError(f"{name!a} occurs twice")
        value[name] = each
    return value


def _integer(text: str) -> int | float:
    return int(text) if text != "-0" else -0.0  # a float, as in the safetensors library
