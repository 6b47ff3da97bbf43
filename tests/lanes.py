"""Runs make targets in two lanes at once: what `make test` does, so that the cluster is tested while the rest is.

    python tests/lanes.py MAKE "lint test-unit …" "test-cluster"

The first lane is seen as it goes; what the second one says is kept in `.test-output/second-lane.log`, and shown from
the end of the first one on. Whichever fails, or Ctrl-C, ends both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOG = Path(".test-output/second-lane.log")


def main(make: str, first: str, second: str) -> int:
    """The exit status of the lane that failed first; 0 if both passed."""
    LOG.parent.mkdir(exist_ok=True)
    lanes: list[subprocess.Popen[bytes]] = []
    with LOG.open("wb") as log, LOG.open("rb") as said:
        try:
            lanes.append(subprocess.Popen([make, *second.split()], stdout=log, stderr=log, start_new_session=True))
            print(f"at the same time: make {second} (so far in {LOG})", flush=True)
            lanes.append(subprocess.Popen([make, *first.split()], start_new_session=True))
            while lanes[1].poll() is None and not lanes[0].poll():
                time.sleep(0.2)
            if lanes[1].poll():
                return lanes[1].returncode
            if lanes[1].poll() is None:
                print(f"\nmake {second} failed:", flush=True)
            while lanes[0].poll() is None or said.peek(1):
                sys.stdout.buffer.write(said.read())
                sys.stdout.flush()
                time.sleep(0.2)
            return lanes[0].returncode
        finally:
            for lane in lanes:
                if lane.poll() is None:
                    # As Ctrl-C: pytest ends what its tests have started, which are sessions of their own.
                    os.killpg(lane.pid, signal.SIGINT)
                    try:
                        lane.wait(120)
                    except subprocess.TimeoutExpired:
                        os.killpg(lane.pid, signal.SIGKILL)
                        lane.wait()


if __name__ == "__main__":
    # Also where a shell has it ignored, as for what it runs in the background; the lanes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(*sys.argv[1:]))
