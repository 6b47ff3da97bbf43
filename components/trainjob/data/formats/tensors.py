"""Check tensors in GGUF files and in NumPy's ``.npy`` and ``.npz``."""

from __future__ import annotations

import ast
import math
import re
import zipfile
import zlib
from typing import IO, Any, BinaryIO

from trainjob.data.formats.candidates import Candidate, Refused

_NPY = b"\x93NUMPY"
_NPY_HEADER = 1_000_000
"""Limit of a header, in bytes; NumPy itself reads 10,000 from untrusted files."""
_TEXT = 2**24
"""Limit of a text in the header of a GGUF file, in bytes; the longest are chat templates."""
# Bytes of GGUF's value types. 8 is a text, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_SIMPLE = re.compile(r"[<>|=]?(?:[?bB]|[biufc]\d+|[SaUV]\d+|[mM]8(?:\[[0-9A-Za-z/]+\])?)")


def gguf(candidate: Candidate) -> None:
    """Check that the file is GGUF with a valid header, and that its tensors start within the file."""
    file = candidate.file
    file.seek(0)
    try:
        if file.read(4) != b"GGUF" or _number(file, 4) not in (2, 3):
            raise Refused("is not a GGUF file of version 2 or 3")
        tensors, values = _number(file, 8), _number(file, 8)
        for _ in range(values):
            _skip_text(file)
            _skip_value(file, _number(file, 4))
        offsets = []
        for _ in range(tensors):
            _skip_text(file)
            _skip(file, 8 * _number(file, 4) + 4)
            offsets.append(_number(file, 8))
    except (EOFError, KeyError):
        raise Refused("has an invalid GGUF header") from None
    if file.tell() + max(offsets, default=0) > candidate.size:
        raise Refused("is truncated")


def npy(candidate: Candidate) -> None:
    """Check that the file is exactly one array of numbers or texts."""
    candidate.file.seek(0)
    size = _array(candidate.file)
    if candidate.file.tell() + size != candidate.size:
        raise Refused(f"has {candidate.size} bytes, but its header states {candidate.file.tell() + size}")


def npz(candidate: Candidate) -> None:
    """Check that the file is a zip archive of arrays of numbers or texts only."""
    try:
        with zipfile.ZipFile(candidate.file) as archive:
            members = archive.infolist()
            if candidate.head(4) != b"PK\x03\x04" or min(each.header_offset for each in members) != 0:
                raise Refused("has data before its zip archive")
            for each in members:
                with archive.open(each) as member:
                    _member(each, member)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError):
        raise Refused("is not a zip archive of arrays") from None


def _member(info: zipfile.ZipInfo, member: IO[bytes]) -> None:
    try:
        size = _array(member)
    except Refused as refused:
        raise Refused(f"has the member {info.filename[:80]!a}, which {refused.reason}") from None
    if member.tell() + size != info.file_size:
        raise Refused(f"has the member {info.filename[:80]!a}, whose size does not match its header")


def _array(file: IO[bytes]) -> int:
    """Read the header of an array; returns the size of the array's data in bytes."""
    if file.read(6) != _NPY:
        raise Refused("is not a NumPy array")
    version = file.read(2)
    width = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}.get(version)
    if width is None:
        raise Refused("has an unknown version of NumPy's format")
    length = int.from_bytes(file.read(width), "little")
    if length > _NPY_HEADER:
        raise Refused("has an invalid header")
    try:
        header = ast.literal_eval(file.read(length).decode("utf-8" if version == b"\3\0" else "latin-1"))
        shape, item = header["shape"], _item_size(header["descr"])
        if not isinstance(shape, tuple) or not all(type(each) is int and each >= 0 for each in shape):
            raise Refused("has an invalid header")
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        raise Refused("has an invalid header") from None
    return math.prod(shape) * item


def _item_size(descr: Any) -> int:
    """Size of one element in bytes; raises Refused for Python objects, which are pickled."""
    if isinstance(descr, str):
        if not _SIMPLE.fullmatch(descr):
            raise Refused(
                "contains Python objects" if "O" in descr else f"has elements of the unknown type {descr[:20]!a}"
            )
        kind, number = descr.lstrip("<>|=")[:1], re.sub(r"\D|\[.*", "", descr)
        return int(number or 1) * (4 if kind == "U" else 1)
    if isinstance(descr, tuple) and len(descr) == 2:
        shape = descr[1] if isinstance(descr[1], tuple) else (descr[1],)
        return _item_size(descr[0]) * math.prod(shape)
    if not isinstance(descr, list):
        raise ValueError("descr")
    return sum(_item_size((field[1], field[2]) if len(field) > 2 else field[1]) for field in descr)


def _number(file: BinaryIO, width: int) -> int:
    data = file.read(width)
    if len(data) != width:
        raise EOFError
    return int.from_bytes(data, "little")


def _skip(file: BinaryIO, count: int) -> None:
    file.seek(count, 1)


def _skip_text(file: BinaryIO) -> None:
    length = _number(file, 8)
    if length > _TEXT:
        raise EOFError
    _skip(file, length)


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == _GGUF_TEXT:
        _skip_text(file)
    elif kind != _GGUF_ARRAY:
        _skip(file, _SIZES[kind])
    else:
        inner, count = _number(file, 4), _number(file, 8)
        if inner == _GGUF_ARRAY:
            raise KeyError(inner)
        if inner != _GGUF_TEXT:
            _skip(file, _SIZES[inner] * count)
        else:
            for _ in range(count):
                _skip_text(file)
