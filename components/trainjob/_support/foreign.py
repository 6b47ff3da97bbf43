"""Reads what somebody else wrote: JSON and files of ranks, people, stores, registries and other programs.

Each reader has limits, and raises `Unreadable` and nothing else, so that one bad document stops nothing else. YAML is
read by `trainjob._support.foreign_yaml`, with the same limits and errors. tests/unit/decoders.py lists the modules
that may decode by themselves, each with its reason.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

MAX_DIGITS = 400
"""Digits of an integer: more than those of `MAX_BITS` in every base except 2. Python refuses more than 4,300."""

MAX_BITS = 1024
"""Bits of an integer: about those of the largest float, which is the type for numbers of KFP, JavaScript and jq."""


class Unreadable(ValueError):
    """A document cannot be read.

    Attributes:
        what: The document.
        why: What is wrong with it, as a predicate: ``has more than 50,000 names and values``.
        where: Its place, as ``, line 3, column 5``; empty if unknown.
        limit: ``size``, ``depth``, ``values`` or ``number`` if it exceeds one; empty otherwise.
    """

    def __init__(self, what: str, why: str, where: str = "", limit: str = "") -> None:
        super().__init__(f"{what} is not readable: it {why}{where}")
        self.what, self.why, self.where, self.limit = what, why, where, limit


class Absent(Unreadable):
    """There is no such file."""


@dataclass(frozen=True)
class Limits:
    """How much is read of a document.

    Attributes:
        size: Bytes of its text; and of all names and values, with aliases expanded.
        depth: Nested lists and mappings. Python's recursion limit would end the program at some hundred levels.
        values: Names and values.
        finite: Whether NaN and infinities, which JSON does not have, are refused.
        of: What has these limits, for errors.
    """

    size: int = 1 << 20
    depth: int = 64
    values: int = 50_000
    finite: bool = True
    of: str = "a document"

    def too_long(self, what: str, found: int) -> Unreadable:
        """The error for a document of so many bytes."""
        return Unreadable(what, f"has {found:,} bytes; {self.of} has at most {self.size:,}", "", "size")

    def too_large(self, what: str, limit: str, expanded: str = "", where: str = "") -> Unreadable:
        """The error for a value whose ``size`` or number of ``values`` is too large."""
        most = f"{self.size:,} bytes of text, names" if limit == "size" else f"{self.values:,} names"
        return Unreadable(what, f"has more than {most} and values{expanded}", where, limit)

    def too_deep(self, what: str, where: str = "") -> Unreadable:
        """The error for a value that is nested too deeply."""
        why = f"is nested {self.depth + 1} lists and mappings deep, or more; {self.of} has at most {self.depth}"
        return Unreadable(what, why, where, "depth")


LIMITS = Limits()
LARGE = Limits(1 << 30, values=1 << 30)
"""Limits of documents whose readers limit the bytes that they read, as lists of the files of a model."""
LENIENT = replace(LIMITS, finite=False)
"""Limits of what Python programs log and people edit: Python's `json` writes NaN."""


def json_of(data: object, what: str, limits: Limits = LIMITS) -> Any:
    """The value of a JSON document.

    Stricter than Python's `json`: parsers differ for anything else, such as which of two equal keys they use.

    Args:
        data: Text, or bytes in UTF-8. Any other object is not readable.
        what: Name of the document for errors, with the object that has it.
        limits: Limits of the document.

    Raises:
        Unreadable: It is not JSON, has a key twice, text that is not Unicode or numbers that JSON does not have, or
            exceeds a limit.
    """
    text = _text_of(data, what, limits)
    constant = _infinite if limits.finite else float
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=constant)
    except json.JSONDecodeError as error:
        if brackets(text) > limits.depth:  # Python 3.13 decodes 4,000 levels, and finds that their ends are missing
            raise limits.too_deep(what) from None
        where = f", line {error.lineno}, column {error.colno}"
        raise Unreadable(what, f"is not valid JSON: {error.msg}", where) from None
    except RecursionError:
        raise limits.too_deep(what) from None
    except ValueError as error:  # of the functions below
        raise Unreadable(what, str(error)) from None
    check(value, what, limits)
    return value


def mapping_of(data: object, what: str, limits: Limits = LIMITS) -> dict[str, Any]:
    """The mapping in a JSON document; raises Unreadable for anything else, as `json_of`."""
    value = json_of(data, what, limits)
    if not isinstance(value, dict):
        raise Unreadable(what, "is not a JSON object")
    return value


