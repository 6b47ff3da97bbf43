"""Measures the start of a local job: from the call of `launch` to the first line of rank 0.

The start of the rank's process alone is measured as the peer and subtracted: the difference is the cost of trainjob.
Each figure is a median. ``python tests/bench/local_launch.py [N]``
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainjob import TrainJobClient
from trainjob._backends.local.backend import LocalBackend

COMMANDS = {
    "sh": ["sh", "-c", "date +%s%N"],
    "python": [sys.executable, "-c", "import time; print(time.time_ns())"],
}


def peer(command: list[str]) -> float:
    """Seconds from the call to the time that the command prints when it is started without trainjob."""
    began = time.time_ns()
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return (int(printed) - began) / 1e9


def launched(client: TrainJobClient, command: list[str], key: str) -> tuple[float, float, float]:
    """Seconds from the call to the rank's line, to the return of `launch`, and from the line to the result."""
    began = time.time_ns()
    ref = client.launch({"runtime": "trainjob-step", "command": command}, key)
    returned = time.time_ns()
    client.wait(ref)
    ended = time.time_ns()
    (line,) = client.logs(ref)
    return (int(line.text) - began) / 1e9, (returned - began) / 1e9, (ended - int(line.text)) / 1e9


def emit(metric: str, value: float, beside: str | None = None, ratio: float | None = None) -> None:
    figures = {"metric": metric, "value": round(value, 4), "unit": "s", "peer": beside}
    print(json.dumps({"bench": "local_launch", **figures, "ratio": round(ratio, 2) if ratio is not None else None}))


def main(number: int) -> None:
    with tempfile.TemporaryDirectory() as home, TrainJobClient(LocalBackend(Path(home))) as client:
        for name, command in COMMANDS.items():
            launched(client, command, f"{name}/warm-up")
            alone, begun, returned, ended = [], [], [], []
            for i in range(number):  # in turn, so that a busy machine is busy for both
                alone.append(peer(command))
                first_line, call, end = launched(client, command, f"{name}/{i}")
                begun.append(first_line)
                returned.append(call)
                ended.append(end)
            start = statistics.median(alone)
            first = statistics.median(begun)
            emit(f"launch to first line ({name}), less its own start", first - start, f"{name} alone", first / start)
            emit(f"launch returns ({name})", statistics.median(returned))
            emit(f"line to result ({name})", statistics.median(ended))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
