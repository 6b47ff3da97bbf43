"""The base of all models: of specs, studies and gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import AliasGenerator, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from trainjob._spec.validation import PROBLEMS, Described, Validation
from trainjob.errors import InvalidSpec, Problem


class Part(Described):
    """Base of all parts: immutable, without unknown fields, reads snake_case and camelCase.

    Raises:
        InvalidSpec: From the constructor, with every field that has an invalid value.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=AliasGenerator(validation_alias=to_camel, serialization_alias=to_camel),
        populate_by_name=True,
    )

    def __init__(self, /, **fields: Any) -> None:
        __tracebackhide__ = True
        try:
            super().__init__(**fields)
        except ValidationError:
            raise self.refusal(Validation(type(self), fields).problems) from None

    # For pydantic, this is a constructor like its own: it does not call it for a part inside of another one, whose
    # problems belong to the outer one.
    vars(__init__)["__pydantic_base_init__"] = True

    @classmethod
    def refusal(cls, problems: Sequence[Problem]) -> InvalidSpec:
        """The error of the constructor. The paths begin with the name of the part, which the error lacks."""
        return InvalidSpec(cls.within(cls.__name__, problems))

    @staticmethod
    def within(where: str, problems: Sequence[Problem]) -> list[Problem]:
        """The problems of a part with paths that begin with its place."""
        return [replace(each, path=f"{where}.{each.path}" if each.path else where) for each in problems]

    def api(self) -> dict[str, Any]:
        """This part in the API's spelling, without unset fields."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


def refuse(problems: Sequence[Problem]) -> None:
    """Raise an error with all `problems` for pydantic, if there are any; their paths begin at the validated value."""
    if problems:
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "; ".join(map(str, problems)), "problems": [*problems]})
