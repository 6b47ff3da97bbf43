"""One collection kept up to date by LIST and WATCH, through everything that an API server and a network do.

The rules and numbers are those of client-go's reflector and of the API server's watch cache (facts: peers 3.1):
a bookmark is due every 60 s, events are remembered for 75 s at least, a resumed watch is priced as one small request.
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

from trainjob.backends.kubernetes.client import PAGE, ApiClient, Request, decode_list
from trainjob.backends.kubernetes.errors import (
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

_UNHEARD = 2
"""After so many watches that brought nothing, not even a bookmark, a list says what is the matter."""


@dataclass(frozen=True)
class Change:
    """What happened to one object.

    Attributes:
        item: The object as it is now, or as it was last.
        deleted: It is gone.
    """

    item: Mapping[str, Any]
    deleted: bool = False


@dataclass(frozen=True)
class Synced:
    """A LIST is complete: what was not in it was not there at that time.

    Attributes:
        uids: UIDs of all objects in it.
    """

    uids: frozenset[str]


@dataclass(frozen=True)
class Outage:
    """The server cannot be reached or answers with errors; it is tried again."""

    notice: str


class Reflector:
    """Follows one collection, restricted by a selector.

    Args:
        client: The connection.
        path: Of the collection.
        selector: ``labelSelector`` or ``fieldSelector``.

    Attributes:
        watching: Whether there is a watch, and what is known not only what was listed some time ago.
        heard: Time of the latest reply, by the monotonic clock.
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
        self.heard = time.monotonic()

    async def events(self) -> AsyncGenerator[Change | Synced | Outage]:
        """Everything that happens, for ever.

        Raises:
            BackendUnavailable: an outage outlasted both budgets.
            ApiError: the server refuses LIST for good, or credentials for longer than a renewal can take.
            ConfigurationError: there are no credentials.
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
                relist_at = time.monotonic() + self._timings.relist * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
                async with aclosing(self._watch(relist_at)) as changes:
                    async for change in changes:
                        yield change
            except (Expired, Transient) as error:
                for outage in self._outages(error):
                    yield outage
                await anyio.sleep(self._outage.pause(error.retry_after))
            except (Unauthorized, ConfigurationError) as error:  # a token is renewed late, a plugin has its own outage
                if not self._version or self._refusals.failure():
                    raise
                yield Outage(f"the API server could not be asked, trying again: {error}")
                await anyio.sleep(self._refusals.pause())

    def _outages(self, error: ApiError) -> list[Outage]:
        """Record a failure. The first in a row is not reported: watches expire, and resource versions get old.

        That there is no connection to the server is reported at once.
        """
        if self._outage.failure():
            raise BackendUnavailable(
                f"the API server could not be reached {self._outage.count} times in a row, for "
                f"{self._outage.elapsed:.0f} s: {error}"
            ) from error
        routine = self._outage.count == 1 and not isinstance(error, NoConnection)
        return [] if routine else [Outage(f"API server unavailable, trying again: {error}")]

    async def _list(self) -> AsyncGenerator[Mapping[str, Any]]:
        """LIST; afterwards `_version` is where to watch from. No page outlives its last item: each may be many MB."""
        token = ""
        while True:
            params = {**self._selector, "limit": str(PAGE), **({"continue": token} if token else {})}
            answer = await self._client.send(Request("GET", self._path, params), decode_list)
            self.heard = time.monotonic()
            for item in answer.pop("items"):
                yield item
            metadata = answer["metadata"]
            self._version = metadata.get("resourceVersion", "")
            token = metadata.get("continue") or ""
            if not token:
                return

    async def _watch(self, relist_at: float) -> AsyncGenerator[Change | Outage]:
        """Changes since `_version`; a broken connection is resumed where it broke, which costs the server little.

        Ends when it is time to list again: now and then, and where watches bring nothing. Where only lists get through,
        lists alone have to do.
        """
        unheard = 0
        while unheard < _UNHEARD and time.monotonic() < relist_at:
            began, heard = time.monotonic(), False
            try:
                async with aclosing(self._stream()) as changes:
                    async for change in changes:
                        heard = True
                        self._outage.success()
                        if change is not None:
                            yield change
                        if time.monotonic() >= relist_at:
                            return
                if not heard and time.monotonic() - began < self._timings.sound:
                    raise ServerError(0, "", "the watch ended as soon as it had begun")
            except Forbidden:  # list is allowed, watch is not
                await anyio.sleep(random.uniform(*self._timings.poll))  # noqa: S311 - jitter
                return
            except Transient as error:
                if time.monotonic() - began >= self._timings.sound:
                    self._outage.success()
                for outage in self._outages(error):
                    yield outage
                await anyio.sleep(self._outage.pause(error.retry_after))
            unheard = 0 if heard else unheard + 1

    async def _stream(self) -> AsyncGenerator[Change | None]:
        """One WATCH connection; None for a bookmark."""
        seconds = random.uniform(300, 600)  # noqa: S311 - client-go's, so that not all reconnect together
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
                    yield self._heard(line)
        finally:
            self.watching = False

    def _heard(self, line: bytes) -> Change | None:
        """What a line of a watch says; None for a bookmark."""
        self.heard = time.monotonic()
        try:
            event = json.loads(line)
            kind, item = event["type"], event["object"]
            version = (item.get("metadata") or {}).get("resourceVersion")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServerError(0, "", f"a watch line that is no event: {line[:80]!r}") from None
        if kind == "ERROR":
            raise error_of(int(item.get("code") or 500), item)
        self._version = version or self._version
        return None if kind == "BOOKMARK" else Change(item, deleted=kind == "DELETED")
