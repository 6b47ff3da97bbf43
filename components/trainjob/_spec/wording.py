"""What pydantic found wrong with a value, in the words of a person who writes specs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import timedelta

from pydantic_core import ErrorDetails

from trainjob._support.display import short
from trainjob._support.durations import EXAMPLES
from trainjob._support.masking import public
from trainjob.errors import Problem

_MUST_BE = {
    "bool": "true or false",
    "date": "a date",
    "dataclass": "a mapping",
    "dict": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "mapping": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "string": "text",
    "time_delta": f"a number of seconds, or a duration such as {EXAMPLES}",
    "tuple": "a list",
}
"""First part of the type of an error of pydantic (``int_parsing``) -> what the value must be."""

SCHEMA_KINDS: Mapping[str, str] = {
    "object": "a mapping",
    "array": "a list",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
"""Type in an OpenAPI schema -> what the value must be."""

_LIMIT = re.compile(r"(greater|less) than or equal to datetime\.timedelta\((days|seconds)=(\d+)\)")
_LITERAL = re.compile(r"0|-?[1-9][0-9]*|true|false")
_LONGEST = 40  # characters of a text that a message repeats


def in_words(detail: ErrorDetails) -> tuple[str, str]:
    """The message about an invalid value, and what to write in place of it, empty if the message says it."""
    kind, value = detail["type"], detail["input"]
    context: Mapping[str, object] = detail.get("ctx") or {}
    if kind == "union_tag_invalid":
        return f"is {context.get('tag')!r}", f"use one of: {_listed(context.get('expected_tags'))}"
    if kind == "union_tag_not_found":
        return "is missing" if isinstance(value, Mapping) else "must be a mapping", ""
    if kind in ("literal_error", "enum"):
        return f"must be {context.get('expected')}", ""
    named = _MUST_BE.get(re.sub(r"_(type|parsing|parsing_size|from_float|exact)$", "", kind), "")
    if kind == "is_instance_of" or named:
        return must_be(named or "a mapping", value)
    message = _LIMIT.sub(_limit, detail["msg"].removeprefix("Value error, "))
    return re.sub(r"^(Input|Value|String|List|Dictionary|Tuple) should ", "must ", message), ""


def must_be(named: str, value: object) -> tuple[str, str]:
    """The message about a value that must be `named` (``a whole number``), and what to write in place of it."""
    if named == "a list" and isinstance(value, str):
        words = json.dumps(_words(public(value)), ensure_ascii=False)
        return "must be a list, not text", f"write a list: {words}"
    repeats = named in (_MUST_BE["int"], _MUST_BE["float"], _MUST_BE["bool"])  # of others, the value may be a secret
    write = f"write {value}" if repeats and isinstance(value, str) and _LITERAL.fullmatch(value) else ""
    return f"must be {named}, not {_shown(value, repeats=repeats)}", write


def text_problem(path: str, value: object) -> Problem:
    """The problem of a value that must be text, with the text to write."""
    if value is None:
        return Problem(path, "must be text, not null", "write '' for an empty text")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    written = f"write '{text}'" if isinstance(value, bool | int | float) else ""
    return Problem(path, f"must be text, not {type(value).__name__}", written)


def _limit(found: re.Match[str]) -> str:
    """``at least 1s``: pydantic writes a limit as Python does."""
    return f"at {'least' if found[1] == 'greater' else 'most'} {short(timedelta(**{found[2]: int(found[3])}))}"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _listed(tags: object) -> str:
    return ", ".join(re.findall(r"'([^']+)'", str(tags)))


def _shown(value: object, *, repeats: bool) -> str:
    if isinstance(value, str):
        return repr(value) if repeats and 0 < len(value) <= _LONGEST else "text"
    if isinstance(value, bool | int | float | None):
        return str(value)
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else f"a value of type {type(value).__name__}"
