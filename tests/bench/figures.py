"""What the measurements share: their output, and times of processes."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Output:
    """Prints each figure as one JSON object in a line, with the load of the machine before it.

    Args:
        bench: Name of the measurement.
    """

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self.emit("machine", f"{os.cpu_count()} cores, Python {platform.python_version()}")

    def emit(self, metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
        """Print a figure, and how often that of the peer fits into it."""
        ratio = value / peer if isinstance(value, int | float) and peer else None
        numbers = {"value": _short(value), "unit": unit, "peer": _short(peer), "ratio": _short(ratio)}
        line = {"bench": self._bench, "metric": metric, **numbers, "load": os.getloadavg()[0]}
        print(json.dumps(line), flush=True)

    def spread(self, metric: str, values: Sequence[float], unit: str, peer: Sequence[float] = ()) -> None:
        """Print median and 95th percentile."""
        for name, of in (("median", statistics.median), ("p95", _p95)):
            self.emit(f"{metric}, {name}", of(values), unit, of(peer) if peer else None)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 95 // 100]


def _short(value: float | str | None) -> float | str | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def environment_of(name: str) -> str:
    """Python of an environment that `make bench` sets up."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing: make .venv-{name}/stamp")
    return str(python)


def settle(processes: Callable[[], Sequence[psutil.Process]], seconds: float = 60) -> None:
    """Wait until the processes use little CPU time."""
    used, deadline = -1.0, time.monotonic() + seconds
    while (now := cpu(processes())) - used > 0.1 and time.monotonic() < deadline:
        used = now
        time.sleep(1)


def cpu(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds."""
    return float(sum(sum(each.cpu_times()[:2]) for each in processes))
