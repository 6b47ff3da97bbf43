from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from trainjob._backends.kubernetes.pods import KubeletLines
from trainjob._support.kube_objects import MAX_LINE
from trainjob._support.log_lines import LogLine, Splitter, Throttle, cri_line, latest, merge, parse_cri

T = "2026-11-21T10:00:00.00000000{}Z"


@given(st.binary().filter(lambda text: b"\n" not in text), st.booleans())
def test_written_lines_are_parsed(text: bytes, partial: bool) -> None:
    (part,) = parse_cri([cri_line(T.format(1), text, partial=partial)])
    assert part == (T.format(1), text.decode("utf-8", "replace"), not partial)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"2026 stdout F hello world\n", "hello world"),
        (b"2026 stderr F to stderr", "to stderr"),
        (b"2026 stdout F \n", ""),
        (b"2026 stdout F", ""),
        (b"2026 stdout F  two blanks", " two blanks"),
    ],
)
def test_cri_lines_are_parsed(raw: bytes, text: str) -> None:
    assert [part for _, part, _ in parse_cri([raw])] == [text]


@pytest.mark.parametrize("raw", [b"", b"\n", b"hello", b"2026 stdin F x", b"2026 stdout X x", b"2026 stdout Fx y"])
def test_other_lines_are_skipped(raw: bytes) -> None:
    assert list(parse_cri([raw])) == []


def test_merge_is_lazy_sorts_by_time_and_keeps_the_order_of_each_rank() -> None:
    zero = [LogLine(T.format(n), "node-0", f"{i}") for i, n in enumerate((1, 3, 3, 5))]
    one = [LogLine(T.format(n), "node-1", f"{i}") for i, n in enumerate((2, 3, 4))]
    merged = list(merge(zero, one))
    assert [line.time for line in merged] == sorted(line.time for line in zero + one)
    assert [line for line in merged if line.rank == "node-0"] == zero
    assert [line for line in merged if line.rank == "node-1"] == one
    assert str(merged[0]) == "[node-0] 0"
    taken: list[str] = []

    def endless(rank: str) -> Iterator[LogLine]:
        for number in itertools.count():
            taken.append(rank)
            yield LogLine(f"{number:09}", rank, "")

    lines = merge(endless("a"), endless("b"))
    assert [next(lines).rank for _ in range(4)] == ["a", "b", "a", "b"]
    assert len(taken) < 8


# --- progress bars


def split(*parts: tuple[str, bool], raw: bool = False) -> list[tuple[str, bool]]:
    """Texts of the lines made of parts, each with its transient flag."""
    splitter = Splitter("node-0", raw=raw)
    lines = [line for text, ended in parts for line in splitter.take("t", text, ended=ended)]
    return [(line.text, line.transient) for line in lines]


ENV = "env: 'python3\r': No such file or directory"
# As tqdm writes bars, and with a carriage return after each state.
TQDM = [("\r  0%", False), ("\r 50%", False), ("\r100%", False), ("", True), ("next", True)]
BEHIND = [("  0%\r", False), (" 50%\r100%\r", False), ("", True), ("next", True)]
JOINED = [("\r 10%|#", False), ("##|", False), ("\r 20%", True)]
BLANK = [("\r 90%", False), ("\r\x1b[2K\r", False), ("\r      \r", False), ("", True)]


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([(" 10%\r 20%\r 30%\r", True), ("next", True)], [(" 30%", False), ("next", False)]),
        ([("\r 10%\r 20%\r 30%", True)], [(" 30%", False)]),
        (TQDM, [("  0%", True), (" 50%", True), ("100%", True), ("100%", False), ("next", False)]),
        (BEHIND, [("  0%", True), ("100%", True), ("100%", False), ("next", False)]),
        (JOINED, [(" 10%|#", True), (" 10%|###|", True), (" 20%", False)]),
        (BLANK, [(" 90%", True), (" 90%", False)]),
        ([("a\r", True), ("\r\r", True), ("b", True)], [("a", False), ("", False), ("b", False)]),
        ([("a\r", False), ("", True)], [("a", True), ("a", False)]),  # cut between the two
        ([("x" * 9, False), ("y", True), ("z", True)], [("x" * 9, False), ("y", False), ("z", False)]),
    ],
)
def test_parts_become_lines_with_the_latest_state_of_a_bar(
    parts: list[tuple[str, bool]], lines: list[tuple[str, bool]]
) -> None:
    assert split(*parts) == lines
    assert split((ENV, True), raw=True) == [(ENV, False)]
    assert split(("\r 1%", False), ("\r 2%", True), raw=True)[-1] == (" 2%", False)


