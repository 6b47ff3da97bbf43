"""One collection kept up to date by LIST and WATCH, through outages of the API server and the network.

Rules and numbers are those of client-go's reflector and of the API server's watch cache: a bookmark is due every 60 s,
events are kept for at least 75 s, a resumed watch costs the server as much as one small request.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import anyio

from trainjob._backends.kubernetes.client import PAGE, ApiClient, Request, parts_of
from trainjob._backends.kubernetes.errors import (
    ApiError,
    Expired,
    Forbidden,
    NoConnection,
    ServerError,
    Transient,
    Unauthorized,
    error_of,
)
from trainjob.errors import BackendUnavailable, ConfigurationError

_MAX_SILENT_WATCHES = 2
"""Consecutive watches without an event or a bookmark, after which the collection is listed again."""


@dataclass(frozen=True)
class Change:
    """A change of one object.

    Attributes:
        item: The object's current state, or its last one.
        deleted: The object was deleted.
    """

    item: Mapping[str, Any]
    deleted: bool = False


@dataclass(frozen=True)
class Synced:
    """A LIST is complete: objects that it lacks did not exist at that time.

    Attributes:
        uids: UIDs of all objects in it.
    """

    uids: frozenset[str]


@dataclass(frozen=True)
class Outage:
    """The server cannot be reached or answers with errors; requests are retried."""

    notice: str


class Reflector:
    """Follows one collection, restricted by a selector.

    Args:
        client: The connection.
        path: Path of the collection.
        selector: ``labelSelector`` or ``fieldSelector``.

    Attributes:
        watching: Whether a watch is open, so that what is known is newer than the latest list.
    """

    def __init__(self, client: ApiClient, path: str, selector: Mapping[str, str]) -> None:
        self._client = client
        self._timings = client.timings
        self._path = path
        self._selector = dict(selector)
        self._outage = client.timings.watch_backoff()
        self._refusals = client.timings.request_backoff()
        self._version = ""
        self.watching = False

    async def events(self) -> AsyncGenerator[Change | Synced | Outage]:
        """All changes, without end.

        Raises:
            BackendUnavailable: An outage used up `Timings.watch_backoff`.
            ApiError: The server forbids LIST, or refuses the credentials for longer than a renewal can take.
            ConfigurationError: There are no credentials.
        """
        while True:
            try:
                uids = set()
                async for item in self._list():
                    uids.add(item["metadata"]["uid"])
                    yield Change(item)
                self._outage.answered()
                self._refusals.success()
                yield Synced(frozenset(uids))
                relist_at = time.monotonic() + self._timings.relist * random.uniform(0.8, 1.2)
                async with aclosing(self._watch(relist_at)) as changes:
                    async for change in changes:
                        yield change
            except (Expired, Transient) as error:
                for outage in self._outages(error):
                    yield outage
                await anyio.sleep(self._outage.pause(error.retry_after))
            except (
                Unauthorized,
                ConfigurationError,
            ) as error:  # a late renewal of a token, an outage of a plugin
                if not self._version or self._refusals.failure():
                    raise
                yield Outage(f"authentication to the API server failed, retrying: {error}")
                await anyio.sleep(self._refusals.pause())

    def _outages(self, error: ApiError) -> list[Outage]:
        """Record a failure. The first in a row is not reported: watches and versions expire in normal operation.

        A connection that cannot be opened is reported at once.
        """
        if self._outage.failure():
            raise BackendUnavailable(
                f"the API server could not be reached {self._outage.count} times in a row, for "
                f"{self._outage.elapsed:.0f} s: {error}"
            ) from error
        routine = self._outage.count == 1 and not isinstance(error, NoConnection)
        return [] if routine else [Outage(f"API server unavailable, retrying: {error}")]

    async def _list(self) -> AsyncGenerator[Mapping[str, Any]]:
        """LIST, and set `_version`, from which to watch. A page is freed after its last item: it may have many MB."""
        token = ""
        while True:
            params = {**self._selector, "limit": str(PAGE), **({"continue": token} if token else {})}
            request = Request("GET", self._path, params)
            items, metadata = parts_of(request, await self._client.send(request))
            for item in items:
                yield item
            del items
            self._version = metadata.get("resourceVersion", "")
            token = metadata.get("continue") or ""
            if not token:
                return

    async def _watch(self, relist_at: float) -> AsyncGenerator[Change | Outage]:
        """Changes since `_version`. A broken watch is resumed at the last version, which costs the server little.

        Ends when the collection has to be listed again: at `relist_at`, after silent watches, or because watches are
        forbidden.
        """
        silent_watches = 0
        while silent_watches < _MAX_SILENT_WATCHES and time.monotonic() < relist_at:
            began, received = time.monotonic(), False
            try:
                async with aclosing(self._stream()) as changes:
                    async for change in changes:
                        received = True
                        self._outage.success()
                        if change is not None:
                            yield change
                        if time.monotonic() >= relist_at:
                            return
                if not received and time.monotonic() - began < self._timings.healthy_after:
                    raise ServerError(0, "", "the watch was closed as soon as it was open")
            except Forbidden:  # listing is permitted, watching is not
                await anyio.sleep(random.uniform(*self._timings.poll))
                return
            except Transient as error:
                if time.monotonic() - began >= self._timings.healthy_after:
                    self._outage.success()
                for outage in self._outages(error):
                    yield outage
                await anyio.sleep(self._outage.pause(error.retry_after))
            silent_watches = 0 if received else silent_watches + 1

    async def _stream(self) -> AsyncGenerator[Change | None]:
        """One WATCH connection; None for a bookmark."""
        seconds = random.uniform(300, 600)
        params = {
            **self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(seconds)),
        }
        request = Request("GET", self._path, params, read_seconds=self._timings.watch_read)
        self.watching = True
        try:
            async with aclosing(self._client.lines(request)) as lines:
                async for line in lines:
                    yield self._parse(line)
        finally:
            self.watching = False

    def _parse(self, line: bytes) -> Change | None:
        """The change in a line of a watch; None for a bookmark."""
        try:
            event = json.loads(line)
            kind, item = event["type"], event["object"]
            version = (item.get("metadata") or {}).get("resourceVersion")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ServerError(0, "", f"the watch sent a line that is not an event: {line[:80]!r}") from None
        if kind == "ERROR":
            code = item.get("code")
            raise error_of(code if isinstance(code, int) else 500, item)
        self._version = version or self._version
        return None if kind == "BOOKMARK" else Change(item, deleted=kind == "DELETED")
