"""HTTP/1.1 for proxies of tests: just enough to separate requests and replies."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus


def parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    """The first two words of a request or reply, and its headers in lower case."""
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    one, two = first.split(" ")[:2]
    return one, two, {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def until_closed(reader: StreamReader, seconds: float | None = None) -> bool:
    """Wait until the client disconnects, for so long at most; return whether it has."""
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(65536):
                pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """A body of these parts."""
    for part in parts:
        yield part


async def write(
    writer: StreamWriter, status: int, headers: Mapping[str, str], body: AsyncIterator[bytes], *, end: bool = True
) -> bool:
    """Send a reply; without `end` the body stays incomplete, and the caller cuts or keeps the connection."""
    chunked = "content-length" not in headers
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    lines += ["transfer-encoding: chunked"] if chunked else []
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    await writer.drain()
    async for data in body:
        if data:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            await writer.drain()
    if chunked and end:
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    return end
