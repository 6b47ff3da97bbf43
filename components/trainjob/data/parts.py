"""The part of a file that a killed transfer has written, found again and trusted only as far as its hashes go.

Beside the bytes (``.resume``) lies a note (``.noted``): a line for the state of the source that they are of, then one
with the SHA-256 of each block. A machine that lost its power may have kept the note and not the bytes; so each block is
read again and compared before anything is built on it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK = 8 * 1024 * 1024
"""Bytes that one line of the note vouches for."""


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
        """The bytes that are there and right, block by block. To be taken to its end before `append`."""
        lines = self._lines()
        good = 1 if lines[:1] == [self._identity] else 0
        if good and self.path.exists():
            with self.path.open("rb", buffering=0) as file:
                for digest in lines[1:]:
                    data = file.read(BLOCK)
                    if len(data) != BLOCK or hashlib.sha256(data).hexdigest() != digest:
                        break
                    good += 1
                    self._size += BLOCK
                    yield data
        # Not in place: cut off in the middle of it, the note would be of no use.
        fresh = self._note.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in (lines[:good] or [self._identity])))
        fresh.replace(self._note)

    def append(self, chunks: Iterable[bytes]) -> None:
        """Write what follows what is held, and make it durable."""
        block, left = hashlib.sha256(), BLOCK
        chunks = iter(chunks)
        # The first chunk is asked for here, since what is held is known only after it.
        first = next(chunks, None)
        mode = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, mode, 0o666), "wb", buffering=0) as file, self._note.open("a") as note:
            file.truncate(self._size)
            file.seek(self._size)
            while first is not None:
                view = memoryview(first)
                while view:
                    count = file.write(view[:left])
                    block.update(view[:count])
                    view, left = view[count:], left - count
                    if not left:
                        note.write(f"{block.hexdigest()}\n")
                        note.flush()
                        block, left = hashlib.sha256(), BLOCK
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
            return self._note.read_text("ascii").split("\n")[:-1]
        except (FileNotFoundError, UnicodeDecodeError):
            return []
