"""What the documents of all kinds have in common: the time, hostile texts, curves and lines of a log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

Document = dict[str, Any]
Points = list[list[float]]
TAKEN = datetime(2026, 11, 26, 2, 0, tzinfo=UTC)
STARTED = TAKEN - timedelta(seconds=6600)
"""When the trainings reported their first step."""
HOSTILE = (
    "<script>window.__pwned = 1</script>",
    "</script><script>window.__pwned = 2</script><!--",
    '"><img src=x onerror="window.__pwned = 3">',
    "javascript:window.__pwned=4",
    "\u202egnp.exe\u202c \u2066isolated",
    "line \u2028 separator \u2029 paragraph",
    "{{document}} ${x} &lt;b&gt; ' \" `",
    "n" * 10_000,
    "long words " * 900,
    "__proto__",
    "constructor",
)
"""Texts that try to leave the place where they are shown. They have no control characters."""


def iso(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(seconds: float) -> str:
    """The time so many seconds before the documents were taken."""
    return iso(TAKEN - timedelta(seconds=seconds))


def curve(
    count: int,
    *,
    first: int = 0,
    start: datetime = STARTED,
    every: float = 2.0,
    end: float = 0.2,
    seed: int = 1,
    pauses: Mapping[int, float] | None = None,
) -> Points:
    """A noisy, falling curve; the noise is the same in each run. `pauses` are seconds before a point."""
    points, time = [], start.timestamp()
    for index in range(count):
        step = first + index * 10
        noise = math.sin(index * 12.9898 * seed) * 43758.5453
        value = end + 2.2 * math.exp(-step / 900) + 0.06 * (noise - math.floor(noise) - 0.5)
        time += (pauses or {}).get(index, 0)
        points.append([step, time + index * every, value])
    return points


def metrics(points: Points) -> dict[str, Points]:
    return {
        "loss": points,
        "accuracy": [[step, time, max(0.0, 1 - value / 2.6)] for step, time, value in points],
        "learning_rate": [[step, time, 3e-4 * math.exp(-step / 1500)] for step, time, _ in points],
        "tokens_per_second": [
            [step, time, 152_000 + 9000 * math.sin(index / 9)] for index, (step, time, _) in enumerate(points)
        ],
    }


def reported(points: Points, percent: int | None = None, **more: Any) -> Document:
    """``trainerStatus`` after the latest of `points`."""
    step, time, _ = points[-1]
    values = {name: series[-1][2] for name, series in metrics(points).items()} | {"trainjob.step": int(step)} | more
    listed = [{"name": name, "value": str(value)} for name, value in values.items()]
    updated = datetime.fromtimestamp(time, UTC).isoformat()
    return {
        "metrics": listed,
        "lastUpdatedTime": updated,
        **({} if percent is None else {"progressPercentage": percent}),
    }


def log(count: int, ranks: int = 2, end: float = 0) -> list[Document]:
    return [
        {
            "rank": f"node-{index % ranks}",
            "time": ago(end + (count - index) * 2),
            "text": f"epoch {index // 40} step {index * 10} loss={2 * math.exp(-index / 90):.4f} lr=3.0e-04",
        }
        for index in range(count)
    ]