@given(st.lists(st.tuples(st.text("ab \r", max_size=9), st.booleans()), max_size=9))
def test_only_the_state_of_a_bar_is_kept(parts: list[tuple[str, bool]]) -> None:
    splitter = Splitter("node-0")
    lines = [line for text, ended in parts for line in splitter.take("t", text, ended=ended)]
    assert not any("\r" in line.text for line in lines)
    assert sum(not line.transient for line in lines) >= sum(ended for _, ended in parts)


def test_latest_omits_replaced_states() -> None:
    lines = [LogLine(f"{i}", "r", text, text.endswith("%")) for i, text in enumerate(["a", "1%", "2%", "b", "3%"])]
    assert [line.text for line in latest(lines)] == ["a", "b", "3%"]


def kubelet(*pieces: tuple[bytes, bool]) -> list[LogLine]:
    lines = KubeletLines(Splitter("node-0"))
    return [line for piece, ended in pieces for line in lines.take(piece, ended=ended)]


def test_parts_of_a_kubelet_line_share_its_time() -> None:
    bar = kubelet((b"2026Z  10%\r 20%\r", False), (b" 30%\r", False), (b" 40%", True), (b"2027Z done\r", True))
    assert bar == [
        LogLine("2026Z", "node-0", " 20%", transient=True),
        LogLine("2026Z", "node-0", " 30%", transient=True),
        LogLine("2026Z", "node-0", " 40%"),
        LogLine("2027Z", "node-0", "done"),
    ]
    assert kubelet((b"unable to retrieve container logs for x", True)) == []
    long = kubelet((b"2026Z " + b"x" * (MAX_LINE + 1), True))
    assert [(line.time, len(line.text)) for line in long] == [("2026Z", MAX_LINE), ("2026Z", 1)]
    parts = b"2026Z " + b"".join(b" %06d\r" % i for i in range(MAX_LINE // 4)) + b"end"
    assert [line.text for line in latest(kubelet((parts, True)))] == ["end"]


def state(text: str, rank: str = "node-0") -> LogLine:
    return LogLine("t", rank, text, transient=True)


@pytest.mark.anyio
async def test_throttle_passes_the_first_and_the_last_state() -> None:
    shown: list[str] = []
    throttle = Throttle(lambda line: shown.append(line.text), 3600)
    for percent in range(100):
        throttle.line(state(f"{percent}%"))
    assert shown == ["0%"]
    throttle.line(state("other rank", "node-1"))
    throttle.line(LogLine("t", "node-0", "99%"))
    throttle.line(LogLine("t", "node-0", "next"))
    assert shown == ["0%", "other rank", "99%", "next"]
    throttle.line(state("again 1%"))
    throttle.line(state("again 2%"))
    assert shown[4:] == []  # the last state was passed on too recently
    throttle.end()
    assert shown[4:] == ["again 2%"]


@pytest.mark.anyio
async def test_throttle_passes_the_last_state_after_its_interval() -> None:
    shown: asyncio.Queue[str] = asyncio.Queue()
    throttle = Throttle(lambda line: shown.put_nowait(line.text), 0.01)
    throttle.line(state("1%"))
    throttle.line(state("2%"))
    throttle.line(state("3%"))
    async with asyncio.timeout(30):
        assert [await shown.get(), await shown.get()] == ["1%", "3%"]
    throttle.line(LogLine("t", "node-0", "3%"))  # its line has ended; this text was passed on already
    throttle.end()
    assert shown.empty()
