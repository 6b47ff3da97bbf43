"""The health and the metrics of the controller, over HTTP: ``/healthz`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trainjob._jobs.controller import INTERVAL, Counters

_UNHEALTHY = 6 * INTERVAL  # seconds without a decision: an outage of the API server makes no restart useful before
_READ = 5.0  # seconds for a request


@asynccontextmanager
async def served(counters: Counters, port: int) -> AsyncIterator[None]:
    """Serve on all addresses of this machine until the end of the block."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ):
                words = (await reader.readline()).split()
            status, body = _reply(words[1].decode("ascii", "replace") if len(words) > 1 else "", counters)
            head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
            await writer.drain()
        except (OSError, TimeoutError, ValueError):  # of the client
            return
        finally:
            writer.close()

    server = await asyncio.start_server(answer, None, port)
    async with server:
        yield


def _reply(path: str, counters: Counters) -> tuple[str, str]:
    if path == "/healthz":
        if counters.decided is not None and time.monotonic() - counters.decided < _UNHEALTHY:
            return "200 OK", "ok\n"
        return "503 Service Unavailable", "no decision for a minute: the API server cannot be reached\n"
    if path == "/metrics":
        return "200 OK", metrics(counters)
    return "404 Not Found", "see /healthz and /metrics\n"


def metrics(counters: Counters) -> str:
    """The counters in the text format of Prometheus."""
    lines = ["# TYPE trainjob_controller_jobs_ended_total counter"]
    lines += [
        f'trainjob_controller_jobs_ended_total{{action="{name}"}} {count}' for name, count in counters.ended.items()
    ]
    lines += ["# TYPE trainjob_controller_failures_total counter"]
    lines += [f"trainjob_controller_failures_total {counters.failed}"]
    for name, value in (("jobs", counters.jobs), ("ended_runs", counters.runs)):
        lines += [f"# TYPE trainjob_controller_{name} gauge", f"trainjob_controller_{name} {value}"]
    return "\n".join(lines) + "\n"
