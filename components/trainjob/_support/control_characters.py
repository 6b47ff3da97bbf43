"""Removes control sequences from text of unknown origin, before it reaches a terminal or a file.

A job's log, a container's message and a server's response can contain any bytes. On a terminal, an OSC sequence sets
the clipboard (OSC 52) or the title, a DCS sequence makes the terminal send input, and bidirectional controls change the
displayed order of text. The sequences follow ECMA-48, with 7-bit and 8-bit introducers.
"""

from __future__ import annotations

import json
import re

_SEQUENCE = re.compile(
    r"(?P<color>\x1b\[[0-9;:]*m)"  # SGR; with a private parameter (`>4;2m`) it is another command
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI, also one that is cut off
    # OSC, DCS, APC, PM, SOS: with their text if their end is on the same line. Without the end, the text is shown.
    r"|(?:\x1b[\]P_^X]|[\x90\x98\x9d-\x9f])(?:[^\x07\x1b\x90\x98-\x9f\n]*(?:\x07|\x1b\\|\x9c))?"
    r"|\x1b[ -/]*[0-~]?"  # any other escape sequence
)
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"  # line separators, invisible tags, surrogates
)
_SILENT = "\x07\x08"  # bell and backspace, removed without a mark
_RESET = "\x1b[0m"
_IS_RESET = re.compile(r"\x1b\[[0;]*m")


def plain(text: str) -> str:
    """`text` without control sequences. Newlines and tabs stay; U+FFFD replaces a removed control character."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_mark, _SEQUENCE.sub("", text.replace("\r\n", "\n")))


def colored(text: str) -> str:
    """`text` as `plain` returns it, but with its colors (SGR), which are reset at the end of each line."""
    if "\x1b[" not in text:
        return plain(text)
    return "\n".join(map(_colored_line, text.replace("\r\n", "\n").split("\n")))


def _colored_line(line: str) -> str:
    parts, last, position = [], "", 0
    for found in _SEQUENCE.finditer(line):
        parts.append(_UNSAFE.sub(_mark, line[position : found.start()]))
        position = found.end()
        if found["color"]:
            last = found[0]
            parts.append(last)
    parts.append(_UNSAFE.sub(_mark, line[position:]))
    if last and not _IS_RESET.fullmatch(last):
        parts.append(_RESET)
    return "".join(parts)


def states(line: str) -> list[str]:
    """The states of a line that a terminal shows one after the other; blank states are left out.

    Progress bars end or begin each state with a carriage return.
    """
    return [state for state in line.split("\r") if plain(state).strip()]


def one_line(text: str, characters: int) -> str:
    """`plain` text on one line, tabs as blanks, cut after `characters` with the number of characters left out."""
    # Text far behind the limit is not processed.
    shown = plain(text[: 20 * characters].rstrip("\r\n")).replace("\t", "    ").replace("\n", " ")
    left_out = max(0, len(shown) - characters) + max(0, len(text) - 20 * characters)
    return f"{shown[:characters]} … ({left_out} characters more)" if left_out else shown


def escaped_json(text: str) -> str:
    """JSON `text` of the same value, with escapes for characters that are unsafe on a terminal or not encodable."""
    return _UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], text)


def short_json(value: object) -> str:
    """A JSON value as text of at most 80 characters; ``(nothing)`` for None."""
    text = "(nothing)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def is_safe(text: str) -> bool:
    """Whether `text` has no characters that `plain` removes."""
    return _UNSAFE.search(text) is None


def _mark(found: re.Match[str]) -> str:
    return "" if found[0] in _SILENT else "\ufffd"
