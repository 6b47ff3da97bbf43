"""Measures the cost of waiting for many TrainJobs, and the latency of their ends, on a real API server.

``python -m tests.bench.waiting [--jobs N]... [--quiet-seconds S]``

Starts the test cluster's etcd and API server, without controllers: the driver, a separate process, writes the status
that Trainer would write. Each client waits for N jobs in a separate namespace, one client after the other:
``trainjob wait NAME...``, with a ticker on its event loop (clients/ours.py), and two others (clients/peers.py).

Latency runs from the answer to the PATCH that sets ``Complete``, which confirms that it is stored, to the waiter's
notification. It is negative if the waiter was notified before the writer; the time from the moment before the PATCH was
sent includes the work of the API server, which no waiter can avoid, and is an upper bound.

Every other job runs, the rest has not started: the client requests the reason from time to time. If 1,000 jobs have to
end within a second, clients/store.py writes that into etcd, as a second API server would: a single one takes 5 ms of
CPU for each PATCH. Latency then runs from the commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import psutil
from tests.bench.figures import ROOT, ApiServer, Output, api_server, settle
from tests.processes import wait_until

AGENTS = {"ours": "trainjob/", "watch": "watch", "poll": "poll"}
PEER_JOBS = 1000  # 10,000 jobs polled would be 5,000 requests per second
BURST = 1000


@dataclass
class Figures:
    """The figures of one client. Latencies in ms, memory in MB; stalls in ms and ms of CPU."""

    after_answer: list[float] = field(default_factory=list)
    after_sending: list[float] = field(default_factory=list)
    first_requests: int = 0
    requests_per_second: float = 0.0
    connections: int = 0
    rss: float = 0.0
    stalls: dict[str, tuple[float, float]] = field(default_factory=dict)


class Waiter:
    """A running client, and when it has seen its jobs end."""

    def __init__(self, command: Sequence[str], names: Sequence[str], environment: dict[str, str]) -> None:
        self.seen: dict[str, float] = {}
        self.began = time.time()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = psutil.Process(self._popen.pid)
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n".join(names) + "\n")
        self._popen.stdin.close()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            name, seen = line.split("\t")
            self.seen[name] = float(seen)

    def stop(self) -> None:
        self._popen.terminate()
        self._popen.wait(30)
        self._reader.join(10)


@contextmanager
def waiting(server: ApiServer, client: str, namespace: str, names: Sequence[str]) -> Iterator[Waiter]:
    settings = {"KUBECONFIG": str(server.kubeconfig), "TRAINJOB_NAMESPACE": namespace, "TRAINJOB_BACKEND": "kubernetes"}
    ours = ["tests.bench.clients.ours", str(ticks(server))]
    command = ours if client == "ours" else ["tests.bench.clients.peers", client, *server.waiter, namespace]
    waiter = Waiter(command, names, settings)
    try:
        verb = "get" if client == "poll" else "watch"
        wait_until("it waits", lambda: server.requests(waiter.began, time.time(), AGENTS[client], verb), 60, poll=0.5)
        settle(lambda: [waiter.process], 4 if client == "poll" else 60)
        yield waiter
    finally:
        waiter.stop()


def ticks(server: ApiServer) -> Path:
    return server.cluster.directory / "ticks"


def stall(server: ApiServer, since: float, until: float) -> tuple[float, float]:
    """The longest delay of the ticker by the event loop, and the maximum CPU time between ticks."""
    found = [tuple(map(float, line.split("\t"))) for line in ticks(server).read_text().splitlines()]
    late, used = (max((tick[i] for tick in found if since <= tick[0] <= until), default=0.0) * 1000 for i in (1, 2))
    return late, used


def measure(server: ApiServer, client: str, number: int, quiet: float) -> Figures:
    figures, namespace = Figures(), f"{client}-{number}"
    names = server.create(namespace, number)
    server.store(namespace, "running", 0, names[::2])
    with waiting(server, client, namespace, names) as waiter:
        quiet_from = time.time()
        time.sleep(quiet)
        quiet_until = time.time()
        figures.rss = waiter.process.memory_info().rss / 1e6
        figures.connections = server.connections([waiter.process])
        ended = server.end(namespace, names, BURST)
        wait_until("all ends are seen", lambda: waiter.seen.keys() >= ended.keys(), 60, poll=0.1)
    figures.after_sending = [(waiter.seen[name] - sent) * 1000 for name, (sent, _) in ended.items()]
    figures.after_answer = [(waiter.seen[name] - answered) * 1000 for name, (_, answered) in ended.items()]
    figures.first_requests = server.requests(waiter.began, quiet_from, AGENTS[client])
    figures.requests_per_second = server.requests(quiet_from, quiet_until, AGENTS[client]) / (quiet_until - quiet_from)
    if client == "ours":
        began = min(sent for sent, _ in ended.values())
        figures.stalls["it begins"] = stall(server, waiter.began, quiet_from)
        figures.stalls["jobs end"] = stall(server, began, max(waiter.seen.values()) + 0.1)
    return figures


def report(output: Output, number: int, ours: Figures, peers: dict[str, Figures]) -> None:
    for name, peer in {"": None, **{f", beside {name}": peer for name, peer in peers.items()}}.items():

        def emit(metric: str, of: str, unit: str, name: str = name, peer: Figures | None = peer) -> None:
            value, other = getattr(ours, of), getattr(peer, of, None)
            if isinstance(value, list):
                output.spread(f"{number} jobs: {metric}{name}", value, unit, other or ())
            else:
                output.emit(f"{number} jobs: {metric}{name}", value, unit, other)

        emit("condition to waiter", "after_answer", "ms")
        emit("sending of the condition to waiter", "after_sending", "ms")
        emit("requests while nothing happens", "requests_per_second", "1/s")
        emit("requests until it waits", "first_requests", "")
        emit("connections", "connections", "")
        emit("memory, RSS", "rss", "MB")
    for when, (late, used) in ours.stalls.items():
        output.emit(f"{number} jobs: longest stall of the event loop while {when}", late, "ms")
        output.emit(f"{number} jobs: most CPU time of the event loop between two ticks while {when}", used, "ms")


def requests_of_a_launch(server: ApiServer) -> int:
    """Count the requests of ``trainjob run --detach`` with a generated key."""
    began = time.time()
    words = ["run", "--detach", "--backend", "kubernetes", "-n", "default", "--runtime", "torch-distributed"]
    command = [str(Path(sys.executable).parent / "trainjob"), *words, "--", "train.py"]
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return server.requests(began, time.time(), AGENTS["ours"])


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
            among = ("watch", "poll") if 1 < number <= PEER_JOBS else ()
            peers = {name: measure(server, name, number, min(arguments.quiet_seconds, 5)) for name in among}
            report(output, number, measure(server, "ours", number, arguments.quiet_seconds), peers)


if __name__ == "__main__":
    main()
