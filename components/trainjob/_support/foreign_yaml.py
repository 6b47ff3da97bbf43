"""Reads YAML that somebody else wrote, with the limits and errors of `trainjob._support.foreign`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from trainjob._support.foreign import LIMITS, MAX_DIGITS, Limits, Unreadable, brackets, check

if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:  # libyaml, which the wheels of PyYAML contain, reads 1 MiB in a second; the Python version takes ten
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yaml_of(data: object, what: str, limits: Limits = LIMITS) -> Any:
    """The value of a YAML document as ``kubectl`` reads it: JSON's types only; dates and ``12:30`` are text.

    Args:
        data: Text, or bytes. Any other object is not readable.
        what: Name of the document for errors.
        limits: Limits of the document.

    Raises:
        Unreadable: It is not YAML, is more than one document, or exceeds a limit.
    """
    return _read(data, what, limits, lambda raw: yaml.load(raw, _Loader))  # noqa: S506 - a safe loader with fewer types


def documents_of(data: object, what: str, limits: Limits = LIMITS) -> list[Any]:
    """The values of all YAML documents in a text; see `yaml_of`."""
    documents: list[Any] = _read(data, what, limits, lambda raw: list(yaml.load_all(raw, _Loader)))
    return documents


def _read(data: object, what: str, limits: Limits, load: Callable[[bytes], Any]) -> Any:
    if not isinstance(data, str | bytes):
        raise Unreadable(what, "is not text")
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > limits.size:
        raise limits.too_long(what, len(raw))
    try:
        _check_events(raw, what, limits)
        value = load(raw)
    except yaml.YAMLError as error:
        where, why = _explained(error, raw)
        if brackets(raw.decode("latin-1")) > limits.depth:  # PyYAML 6.0.4 looks ahead, with its own limit and words
            raise limits.too_deep(what, where) from None
        raise Unreadable(what, f"is not valid YAML: {why}", where) from None
    check(value, what, limits)
    return value


@dataclass
class _Open:
    """A list or mapping whose end has not been read yet.

    Attributes:
        anchor: Its name for aliases.
        size: Its bytes.
        count: Its names and values, itself included.
        height: Its levels of nested lists and mappings, itself included.
        keys: Of a mapping, its keys so far; None of a list.
        is_key: Whether the next part of a mapping is a key.
    """

    anchor: str | None
    size: int = 1
    count: int = 1
    height: int = 1
    keys: set[str] | None = None
    is_key: bool = True

    def take(self, part: yaml.Event, what: str) -> None:
        """Take the end of a part. Refuse a key that occurs twice: parsers differ in which value they use."""
        if self.keys is None:
            return
        if self.is_key and isinstance(part, yaml.ScalarEvent) and part.value != "<<":
            if part.value in self.keys:
                raise Unreadable(what, f"has the key {part.value[:80]!a}, which occurs twice", _at(part.start_mark))
            self.keys.add(part.value)
        self.is_key = not self.is_key


def _check_events(raw: bytes, what: str, limits: Limits) -> None:
    """Refuse YAML that is too deep, or too large with its aliases expanded, before objects are built.

    Afterwards would be too late: merged mappings (``<<``) are copied.
    """
    known: dict[str | None, tuple[int, int, int]] = {}
    opened, expanded = [_Open(None)], ""
    for event in yaml.parse(raw, Loader=_Safe):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Open(event.anchor, keys=set() if isinstance(event, yaml.MappingStartEvent) else None))
            size, count, height = 0, 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            size, count, height = known[done.anchor] = done.size, done.count, done.height
        elif isinstance(event, yaml.ScalarEvent):
            size, count, height = known[event.anchor] = len(event.value.encode("utf-8", "surrogatepass")) + 1, 1, 0
        elif isinstance(event, yaml.AliasEvent):
            if any(each.anchor == event.anchor for each in opened[1:]):
                raise Unreadable(what, f"has an alias inside its own anchor: *{event.anchor}", _at(event.start_mark))
            expanded = " with its aliases expanded"
            size, count, height = known.get(event.anchor, (0, 0, 0))
        else:
            continue
        last = opened[-1]
        if not isinstance(event, yaml.CollectionStartEvent):
            last.take(event, what)
        last.size, last.count, last.height = last.size + size, last.count + count, max(last.height, height + 1)
        if len(opened) - 1 + height > limits.depth:
            raise limits.too_deep(what, _at(event.start_mark))
        if last.size > limits.size or last.count > limits.values:
            limit = "size" if last.size > limits.size else "values"
            raise limits.too_large(what, limit, expanded, _at(event.start_mark))


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
        if len(text) > MAX_DIGITS:
            problem = f"an integer of {len(text):,} digits; at most {MAX_DIGITS}"
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
