"""The schema of a TrainJob's spec, as Trainer defines it: unknown, misplaced, missing and malformed fields.

`trainjob_crd.json` is merged from the CustomResourceDefinitions of Trainer 2.1 to 2.3 (``manifests/base/crds`` of
github.com/kubeflow/trainer), without descriptions: a field passes if any of these releases has it. ``TRAINJOB_CRD``
names another file, the output of ``kubectl get crd trainjobs.trainer.kubeflow.org -o json``. What a schema cannot say
(rules in CEL, webhooks, the checks of pods) is in `checks` and `pods`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainjob._spec.quantities import A_QUANTITY, quantity_to_write, quantity_value
from trainjob._spec.wording import SCHEMA_KINDS, must_be, text_problem
from trainjob._support.foreign import LARGE, Unreadable, mapping_of
from trainjob._support.kube_objects import mapping, mappings
from trainjob.errors import ConfigurationError, Problem
from trainjob.job import API_VERSION
from trainjob.settings import schema_file

Schema = Mapping[str, Any]
"""An OpenAPI v3 schema."""

_DATA = Path(__file__).with_name("trainjob_crd.json")
_VARIABLE = "TRAINJOB_CRD"
POD = ("runtimePatches", "trainingRuntimeSpec", "template", "spec", "replicatedJobs", "template", "spec", "template")
"""Path of the pod template in the schema."""

_MOST_LISTED = 12
_EXPLAINED = 200  # problems before which similar names are searched: that takes up to 1 ms
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (Mapping,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def schema(*path: str) -> Schema:
    """The schema of ``spec``, or of what is at `path` below it, in which a list stands for its items.

    Raises:
        ConfigurationError: The file of ``TRAINJOB_CRD`` is not a CustomResourceDefinition of TrainJobs.
    """
    found = _spec_schema(schema_file())
    for name in path:
        part = mapping(found, "properties", name)
        found = mapping(part, "items") or part
    return found


@lru_cache(maxsize=2)
def _spec_schema(file: str) -> Schema:
    if not file:
        return mapping_of(_DATA.read_bytes(), _DATA.name, LARGE)
    try:
        crd = mapping_of(Path(file).read_bytes(), file, LARGE)
    except OSError as error:
        raise ConfigurationError(f"{_VARIABLE}: {file} cannot be read: {error.strerror}") from None
    except Unreadable as error:
        raise ConfigurationError(f"{_VARIABLE}: {error}") from None
    version = API_VERSION.rpartition("/")[2]
    found = [each for each in mappings(crd, "spec", "versions") if each.get("name") == version]
    spec = mapping(found[0] if found else {}, "schema", "openAPIV3Schema", "properties", "spec")
    if not spec:
        raise ConfigurationError(
            f"{_VARIABLE}: {file} has no schema of {API_VERSION}; write it by "
            "`kubectl get crd trainjobs.trainer.kubeflow.org -o json`"
        )
    return spec


def read(value: Any, expected: Schema, where: str, found: list[Problem], *, exact: bool = False) -> Any:
    """A value as it is sent: with the API's names of fields, without unset ones.

    Args:
        value: A JSON value.
        expected: Its schema.
        where: Its path in messages.
        found: Problems are added to it; a value of another type is empty or None in the result.
        exact: Whether names are those of the API alone. Otherwise ``mount_path`` is read as ``mountPath``, and a Secret
            may be given by its name.
    """
    kind = expected.get("type", "")
    if not exact:
        value = _long_form(value, expected)
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)  # KFP passes each number as a float
    if expected.get("x-kubernetes-int-or-string"):
        return _int_or_string(value, expected, where, found)
    if kind == "string" and not isinstance(value, str):
        found.append(text_problem(where, value))
        return ""
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        found.append(Problem(where, *must_be(SCHEMA_KINDS[kind], value)))
        return None
    if kind == "object":
        return _fields(value, expected, where, found, exact=exact)
    if kind == "array":
        return _items(value, expected, where, found, exact=exact)
    if isinstance(value, str):
        _limits(len(value), expected, "Length", where, "characters", found)
    elif isinstance(value, int | float):
        bits = {"int32": 31, "int64": 63}.get(expected.get("format", ""), 63)
        _limits(value, {"maximum": (1 << bits) - 1, "minimum": -1 << bits, **expected}, "imum", where, "", found)
    return value


def _int_or_string(value: Any, expected: Schema, where: str, found: list[Problem]) -> Any:
    """A quantity, if there is a pattern; else a number or a text."""
    text = "" if isinstance(value, bool) or not isinstance(value, int | float | str) else str(value)
    if "pattern" in expected and quantity_value(text) is None:
        shown = f"{text!r} is not {A_QUANTITY}" if text else must_be(A_QUANTITY, value)[0]
        found.append(Problem(where, shown, quantity_to_write(text)))
    elif not text:
        found.append(Problem(where, *must_be("a number or text", value)))
    return value


def _items(value: Sequence[Any], expected: Schema, where: str, found: list[Problem], *, exact: bool) -> list[Any]:
    ends = [_entry(each, i) for i, each in enumerate(value)]
    items = [
        read(each, expected["items"], where + end, found, exact=exact) for end, each in zip(ends, value, strict=True)
    ]
    _limits(len(items), expected, "Items", where, "entries", found)
    seen: set[tuple[str, ...]] = set()
    for i, item in enumerate(items):
        key = tuple(str(mapping(item).get(name)) for name in expected.get("x-kubernetes-list-map-keys", ()))
        if key and key in seen:
            found.append(Problem(f"{where}[{i}]", f"{', '.join(key)} is given twice"))
        seen.add(key)
    return items


def _entry(value: object, index: int) -> str:
    """The end of an entry's path: variables of an environment have names."""
    fields = mapping(value)
    named = isinstance(fields.get("name"), str) and ("value" in fields or "valueFrom" in fields)
    return f".{fields['name']}" if named else f"[{index}]"


