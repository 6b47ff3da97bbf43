"""Documents that no reader may fail on: each reader answers as it documents, and the others are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def laughs(first: bytes, then: bytes) -> bytes:
    """A few lines of YAML that expand to 3 to the power of 25 values."""
    lines = [b"%c: &%c %s" % (name, name, then % (name - 1, name - 1, name - 1)) for name in range(98, 122)]
    return b"\n".join([b"a: &a " + first, *lines])


DOCUMENTS: dict[str, bytes] = {
    "lists of depth 4,000": b"[" * 4000,
    "lists of depth 4,000 with their ends": b"[" * 4000 + b"]" * 4000,
    "lists of depth 65": b"[" * 65 + b"]" * 65,
    "mappings of depth 100,000": b'{"a":' * 100_000,
    "a message of depth 4,000": b'{"trainjob":' + b"[" * 4000,
    "an error of depth 4,000": b'{"trainjob": 1, "error": ' + b"[" * 4000 + b"]" * 4000 + b"}",
    "2 MiB of text": b'{"a": "' + b"x" * (2 << 20) + b'"}',
    "100,000 values": b"[" + b"0," * 100_000 + b"0]",
    "an integer of 5,000 digits": b'{"trainjob": ' + b"9" * 5000 + b"}",
    "an integer beyond all floats": b'{"trainjob": ' + b"9" * 400 + b"}",
    "a float beyond all floats": b'{"a": 1e999}',
    "NaN": b'{"a": NaN, "b": -Infinity}',
    "a lone surrogate": b'{"a": "\\ud800"}',
    "NUL": b'{"a": "\\u0000", "\\u0000": 1}',
    "a key twice": b'{"a": 1, "a": 2}',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "nothing": b"",
    "white space": b" \n",
    "a cut document": b'{"a": [1, ',
    "null": b"null",
    "a number": b"1",
    "a text": b'"x"',
    "a list": b'[null, 1, "x", [], {}]',
    "an empty mapping": b"{}",
    "aliases": laughs(b"[x, x, x]", b"[*%c, *%c, *%c]"),
    "merged mappings": laughs(b"{k: 1}", b"{<<: [*%c, *%c, *%c]}"),
    "an alias of itself": b"a: &a [*a]",
    "a tag of Python": b"a: !!python/object/apply:os.system [id]",
}
"""Name of a document -> its bytes."""

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    10**20,
    "",
    "x",
    "9" * 5000,
    "\0\x1b[31m",
    [],
    [[]],
    {},
    {"a": {"b": []}},
)
"""Values that a reader does not expect where it expects another one."""


def mutations(example: Any) -> Iterator[Any]:
    """The document with each of its parts replaced by each odd value, and without it."""
    yield from ODD
    parts = example.items() if isinstance(example, dict) else enumerate(example) if isinstance(example, list) else ()
    for name, part in parts:
        for changed in mutations(part):
            whole = json.loads(json.dumps(example))
            whole[name] = changed
            yield whole
        if isinstance(example, dict):
            yield {other: value for other, value in example.items() if other != name}
