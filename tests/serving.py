"""Runs a server of the standard library in a thread while a block runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import HTTPServer
from socketserver import BaseServer, ThreadingMixIn
from typing import Any, TypeVar

Server = TypeVar("Server", bound=BaseServer)


class EndsConnections(ThreadingMixIn, HTTPServer):
    """Closes idle connections when the server closes; the standard servers wait for the timeout of each."""

    daemon_threads = False

    def process_request(self, request: Any, client_address: Any) -> None:
        self.__dict__.setdefault("_connections", set()).add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.__dict__["_connections"].discard(request)
        super().shutdown_request(request)

    def settle(self) -> None:
        """Wait until no client is connected and every request is finished."""
        deadline = time.monotonic() + 10
        time.sleep(0.005)  # for a connection that is not accepted yet
        while self.__dict__.get("_connections"):
            assert time.monotonic() < deadline, "a connection does not end"
            time.sleep(0.001)

    def server_close(self) -> None:
        for request in list(self.__dict__.get("_connections", ())):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve requests in a thread. At the end, set the event ``stalled`` of the server, which releases its handlers."""
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
