"""Measures the cost of waiting for many TrainJobs, and the latency of their ends, on a real API server.

``python -m tests.bench.waiting [--jobs N]... [--quiet-seconds S]``

Starts the test cluster's etcd and API server, without controllers. ``trainjob wait NAME...`` waits for N jobs in a
separate namespace, and for up to 1,000 jobs another process that requests each job every 2 s (clients/poll.py).

Every other job runs, the rest has not started: the client requests the reason from time to time. Up to 1,000 jobs end
one after the other, 40 a second; of more, 1,000 end within a second. Their ends are written into etcd, as a second API
server would. Latency runs from the commit to the waiter's notification.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
from tests.bench.figures import ROOT, Output, settle
from tests.bench.server import ApiServer, api_server
from tests.processes import wait_until

PROGRAM = str(Path(sys.executable).parent / "trainjob")
CLIENTS = {"trainjob/": ("watch", 60), "poll": ("get", 4)}
"""User agent of each client -> the request by which it waits, and after how many seconds it is quiet at the latest."""
BURST = 1000  # also the most jobs that are polled: 10,000 would be 5,000 requests per second


@contextmanager
def waiting(
    server: ApiServer, client: str, namespace: str, names: Sequence[str]
) -> Iterator[tuple[Popen[bytes], Path]]:
    """A running client, and the file with a line for each end that it has seen."""
    seen = server.cluster.directory / f"{namespace}.seen"
    settings = {"TRAINJOB_NAMESPACE": namespace, "TRAINJOB_BACKEND": "kubernetes", "KUBECONFIG": str(server.kubeconfig)}
    # The name of one job, twice, is waited for like many.
    command = [PROGRAM, "wait", *names, names[0]]
    if client == "poll":
        command = [sys.executable, "-m", "tests.bench.clients.poll", str(server.kubeconfig), namespace, *names]
    verb, seconds = CLIENTS[client]
    began = time.time()
    with seen.open("wb") as output, Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=output) as process:
        try:
            wait_until("it waits", lambda: server.requests(began, time.time(), client, verb), 60, poll=0.5)
            settle(lambda: [psutil.Process(process.pid)], seconds)
            yield process, seen
        finally:
            process.terminate()


def measure(
    server: ApiServer, client: str, number: int, quiet: float
) -> tuple[list[float], dict[tuple[str, str], float]]:
    """Latencies in ms; name and unit of each other figure -> its value."""
    namespace = f"{client.strip('/')}-{number}"
    names = [job["metadata"]["name"] for job in server.create(namespace, number)]
    server.store(namespace, names[::2], "Running", at_once=20)
    began = time.time()
    with waiting(server, client, namespace, names) as (process, output):
        quiet_from = time.time()
        time.sleep(quiet)
        quiet_until = time.time()
        running = psutil.Process(process.pid)
        memory, connections = running.memory_info().rss / 1e6, server.connections([running])
        ending = random.sample(names, min(number, BURST))
        rate, at_once = (1050, 20) if number > BURST else (40, 1)
        ended = server.store(namespace, ending, "Complete", rate=rate, at_once=at_once)
        wait_until("all ends are seen", lambda: _times(output).keys() >= ended.keys(), 60, poll=0.5)
    seen = _times(output)
    requests = server.requests(quiet_from, quiet_until, client)
    return [(seen[name] - at) * 1000 for name, at in ended.items()], {
        ("requests while nothing happens", "1/s"): requests / (quiet_until - quiet_from),
        ("requests until it waits", ""): server.requests(began, quiet_from, client),
        ("connections", ""): connections,
        ("memory, RSS", "MB"): memory,
    }


def _times(output: Path) -> dict[str, float]:
    """Name of a job -> Unix time at which its end was seen."""
    lines = output.read_text().rpartition("\n")[0].splitlines()
    return {name: float(seen) for name, seen in (line.split("\t") for line in lines)}


def requests_of_a_launch(server: ApiServer) -> int:
    """Count the requests of ``trainjob run --detach`` with a generated key."""
    began = time.time()
    words = ["run", "--detach", "--backend", "kubernetes", "-n", "default", "--runtime", "torch-distributed"]
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    command = [PROGRAM, *words, "--", "train.py"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return server.requests(began, time.time(), "trainjob/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, action="append", help="number of jobs (1, 100, 1000 and 10000)")
    parser.add_argument("--quiet-seconds", type=float, default=60, help="time of counting requests (%(default)s)")
    arguments = parser.parse_args()
    output = Output("waiting")
    with api_server() as server:
        output.emit("API server", ", ".join(f"{name} {version}" for name, version in server.cluster.versions().items()))
        output.emit("requests of one launch", requests_of_a_launch(server))
        for number in arguments.jobs or (1, 100, 1000, 10_000):
            latency, ours = measure(server, "trainjob/", number, arguments.quiet_seconds)
            quiet = min(arguments.quiet_seconds, 5)
            late, peer = measure(server, "poll", number, quiet) if 1 < number <= BURST else ([], {})
            output.spread(f"{number} jobs: end to waiter", latency, "ms", late)
            for (metric, unit), value in ours.items():
                output.emit(f"{number} jobs: {metric}", value, unit, peer.get((metric, unit)))


if __name__ == "__main__":
    main()
