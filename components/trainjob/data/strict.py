"""Strict JSON. Readers differ in what they make of the rest, such as which one of two equal keys they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainjob.errors import ConfigurationError


def loads(data: bytes) -> Any:
    """Read it.

    Raises:
        ValueError: It is no JSON, not in UTF-8, or has a key twice, NaN, an infinity or half a character.
        RecursionError: It is nested too deep.
    """
    value = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # finds NaN, infinities and lone surrogates
    return value


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that is the value of an option of a command, or is in the file that ``@path`` names.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        value = json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{option} is neither JSON nor @file with JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option} has to be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise ValueError(f"{name!a} is there twice")
        value[name] = each
    return value


def _integer(text: str) -> int | float:
    return int(text) if text != "-0" else -0.0  # no natural number, as the safetensors library has it
