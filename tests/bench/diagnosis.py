"""Measures the diagnosis of a job of 1,000 crashed pods: with as many logs, lines and Events as are read at most.

``python -m tests.bench.diagnosis [PODS]``
"""

from __future__ import annotations

import sys
import time

from tests.bench.figures import Output
from tests.objects import ended, event, pod, trainjob

from trainjob._backends.kubernetes.pods import MAX_TAILS
from trainjob._diagnosis import READ_LINES, diagnosis_of
from trainjob.status import Observation, Phase
from trainjob.verdicts import Evidence

EVENTS = 5000
LINE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711"


def main(number: int) -> None:
    pods = [pod(rank, ended(1)) for rank in range(number)]
    names = [each["metadata"]["name"] for each in pods]
    logs = {name: [LINE] * READ_LINES for name in names[:MAX_TAILS]}
    events = [event("FailedMount", "no such volume", about=names[i % number]) for i in range(EVENTS)]
    evidence = Evidence(trainjob(), pods, logs, events)
    began = time.process_time()
    diagnosis_of(evidence, Observation(Phase.FAILED))
    what = f"{number} pods, {len(logs)} logs of {READ_LINES} lines, {len(events)} events"
    Output("diagnosis").emit(f"diagnosis of {what}: CPU", time.process_time() - began, "s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
