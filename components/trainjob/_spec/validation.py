"""Turns pydantic's errors into problems, and validates the other fields without those that it refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel, to_snake
from pydantic_core import ErrorDetails

from trainjob._spec.wording import in_words, text_problem
from trainjob.errors import Problem

PROBLEMS = "problems"
"""Type of pydantic's error for problems that a validator has found itself."""

_EXPLAINED = 200
"""Errors that are explained by a similar name, which is found in 0.5 ms; the others have pydantic's message."""

_LONGEST_NAME = 100  # characters of a field's name, far more than any field has


class Described(BaseModel):
    """A model, with what the messages about it depend on."""

    unknown_field: ClassVar[str] = ""
    """What to do with a field that the model does not have; by default, the message lists the fields."""

    written_as: ClassVar[Mapping[str, str]] = {}
    """Name that people try -> what to write in place of it."""


Model = TypeVar("Model", bound=Described)
Location = tuple[int | str, ...]


def field_name(name: str) -> str:
    """A field's name in snake_case; `name` unchanged if it is too long for a field.

    The time of pydantic's `to_snake` grows with the square of the length: two minutes for 100,000 capitals.
    """
    return to_snake(name) if len(name) <= _LONGEST_NAME else name


class Validation(Generic[Model]):
    """One reading of a model's fields.

    Attributes:
        model: The model of the valid fields; None if it cannot be made of them.
        problems: What was refused.
        refused: Fields that were refused, and the fields that were meant by misspelled ones; in snake_case.
    """

    def __init__(self, kind: type[Model], fields: Mapping[Any, Any]) -> None:
        self.problems: list[Problem] = []
        self.refused: set[str] = set()
        self.model: Model | None = None
        self._kind = kind
        self._meant: set[str] = set()
        valid = {str(name): value for name, value in fields.items()}
        try:
            self.model = kind.model_validate(valid)
        except ValidationError as error:
            details = error.errors()
            explained = [
                each for i, detail in enumerate(details) for each in self._problems(detail, known=i < _EXPLAINED)
            ]
            self.problems = [*{each.path: each for each in reversed(explained) if not self._follows(each)}.values()][
                ::-1
            ]
            heads = {str(each["loc"][0]) for each in details if each["loc"]}
            self.refused = {field_name(name.partition(".")[0]) for name in (*heads, *self._meant)}
            if all(each["loc"] for each in details):
                with suppress(ValidationError):
                    self.model = kind.model_validate(
                        {name: value for name, value in valid.items() if name not in heads}
                    )

    def _follows(self, problem: Problem) -> bool:
        """Whether a field is missing only because its name is misspelled."""
        return problem.message == "is missing" and problem.path in self._meant

    def _problems(self, detail: ErrorDetails, *, known: bool) -> Iterator[Problem]:
        path, kind, value = path_of(detail["loc"]), detail["type"], detail["input"]
        if kind == PROBLEMS:
            for each in detail["ctx"][PROBLEMS]:
                joined = f"{path}{'' if each.path.startswith('[') or not path or not each.path else '.'}{each.path}"
                yield replace(each, path=joined)
        elif kind == "extra_forbidden" and known:
            yield self._unknown(path, detail["loc"])
        elif kind == "literal_error" and detail["loc"][-1] == "[key]":
            allowed = str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
            yield Problem(path_of(detail["loc"][:-1]), "no such field", f"fields: {allowed}")
        elif kind == "missing":
            parent, _, name = path.rpartition(".")
            yield Problem(f"{parent}.{field_name(name)}" if parent else field_name(name), "is missing")
        elif kind == "string_type":
            yield text_problem(path, value)
        elif kind == "union_tag_not_found" and isinstance(value, Mapping):
            yield Problem(f"{path}.{str(detail['ctx']['discriminator']).strip(chr(39))}", *in_words(detail))
        else:
            yield Problem(path, *in_words(detail))

    def _unknown(self, path: str, location: Location) -> Problem:
        name = str(location[-1])
        parts = _parts_at(self._kind, location[:-1])
        names = {each: to_camel(each) for part in parts for each in part.model_fields}
        tried = {each: text for part in parts for each, text in part.written_as.items()}
        if text := tried.get(field_name(name)):
            return Problem(path, "no such field", text)
        if name in names or name in names.values():
            both = next(pair for pair in names.items() if name in pair)
            return Problem(path, "is given twice", f"remove {both[0]} or {both[1]}")
        if similar := _similar(name, list(names)):
            self._meant.add(f"{path[: -len(name)]}{similar}")
            return Problem(path, "no such field", f"did you mean {similar}?")
        if len(parts) == 1 and parts[0].unknown_field:
            return Problem(path, "no such field", parts[0].unknown_field)
        if field_name(name) in self._kind.model_fields:
            return Problem(path, "no such field", f"{field_name(name)} is a field of the spec itself")
        return Problem(path, "no such field", f"fields: {', '.join(names)}" if 0 < len(names) <= 12 else "")


def path_of(location: Location) -> str:
    """``a.b[0]`` for a location in a value."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


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


def _similar(name: str, names: list[str]) -> str:
    """The most similar field; empty if no field is similar."""
    lower = {field_name(each): each for each in names}
    if close := difflib.get_close_matches(field_name(name), lower, n=1):
        return lower[close[0]]
    words = set(field_name(name).split("_"))
    inside = [each for each in lower if set(each.split("_")) <= words]
    return lower[max(inside, key=len)] if inside else ""
