"""Replies of the fake API server without a network, as `ApiClient` uses those of httpx."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol


class Watch(Protocol):
    """An open watch: its events as lines."""

    def lines(self) -> AsyncIterator[bytes]: ...

    def close(self) -> None: ...


class Headers(dict[str, str]):
    """The headers of a reply."""

    def get_list(self, name: str) -> list[str]:
        """Every value of a header."""
        return [self[name]] if name in self else []


class Reply:
    """A reply at a Unix time."""

    def __init__(self, status: int, at: float, content: bytes = b"", watch: Watch | None = None) -> None:
        self.status_code = status
        self.headers = Headers(date=_date(int(at)))
        self._content = content
        self._watch = watch

    async def aread(self) -> bytes:
        """The body."""
        return self._content

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """The body, or the events of a watch as they are delivered."""
        if self._watch is None:
            yield self._content
            return
        async for line in self._watch.lines():
            yield line

    async def aclose(self) -> None:
        """Close the watch."""
        if self._watch is not None:
            self._watch.close()


@lru_cache
def _date(at: int) -> str:
    return formatdate(at, usegmt=True)
