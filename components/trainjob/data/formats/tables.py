"""Tables of Apache Arrow and Parquet, and logs of TensorBoard."""

from __future__ import annotations

import base64
import binascii
import re

from trainjob.data.formats.candidates import Candidate, Refused

# An extension type of pyarrow up to version 20: its parameters are a pickle, which versions before 14 always load.
_PICKLED = b"arrow.py_extension_type"
_SCHEMA = 64 * 1024 * 1024
"""Limit of a schema or footer, in bytes; that of a table with 100,000 columns has 20 MB."""
_STREAM = b"\xff\xff\xff\xff"  # precedes each message of Arrow's stream format
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{64,}")


def parquet(candidate: Candidate) -> None:
    """Check that the file is Parquet without pickled types."""
    end = candidate.tail(8)
    if candidate.size < 12 or candidate.head(4) != b"PAR1" or end[4:] != b"PAR1":
        raise Refused("is not a Parquet file, or is truncated")
    length = int.from_bytes(end[:4], "little")
    footer = _within(candidate, candidate.size - 8 - length, length)
    # Arrow's schema is base64 after its key. The match may begin before it, so all four offsets are decoded.
    for match in _BASE64.finditer(footer):
        for start in range(4):
            part = match[0][start:]
            if _PICKLED in _decoded(part[: len(part) // 4 * 4]):
                raise Refused("has a pickled type (arrow.py_extension_type)")
    if _PICKLED in footer:
        raise Refused("has a pickled type (arrow.py_extension_type)")


def arrow(candidate: Candidate) -> None:
    """Check that the file is an Arrow file (Feather 2) or stream without pickled types."""
    start = candidate.head(16)
    schemas = []
    if start.startswith(b"ARROW1\0\0"):
        end = candidate.tail(10)
        if candidate.size < 24 or end[4:] != b"ARROW1":
            raise Refused("is not an Arrow file, or is truncated")
        length = int.from_bytes(end[:4], "little")
        schemas.append(_within(candidate, candidate.size - 10 - length, length))
        start = start[8:]
        at = 8
    else:
        at = 0
    if not start.startswith(_STREAM):
        raise Refused("is neither an Arrow file nor an Arrow stream")
    schemas.append(_within(candidate, at + 8, int.from_bytes(start[4:8], "little")))
    if any(_PICKLED in schema for schema in schemas):
        raise Refused("has a pickled type (arrow.py_extension_type)")


def events(candidate: Candidate) -> None:
    """Check that the file is a sequence of TFRecords, like the logs of TensorBoard."""
    file, at = candidate.file, 0
    while at < candidate.size:
        file.seek(at)
        at += 8 + 4 + int.from_bytes(file.read(8), "little") + 4
    if at != candidate.size or not at:
        raise Refused("is not a TensorBoard log, or is truncated")


def _within(candidate: Candidate, start: int, length: int) -> bytes:
    if start < 0 or length > _SCHEMA or start + length > candidate.size:
        raise Refused("has an invalid schema")
    candidate.file.seek(start)
    return candidate.file.read(length)


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text)
    except binascii.Error:
        return b""
