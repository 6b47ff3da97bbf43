"""Forwards connections: ``python -m tests.testcluster.relay <address> <port> <target port>``.

The API server listens on 127.0.0.1 only. The real node is in a separate network and reaches the API server through this
relay, on an address that only this machine and the node have.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


async def _serve(address: str, port: int, target: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()  # the client sees what it sees when the API server is down
            return
        await asyncio.gather(_pump(reader, upstream_writer), _pump(upstream_reader, writer))

    server = await asyncio.start_server(connected, address, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