def env_value(value: Any) -> dict[str, Any]:
    """The value of an environment variable as in the API; a source may be given without ``valueFrom`` around it."""
    if not isinstance(value, Mapping):
        return {"value": value}
    source = next(iter(value.values())) if set(value) in ({"valueFrom"}, {"value_from"}) else value
    return {"valueFrom": source}


def _long_form(value: Any, expected: Schema) -> Any:
    """As in the API: a reference that is given by its name alone, an environment that is a mapping."""
    if isinstance(value, str) and set(mapping(expected, "properties")) == {"name"}:
        return {"name": value}
    if isinstance(value, Mapping) and "valueFrom" in mapping(expected, "items", "properties"):
        return [{"name": name, **env_value(each)} for name, each in value.items()]
    return value


def _limits(size: float, expected: Schema, kind: str, where: str, unit: str, found: list[Problem]) -> None:
    if size > expected.get(f"max{kind}", size):
        limit = expected[f"max{kind}"]
        found.append(Problem(where, f"has {size:,} {unit}; at most {limit:,}" if unit else f"must be at most {limit}"))
    elif size < expected.get(f"min{kind}", size):
        limit = expected[f"min{kind}"]
        found.append(
            Problem(where, f"has {size:,} {unit}; at least {limit:,}" if unit else f"must be at least {limit}")
        )


def _fields(
    value: Mapping[Any, Any], expected: Schema, where: str, found: list[Problem], *, exact: bool
) -> dict[str, Any]:
    fields, others = expected.get("properties"), expected.get("additionalProperties")
    sent: dict[str, Any] = {}
    given: dict[str, str] = {}
    missing = set(expected.get("required", ()))
    for name, part in ((str(name), part) for name, part in value.items()):
        at = f"{where}.{name}" if where else name
        if fields is None:
            sent[name] = part if others is None else read(part, others, at, found, exact=exact)
            continue
        known = name if name in fields or exact else camel(name)
        if part is None and (known in missing or known not in fields):
            continue  # as if it was left out
        if known not in fields:
            similar = near(name, [*fields], exact=exact) if len(found) < _EXPLAINED else ""
            missing.discard(camel(similar))
            hint = f"did you mean {similar}?" if similar else _elsewhere(known) or _fields_are(fields, found)
            found.append(Problem(at, "no such field", hint))
        elif known in given:
            found.append(Problem(at, "is given twice", f"remove {given[known]} or {name}"))
        else:
            missing.discard(known)
            given[known] = name
            if part is not None and not (not exact and _says_nothing(part, fields[known])):
                sent[known] = read(part, fields[known], at, found, exact=exact)
    found += [Problem(f"{where}.{name}" if where else name, "is missing") for name in sorted(missing)]
    return sent


def _says_nothing(value: object, expected: Schema) -> bool:
    """Whether a part is an empty list or mapping of names, as models of the ``kubernetes`` package have them."""
    return not value and isinstance(value, list | tuple | Mapping) and "properties" not in expected


def camel(name: str) -> str:
    """``mountPath`` for ``mount_path``."""
    first, *others = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def near(name: str, names: list[str], *, exact: bool = False) -> str:
    """The most similar of several names of fields; empty if none is similar."""
    plain = {each.lower(): each for each in reversed(names)}
    close = difflib.get_close_matches((name if exact else camel(name)).lower()[:100], plain, n=1, cutoff=0.75)
    return plain[close[0]] if close else ""


def _elsewhere(name: str) -> str:
    """Where in a spec a field of this name stands; empty if there are no such places, or more than two."""
    pod = f"spec.{'.'.join(POD)}.spec."
    places = [each.replace(pod, "a pod's ") for each in _places(schema_file()).get(name, ())]
    return f"it is a field of {' or '.join(places)}" if len(places) in (1, 2) else ""


def _fields_are(fields: Schema, found: Sequence[Problem]) -> str:
    listed = f"fields: {', '.join(fields)}" if len(fields) <= _MOST_LISTED else ""
    other = f"for a Trainer other than 2.1 to 2.3, {_VARIABLE} names the file of its schema"
    return "; ".join(filter(None, (listed, "" if any(_VARIABLE in each.instead for each in found) else other)))


@lru_cache(maxsize=2)
def _places(file: str) -> dict[str, list[str]]:
    """Name of a field -> the shortest paths of the objects that have it, of those at one depth all."""
    places: dict[str, list[str]] = {}
    level: list[tuple[str, Schema]] = [("spec", _spec_schema(file))]
    while level:
        below: list[tuple[str, Schema]] = []
        here: dict[str, list[str]] = {}
        for path, each in level:
            for name, part in properties(each):
                here.setdefault(name, []).append(path)
                if name != "podTemplateOverrides":  # of 2.1, and a copy of what `runtimePatches` has
                    below.append((f"{path}.{name}", part))
        places = {**here, **places}
        level = below
    return places


def properties(expected: Schema) -> Iterator[tuple[str, Schema]]:
    """The fields of an object, or of the entries of a list."""
    inner = expected
    while "items" in inner:
        inner = inner["items"]
    yield from mapping(inner, "properties").items()
