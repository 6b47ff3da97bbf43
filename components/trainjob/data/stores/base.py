"""The interface of all stores. `trainjob.data.stores.opening` chooses the store of a location.

A store is opened at a location and takes paths relative to it. The empty path is the location itself, if that is a
single file. Errors are those of `trainjob.errors`; they name the location and contain no credential.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from trainjob._support import retrying
from trainjob._support.foreign import LARGE
from trainjob.data.locations import Location
from trainjob.errors import ConfigurationError, CorruptData, StoreUnavailable

T = TypeVar("T")

CHUNK = 1024 * 1024
"""Bytes per read: small compared with network buffers, large compared with the cost of a system call."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store.

    Attributes:
        path: Relative to the root of the store.
        size: Bytes.
        etag: Entity tag: changes with the content, as far as the store can detect it. Empty if the store has none.
        sha256: SHA-256 that the store itself reports, in hexadecimal. Empty if it reports none.
        refused: Why it cannot be read, if it cannot: a link to nothing, for example. Its size is then -1.
    """

    path: str
    size: int
    etag: str = ""
    sha256: str = ""
    refused: str = ""


class ReadableStore(ABC):
    """A store that can be read. A method that is not abstract has a default for stores without that ability."""

    resumes_reads: ClassVar[bool] = False
    """Whether `read` resumes by itself after a cut. Such a store verifies a file only if one `read` returns all of
    it."""

    def __init__(self, location: Location) -> None:
        self._location = location

    @property
    def location(self) -> Location:
        """The location at which the store was opened."""
        return self._location

    def resolved(self) -> Location:
        """The location of the exact version that is read: with the commit or digest, where the store has one.

        Raises:
            SourceNotFound: The location does not exist.
        """
        return self._location

    @abstractmethod
    def list(self) -> Iterator[Entry]:
        """List all files below the location, in no particular order; nothing if the location does not exist.

        Raises:
            UnsafePath: A name or link leads out of the store.
        """

    @abstractmethod
    def stat(self, path: str) -> Entry:
        """Return one file; raise SourceNotFound if it does not exist."""

    @abstractmethod
    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read the bytes from ``start`` on: ``length`` of them, or to the end.

        Raises:
            SourceNotFound: The file does not exist.
            CorruptData: The file no longer has the entity tag ``etag``, or changed while it was read.
        """

    def supports_ranges(self, path: str, entry: Entry) -> bool:
        """Whether several ranges of the file at ``path`` can be read at once, and faster.

        If so, the file has an entity tag, so that all ranges are of one state.
        """
        del path, entry
        return False

    def sidecar_versions(self, path: str) -> Iterator[bytes]:
        """All versions of a file beside a model (`trainjob.data.file_manifest.SIDECARS`), the latest first.

        Empty where the store does not keep versions; then `read` returns the only one.
        """
        del path
        return iter(())

    def close(self) -> None:  # noqa: B027 - optional: a store without connections has nothing to close
        """Close the store's connections. The store is not used afterwards."""


class WritableStore(ReadableStore):
    """A store that can also be written. `trainjob.data.stores.opening.open_writable` opens one."""

    @abstractmethod
    def begin(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        """Exclude other writers, as far as the store can, until the block or the process ends."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Create or replace a file. It appears complete, or, if ``chunks`` raises, not at all.

        ``size`` is a hint for buffers. ``chunks`` may be `Rereadable`.
        """

    def resume_write(self, path: str, content: Resumable, size: int, identity: str) -> None:
        """Like `write`, but what a killed process has written of the file is not sent again, where the store can.

        Args:
            path: The file.
            content: What the file is to contain.
            size: As for `write`.
            identity: State of the source. Parts that were written of another state are not used.
        """
        del identity
        self.write(path, content, size)

    @abstractmethod
    def write_small(self, path: str, data: bytes) -> None:
        """Create or replace a small file durably: on return it and all files written before it are on disk."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file durably if it does not exist; False if it exists. Of several writers, one creates it.

        Raises:
            ConfigurationError: The store has no such operation.
        """
        del data
        raise ConfigurationError(
            f"{self._location} cannot create {path} only if it does not exist; use a directory or an object store"
        )

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; no error if it does not exist."""

    @abstractmethod
    def finish(self) -> None:
        """Remove everything below ``.trainjob``. Only inside ``begin``."""


@runtime_checkable
class Rereadable(Protocol):
    """The bytes of a file, for `WritableStore.write`, that can be read more than once."""

    source: ReadableStore
    """The store that they are read from."""

    def preview(self) -> Iterator[bytes]:
        """Read all bytes, checked like the first time; they are not counted as transferred."""
        ...

    def reread(self, start: int) -> Iterator[bytes]:
        """Read from ``start`` on, without checks."""
        ...


class Resumable(Protocol):
    """The bytes of a file of which the target may have some already."""

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes so far, including those that the target had."""
        ...

    def __iter__(self) -> Iterator[bytes]:
        """All bytes."""
        ...

    def after(self, held: Iterator[bytes]) -> Iterator[bytes]:
        """The bytes that follow ``held``, the bytes that the target has, in order."""
        ...


def read_small(store: ReadableStore, path: str, limit: int = LARGE.size) -> bytes:
    """All bytes of a document, which somebody else may have written.

    Raises:
        SourceNotFound: It does not exist.
        CorruptData: It has more than ``limit`` bytes. No more are read.
    """
    data = bytearray()
    for chunk in store.read(path):
        data += chunk
        if len(data) > limit:
            raise CorruptData(
                f"{store.location.child(path).uri} has more than {limit:,} bytes, the limit of a document"
            )
    return bytes(data)


def retry(action: Callable[[], T]) -> T:
    """The result of ``action``, retried while a store is unavailable."""
    return retrying.retry(action, StoreUnavailable, retrying.TRANSFER())
