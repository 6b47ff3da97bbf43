"""Measures the cost of waiting for many TrainJobs, and the latency of their ends, on a real API server.

::

    python tests/bench/waiting.py [--jobs N]... [--quiet-seconds S] [--idle-seconds S]

Starts the test cluster's etcd and API server, without controllers: the driver, a separate process, writes the status
that Trainer would write. Each client waits for N jobs in a separate namespace, one client after the other. Clients:

* ours: ``trainjob wait NAME...``, with a ticker on its event loop (clients/ours.py);
* LIST+WATCH: a minimal client with one watch (clients/watch.py);
* GET: one request for each job every 2 s (clients/poll.py).

Latency runs from the answer to the PATCH that sets ``Complete``, which confirms that it is stored, to the waiter's
notification. It is negative if the waiter was notified before the writer, so the time from the moment before the PATCH
was sent is also reported: it includes the work of the API server, which no waiter can avoid, and is an upper bound.

Every other job runs, the rest has not started: the client requests the reason from time to time. If 1,000 jobs have to
end within a second, clients/store.py writes that into etcd, as a second API server would: a single one takes 5 ms of
CPU for each PATCH. Latency then runs from the commit.

Requests are counted in the API server's audit log, by the client's User-Agent; connections and memory are read from
/proc. A client itself reports only the time of its notification and its ticker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Thread

import psutil
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.processes import wait_until
from tests.testcluster.api import client_user, write_kubeconfig
from tests.testcluster.control_plane import Cluster

PYTHON_PATH = {"PYTHONPATH": str(ROOT)}
CLIENTS = Path(__file__).parent / "clients"
USER_AGENTS = {"ours": "trainjob/", "LIST+WATCH": "plain-watch", "GET": "poll"}
PEER_JOBS = 1000  # 10,000 jobs polled would be 5,000 requests per second
BURST = 1000  # number of jobs that end within one second, if there are at least as many
BUSY_PERCENT = 20.0
STEADY = 40.0  # jobs that end per second, if there are fewer: a fifth of a core of the API server
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["waiter"]}, {"level": "None"}],
}


def emit(metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
    ratio = value / peer if isinstance(value, float | int) and peer and min(value, peer) >= 0 else None
    figures = {"metric": metric, "value": _short(value), "unit": unit, "peer": _short(peer), "ratio": _short(ratio)}
    print(json.dumps({"bench": "waiting", **figures}), flush=True)


def _short(value: float | str | None) -> float | str | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass
class Figures:
    """The figures of one client and number of jobs. Latencies in ms, memory in MB; stalls in ms and ms of CPU."""

    after_answer: list[float] = field(default_factory=list)
    after_sending: list[float] = field(default_factory=list)
    first_requests: int = 0
    requests_per_second: float = 0.0
    connections: int = 0
    rss: float = 0.0
    pss: float = 0.0
    ending_seconds: float = 0.0
    first_stall: tuple[float, float] = (0.0, 0.0)
    ending_stall: tuple[float, float] = (0.0, 0.0)


def _output(program: str, *arguments: str, names: Sequence[str]) -> list[str]:
    command = [sys.executable, str(CLIENTS / program), *arguments]
    environment = {**os.environ, **PYTHON_PATH}
    done = subprocess.run(
        command, input="\n".join(names), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()


class Waiter:
    """A running client: its output, and the kernel's figures of it."""

    def __init__(self, command: Sequence[str], names: Sequence[str], environment: dict[str, str]) -> None:
        self.seen: dict[str, float] = {}
        self.began = time.time()
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(names) + "\n")
        self.process.stdin.close()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, seen = line.split("\t")
            self.seen[name] = float(seen)

    def settle(self) -> None:
        """Wait until the client is idle."""
        process, deadline = psutil.Process(self.process.pid), time.monotonic() + 60
        busy = True
        while busy and time.monotonic() < deadline:
            before = sum(process.cpu_times()[:2])
            time.sleep(0.5)
            busy = sum(process.cpu_times()[:2]) - before > 0.03
        if self.process.poll() is not None:
            raise SystemExit(f"{self.process.args!r} has ended with {self.process.returncode}")

    def measure(self, figures: Figures, port: int) -> None:
        process = psutil.Process(self.process.pid)
        memory = process.memory_full_info()
        figures.rss, figures.pss = memory.rss / 1e6, memory.pss / 1e6
        figures.connections = sum(
            each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port
            for each in process.net_connections("tcp")
        )

    def until_seen(self, names: Sequence[str]) -> None:
        wait_until(f"{len(names)} jobs are seen", lambda: self.seen.keys() >= set(names), 60, poll=0.1)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._reader.join(10)


