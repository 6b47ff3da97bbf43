"""A cancelled request leaves no connection open."""

from __future__ import annotations

import asyncio
import socket

import anyio.to_thread
import pytest

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient, Request

pytestmark = pytest.mark.anyio


async def test_a_request_that_is_cancelled_during_its_tls_handshake_closes_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        client = ApiClient(Credentials(host=f"https://127.0.0.1:{server.getsockname()[1]}", token="t"))
        request = asyncio.create_task(client.send(Request("GET", "/version")))
        accepted, _ = await anyio.to_thread.run_sync(server.accept)
        with accepted:
            accepted.settimeout(20)
            assert await anyio.to_thread.run_sync(accepted.recv, 65536), "the client's part of the handshake"
            request.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await request
            await client.aclose()
            # Without `caught`, the garbage collector might close what the client has left.
            assert caught.tb is not None
            assert await anyio.to_thread.run_sync(accepted.recv, 65536) == b"", "the connection is closed"
