"""Text without control sequences."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from hypothesis import given, strategies as st

from trainjob._support.control_characters import colored, escaped_json, is_safe, one_line, plain

COLOR = re.compile(r"\x1b\[[0-9;:]*m")
INTRODUCERS = (
    "\x1b \x1b[ \x1b] \x1bP \x1b_ \x1b^ \x1bX \x1b\\ \x1bc \x1b(0 \x9b \x9d \x90 \x9f \x9e \x98 \x9c \x07 \x18 \x1a"
)
TAILS = "31m 0m m ; : >4;2m ?25l 2J 52;c;aGVp 0;title a é 日 \x1b[31m \x1b[0m \x1b[38;2;1;2;3m"
SINGLE = ["\r", "\n", "\r\n", "\t", *"\u202e\u2066\u2028\x00\x7f\udc80\U000e0041"]
PARTS = st.sampled_from([*INTRODUCERS.split(" "), *TAILS.split(" "), *SINGLE])
HOSTILE = st.lists(PARTS | st.text(max_size=5), max_size=12).map("".join)


def controls(text: str) -> list[str]:
    """Characters that a terminal would not display unchanged."""
    kinds, turns = {"Cc", "Cs", "Zl", "Zp"}, {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    found = [c for c in text if unicodedata.category(c) in kinds or unicodedata.bidirectional(c) in turns]
    return [c for c in found if c not in "\t\n"]


@given(HOSTILE)
def test_plain_text_has_no_control_sequence(text: str) -> None:
    assert controls(plain(text)) == []
    assert plain(plain(text)) == plain(text)
    plain(text).encode()


@given(HOSTILE)
def test_colored_text_has_no_sequence_but_colors(text: str) -> None:
    shown = colored(text)
    assert controls(COLOR.sub("", shown)) == []
    assert colored(shown) == shown
    for line in shown.split("\n"):  # no color continues on the next line
        found = COLOR.findall(line)
        assert not found or re.fullmatch(r"\x1b\[[0;]*m", found[-1])
    assert plain(shown) == plain(text)


@given(HOSTILE, st.integers(0, 60))
def test_text_cut_anywhere_is_safe(text: str, position: int) -> None:
    for part in (text[:position], text[position:]):
        assert controls(COLOR.sub("", colored(part))) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZWNobyBoaQ==\x07after", "after"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("\x1b]8;;https://host\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP$qm\x1b\\after", "after"),
        ("\x1b_apc\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\after", "after"),
        ("\x9d52;c;aGVp\x9cafter", "after"),
        ("\x9b31mafter", "after"),
        ("\x1b[>4;2mafter", "after"),  # xterm's key modifiers end with m, like colors
        ("\x1b[?1049h\x1b[2J\x1b[Hafter", "after"),
        ("\x1bcafter", "after"),
        ("\x1b(0after", "after"),
        ("\x1b]0;no end", "0;no end"),  # a stray introducer removes no text
        ("\x1b\x1b[31m[2J", "[2J"),
        ("a\x00b\x7fc", "a\ufffdb\ufffdc"),
        ("beep\x07 back\x08", "beep back"),
        ("turned \u202egpj.exe", "turned \ufffdgpj.exe"),
        ("a\tb\r\nc", "a\tb\nc"),
        ("日本 é 👩‍🚀", "日本 é 👩‍🚀"),
    ],
)
def test_sequences_are_removed_and_text_stays(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_colors_stay_and_end_with_the_line() -> None:
    assert colored("\x1b[31mred\nplain") == "\x1b[31mred\x1b[0m\nplain"
    assert colored("\x1b[1;31mred\x1b[0m \x1b[mplain") == "\x1b[1;31mred\x1b[0m \x1b[mplain"
    assert colored("\x1b[31mred\x1b[39m") == "\x1b[31mred\x1b[39m\x1b[0m"
    assert colored("\x1b[38:2:1:2:3mred\x1b]0;x\x07") == "\x1b[38:2:1:2:3mred\x1b[0m"


def test_length_of_one_line_is_limited() -> None:
    assert one_line("a\tb\nc\n", 9) == "a    b c"
    assert one_line("x" * 30, 10) == "xxxxxxxxxx … (20 characters more)"
    assert one_line("x" * 1000, 10) == "xxxxxxxxxx … (990 characters more)"


@given(HOSTILE)
def test_json_is_the_same_value_and_safe(text: str) -> None:
    written = escaped_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert json.loads(written) == {text: [text]}
    assert is_safe(written)


def test_sanitizing_takes_linear_time() -> None:
    for part in ("\x1b]", "\x9d", "\x1b[", "\x1bP1", "\x1b[31", "\x9b0;", "\x1b \x1b"):
        assert controls(plain(part * 100_000)) == []  # quadratic time would take hours
        assert controls(COLOR.sub("", colored(part * 100_000))) == []