def wait_for_idle_machine(seconds: float) -> None:
    """Wait until the machine has little other load, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and psutil.cpu_percent(2) > BUSY_PERCENT:
        pass


class Bench:
    """Runs an API server, the driver, and the clients one after the other."""

    def __init__(self, cluster: Cluster, audit_log: Path, quiet_seconds: float, idle_seconds: float) -> None:
        self._cluster = cluster
        self._audit_log = audit_log
        self._quiet = quiet_seconds
        self.idle_seconds = idle_seconds
        self._port = cluster.layout.ports["api"]
        self._etcd = str(cluster.layout.ports["etcd"])
        authority = cluster.layout.authority
        # A separate user, so that the audit log has only the requests of this process.
        pair = authority.issue("waiter", "system:masters")
        self.kubeconfig = write_kubeconfig(
            cluster.directory / "waiter.kubeconfig",
            cluster.layout.server,
            authority.certificate.read_bytes(),
            client_user(pair.certificate, pair.key),
        )
        self._waiter = [cluster.layout.server, *map(str, (authority.certificate, pair.certificate, pair.key))]
        admin = cluster.layout.client
        self.driver = [cluster.layout.server, *map(str, (authority.certificate, admin.certificate, admin.key))]
        self._ticks = cluster.directory / "ticks"

    def drive(self, namespace: str, action: str, number: float, names: Sequence[str] = ()) -> list[str]:
        return _output("driver.py", *self.driver, namespace, action, str(number), names=names)

    def store(self, namespace: str, state: str, seconds: float, names: Sequence[str]) -> list[str]:
        return _output("store.py", self._etcd, namespace, state, str(seconds), names=names)

    def create(self, namespace: str, number: int) -> list[str]:
        self._cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        names = self.drive(namespace, "create", number)
        self.store(namespace, "running", 0, names[::2])
        return names

    @contextmanager
    def waiting(self, client: str, namespace: str, names: Sequence[str]) -> Iterator[Waiter]:
        environment = {**PYTHON_PATH, "KUBECONFIG": str(self.kubeconfig), "TRAINJOB_NAMESPACE": namespace}
        programs = {"ours": "ours.py", "LIST+WATCH": "watch.py", "GET": "poll.py"}
        arguments = [str(self._ticks)] if client == "ours" else [*self._waiter, namespace]
        command = [sys.executable, str(CLIENTS / programs[client]), *arguments]
        waiter = Waiter(command, names, {**environment, "TRAINJOB_BACKEND": "kubernetes"})
        try:
            yield waiter
        finally:
            waiter.stop()

    def until_it_waits(self, client: str, waiter: Waiter) -> None:
        if client == "GET":
            time.sleep(2)  # one round of requests
        else:
            wait_until(
                f"{client} watches", lambda: self.requests(client, waiter.began, time.time(), "watch"), 60, poll=0.5
            )
            waiter.settle()

    def requests(self, client: str, since: float, until: float, verb: str = "") -> int:
        """Requests that the API server received from `client` between two Unix times."""
        found = set()
        for line in self._audit_log.read_text().rpartition("\n")[0].splitlines():
            event = json.loads(line)
            received = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            its = event.get("userAgent", "").startswith(USER_AGENTS[client]) and event["verb"].startswith(verb)
            if its and since <= received <= until:
                found.add(event["auditID"])
        return len(found)

    def stall(self, since: float, until: float) -> tuple[float, float]:
        """The longest delay of the ticker by the event loop, and the maximum CPU time between ticks."""
        ticks = [tuple(map(float, line.split("\t"))) for line in self._ticks.read_text().splitlines()]
        ticks = [tick for tick in ticks if since <= tick[0] <= until]
        late, used = (max((tick[i] for tick in ticks), default=0.0) * 1000 for i in (1, 2))
        return late, used

    def run(self, client: str, number: int) -> Figures:
        figures = Figures()
        namespace = f"{client.lower().replace('+', '-')}-{number}"
        names = self.create(namespace, number)
        wait_for_idle_machine(self.idle_seconds)
        with self.waiting(client, namespace, names) as waiter:
            self.until_it_waits(client, waiter)
            quiet_from = time.time()
            time.sleep(self._quiet if client == "ours" else min(self._quiet, 10.0) / 2)
            quiet_until = time.time()
            waiter.measure(figures, self._port)
            ending = random.sample(names, min(number, BURST))
            wait_for_idle_machine(0 if client == "GET" else self.idle_seconds)
            if number > BURST:
                finished = self.store(namespace, "complete", 0.95, ending)
            else:
                finished = self.drive(namespace, "finish", STEADY, ending)
            waiter.until_seen(ending)
        times = {name: (float(at[0]), float(at[-1])) for name, *at in (line.split("\t") for line in finished)}
        began, ended = min(sent for sent, _ in times.values()), max(answered for _, answered in times.values())
        figures.ending_seconds = ended - began
        figures.after_sending = [(waiter.seen[name] - sent) * 1000 for name, (sent, _) in times.items()]
        figures.after_answer = [(waiter.seen[name] - answered) * 1000 for name, (_, answered) in times.items()]
        figures.first_requests = self.requests(client, waiter.began, quiet_from)
        figures.requests_per_second = self.requests(client, quiet_from, quiet_until) / (quiet_until - quiet_from)
        if client == "ours":
            figures.first_stall = self.stall(waiter.began, quiet_from)
            figures.ending_stall = self.stall(began, max(waiter.seen.values()) + 0.1)
        return figures

    def one(self) -> Figures:
        """Measure a process that waits for one job."""
        figures = Figures()
        with self.waiting("ours", "one", self.create("one", 1)) as waiter:
            self.until_it_waits("ours", waiter)
            waiter.measure(figures, self._port)
        return figures

    def launch_requests(self) -> int:
        """Count the requests of one launch."""
        began = time.time()
        command = [str(Path(sys.executable).parent / "trainjob"), "--backend", "kubernetes", "-n", "default"]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        words = ["run", "--detach", "--runtime", "torch-distributed", "--", "torchrun", "train.py"]
        subprocess.run([*command, *words], env=environment, capture_output=True, check=True)
        return self.requests("ours", began, time.time())


def report(number: int, ours: Figures, one: Figures, peers: dict[str, Figures]) -> None:
    def each(metric: str, unit: str, value: float, of_peers: dict[str, float] | None = None) -> None:
        emit(f"{number} jobs: {metric}", value, unit)
        for name, peer in (of_peers or {}).items():
            emit(f"{number} jobs: {metric}, beside {name}", value, unit, peer)

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20)[-1]

    each("seconds in which those that end did", "s", ours.ending_seconds)
    for metric, of in (("median", statistics.median), ("p95", p95)):
        values = {name: of(peer.after_answer) for name, peer in peers.items()}
        each(f"condition to waiter, {metric}", "ms", of(ours.after_answer), values)
    for metric, of in (("median", statistics.median), ("p95", p95)):
        values = {name: of(peer.after_sending) for name, peer in peers.items()}
        each(f"sending of the condition to waiter, {metric}", "ms", of(ours.after_sending), values)
    quiet = {name: peer.requests_per_second for name, peer in peers.items()}
    each("requests while nothing happens", "1/s", ours.requests_per_second, quiet)
    each("requests until it waits", "", ours.first_requests)
    each("connections", "", ours.connections, {name: float(peer.connections) for name, peer in peers.items()})
    each("memory above one job, RSS", "MB", ours.rss - one.rss)
    each("memory above one job, PSS", "MB", ours.pss - one.pss)
    each("memory, RSS", "MB", ours.rss, {name: peer.rss for name, peer in peers.items()})
    for when, stall in (("it begins", ours.first_stall), ("jobs end", ours.ending_stall)):
        each(f"longest stall of the event loop while {when}", "ms", stall[0])
        each(f"most CPU time of the event loop between two ticks while {when}", "ms", stall[1])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores,{model.rstrip()}, {memory:.0f} GiB, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, action="append", help="number of jobs (100, 1000 and 10000)")
    parser.add_argument(
        "--quiet-seconds", type=float, default=60, help="seconds for which requests are counted (%(default)s)"
    )
    parser.add_argument(
        "--idle-seconds",
        type=float,
        default=0,
        help="maximum wait for an idle machine before each measurement",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        policy, audit_log = Path(temporary, "policy.yaml"), Path(temporary, "audit.log")
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        emit("machine", machine())
        emit("load average before", os.getloadavg()[0])
        with Cluster(kueue=False, controllers=False, api_server_flags=flags) as cluster:
            emit("API server", ", ".join(f"{name} {version}" for name, version in cluster.versions().items()))
            bench = Bench(cluster, audit_log, arguments.quiet_seconds, arguments.idle_seconds)
            emit("requests of one launch", bench.launch_requests())
            one = bench.one()
            for number in arguments.jobs or (100, 1000, 10_000):
                peers = {name: bench.run(name, number) for name in ("LIST+WATCH", "GET") if number <= PEER_JOBS}
                report(number, bench.run("ours", number), one, peers)


if __name__ == "__main__":
    main()
