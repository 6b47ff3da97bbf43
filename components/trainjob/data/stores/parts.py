"""The partial file of a killed transfer, which is reused only as far as its hashes match.

Beside the bytes (``.resume``) is a journal (``.noted``). Its first line identifies the state of the source; each
further line has a number of bytes and the SHA-256 of all bytes up to there. After a power failure the journal may be on
disk and the bytes not. So all bytes that the journal lists are read and compared before more are appended.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trainjob._support.foreign import read_regular

BLOCK = 8 * 1024 * 1024
"""Bytes after which a line is added to the journal, at the end of the current chunk."""
_LONGEST = 64 << 20  # bytes of a journal: of a file of 6 TB


class Part:
    """A partial file.

    Args:
        folder: Directory of the partial file.
        name: Name of the final file; any text.
        identity: State of the source. A partial file of another state is not reused.
    """

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        key = hashlib.sha256(name.encode()).hexdigest()[:24]
        self.path, self._journal = folder / f"{key}.resume", folder / f"{key}.noted"
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._size = 0

    def held(self) -> Iterator[bytes]:
        """The verified bytes of the partial file. Must be exhausted before `append`."""
        lines = self._lines()
        good = 1 if lines[:1] == [self._identity] else 0
        if good and self.path.exists():
            sha256 = hashlib.sha256()
            with self.path.open("rb", buffering=0) as file:
                for line in lines[1:]:
                    size, _, digest = line.partition(" ")
                    count = int(size) - self._size
                    data = file.read(count) if 0 < count <= 2 * BLOCK else b""
                    sha256.update(data)
                    if len(data) != count or sha256.hexdigest() != digest:
                        break
                    good += 1
                    self._size += count
                    yield data
        # Replaced, not rewritten in place: a journal that is cut off would be useless.
        fresh = self._journal.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in (lines[:good] or [self._identity])))
        fresh.replace(self._journal)

    def append(self, chunks: Iterable[bytes], digest: Callable[[], str]) -> None:
        """Write the bytes that follow the held ones, and make the file durable.

        Args:
            chunks: These bytes.
            digest: Returns the SHA-256 of all bytes up to the end of the last chunk taken.
        """
        chunks = iter(chunks)
        # Take the first chunk here: `self._size` is known only after it.
        first = next(chunks, None)
        mode = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, mode, 0o666), "wb", buffering=0) as file, self._journal.open("a") as journal:
            file.truncate(self._size)
            at = recorded = file.seek(self._size)
            while first is not None:
                view = memoryview(first)
                while view:
                    view = view[file.write(view) :]
                at += len(first)
                if at - recorded >= BLOCK:
                    journal.write(f"{at} {digest()}\n")
                    journal.flush()
                    start_writing(file.fileno(), recorded, at)
                    recorded = at
                first = next(chunks, None)
            os.fsync(file.fileno())

    def move(self, target: Path) -> None:
        """Rename the finished file to its final name."""
        self.path.replace(target)
        self._journal.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the partial file."""
        for path in (self.path, self._journal):
            path.unlink(missing_ok=True)

    def _lines(self) -> list[str]:
        try:
            # The last line may have been cut off.
            identity, *lines = read_regular(self._journal, _LONGEST).decode("ascii").split("\n")[:-1]
        except ValueError:  # also if it does not exist or is not readable
            return []
        return [identity, *itertools.takewhile(re.compile(r"[0-9]{1,18} [0-9a-f]{64}").fullmatch, lines)]


def start_writing(file: int, start: int = 0, end: int = 0) -> None:
    """Start writing these bytes of a file, by default all, to the disk, so that `fsync` is short."""
    if hasattr(os, "posix_fadvise"):
        # Dirty pages stay in memory; the call only starts their write-back.
        os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
