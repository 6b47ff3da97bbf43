"""Measures the cost of `trainjob.progress.step` for a training with steps of 10 ms, with and without a watchdog.

And the cost of the watchdog's looks at the stack of the main thread, with 40 frames, ten times a second.

::

    python tests/bench/step.py [CALLS]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

STEP_SECONDS = 0.01
LOOKS_PER_STEP = 0.1
FRAMES, LOOKS = 40, 20_000


def measure(calls: int) -> float:
    """Seconds of one call: the fastest of five series, since other work can only slow it down."""
    from trainjob import progress

    progress.step(0)
    series = []
    for _ in range(5):
        began = time.perf_counter()
        for number in range(calls):
            progress.step(number)
        series.append((time.perf_counter() - began) / calls)
    return min(series)


def look(frames: int) -> float:
    """Seconds of one look at a stack of so many frames."""
    if frames:
        return look(frames - 1)
    from trainjob.progress.watchdog import Places

    places, main = Places(), threading.main_thread().ident or 0
    began = time.perf_counter()
    for _ in range(LOOKS):
        places.of(sys._current_frames().get(main))
    return (time.perf_counter() - began) / LOOKS


def main(calls: int) -> None:
    """Print one JSON object per figure."""
    for name, timeout in (("without stall_timeout", ""), ("with stall_timeout", "900")):
        env = {**os.environ, "TRAINJOB_STALL_TIMEOUT": timeout}
        command = [sys.executable, __file__, str(calls), "measure"]
        seconds = float(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
        figure = {"bench": "step", "metric": name, "value": round(seconds * 1e6, 3), "unit": "us per call"}
        print(json.dumps({**figure, "peer": "a step of 10 ms", "ratio": seconds / STEP_SECONDS}))
    seconds = look(FRAMES)
    figure = {"bench": "step", "metric": "a look of the watchdog", "value": round(seconds * 1e6, 3), "unit": "us"}
    print(json.dumps({**figure, "peer": "a step of 10 ms", "ratio": LOOKS_PER_STEP * seconds / STEP_SECONDS}))


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    if sys.argv[2:]:
        print(measure(count))
    else:
        main(count)
