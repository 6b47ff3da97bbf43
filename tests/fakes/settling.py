"""Test servers that can wait until no client is connected."""

from __future__ import annotations

import socketserver
import threading
import time
from typing import Any


class Settling(socketserver.ThreadingMixIn):
    """A server with a thread for each connection."""

    _connections = 0
    _counting = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._count(1)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._count(-1)

    def _count(self, step: int) -> None:
        with self._counting:
            self._connections += step

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected."""

    def settle(self) -> None:
        """Wait until no client is connected and every request is finished."""
        deadline = time.monotonic() + 10
        time.sleep(0.005)  # for a connection that is not accepted yet
        while self._connections:
            assert time.monotonic() < deadline, "a connection does not end"
            time.sleep(0.001)
