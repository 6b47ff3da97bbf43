"""Check ONNX and SentencePiece models (protocol buffers) and MessagePack, without loading their schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

from trainjob.data.formats.candidates import Candidate, Refused

_DEPTH = 100
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types of protocol buffers
# onnx.proto of ONNX 1.19: by message, the fields whose messages may refer to files or operators.
_ONNX: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
    "external": {},
}
_MODEL_FIELDS = frozenset({*range(1, 9), 14, 20, 25, 26})
_OPERATOR = 4


def onnx(candidate: Candidate) -> set[str]:
    """Check that the file is an ONNX model; returns its files of external tensors, relative to the model's directory.

    Custom operators are libraries of the program that runs the model; the model cannot contain them.
    """
    walk = _Walk(candidate)
    try:
        present = set(walk.message("model", candidate.size, 0))
    except (_Malformed, UnicodeDecodeError):
        raise Refused("is not an ONNX model") from None
    if not {1, 7} <= present <= _MODEL_FIELDS:
        raise Refused("is not an ONNX model")
    return walk.locations


def sentencepiece(candidate: Candidate) -> None:
    """Check that the file is a SentencePiece model: a sequence of pieces and settings."""
    try:
        found = [(number, wire) for number, wire, _ in _fields(candidate.file, candidate.size)]
    except _Malformed:
        raise Refused("is not a SentencePiece model") from None
    # sentencepiece_model.proto: pieces, trainer, normalizer, self-test, denormalizer.
    if (1, _BYTES) not in found or not set(found) <= {(number, _BYTES) for number in range(1, 6)}:
        raise Refused("is not a SentencePiece model")


def msgpack(candidate: Candidate) -> None:
    """Check that the file is one MessagePack map, as Flax writes it, without Python objects (msgpack-numpy)."""
    file = candidate.file
    file.seek(0)
    left, previous = 1, b""
    first = True
    while left:
        kind, count, items = _item(file)
        if first and kind != "map":
            raise Refused("is not a MessagePack map")
        first = False
        left += items - 1
        short = kind == "bytes" and count <= 16
        value = _exactly(file, count) if short else b""
        if not short:
            file.seek(count, 1)
        if previous == b"kind" and value == b"O":
            raise Refused("has an array of Python objects, which is a pickle")
        previous = value
        if file.tell() > candidate.size:
            raise Refused("is truncated")
    if file.tell() != candidate.size:
        raise Refused("is not a MessagePack map")


class _Malformed(Exception):
    """The bytes are not a protocol buffer."""


class _Walk:
    """One ONNX model. ``locations``: the external files of its tensors."""

    def __init__(self, candidate: Candidate) -> None:
        self._file = candidate.file
        self._file.seek(0)
        self.locations: set[str] = set()

    def message(self, kind: str, end: int, depth: int) -> Iterator[int]:
        """Walk a message; yields the numbers of its fields."""
        if depth > _DEPTH:
            raise _Malformed
        entry: dict[int, bytes] = {}
        for number, wire, stop in _fields(self._file, end, start=self._file.tell()):
            if wire == _BYTES and (inner := _ONNX[kind].get(number)):
                for _ in self.message(inner, stop, depth + 1):
                    pass
            elif (kind == "external" or (kind == "node" and number == _OPERATOR)) and wire == _BYTES:
                entry[number] = self._file.read(min(4096, stop - self._file.tell()))
            yield number
        if kind == "external" and entry.get(1) == b"location":
            self.locations.add(entry.get(2, b"").decode())
        if kind == "node" and entry.get(_OPERATOR) == b"PyOp":
            raise Refused("has an operator that calls Python code (PyOp)")


def _fields(file: BinaryIO, end: int, start: int = 0) -> Iterator[tuple[int, int, int]]:
    """Number, wire type and end of each field between two offsets; unread bytes of a field are skipped."""
    at = start
    while at < end:
        file.seek(at)
        key = _varint(file)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            _varint(file)
            at = file.tell()
        elif wire == _BYTES:
            length = _varint(file)
            at = file.tell() + length
        elif wire in (_EIGHT, _FOUR):
            at = file.tell() + (8 if wire == _EIGHT else 4)
        else:
            raise _Malformed
        if not number or at > end:
            raise _Malformed
        yield number, wire, at


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise _Malformed


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise Refused("is truncated")
    return data


# MessagePack, by the first byte of an item. Kind, and number of bytes of the length that follows:
_LONG = {
    **{0xC4 + n: ("bytes", 1 << n) for n in range(3)},
    **{0xC7 + n: ("extension", 1 << n) for n in range(3)},
    **{0xD9 + n: ("bytes", 1 << n) for n in range(3)},
    **{0xDC + n: ("array", 2 << n) for n in range(2)},
    **{0xDE + n: ("map", 2 << n) for n in range(2)},
}
# Kind and length of all other items:
_SHORT = {
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), ("number", 0)),
    **{0x80 + n: ("map", n) for n in range(16)},
    **{0x90 + n: ("array", n) for n in range(16)},
    **{0xA0 + n: ("bytes", n) for n in range(32)},
    **dict.fromkeys((0xCC, 0xD0), ("number", 1)),
    **dict.fromkeys((0xCD, 0xD1), ("number", 2)),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), ("number", 4)),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), ("number", 8)),
    **{0xD4 + n: ("extension", 1 << n) for n in range(5)},
}


def _item(file: BinaryIO) -> tuple[str, int, int]:
    """Kind of the next item, the number of its bytes, and the number of items in it."""
    code = _exactly(file, 1)[0]
    if code in _SHORT:
        kind, length = _SHORT[code]
    elif code in _LONG:
        kind, width = _LONG[code]
        length = int.from_bytes(_exactly(file, width), "big")
    else:
        raise Refused("is not MessagePack")
    if kind in ("map", "array"):
        return kind, 0, length * (2 if kind == "map" else 1)
    return kind, length + (kind == "extension"), 0  # an extension has one byte for its type
