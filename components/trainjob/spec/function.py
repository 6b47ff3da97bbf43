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

from trainjob.spec.parts import Part


class Function(Part):
    """A Python function's source, to be run on every node.

    It travels as text, so it must bring its own imports; it is never passed through a shell.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    source: Annotated[str, Field(min_length=1, max_length=96 * 1024)]  # Linux takes 128 KiB in one argument

    @classmethod
    def of(cls, function: Callable[..., object]) -> Self:
        """Take the source of `function`; ValueError says why that cannot work for this one."""
        function = inspect.unwrap(function)
        name = getattr(function, "__name__", "")
        if not inspect.isfunction(function) or name == "<lambda>" or inspect.iscoroutinefunction(function):
            raise ValueError("must be a function defined with def")
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:
            raise ValueError(f"the source of {name}() cannot be read ({error}); put it into a file") from error
        # A nested function is not dedented, since that would change what its multi-line strings hold.
        header = "if True:\n" if source[0].isspace() else ""
        definition = _definition(header + source)
        lines = (header + source).split("\n")
        source = header + "\n".join(lines[definition.lineno - 1 :])  # decorators stay behind
        known = {name, *dir(builtins)}
        foreign = {*function.__code__.co_freevars, *_globals(function.__code__), *_in_defaults(definition)} - known
        if foreign:
            raise ValueError(
                f"{name}() uses {', '.join(sorted(foreign))} from outside itself, which will not be there on the "
                "nodes: import or define it inside the function, or pass it in func_args"
            )
        return cls(name=name, source=source)


def _globals(code: CodeType) -> Iterator[str]:
    """Names that `code` and the functions inside it look up in their module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _definition(source: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))


def _in_defaults(definition: ast.FunctionDef) -> Iterator[str]:
    """Names that the default values of the parameters use."""
    for default in (*definition.args.defaults, *filter(None, definition.args.kw_defaults)):
        for node in ast.walk(default):
            if isinstance(node, ast.Name):
                yield node.id
