"""The part of a file that a killed transfer has written, found again and trusted only as far as its hashes go.

Beside the bytes (``.resume``) lies a note (``.noted``): a line for the state of the source that they are of, then now
and then one that says how many bytes there are and what the SHA-256 of all of them is. A machine that lost its power
may have kept the note and not the bytes; so all that it vouches for is read again and compared before anything is built
on it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

BLOCK = 8 * 1024 * 1024
"""Bytes after which a line of the note is due; it is written when the chunk that they end in has been."""


class Part:
    """A file that is being written.

    Args:
        folder: Where it is kept.
        name: Of the file to be; any text.
        identity: The state of the source. What is left of another state is of no use.
    """

    def __init__(self, folder: Path, name: str, identity: str) -> None:
        key = hashlib.sha256(name.encode()).hexdigest()[:24]
        self.path, self._note = folder / f"{key}.resume", folder / f"{key}.noted"
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._size = 0

    def held(self) -> Iterator[bytes]:
        """The bytes that are there and right. To be taken to its end before `append`."""
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
        # Not in place: cut off in the middle of it, the note would be of no use.
        fresh = self._note.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in (lines[:good] or [self._identity])))
        fresh.replace(self._note)

    def append(self, chunks: Iterable[bytes], digest: Callable[[], str]) -> None:
        """Write what follows what is held, and make it durable.

        Args:
            chunks: It.
            digest: SHA-256 of all bytes up to the end of the chunk that was asked for last.
        """
        chunks = iter(chunks)
        # The first chunk is asked for here, since what is held is known only after it.
        first = next(chunks, None)
        mode = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, mode, 0o666), "wb", buffering=0) as file, self._note.open("a") as note:
            file.truncate(self._size)
            at = noted = file.seek(self._size)
            while first is not None:
                view = memoryview(first)
                while view:
                    view = view[file.write(view) :]
                at += len(first)
                if at - noted >= BLOCK:
                    note.write(f"{at} {digest()}\n")
                    note.flush()
                    start_writing(file.fileno(), noted, at)
                    noted = at
                first = next(chunks, None)
            os.fsync(file.fileno())

    def move(self, target: Path) -> None:
        """Give the finished file its name."""
        self.path.replace(target)
        self._note.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forget it."""
        for path in (self.path, self._note):
            path.unlink(missing_ok=True)

    def _lines(self) -> list[str]:
        try:
            # The last line may have been cut off.
            identity, *lines = self._note.read_text("ascii").split("\n")[:-1]
        except (FileNotFoundError, ValueError):
            return []
        return [identity, *itertools.takewhile(re.compile(r"[0-9]{1,18} [0-9a-f]{64}").fullmatch, lines)]


def start_writing(file: int, start: int = 0, end: int = 0) -> None:
    """Let the kernel write these bytes of a file, by default all, to the disk now, so that `fsync` is short."""
    if hasattr(os, "posix_fadvise"):
        # What is not on the disk yet stays in memory; only the writing begins.
        os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
