"""A Python function as the trainer."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Annotated, Self

from pydantic import Field

from trainjob._spec.base import Part

_LONGEST = 96 * 1024  # characters; an argument of a process has at most 128 KiB on Linux


class Function(Part):
    """The source of a Python function that runs on every node.

    It is sent as text, so it must contain its imports; no shell interprets it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    source: Annotated[str, Field(min_length=1, max_length=_LONGEST)]

    @classmethod
    def of(cls, function: Callable[..., object], *, arguments: str = ", or pass it in func_args") -> Self:
        """Read the source of `function`.

        Args:
            function: The function.
            arguments: Another way to give it a value, for the error about names from outside itself.

        Raises:
            ValueError: The function cannot run on the nodes; with the reason.
        """
        function = inspect.unwrap(function)
        name = getattr(function, "__name__", "")
        if not inspect.isfunction(function) or name == "<lambda>" or inspect.iscoroutinefunction(function):
            raise ValueError("must be a function defined with def")
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise ValueError(
                f"the source of {name}() cannot be read ({error}); write the function to a file"
            ) from error
        # A nested function is not dedented, since that would change its multi-line strings.
        header = "if True:\n" if source[0].isspace() else ""
        definition = _definition(header + source)
        lines = (header + source).split("\n")
        source = header + "\n".join(lines[definition.lineno - 1 :])  # without decorators
        known = {name, *dir(builtins)}
        foreign = {*function.__code__.co_freevars, *_globals(function.__code__), *_in_defaults(definition)} - known
        if foreign:
            raise ValueError(
                f"{name}() uses {', '.join(sorted(foreign))} from outside itself, which does not exist on the nodes: "
                f"import or define it inside the function{arguments}"
            )
        if len(source) > _LONGEST:
            raise ValueError(
                f"the source of {name}() has {len(source):,} characters; at most {_LONGEST:,}: put code into the image"
            )
        return cls(name=name, source=source)


def _globals(code: CodeType) -> Iterator[str]:
    """Names that `code` and its inner functions read from their module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _definition(source: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))


def _in_defaults(definition: ast.FunctionDef) -> Iterator[str]:
    """Names in the default values of the parameters."""
    for default in (*definition.args.defaults, *filter(None, definition.args.kw_defaults)):
        for node in ast.walk(default):
            if isinstance(node, ast.Name):
                yield node.id
