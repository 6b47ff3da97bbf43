from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainjob.logs import LogLine, cri_line, merge, parse_cri

T = "2026-11-21T10:00:00.00000000{}Z"


def test_a_line_as_it_is_shown() -> None:
    assert str(LogLine(T.format(1), "node-1", "epoch 3")) == "[node-1] epoch 3"


@given(st.binary().filter(lambda text: b"\n" not in text), st.booleans())
def test_what_is_written_is_read(text: bytes, partial: bool) -> None:
    (line,) = parse_cri("node-0", [cri_line(T.format(1), text, partial=partial)])
    assert line == LogLine(T.format(1), "node-0", text.decode("utf-8", "replace"))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"2026 stdout F hello world\n", "hello world"),
        (b"2026 stderr F to stderr", "to stderr"),
        (b"2026 stdout P a part", "a part"),
        (b"2026 stdout F \n", ""),
        (b"2026 stdout F", ""),
        (b"2026 stdout F  two blanks", " two blanks"),
        (b"2026 stdout F \xff\xfe\n", "\ufffd\ufffd"),
    ],
)
def test_lines_of_the_cri_format(raw: bytes, text: str) -> None:
    assert [line.text for line in parse_cri("r", [raw])] == [text]


@pytest.mark.parametrize("raw", [b"", b"\n", b"hello", b"2026 stdin F x", b"2026 stdout X x", b"2026 stdout Fx y"])
def test_what_is_no_such_line_is_passed_over(raw: bytes) -> None:
    assert list(parse_cri("r", [raw])) == []


def test_merging_goes_by_time_and_keeps_each_ranks_order() -> None:
    zero = [LogLine(T.format(n), "node-0", f"{i}") for i, n in enumerate((1, 3, 3, 5))]
    one = [LogLine(T.format(n), "node-1", f"{i}") for i, n in enumerate((2, 3, 4))]
    merged = list(merge(zero, one))
    assert [line.time for line in merged] == sorted(line.time for line in zero + one)
    assert [line for line in merged if line.rank == "node-0"] == zero
    assert [line for line in merged if line.rank == "node-1"] == one


def test_merging_is_lazy() -> None:
    taken = []

    def endless(rank: str) -> object:
        n = 0
        while True:
            taken.append(rank)
            yield LogLine(f"{n:09}", rank, "")
            n += 1

    lines = merge(endless("a"), endless("b"))  # type: ignore[arg-type]
    assert [next(lines).rank for _ in range(4)] == ["a", "b", "a", "b"]
    assert len(taken) < 8
