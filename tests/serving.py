"""A server of the standard library in a thread, for the length of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

Server = TypeVar("Server", bound=BaseServer)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve; at the end what hangs in its event ``stalled``, if it has one, goes on."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        stalled = getattr(server, "stalled", None)
        if isinstance(stalled, threading.Event):
            stalled.set()
        server.shutdown()
        thread.join()
        server.server_close()
