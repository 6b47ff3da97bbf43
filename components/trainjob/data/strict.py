"""Strict JSON. Readers differ in what they make of the rest, such as which one of two equal keys they take."""

from __future__ import annotations

import json
from typing import Any


def loads(data: bytes) -> Any:
    """Read it.

    Raises:
        ValueError: It is no JSON, not in UTF-8, or has a key twice, NaN, an infinity or half a character.
        RecursionError: It is nested too deep.
    """
    value = json.loads(data.decode(), object_pairs_hook=_unique, parse_int=_integer)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # finds NaN, infinities and lone surrogates
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
