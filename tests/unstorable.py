"""Values that a training may report or return, although not every store holds them, and the check of what is stored."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format, struct_pb2

CLEANED: dict[str, tuple[str, Any]] = {
    "no UTF-8": (r"b'caf\xe9.csv'.decode(errors='surrogateescape')", "caf\ufffd.csv"),
    "half of a pair": (r"'\ud83d'", "\ufffd"),
    "NUL": (r"{'a\0': ['x\0y']}", {"a\ufffd": ["x\ufffdy"]}),
    "control characters": (r"'\x1b[31mred\x7f\x9b\r\n'", "\ufffd[31mred\ufffd\ufffd\r\n"),
    "Airflow's own keys": (
        "{'__classname__': 'os.system', '__id__': 1}",
        {"__classname___": "os.system", "__id___": 1},
    ),
    "a tuple": ("(1, 'a')", [1, "a"]),
    "a number as key": ("{1: 2.5}", {"1": 2.5}),
}
"""Expressions, since another process makes the values; and the JSON that is stored of them."""
LOST: dict[str, str] = {
    "NaN": "float('nan')",
    "infinity": "[{'lr': float('-inf')}]",
    "a huge int": "10**400",
    "a deep list": "__import__('functools').reduce(lambda value, _: [value], range(100), 1)",
    "a set": "{1, 2}",
    "a path": "__import__('pathlib').Path('/models')",
    "a generator": "(part for part in 'ab')",
    "bytes": r"b'\xff'",
    "an object": "object()",
    "a tuple as key": "{(1, 2): 3}",
}
"""Expressions of what is not JSON: it is lost with a line in the log."""
VALUES = [*(expression for expression, _ in CLEANED.values()), *LOST.values()]


def unstorable(value: object) -> list[str]:
    """What PostgreSQL, UTF-8, JSON, KFP's protobuf and Airflow's serializer refuse in a value.

    Raises:
        ValueError: It is not JSON, or not Unicode.
        json_format.ParseError: Protobuf cannot hold it.
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()
    json_format.ParseDict({"result": json.loads(text)}, struct_pb2.Struct()).SerializeToString()
    found = [name for name in ("__classname__", "__id__", "__type") if f'"{name}"' in text]
    return found + [character for character in ("\\u0000", "\\u001b", "\x7f", "\x9b") if character in text]
