"""Reads the log files of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainjob._backends.local.store import JobFiles
from trainjob._support.foreign import Unreadable, read_regular
from trainjob._support.log_lines import LogLine, Splitter, latest, parse_cri


class LogReader:
    """Reads the log file of one rank from the position where it stopped.

    Args:
        files: The files of the job.
        pod: Name of the rank's pod.
        splitter: Splits what the rank wrote into lines.
    """

    def __init__(self, files: JobFiles, pod: str, splitter: Splitter) -> None:
        self._path = files.directory / "logs" / f"{pod}.log"
        self._splitter = splitter
        self._position = 0

    def _read(self, size: int) -> bytes:
        """Complete lines, `size` bytes at most."""
        try:
            data = read_regular(self._path, size, start=self._position, cut=True)
        except Unreadable:  # it does not exist yet, or the training has replaced it
            return b""
        lines = data[: data.rfind(b"\n") + 1]
        self._position += len(lines)
        return lines

    def _parse(self, raw: Iterable[bytes]) -> Iterator[LogLine]:
        for written, text, ended in parse_cri(raw):
            yield from self._splitter.take(written, text, ended=ended)

    def lines(self) -> Iterator[LogLine]:
        """Complete lines, and the latest state of a progress bar, since the last call; reads 1 MiB at a time."""
        while lines := self._read(1 << 20):
            yield from latest(self._parse(lines.split(b"\n")))

    def tail(self, count: int) -> list[LogLine]:
        """The last `count` existing lines."""
        most = count * 4096 + (64 << 10)
        size = self._path.stat().st_size if self._path.exists() else 0
        self._position = start = max(0, size - most)
        raw = self._read(most).split(b"\n")
        lines = list(latest(self._parse(raw[1:] if start else raw)))  # the first one may be incomplete
        return lines[max(0, len(lines) - count) :]
