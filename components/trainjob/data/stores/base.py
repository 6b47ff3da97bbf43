"""Stores: where bytes are. The protocol; which store a location is of, says `trainjob.data.stores.opening`.

A store is opened at a location and speaks of paths relative to it; the empty path is the location itself, when that is
a single file. Errors are those of `trainjob.errors`, name the location, and never hold a credential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from trainjob import retrying
from trainjob.data.locations import Location
from trainjob.errors import StoreUnavailable

T = TypeVar("T")

CHUNK = 1024 * 1024
"""Bytes per read; small beside the buffers of a network, large beside the cost of a system call."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a store.

    Attributes:
        path: Relative to the root of the store.
        size: Bytes.
        etag: Changes when the content does, as far as the store can tell; empty where it cannot.
        sha256: What the store itself says that it is, in hexadecimal; empty where it does not say.
    """

    path: str
    size: int
    etag: str = ""
    sha256: str = ""


@runtime_checkable
class Reread(Protocol):
    """The bytes of a file of a store, for `Store.write` of another one: they can be had more than once."""

    source: Store
    """Where they are."""

    def preview(self) -> Iterator[bytes]:
        """All of them, checked as the first time; they do not count as moved."""
        ...

    def again(self, start: int) -> Iterator[bytes]:
        """From ``start`` on, not checked any more."""
        ...


class Store(Protocol):
    """What every store does."""

    @property
    def location(self) -> Location:
        """Where it was opened."""
        ...

    def list(self) -> Iterator[Entry]:
        """All files below the location, in no particular order; none if there is nothing.

        Raises:
            UnsafePath: A name or link that leads out of the store.
        """
        ...

    def stat(self, path: str) -> Entry:
        """One file; SourceNotFound if there is none."""
        ...

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """The bytes from ``start`` on, ``length`` of them or to the end.

        Raises:
            SourceNotFound: There is no such file.
            CorruptData: It no longer has the entity tag ``etag``, or changed while it was read.
        """
        ...

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Create or replace a file. It appears whole, or, when ``chunks`` raises, not at all.

        ``size`` is a hint for buffers. ``chunks`` may be a `Reread`.
        """
        ...

    def write_small(self, path: str, data: bytes) -> None:
        """Create or replace a small file, durably: it is on disk, with all written before it, on return."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file; no error if there is none."""
        ...

    def begin(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        """Keep other writers out as far as the store can, to the end of the block or of the process."""
        ...

    def finish(self) -> None:
        """Remove all below ``.trainjob``. Only inside ``begin``."""
        ...


@runtime_checkable
class Ranged(Protocol):
    """A store from which several parts of a file can be read at once, and faster so."""

    def ranged(self, path: str, entry: Entry) -> bool:
        """Whether that goes for the file at ``path``.

        Then it has an entity tag, so that its parts are parts of one state.
        """
        ...


class Continued(Protocol):
    """The bytes of a file of which some may be there already."""

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes that have passed, those that were there included."""
        ...

    def after(self, held: Iterator[bytes]) -> Iterator[bytes]:
        """Given the bytes that are there, in order, those that follow them."""
        ...


@runtime_checkable
class Resuming(Protocol):
    """A store that finds again what a killed process has written of a file."""

    def write_on(self, path: str, identity: str, content: Continued) -> None:
        """Like `Store.write`, but what is there is not sent again.

        Args:
            path: The file.
            identity: The state of the source: what is there of another state is of no use.
            content: What is to be in it.
        """
        ...


@runtime_checkable
class Bridging(Protocol):
    """A store whose `Store.read` goes on after cuts itself, and checks a file only where all of it is read at once."""

    bridging: Literal[True]


@runtime_checkable
class Referring(Protocol):
    """A store that keeps each version of what was written beside a model (`trainjob.data.content.SIDECARS`)."""

    def beside(self, path: str) -> Iterator[bytes]:
        """All versions of such a file, the last one first."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A store that has connections of its own."""

    def close(self) -> None:
        """Close them. The store is not used afterwards."""
        ...


def retry(action: Callable[[], T]) -> T:
    """The result of ``action``, retried while a store is unavailable."""
    return retrying.retry(action, StoreUnavailable, retrying.STORE())
