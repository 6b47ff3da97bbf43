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

_LIMIT = re.compile(r"(greater|less) than or equal to datetime\.timedelta\((days|seconds)=(\d+)\)")
_LONGEST = 40  # characters of a text that a message repeats


def in_words(detail: ErrorDetails) -> tuple[str, str]:
    """The message about an invalid value, and what to write in place of it, empty if the message says it."""
    kind, value = detail["type"], detail["input"]
    context: Mapping[str, object] = detail.get("ctx") or {}
    if kind == "list_type" and isinstance(value, str):
        return "must be a list, not text", f"write a list: {json.dumps(_words(public(value)), ensure_ascii=False)}"
    if kind == "union_tag_invalid":
        return f"is {context.get('tag')!r}", f"use one of: {_listed(context.get('expected_tags'))}"
    if kind == "union_tag_not_found":
        return "is missing" if isinstance(value, Mapping) else "must be a mapping", ""
    if kind in ("literal_error", "enum"):
        return f"must be {context.get('expected')}", ""
    named = _MUST_BE.get(re.sub(r"_(type|parsing|parsing_size|from_float|exact)$", "", kind), "")
    if kind == "is_instance_of" or named:
        repeats = named in ("a whole number", "a number", "true or false")  # of others, the value may be a secret
        return f"must be {named or 'a mapping'}, not {_shown(value, repeats=repeats)}", ""
    message = _LIMIT.sub(_limit, detail["msg"].removeprefix("Value error, "))
    return re.sub(r"^(Input|Value|String|List|Dictionary|Tuple) should ", "must ", message), ""


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
