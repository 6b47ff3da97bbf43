"""Measures the cost of one transfer for its process."""

from __future__ import annotations

import json
import re
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def measure(run: Callable[[], object]) -> None:
    """Run a transfer; print as JSON its seconds, CPU, memory (RSS before it and maximum), and bytes sent by Python."""
    sent = _count_sent()
    before = _status("VmRSS")
    began, used = time.perf_counter(), _cpu()
    run()
    figures = {
        "seconds": time.perf_counter() - began,
        "cpu": _cpu() - used,
        "memory": _status("VmHWM"),
        "before": before,
        "sent": sum(sent),
    }
    print(json.dumps(figures), flush=True)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _count_sent() -> list[int]:
    sent: list[int] = []
    for name in ("send", "sendall"):
        original = getattr(socket.socket, name)

        def counted(self: socket.socket, data: Any, *flags: int, original: Any = original) -> Any:
            sent.append(memoryview(data).nbytes)
            return original(self, data, *flags)

        setattr(socket.socket, name, counted)
    return sent


def _status(name: str) -> int:
    # Not ru_maxrss, which a process inherits from its parent.
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1]) * 1024
