"""Turns pydantic's errors into problems, and removes invalid parts so that the rest of a spec can be checked, too."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import ErrorDetails

from trainjob._spec.checks import text_problem
from trainjob._spec.wording import in_words
from trainjob.errors import Problem

_PASSES = 5
"""Validations that remove only invalid parts; a field that is invalid after that is removed as a whole."""

_EXPLAINED = 200
"""Errors of a pass that are explained, and whose parts are removed one by one: a similar name is found in 0.5 ms."""

ENV_ENTRY = "env_entry"
"""Type of pydantic's error for an entry of an env list that has no valid form."""

_LONGEST_NAME = 100  # characters of a field's name, far more than any field has


class Described(BaseModel):
    """A model, with what the messages about it depend on."""

    camel_case: ClassVar[bool] = False
    """Whether the docs write its fields as Kubernetes does; those of all others are written in snake_case."""

    unknown_field: ClassVar[str] = ""
    """What to do with a field that the model does not have; by default, the message lists the fields."""


Model = TypeVar("Model", bound=Described)
Location = tuple[int | str, ...]
_BRANCH = re.compile(r"(function-.*|EnvVarSource|str|\[key\])")


def field_name(name: str) -> str:
    """A field's name in snake_case; `name` unchanged if it is too long for a field.

    The time of pydantic's `to_snake` grows with the square of the length: two minutes for 100,000 capitals.
    """
    return to_snake(name) if len(name) <= _LONGEST_NAME else name


class Validation(Generic[Model]):
    """All passes over one spec.

    Attributes:
        model: The model without its invalid parts; None if they cannot be removed.
        problems: What pydantic refused.
        removed: Paths of the parts that were removed, in snake_case.
    """

    def __init__(self, kind: type[Model], fields: Mapping[Any, Any]) -> None:
        self.problems: list[Problem] = []
        self.removed: set[str] = set()
        self.model: Model | None = None
        self._kind = kind
        self._similar: list[str] = []
        valid: Any = dict(fields)
        for count in range(_PASSES + len(fields) + 1):
            try:
                self.model = kind.model_validate(valid)
                return
            except ValidationError as error:
                details = error.errors()
                whole_fields = count >= _PASSES or len(details) > _EXPLAINED
                valid = self._without_invalid(valid, details, whole_fields=whole_fields)
                if not all(each["loc"] for each in details):
                    return  # the model itself is invalid, and has no part to remove

    def _was_removed(self, path: str) -> bool:
        """Whether a part was removed at `path` or below, from which a problem at `path` only follows."""
        path = snake_path(path)
        return (
            bool(self.removed)
            if not path
            else any(each == path or each.startswith((f"{path}.", f"{path}[")) for each in self.removed)
        )

    def _without_invalid(
        self, fields: Mapping[Any, Any], details: Sequence[ErrorDetails], *, whole_fields: bool
    ) -> Any:
        """Record the problems; return the fields without the invalid parts."""
        known = {problem.path for problem in self.problems}
        found: dict[str, Problem] = {}
        removed: set[Location] = set()
        emptied: set[Location] = set()
        paths: set[str] = set()
        for detail in details:
            if detail["loc"][-1:] == ("str",) and isinstance(detail["input"], Mapping):
                continue  # an env source; the union's other branch reports what is wrong with it
            if whole_fields:
                removed.add(detail["loc"][:1])
            elif detail["type"] == "string_type" and (text := _resolved(fields, detail, exact=True)):
                emptied.add(text)
            else:
                removed.add(_resolved(fields, detail))
            explained = len(found) < _EXPLAINED
            problem = self._problem(detail) if explained else Problem(_path(detail["loc"]), *in_words(detail))
            if problem.path in known or self._was_removed(problem.path):
                continue
            found.setdefault(problem.path, problem)  # the first branch of a union is what the author meant
            if detail["type"] != "string_type":
                paths.add(snake_path(problem.path))
        misspelled = {f"{path}: is missing" for path in self._similar}
        self.problems += [
            each for path, each in found.items() if f"{snake_path(path)}: {each.message}" not in misspelled
        ]
        self.removed |= {*paths, *self._similar}
        return _rebuilt(fields, (), removed, emptied)

    def _problem(self, detail: ErrorDetails) -> Problem:
        path, kind, value = _path(detail["loc"]), detail["type"], detail["input"]
        if kind == "extra_forbidden" or (kind == "literal_error" and detail["loc"][-1:] == ("[key]",)):
            return self._unknown(path, detail)
        if kind == "missing":
            parent, _, name = path.rpartition(".")
            name = name if self._camel_case(detail["loc"]) else field_name(name)
            return Problem(f"{parent}.{name}" if parent else name, "is missing")
        if kind == "string_type":
            return text_problem(path, value)
        if kind == "union_tag_not_found" and isinstance(value, Mapping):
            path = f"{path}.{str(detail['ctx']['discriminator']).strip(chr(39))}"
        return Problem(path, *in_words(detail))

    def _unknown(self, path: str, detail: ErrorDetails) -> Problem:
        name = str(detail["loc"][-1] if detail["loc"][-1] != "[key]" else detail["loc"][-2])
        parts = _parts_at(self._kind, detail["loc"][:-1])
        names = {each: to_camel(each) for part in parts for each in part.model_fields}
        if detail["loc"][-1] == "[key]":
            names = {each: each for each in re.findall(r"'([^']+)'", detail["msg"])}
        elif name in names or name in names.values():
            both = next(pair for pair in names.items() if name in pair)
            return Problem(path, "is given twice", f"remove {both[0]} or {both[1]}")
        if self._camel_case(detail["loc"]):
            names = {each: each for each in names.values()}
        if similar := _similar(name, list(names)):
            self._similar.append(snake_path(f"{path[: -len(name)]}{similar}"))
            return Problem(path, "no such field", f"did you mean {similar}?")
        if len(parts) == 1 and parts[0].unknown_field:
            return Problem(path, "no such field", parts[0].unknown_field)
        if field_name(name) in self._kind.model_fields:
            return Problem(path, "no such field", f"{field_name(name)} is a field of the spec itself")
        return Problem(path, "no such field", f"fields: {', '.join(names)}" if 0 < len(names) <= 12 else "")

    def _camel_case(self, location: Location) -> bool:
        return any(part.camel_case for part in _parts_at(self._kind, location[:-1]))


