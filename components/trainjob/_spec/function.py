"""A Python function as the trainer."""

from __future__ import annotations

import ast
import builtins
import difflib
import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Annotated, Self

from pydantic import Field

from trainjob._spec.base import Part
from trainjob.errors import Problem

_LONGEST = 96 * 1024  # characters; an argument of a process has at most 128 KiB on Linux
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL", "DELETE_NAME"}
_SCRIPT = "__annotations__", "__conditional_annotations__"  # in addition to builtins, every script has these
_OF_IPYTHON = "exit", "open", "quit"  # IPython puts others into a notebook's namespace, for its own shell
_FUTURE = annotations.compiler_flag  # of modules with that import
_NO_CALL = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Function(Part):
    """The source of a Python function that runs on every node.

    It is sent as text, so it must contain its imports; no shell interprets it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    source: Annotated[str, Field(min_length=1, max_length=_LONGEST)]

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        *,
        arguments: str = ", or pass it as an argument",
        known: Collection[str] = (),
    ) -> Self:
        """Read the source of `function`, and check that it runs without its module.

        The source is sent unchanged but for its decorators, and for annotations of its parameters and return value that
        name objects of its module: these become ``object``.

        Args:
            function: The function.
            arguments: Another way to give it a value, for the error about names from outside itself.
            known: Names that its module has on the nodes.

        Raises:
            ValueError: The function cannot run on the nodes; with the reason.
        """
        wrappers: list[object] = []
        plain = inspect.unwrap(function, stop=wrappers.append)  # called for each wrapper
        if not inspect.isfunction(plain) or (code := plain.__code__).co_name == "<lambda>" or code.co_flags & _NO_CALL:
            raise ValueError("must be a function defined with def, without async and yield")
        name = code.co_name
        try:
            lines, first = inspect.getsourcelines(plain)
            header = ["if True:\n"] if lines[0][0] in " \t" else []  # dedented, its multi-line strings would change
            definition = _definition("".join(header + lines), nested=bool(header))
        except (OSError, TypeError, SyntaxError, TokenError) as error:
            raise ValueError(
                f"the source of {name}() cannot be read ({error}); write the function to a file"
            ) from error
        if definition is None or [definition.name, *_names(definition)] != [name, *_parameters(code)]:
            raise ValueError(f"the source of {name}() changed after it was imported; import it again")
        _check_decorators(code, definition, len(wrappers), first - len(header) - 1)
        body = lines[definition.lineno - len(header) - 1 :]
        if code.co_flags & _FUTURE:
            header = ["from __future__ import annotations\n", *header]
            source = "".join(header + body)
        else:
            source = _without_outside_annotations("".join(header + body), nested=bool(header))
        offset = first + len(lines) - len(body) - len(header) - 1
        outside = {each: line for each, line in _outside(plain, source, offset).items() if each not in known}
        if outside:
            found = ", ".join(f"{each} (line {line})" for each, line in sorted(outside.items()))
            raise ValueError(
                f"{name}() uses {found} from outside itself, which does not exist on the nodes: "
                f"import or define it inside the function{arguments}"
            )
        if len(source) > _LONGEST:
            raise ValueError(
                f"the source of {name}() has {len(source):,} characters; at most {_LONGEST:,}: put code into the image"
            )
        return cls(name=name, source=source)

    def argument_problems(self, given: Collection[str]) -> Iterator[Problem]:
        """Where keyword arguments of these names do not match the parameters of the function."""
        try:
            statements = ast.parse(self.source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # perhaps of a newer Python than this one
            return
        statements = [x for each in statements for x in (each.body if isinstance(each, ast.If) else [each])]
        definition = next((x for x in statements if isinstance(x, ast.FunctionDef) and x.name == self.name), None)
        if definition is None:  # bound by an import, for example
            return
        of = definition.args
        by_position = [each.arg for each in of.posonlyargs]
        positional = [*by_position, *(each.arg for each in of.args)]
        required = {*positional[: len(positional) - len(of.defaults)]}
        required |= {each.arg for each, default in zip(of.kwonlyargs, of.kw_defaults, strict=True) if default is None}
        if unreachable := required & {*by_position}:
            names = ", ".join(sorted(unreachable))
            yield Problem("func", f"{self.name}() takes {names} only by position", "remove the / from its parameters")
        if missing := required - {*by_position} - {*given}:
            yield Problem("func_args", f"lacks {', '.join(sorted(missing))}, which {self.name}() requires")
        named = [each for each in _names(definition) if each not in by_position]
        for each in sorted({*given} - {*named} if of.kwarg is None else ()):
            near = difflib.get_close_matches(each, named, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its parameters are: {', '.join(named) or 'none'}"
            yield Problem(f"func_args.{each}", f"is not a parameter of {self.name}()", hint)


def _definition(source: str, nested: bool) -> ast.FunctionDef | None:
    statement = ast.parse(source).body[0]
    if nested and isinstance(statement, ast.If):
        statement = statement.body[0]
    return statement if isinstance(statement, ast.FunctionDef) else None


def _names(definition: ast.FunctionDef) -> list[str]:
    of = definition.args
    return [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs)]


def _parameters(code: CodeType) -> Iterable[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _check_decorators(code: CodeType, definition: ast.FunctionDef, wrappers: int, offset: int) -> None:
    """Refuse methods, and decorators that are a part of what was given.

    A decorator is none if it returned the function itself, or was applied to it later (Airflow's, KFP's).

    Raises:
        ValueError: With the reason.
    """
    name, written = definition.name, definition.decorator_list
    owner = code.co_qualname.rpartition(".")[0]
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in written)
    if owner and not owner.endswith("<locals>") and not static:
        raise ValueError(
            f"{name}() (line {definition.lineno + offset}) is a method of {owner.rpartition('.')[2]}, which does not "
            "exist on the nodes: define the function outside of the class, or make it a staticmethod"
        )
    if wrappers:
        decorators = ", ".join(
            f"@{ast.unparse(each.func if isinstance(each, ast.Call) else each)} (line {each.lineno + offset})"
            for each in written[-wrappers:]
        )
        raise ValueError(
            f"{name}() is wrapped by {decorators or 'another function'}, which would not run on the nodes, since only "
            f"the source of {name}() is sent: use it inside the function, or pass {name}.__wrapped__ to run without it"
        )


def _without_outside_annotations(source: str, nested: bool) -> str:
    """`source` with ``object`` for annotations of the signature that name anything but builtins.

    They are evaluated where the function is defined, but nothing on the nodes needs them.
    """
    if (definition := _definition(source, nested)) is None:
        return source
    of, text = definition.args, source.encode()
    parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]
    written = filter(None, [definition.returns, *(each.annotation for each in parameters)])
    starts = [0, *accumulate(len(line) + 1 for line in text.split(b"\n"))]  # columns of `ast` are bytes
    for each in sorted(written, key=lambda each: (-each.lineno, -each.col_offset)):
        if any(isinstance(part, ast.Name) and part.id not in dir(builtins) for part in ast.walk(each)):
            begin, end = starts[each.lineno - 1] + each.col_offset, starts[(each.end_lineno or 0) - 1]
            text = text[:begin] + b"object" + text[end + (each.end_col_offset or 0) :]
    return text.decode()


def _outside(function: FunctionType, source: str, offset: int) -> dict[str, int]:
    """Names that `source` reads from outside itself, with their lines, which are `offset` higher in the file.

    Raises:
        ValueError: The source is not a complete program.
    """
    name = function.__code__.co_name
    try:
        module = compile(source, name, "exec", dont_inherit=True, optimize=0)
    except SyntaxError as error:  # `nonlocal`
        raise ValueError(
            f"{name}() (line {(error.lineno or 0) + offset}) cannot run by itself: {error.msg}; "
            "define what it uses inside the function"
        ) from None
    read, bound = _globals(module)
    read = {each: line for each, line in read.items() if each not in bound and not _is_builtin(each, function)}
    relative = {
        "." * node.level + (node.module or ""): node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level
    }
    return {each: line + offset for each, line in (relative | read).items()}


def _globals(module: CodeType) -> tuple[dict[str, int], set[str]]:
    """Names that `module` reads from its globals, with the first line of each, and those that it binds there.

    In each scope the first access in the order of the code decides: ``n += 1`` and, in a class, ``n = n`` read.
    """
    read: dict[str, int] = {}
    bound: set[str] = set()
    scopes = [module]
    for scope in scopes:  # grows
        seen: set[str] = set()
        for each in dis.get_instructions(scope):
            stored = each.opname in ("STORE_GLOBAL", "STORE_NAME")
            if not (stored or each.opname in _READS) or each.argval in seen:
                continue
            seen.add(each.argval)
            if not stored:
                line = each.positions.lineno if each.positions is not None else None
                read[each.argval] = min(line or scope.co_firstlineno, read.get(each.argval, sys.maxsize))
            elif scope is module or each.opname == "STORE_GLOBAL":
                bound.add(each.argval)
        scopes += [each for each in scope.co_consts if isinstance(each, CodeType)]
    return read, bound


def _is_builtin(name: str, function: FunctionType) -> bool:
    """Whether `name` is a builtin on the nodes, and the same for `function` here."""
    if name in _SCRIPT:
        return True
    if name not in vars(builtins):
        return False
    value = vars(builtins)[name]
    origin = getattr(value, "__module__", None) or "builtins"
    if origin.partition(".")[0] not in sys.stdlib_module_names:  # IPython and profilers add names to builtins
        return False
    if name.startswith("__") or (name in _OF_IPYTHON and "get_ipython" in function.__globals__):
        return True
    return name not in function.__code__.co_freevars and function.__globals__.get(name, value) is value
