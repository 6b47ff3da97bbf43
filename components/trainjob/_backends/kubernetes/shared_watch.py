"""One LIST and WATCH of a collection, shared by any number of listeners.

A listener costs one entry in a dictionary. Only the fields that listeners need are kept of an object, and a listener
wakes only when they change. Level-triggered: a late or slow listener gets the latest states and no history.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.errors import Forbidden
from trainjob._backends.kubernetes.reflector import Change, Outage, Reflector, Synced
from trainjob.errors import BackendUnavailable, ConfigurationError, TrainJobError

_log = logging.getLogger(__name__)

_LINGER_SECONDS = 30.0  # a watch of all jobs stays open for so long without listeners: the next one often follows soon
SLICE = 100
"""Events handled and listeners woken in one turn of the event loop, at 0.1 ms each."""

Object = Mapping[str, Any]


_NO_CHANGES: Mapping[str, Object] = {}


class Listener:
    """Collects the changes of the objects of one key until the end of its ``with`` block.

    Attributes:
        key: The key.
        error: Why nothing follows any more; None while the watch is open.
    """

    __slots__ = ("_changed", "_gone", "_notice", "_only", "_watch", "_woken", "error", "key")

    def __init__(self, watch: SharedWatch, key: str, only: Callable[[Object], object] | None) -> None:
        self._watch = watch
        self._only = only
        self._changed: dict[str, Object] | None = None
        self._notice = ""
        self._gone = False
        self._woken: asyncio.Future[None] | None = None  # an asyncio.Event would cost 0.8 KB
        self.key = key
        self.error: TrainJobError | None = None

    @property
    def has_news(self) -> bool:
        """Whether `take` returns or raises something."""
        return bool(self._changed or self._notice or self._gone or self.error)

    def news(self) -> asyncio.Future[None]:
        """Done as soon as `has_news`. A coroutine would cost each listener 0.4 KB."""
        self._woken = asyncio.get_running_loop().create_future()
        if self.has_news:
            self._woken.set_result(None)
        return self._woken

    def take(self) -> tuple[Mapping[str, Object], str, bool]:
        """What has changed since the last call.

        Returns:
            The latest state of each object that changed, by UID, which is the last one of an object that was deleted;
            a notice for people about an outage, or nothing; whether an object was deleted, or none of this key exists.

        Raises:
            TrainJobError: The watch has failed or was closed.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)  # all listeners have this error, and each would add its frames
        taken = self._changed or _NO_CHANGES, self._notice, self._gone
        self._changed, self._notice, self._gone = None, "", False
        return taken

    def put(self, uid: str, state: Object, *, gone: bool = False) -> None:
        """Add the state of an object, unless it is none of those that are listened to."""
        if self._only is None or self._only(state):
            self._changed = self._changed or {}
            self._changed[uid] = state
            self._gone = self._gone or gone
            self._wake()

    def report(self, *, notice: str = "", gone: bool = False, error: TrainJobError | None = None) -> None:
        """Add what is about no state."""
        self._notice = notice or self._notice
        self._gone = self._gone or gone
        self.error = error or self.error
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def __enter__(self) -> Listener:
        """The listener."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        self._watch.remove(self)


class SharedWatch(ABC):
    """All listeners of a collection, on one event loop. Open while there are any; a watch of all jobs 30 s longer.

    A watch of one job ends with its last listener, so that the next wait for the job sees what was changed since.
    Each watch has its own back-off: a collection that cannot be listed delays no other one.

    Args:
        client: The connection.
        path: Path of the collection.
        selector: ``fieldSelector`` or ``labelSelector`` of the objects.
        single: Whether the objects are those of one job.

    Attributes:
        known: The kept state of each object, by key and UID.
        synced: Whether `known` has all objects.
    """

    def __init__(self, client: ApiClient, path: str, selector: Mapping[str, str], *, single: bool) -> None:
        self.client = client
        self.path = path
        self._selector = selector
        self._single = single
        self.known: dict[str, dict[str, Object]] = {}
        self.synced = False
        self._listeners: dict[str, list[Listener]] = {}
        self._reflector: Reflector | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()  # cancelled ones, which have connections to close
        self._lingering: asyncio.TimerHandle | None = None

    @abstractmethod
    def key_of(self, item: Object) -> str:
        """The key of an object."""

    @abstractmethod
    def kept_of(self, item: Object) -> Object:
        """What is kept of an object."""

    async def beside(self) -> None:  # noqa: B027 - most watches have nothing beside them
        """Runs while the watch does."""

    @property
    def current(self) -> bool:
        """Whether a watch is open, so that `known` is newer than the latest LIST."""
        return self._reflector is not None and self._reflector.watching

    @property
    def idle(self) -> bool:
        """Whether it is closed and nobody listens."""
        return not self._tasks and not self._listeners

    @property
    def keys(self) -> list[str]:
        """The keys that are listened to."""
        return list(self._listeners)

    def listen(self, key: str, only: Callable[[Object], object] | None = None) -> Listener:
        """Listen to the objects of a key: first to those that exist, then to each that changes.

        Args:
            key: The key.
            only: Whether to listen to an object in this state; to every one if left out.
        """
        if self._lingering is not None:
            self._lingering.cancel()
        listener = Listener(self, key, only)
        self._listeners.setdefault(key, []).append(listener)
        if not self._tasks:
            self._reflector = Reflector(self.client, self.path, self._selector)
            self._tasks = [asyncio.create_task(each) for each in (self._run(self._reflector), self.beside())]
        for uid, state in self.known.get(key, {}).items():
            listener.put(uid, state)
        if self.synced and key not in self.known:  # created after the LIST, or deleted before it
            listener.report(gone=True)
        return listener

    def refresh(self, key: str) -> None:
        """Pass on the known objects of a key once more, because something else about them has changed."""
        for listener in self._listeners.get(key, ()):
            for uid, state in self.known.get(key, {}).items():
                listener.put(uid, state)

    def remove(self, listener: Listener) -> None:
        """Forget a listener; close the watch if none follows soon."""
        self._listeners[listener.key].remove(listener)
        if not self._listeners[listener.key]:
            del self._listeners[listener.key]
        if not self._listeners and self._tasks:
            if self._single:
                self._close()
            else:
                self._lingering = self._tasks[0].get_loop().call_later(_LINGER_SECONDS, self._close)

    async def aclose(self) -> None:
        """Close the watch. Its listeners get an error."""
        self._close()
        if self._ending:
            await asyncio.wait(self._ending)

    def _close(self) -> None:
        self._end(BackendUnavailable(f"the watch of {self.path} was closed"))

    def _end(self, error: TrainJobError) -> None:
        """End the present tasks, so that the next listener starts new ones. Every listener gets the error."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        self._tasks = []
        if self._lingering is not None:
            self._lingering.cancel()
        self.known.clear()
        self.synced = False
        for listener in self._all():
            listener.report(error=error)

    async def _run(self, reflector: Reflector) -> None:
        handled = 0
        try:
            async with aclosing(reflector.events()) as events:
                async for event in events:
                    await self._handle(event)
                    handled += 1
                    if handled % SLICE == 0:
                        await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - after any error, no listener may wait for ever
            if not isinstance(error, TrainJobError):
                _log.exception("the watch of %s failed", self.path)
            if asyncio.current_task() in self._tasks:  # otherwise it was closed before
                if not isinstance(error, BackendUnavailable | ConfigurationError | Forbidden):
                    error = BackendUnavailable(f"{type(error).__name__}: {error}")
                self._end(error)

    def _all(self) -> list[Listener]:
        return [listener for listeners in self._listeners.values() for listener in listeners]

    async def _handle(self, event: Change | Synced | Outage) -> None:
        if isinstance(event, Change):
            self._change(event)
        elif isinstance(event, Outage):
            if not self.synced:  # there may be no state yet that could carry the notice
                _log.warning("%s", event.notice)
            for i, listener in enumerate(self._all(), 1):
                listener.report(notice=event.notice)
                if i % SLICE == 0:
                    await asyncio.sleep(0)
        else:
            for key, objects in list(self.known.items()):
                for uid in objects.keys() - event.uids:
                    self._forget(key, uid)
            self.synced = True
            for listener in self._all():
                if listener.key not in self.known:
                    listener.report(gone=True)

    def _change(self, change: Change) -> None:
        key, uid, state = self.key_of(change.item), change.item["metadata"]["uid"], self.kept_of(change.item)
        objects = self.known.setdefault(key, {})
        if change.deleted or objects.get(uid) != state:
            objects[uid] = state
            for listener in self._listeners.get(key, ()):
                listener.put(uid, state, gone=change.deleted)
        if change.deleted:
            self._forget(key, uid)

    def _forget(self, key: str, uid: str) -> None:
        del self.known[key][uid]
        if not self.known[key]:
            del self.known[key]
