"""Reads specs, with limits of size and depth. All readers of specs use this module.

`load` reads a mapping, YAML or JSON; `check_limits` checks values that other programs have read (Airflow, KFP).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import yaml

from trainjob.errors import InvalidSpec, Problem

if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:  # libyaml, which the wheels of PyYAML contain, reads 1 MiB in a second; the Python version takes ten
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_BYTES = 1 << 20
"""Bytes of a spec with its YAML aliases expanded. etcd accepts requests of 1.5 MiB (``--max-request-bytes``,
https://etcd.io/docs/v3.6/dev-guide/limit/), which include the API server's additions to an object."""

MAX_DEPTH = 64
"""Nested lists and mappings. A pod template in a manifest has about 20 levels. The modules that check and write a spec
reach Python's recursion limit, which would end the program, at about 300 levels."""

MAX_BITS = 1024
"""Bits of an integer: about those of the largest float, which is KFP's type for numbers. Python refuses to write
integers of more than 4,300 digits."""

MAX_VALUES = 50_000
"""Names and values of lists and mappings: more than fit into `func_args`, which become one argument of a process of at
most 128 KiB (Linux, ``MAX_ARG_STRLEN``)."""

_DIGITS = 400  # of an integer in YAML: more than those of 1,024 bits, in every base except 2
_INSTEAD = "put data into a file and list it in inputs; put code into the image"


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
        _refuse(name, f"has {_size(source) or f'more than {MAX_BYTES:,}'} bytes; {_MOST}", _INSTEAD)
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
        data = source if isinstance(source, str | bytes) else read_spec_file(source, name)
    except OSError as error:
        raise InvalidSpec([Problem("", f"{name or 'the spec'} cannot be read: {error.strerror}")]) from None
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if len(data) > MAX_BYTES:
        _refuse(name, f"has {len(data):,} bytes; {_MOST}", _INSTEAD)
    try:
        _check_events(data, name)
        loaded = yaml.load(data, _Loader)  # noqa: S506 - a safe loader with fewer types
    except yaml.YAMLError as error:
        where, why = _explained(error, data)
        raise InvalidSpec([Problem("", f"{name or 'the spec'}{where}: not valid YAML: {why}")]) from None
    if not isinstance(loaded, dict):
        found = "is empty" if loaded is None else f"is {'a list' if isinstance(loaded, list) else 'a single value'}"
        _refuse(name, f"{found}; write a mapping of fields, such as runtime: torch-distributed")
    return loaded


_MOST = f"a spec has at most {MAX_BYTES:,} (1 MiB), since a cluster stores objects of at most 1.5 MiB"


def check_limits(value: object, name: str = "") -> None:
    """Refuse a value that is too large or too deeply nested for a spec. Larger values do not take longer.

    Args:
        value: Lists, mappings, models and their contents; other objects are not inspected.
        name: Its name in errors.

    Raises:
        InvalidSpec: With the limit and the actual value.
    """
    size, count, level, depth = 0, 1, [value], 0
    while level:  # by level, without recursion: the value may contain itself
        if depth > MAX_DEPTH:
            _refuse(name, _deep(depth))
        below: list[object] = []
        for each in level:
            size += _bytes_of(each, name)
            if size > MAX_BYTES:
                _refuse(name, f"has more than {MAX_BYTES:,} bytes of text, names and values; {_MOST}", _INSTEAD)
            below.extend(_parts(each))
            if count + len(below) > MAX_VALUES:
                _refuse(name, f"has more than {MAX_VALUES:,} names and values", _INSTEAD)
        level, count, depth = below, count + len(below), depth + 1


def plain_models(value: Any) -> Any:
    """A value within the limits, with models of the ``kubernetes`` package as mappings of the API."""
    if isinstance(value, Mapping):
        return {name: plain_models(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_models(each) for each in value]
    names = _model_fields(value)
    parts = {name: plain_models(getattr(value, field)) for field, name in names.items()}
    return {name: part for name, part in parts.items() if part is not None} if names else value


def _model_fields(value: object) -> Mapping[str, str]:
    """Attribute -> name in the API of a model of the ``kubernetes`` package; empty for any other value."""
    names = getattr(type(value), "attribute_map", None)
    return names if isinstance(names, Mapping) else {}


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if names := _model_fields(value):
        return [getattr(value, name) for name in names]
    # pydantic's models: this module does not import pydantic, so that a DAG file does not need it.
    return vars(value).values() if hasattr(type(value), "model_fields") else ()


def _bytes_of(value: object, name: str) -> int:
    if isinstance(value, str):
        try:
            return len(value.encode()) + 1
        except UnicodeEncodeError as error:
            text = repr(value[max(0, error.start - 20) : error.end])
            _refuse(name, f"has text that is not Unicode (half of a surrogate pair): {text}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        _refuse(name, f"has an integer of {value.bit_length():,} bits; at most {MAX_BITS:,}", "write it as text")
    return len(value) if isinstance(value, bytes) else 1


# ---------------------------------------------------------------- YAML


@dataclass
class _Open:
    """A list or mapping whose end has not been read yet.

    Attributes:
        anchor: Its name for aliases.
        size: Its bytes.
        count: Its names and values, itself included.
        height: Its levels of nested lists and mappings, itself included.
    """

    anchor: str | None
    size: int = 1
    count: int = 1
    height: int = 1


def _check_events(data: bytes, name: str) -> None:
    """Refuse YAML that is too deep, or too large with its aliases expanded, before objects are built."""
    known: dict[str | None, tuple[int, int, int]] = {}
    opened, aliased = [_Open(None)], False
    for event in yaml.parse(data, Loader=_Safe):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Open(event.anchor))
            size, count, height = 0, 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            size, count, height = known[done.anchor] = done.size, done.count, done.height
        elif isinstance(event, yaml.ScalarEvent):
            size, count, height = known[event.anchor] = len(event.value.encode("utf-8", "surrogatepass")) + 1, 1, 0
        elif isinstance(event, yaml.AliasEvent):
            if any(each.anchor == event.anchor for each in opened[1:]):
                _refuse(name, f"has an alias inside its own anchor: *{event.anchor}{_at(event.start_mark)}")
            aliased = True
            size, count, height = known.get(event.anchor, (0, 0, 0))
        else:
            continue
        last = opened[-1]
        last.size, last.count, last.height = last.size + size, last.count + count, max(last.height, height + 1)
        if len(opened) - 1 + height > MAX_DEPTH:
            _refuse(name, _deep(len(opened) - 1 + height, _at(event.start_mark)))
        if last.size > MAX_BYTES or last.count > MAX_VALUES:
            found = f"{MAX_BYTES:,} bytes" if last.size > MAX_BYTES else f"{MAX_VALUES:,} names and values"
            expanded = " with its aliases expanded" if aliased else ""
            _refuse(name, f"has more than {found}{expanded}{_at(event.start_mark)}, the limit of a spec", _INSTEAD)


class _Loader(_Safe):
    """JSON's types only, as in ``kubectl``, and errors with line numbers."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct a value.

        Raises:
            ConstructorError: The value is invalid for its type.
        """
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, OverflowError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"{_brief(repr(node.value))} is not a valid {kind}", node.start_mark
            ) from None

    def integer(self, node: Any) -> int | str:
        """An integer; base 60 of YAML 1.1 (12:30) is text."""
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        if len(text) > _DIGITS:
            problem = f"an integer of {len(text):,} digits; at most {_DIGITS}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(self.construct_yaml_int(node))

    def real(self, node: Any) -> float | str:
        """A float; base 60 of YAML 1.1 is text."""
        text = str(self.construct_scalar(node))
        return text if ":" in text else float(self.construct_yaml_float(node))


_JSON = ("null", "bool", "int", "float", "str", "seq", "map")
_Loader.yaml_constructors = {
    tag: make
    for tag, make in _Safe.yaml_constructors.items()
    if tag is None or str(tag).removeprefix("tag:yaml.org,2002:") in _JSON
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.real)
_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0].rpartition(":")[2] not in ("timestamp", "value")]
    for first, resolvers in _Safe.yaml_implicit_resolvers.items()
}


def _explained(error: yaml.YAMLError, data: bytes) -> tuple[str, str]:
    """Position of a YAML error, as ``, line 3, column 5``, and its cause; each on one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        began = _at(error.context_mark) if error.context_mark and error.context else ""
        context = f"{error.context} (from{began[1:]})" if began else error.context
        return _at(mark), _brief(" ".join(", ".join(filter(None, (context, error.problem))).split()))
    if isinstance(error, yaml.reader.ReaderError):
        before = data[: error.position]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        return f", line {line}, column {column}", _brief(str(error.reason))
    return "", _brief(" ".join(str(error).split()))


def _at(mark: Any) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _brief(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _size(source: IO[bytes]) -> str:
    """Bytes of a file; empty if only reading it to its end would tell."""
    try:
        found = os.fstat(source.fileno())
    except OSError:
        return ""
    return f"{found.st_size:,}" if stat.S_ISREG(found.st_mode) else ""


def _deep(found: int, where: str = "") -> str:
    return f"is nested {found} lists and mappings deep, or more{where}; a spec has at most {MAX_DEPTH}"


def _refuse(name: str, message: str, instead: str = "") -> NoReturn:
    raise InvalidSpec([Problem("", f"{name or 'the spec'} {message}", instead)])
