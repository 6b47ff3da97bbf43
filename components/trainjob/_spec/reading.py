"""Reads specs, with limits of size and depth. All readers of specs use this module.

`load_spec` reads a mapping, YAML or JSON; `check_limits` checks values that other programs have read (Airflow, KFP).
"""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn

from trainjob._support import foreign
from trainjob._support.foreign import Limits, Unreadable
from trainjob._support.foreign_yaml import yaml_of
from trainjob.errors import InvalidSpec, Problem

MAX_BYTES = 1 << 20
"""Bytes of a spec with its YAML aliases expanded. etcd accepts requests of 1.5 MiB (``--max-request-bytes``,
https://etcd.io/docs/v3.6/dev-guide/limit/), which include the API server's additions to an object."""

MAX_DEPTH = 64
"""Nested lists and mappings. A pod template in a manifest has about 20 levels. The modules that check and write a spec
reach Python's recursion limit, which would end the program, at about 300 levels."""

MAX_VALUES = 50_000
"""Names and values of lists and mappings: more than fit into `func_args`, which become one argument of a process of at
most 128 KiB (Linux, ``MAX_ARG_STRLEN``)."""

_LIMITS = Limits(MAX_BYTES, MAX_DEPTH, MAX_VALUES, finite=False, of="a spec")  # its fields refuse NaN and infinities
_FINITE = replace(_LIMITS, finite=True)
_MOST = " (1 MiB), since a cluster stores objects of at most 1.5 MiB"
_INSTEAD = "put data into a file and list it in inputs; put code into the image"
_ADVICE = {"size": _INSTEAD, "values": _INSTEAD, "number": "write it as text"}


def read_spec_file(source: Path | IO[bytes], name: str = "") -> bytes:
    """The bytes of a spec's file.

    Args:
        source: The file, or its path.
        name: Its name in errors; the path if left out.

    Raises:
        InvalidSpec: The file is too large. Only the maximum size is read.
        OSError: The file cannot be read.
    """
    if isinstance(source, Path):
        with source.open("rb") as file:
            return read_spec_file(file, name or str(source))
    data = source.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        found = _size(source) or f"more than {MAX_BYTES:,}"
        _refuse(name, f"has {found} bytes; a spec has at most {MAX_BYTES:,}{_MOST}", _INSTEAD)
    return data


def load_spec(source: Mapping[str, Any] | str | bytes | Path | IO[bytes], name: str = "") -> dict[str, Any]:
    """The fields of a spec. Only the limits of text are checked; `TrainJobSpec` checks the others.

    YAML is read as by ``kubectl``: dates and ``12:30`` are text.

    Args:
        source: A mapping, YAML or JSON text, a file of it, or the path of one.
        name: Its name in errors; the path if left out.

    Raises:
        InvalidSpec: The source cannot be read, is not a mapping, is too large or too deeply nested.
    """
    if isinstance(source, Mapping):
        return dict(source)
    name = name or (str(source) if isinstance(source, Path) else "")
    try:
        loaded = yaml_of(source if isinstance(source, str | bytes) else read_spec_file(source, name), name, _LIMITS)
    except OSError as error:
        _refuse(name, f"cannot be read: {error.strerror}")
    except Unreadable as error:
        _refuse_unreadable(name, error)
    if not isinstance(loaded, dict):
        found = "is empty" if loaded is None else f"is {'a list' if isinstance(loaded, list) else 'a single value'}"
        _refuse(name, f"{found}; write a mapping of fields, such as runtime: torch-distributed")
    return loaded


def read_part(text: str) -> dict[Any, Any] | list[Any] | None:
    """The mapping or list that a template has written as text: JSON, Python (as Jinja writes a value) or YAML.

    None if the text is neither, or too large or too deeply nested for a spec.
    """
    if len(text) > MAX_BYTES:
        return None
    try:
        found = foreign.json_of(text, "", _FINITE)
        return found if isinstance(found, dict | list) else None
    except Unreadable as error:
        if not error.why.startswith("is not valid JSON"):
            return None  # Python and YAML would take one of two values of a key, and read 1e999 as an infinity
    readers: list[Callable[[str], Any]] = [_literal]
    # A Python object that is not a literal, such as datetime(2026, 3, 1), would be other values in YAML's flow style.
    if not text.lstrip().startswith(("{", "[", "(")):
        readers.append(lambda text: yaml_of(text, "", _FINITE))
    for read in readers:
        try:
            found = read(text)
            foreign.check(found, "", _FINITE)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict | list | tuple):
            return found if isinstance(found, dict) else [*found]
    return None


def _literal(text: str) -> Any:
    """The value of a Python literal. Raises ValueError for a key that occurs twice."""
    tree = ast.parse(text.lstrip(), mode="eval")
    for node in ast.walk(tree):
        keys = [ast.literal_eval(key) for key in node.keys if key] if isinstance(node, ast.Dict) else []
        if len(set(keys)) < len(keys):
            raise ValueError("a key occurs twice")
    return ast.literal_eval(tree)


def check_limits(value: object, name: str = "") -> None:
    """Refuse a value that is too large or too deeply nested for a spec. Larger values do not take longer.

    Args:
        value: Lists, mappings, models and their contents; other objects are not inspected.
        name: Its name in errors.

    Raises:
        InvalidSpec: With the limit and the actual value.
    """
    try:
        foreign.check(value, name, _LIMITS)
    except Unreadable as error:
        _refuse_unreadable(name, error)


def plain_models(value: Any) -> Any:
    """A value within the limits, with models of the ``kubernetes`` package as mappings of the API."""
    if isinstance(value, Mapping):
        return {name: plain_models(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_models(each) for each in value]
    names = foreign.api_names(value)
    parts = {name: plain_models(getattr(value, field, None)) for field, name in names.items()}
    return {name: part for name, part in parts.items() if part is not None} if names else value


def _size(source: IO[bytes]) -> str:
    """Bytes of a file; empty if only reading it to its end would tell."""
    try:
        found = os.fstat(source.fileno())
    except OSError:
        return ""
    return f"{found.st_size:,}" if stat.S_ISREG(found.st_mode) else ""


def _refuse_unreadable(name: str, error: Unreadable) -> NoReturn:
    if "found another document" in error.why:
        _refuse(name, f"has more than one YAML document{error.where}", "write one job in a file")
    if error.why.startswith("is not valid"):
        why = f"{name or 'the spec'}{error.where}: {error.why.removeprefix('is ')}"
        raise InvalidSpec([Problem("", why)]) from None
    most = _MOST if error.limit == "size" else ""
    _refuse(name, f"{error.why}{most}{error.where}", _ADVICE.get(error.limit, ""))


def _refuse(name: str, message: str, instead: str = "") -> NoReturn:
    raise InvalidSpec([Problem("", f"{name or 'the spec'} {message}", instead)]) from None
