"""A server of the standard library in a thread, for the length of a block."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import HTTPServer
from socketserver import BaseServer, ThreadingMixIn
from typing import Any, TypeVar

Server = TypeVar("Server", bound=BaseServer)


class EndsConnections(ThreadingMixIn, HTTPServer):
    """Ends idle connections as it closes. Others wait until each has reached its timeout."""

    daemon_threads = False

    def process_request(self, request: Any, client_address: Any) -> None:
        self.__dict__.setdefault("_connections", set()).add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.__dict__["_connections"].discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for request in list(self.__dict__.get("_connections", ())):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()


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