def _path(location: Location) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _BRANCH.fullmatch(part):  # branches of a union are no part of the path
            path += f".{part}" if path else part
    return path


def snake_path(path: str) -> str:
    """A problem's path with all its fields in snake_case."""
    return ".".join(field_name(part) for part in path.split("."))


def _parts_at(kind: type[Described], location: Location) -> list[type[Described]]:
    """The models that may stand at a location."""
    parts = [kind]
    for name in location:
        for part in parts:
            for each, field in part.model_fields.items():
                if name in (each, to_camel(each)):
                    parts = [*_models(field.annotation)]
                    break
    return parts


def _models(annotation: Any) -> Iterator[type[Described]]:
    if isinstance(annotation, type) and issubclass(annotation, Described):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)


def _similar(name: str, names: Sequence[str]) -> str:
    """The most similar field; empty if no field is similar."""
    lower = {field_name(each): each for each in names}
    if close := difflib.get_close_matches(field_name(name), lower, n=1):
        return lower[close[0]]
    words = set(field_name(name).split("_"))
    inside = [each for each in lower if set(each.split("_")) <= words]
    return lower[max(inside, key=len)] if inside else ""


def _resolved(fields: Mapping[Any, Any], detail: ErrorDetails, *, exact: bool = False) -> Location:
    """Location of the invalid part in the author's fields; its innermost parent if the part is missing.

    pydantic's location also has the branches of unions, and the keys that validators have made of the fields.
    """
    value: Any = fields
    at: list[int | str] = []
    by_name = False
    for part in detail["loc"]:
        key: int | str | None = None
        if isinstance(value, Mapping):
            if len(value) == 1 and part not in value:
                wrapped = next(iter(value))
                if wrapped in ("valueFrom", "value_from"):
                    at, value = [*at, wrapped], value[wrapped]
            key = part if isinstance(value, Mapping) and part in value else None
        elif isinstance(value, list | tuple):
            names = {each.get("name"): i for i, each in enumerate(value) if _is_named(each)}
            key = part if isinstance(part, int) and part < len(value) else names.get(part)
        if key is not None:
            by_name = isinstance(key, int) and key != part
            at, value = [*at, key], value[key]
    if exact:
        if isinstance(value, Mapping) and _is_named(value) and "value" in value:
            at, value = [*at, "value"], value["value"]
        return () if isinstance(value, Mapping | list | tuple) else tuple(at)
    while not by_name and detail["type"] != ENV_ENTRY and len(at) > 1 and isinstance(at[-1], int):
        at.pop()  # an element that is removed would change the numbers of those behind it
    return tuple(at)


def _is_named(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


def _rebuilt(value: Any, at: Location, removed: set[Location], emptied: set[Location]) -> Any:
    if at in emptied:
        return ""
    if isinstance(value, Mapping):
        pairs = ((name, part, (*at, name)) for name, part in value.items())
        return {name: _rebuilt(part, below, removed, emptied) for name, part, below in pairs if below not in removed}
    if isinstance(value, list | tuple):
        parts = ((part, (*at, i)) for i, part in enumerate(value))
        return [_rebuilt(part, below, removed, emptied) for part, below in parts if below not in removed]
    return value
