"""A training that reports its progress to Trainer's status API, with trainjob or with the Kubeflow SDK.

``reports.py trainjob|kubeflow STEPS``: prints the seconds of each update as a JSON list. Every client runs with the
variables that Trainer sets in containers, in an environment in which it is installed.
"""

from __future__ import annotations

import json
import sys
import time

PAUSE = 0.05  # seconds of training between two updates


def main(client: str, steps: int) -> None:
    if client == "trainjob":
        from trainjob import progress

        def update(step: int) -> None:
            progress.report(progress=100 * step / steps, metrics={"loss": 1 / step, "step": step})
    else:
        from kubeflow.trainer import update_trainjob_status

        def update(step: int) -> None:
            update_trainjob_status(100 * step // steps, metrics={"loss": 1 / step, "step": step})

    spent = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        update(step)
        spent.append(time.perf_counter() - began)
        time.sleep(PAUSE)
    print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
