"""Gives values of a run the type of their place: text in a spec, numbers and bools in pods.

It is one rule for the Airflow provider and the components.

The author of a workflow cannot write ``'3'`` where a task, a parameter or a template gives 3. Literals stay as they
are: `trainjob._spec.checks.text_problem` names the text to write.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

from trainjob._spec.schema import POD, properties, schema

Location = tuple[str | int, ...]

EXACT = 2**53
"""Largest whole number up to which a float has every whole number (IEEE 754 binary64)."""

_NAMED = ("env", "inputs", "outputs", "labels", "annotations", "nodeselector", "matchlabels")
"""Mappings of names to text, here and below without ``_`` and capitals: fields of a spec and of Kubernetes objects."""
_WORDS = ("command", "args", "packagestoinstall", "pipindexurls")
_SINGLE = ("runtime", "image", "checkpoints", "name", "value", "key", "storageuri", "serviceaccountname", "claimname")
_JSON = ("func_args",)
_REFERENCES = ({"valueFrom"}, {"value_from"})


def as_text(value: Any) -> Any:
    """A value as text.

    None becomes an empty text, a bool ``true`` or ``false``, a date ISO 8601, a list or mapping JSON. A whole number is
    written without ``.0`` if no digit depends on it: KFP passes all numbers as floats. Other objects stay as they are.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "dtype"):  # a scalar of NumPy
        value = value.item()
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        value = int(value)
    if isinstance(value, bool | Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=as_text)
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, int | float | Decimal | UUID | os.PathLike) else value


def with_texts(value: Any, is_given: Callable[[Location], bool], at: Location = (), *, due: bool = False) -> Any:
    """`value` with text where a spec, or an object of Kubernetes inside it, has text; in `pod`, also the reverse.

    Args:
        value: Fields of a spec, a complete TrainJob object, or a part of them.
        is_given: Whether the run gives the part at a location. Parts of a given part are given, too.
        at: Location of the value.
        due: Whether text is due there.
    """
    if due and is_given(at) and not _is_reference(value, at):
        return as_text(value)
    if isinstance(value, Mapping):
        named = bool(at) and _plain(at[-1]) in _NAMED
        return {
            name: part
            if name in _JSON
            else with_texts(part, is_given, (*at, name), due=named or _is_single(name, part))
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        words = bool(at) and _plain(at[-1]) in _WORDS
        return [with_texts(part, is_given, (*at, i), due=words) for i, part in enumerate(value)]
    if isinstance(value, str) and "pod" in at[:1] and is_given(at):
        return _of_text(value, _types().get(_plain(at[-1]), ""))
    return value


def _of_text(text: str, kind: str) -> Any:
    """The number or bool that a template has written as text, where a pod has one."""
    if kind == "integer" and re.fullmatch(r"-?\d{1,19}", text):
        return int(text)
    return text.lower() == "true" if kind == "boolean" and text.lower() in ("true", "false") else text


@cache
def _types() -> dict[str, str]:
    """Name of a field of a pod -> its type, by TrainJob's schema."""
    found: dict[str, str] = {}
    level = [schema(*POD)]
    while level:
        fields = [pair for each in level for pair in properties(each)]
        found |= {_plain(name): str(part.get("type", "")) for name, part in fields}
        level = [part for _, part in fields]
    return found


def _plain(name: object) -> str:
    return str(name).replace("_", "").lower()


def _is_single(name: object, value: object) -> bool:
    """Whether text is due: ``runtime`` can be a mapping, and an unset field is not an empty text."""
    is_set = value is not None or name == "value"
    return is_set and _plain(name) in _SINGLE and not isinstance(value, Mapping | list | tuple)


def _is_reference(value: object, at: Location) -> bool:
    """Whether a value in an env is a reference, such as ``{"valueFrom": {"secretKeyRef": …}}``."""
    return isinstance(value, Mapping) and len(at) > 1 and at[-2] == "env" and set(value) in _REFERENCES