def brackets(text: str) -> int:
    """The deepest nesting of brackets in a text, those in quotes included: a reason why a decoder has failed."""
    depth = deepest = 0
    for each in re.findall(r"[\[\]{}]", text):
        depth += 1 if each in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def check(value: object, what: str, limits: Limits = LIMITS) -> None:
    """Check a value that has been read. Larger values do not take longer, nor does one that contains itself.

    Args:
        value: Lists, mappings, pydantic's models and their contents; other objects are not inspected.
        what: Its name for errors.
        limits: Its limits.

    Raises:
        Unreadable: It exceeds a limit, or has text that is not Unicode.
    """
    size, count, most_bytes, most = 0, 0, limits.size, limits.values
    opened: list[Iterator[object]] = [iter((value,))]  # without recursion
    while opened:
        for each in opened[-1]:
            count += 1
            if type(each) is str and each.isascii():  # most values of most documents
                size += len(each) + 1
                parts = None
            else:
                size, parts = size + _bytes_of(each, what, limits), _parts(each)
            if size > most_bytes or count > most:
                raise limits.too_large(what, "size" if size > most_bytes else "values")
            if parts is not None:
                if len(opened) > limits.depth:
                    raise limits.too_deep(what)
                opened.append(iter(parts))
                break
        else:
            opened.pop()


def _parts(value: object) -> Iterable[object] | None:
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, _MAPPINGS):
        return chain.from_iterable(value.items())
    if isinstance(value, _LISTS):
        return value
    if names := api_names(value):
        return (getattr(value, name, None) for name in names)
    # pydantic's models: this module does not import pydantic, so that a DAG file does not need it.
    return vars(value).values() if hasattr(type(value), "model_fields") else None


def api_names(value: object) -> Mapping[str, str]:
    """Attribute -> name in the API of a model of the ``kubernetes`` package; empty for any other value."""
    found = getattr(type(value), "attribute_map", None)
    return found if isinstance(found, Mapping) else {}


_PLAIN, _MAPPINGS, _LISTS = (str, int, float, type(None)), (dict, Mapping), (list, tuple, set, frozenset)


def _bytes_of(value: object, what: str, limits: Limits) -> int:
    if isinstance(value, str):
        try:
            return len(value.encode()) + 1
        except UnicodeEncodeError as error:
            text = repr(value[max(0, error.start - 20) : error.end])
            raise Unreadable(what, f"has text that is not Unicode (half of a surrogate pair): {text}") from None
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        why = f"has an integer of {value.bit_length():,} bits; at most {MAX_BITS:,}"
        raise Unreadable(what, why, "", "number")
    if limits.finite and isinstance(value, float) and not math.isfinite(value):
        raise Unreadable(what, f"has the number {value}, which JSON does not have", "", "number")
    return len(value) if isinstance(value, bytes) else 1


def _text_of(data: object, what: str, limits: Limits) -> str:
    if not isinstance(data, str | bytes | bytearray):
        raise Unreadable(what, "is not text")
    try:
        size = len(data.encode()) if isinstance(data, str) else len(data)
        if size > limits.size:
            raise limits.too_long(what, size)
        return data if isinstance(data, str) else data.decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise Unreadable(what, f"is not UTF-8 text ({error.reason})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, each in pairs:
        if name in value:
            raise ValueError(f"has the key {name[:80]!a}, which occurs twice")
        value[name] = each
    return value


def _integer(text: str) -> int | float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"has an integer of {len(text):,} digits; at most {MAX_DIGITS}")
    return int(text) if text != "-0" else -0.0  # a float, as in the safetensors library


def _infinite(text: str) -> float:
    raise ValueError(f"has the number {text}, which JSON does not have")


# ---------------------------------------------------------------- files


def open_regular(path: Path) -> FileIO:
    """Open a file of a directory to which a training or another program may write.

    Follows no link, does not wait for the writer of a FIFO, and opens nothing but files.

    Raises:
        Absent: It does not exist.
        Unreadable: It is not a regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise Absent(str(path), "does not exist") from None
    except OSError as error:  # ELOOP is a link, ENXIO a socket
        other = error.errno in (errno.ELOOP, errno.ENXIO)
        raise Unreadable(str(path), "is not a regular file" if other else f"gives: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # of the opened file: the name may have another by now
        os.close(descriptor)
        raise Unreadable(str(path), "is not a regular file")
    return FileIO(descriptor)


def read_regular(path: Path, limit: int, *, start: int = 0, cut: bool = False) -> bytes:
    """The bytes of a file as by `open_regular`. At most `limit` are read, whatever its size says or becomes.

    Args:
        path: The file.
        limit: Most bytes to return.
        start: Position of the first byte.
        cut: Whether a longer file is cut; otherwise it is not readable.

    Raises:
        Absent: It does not exist.
        Unreadable: It is longer, is not a regular file, or cannot be read.
    """
    with open_regular(path) as file:
        return read_opened(file, path, limit, start=start, cut=cut)


def read_opened(file: FileIO, path: Path, limit: int, *, start: int = 0, cut: bool = False) -> bytes:
    """The same of a file that `open_regular` has opened."""
    data = bytearray()
    try:
        file.seek(start)
        while len(data) <= limit and (more := file.read(min(1 << 20, limit + 1 - len(data)))):
            data += more
    except OSError as error:
        raise Unreadable(str(path), f"gives: {error.strerror}") from None
    if len(data) > limit and not cut:
        raise Unreadable(str(path), f"has more than {limit:,} bytes", "", "size")
    return bytes(data[:limit])
