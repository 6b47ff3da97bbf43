"""Measures transfers of a large file and many small ones with S3 and from a hub, compared with other clients.

::

    python tests/bench/stores.py [--runs N] [--mebibytes N] [--files N] [--stores PYTHON]

The server is SeaweedFS, on this machine; the hub is that of the unit tests. Each transfer is a separate process with a
new target; the clients take turns. Seconds are those of the transfer, without imports; memory is the maximum of the
process. The other clients are in a separate environment (``make .venv-stores/stamp``), each used in its fastest way
(`tests.bench.clients.stores`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.seaweedfs import SeaweedFS  # noqa: E402 - the path comes first

STORES = ROOT / ".venv-stores" / "bin" / "python"
MIB = 1024 * 1024
CLIENTS = {
    ("s3", "up"): ("trainjob", "obstore", "obstore, SHA-256", "boto3", "s3fs"),
    ("s3", "down"): ("trainjob", "obstore", "obstore, SHA-256", "obstore, SHA-256, fsync", "boto3", "s3fs", "opendal"),
    ("hub", "down"): ("trainjob", "huggingface-hub"),
}
FIGURES = {
    "seconds": ("time", "s", 1.0),
    "cpu": ("CPU of the client", "s", 1.0),
    "server": ("CPU of the server", "s", 1.0),
    "least": ("both, spread over all cores", "s", 1.0),
    "memory": ("memory", "MB", 1e6),
    "before": ("of it before the transfer", "MB", 1e6),
}
Figures = dict[str, float]


def emit(metric: str, value: float | str, unit: str = "", client: str = "", ratio: float | None = None) -> None:
    line = {"metric": metric, "client": client, "value": value, "unit": unit, "peer": None, "ratio": ratio}
    print(json.dumps({"bench": "stores", **line}), flush=True)


def once(python: Path, environment: Mapping[str, str], *arguments: str, server: int | None = None) -> Figures:
    """One transfer; ``server`` is the process id of the server."""
    command = [str(python), "-m", "tests.bench.clients.stores", *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    before = cpu(server)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    used = cpu(server) - before
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures | {"server": used, "least": (figures["cpu"] + used) / (os.cpu_count() or 1)}


def cpu(process: int | None) -> float:
    """CPU seconds that a process has used."""
    times = psutil.Process(process).cpu_times() if process else None
    return times.user + times.system if times else 0.0


def check(source: Path, target: Path) -> None:
    command = ["diff", "-rq", "--exclude=MANIFEST.json", "--exclude=.cache", str(source), str(target)]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"{target} differs from {source}")
    # Keep small files until the end: for minutes after a deletion, ext4 allocates inodes slowly.
    for path in target.glob("*.safetensors"):
        path.unlink()


def turned(clients: Sequence[str], run: int) -> Sequence[str]:
    """The clients in a rotated order, so that each is sometimes first and sometimes last."""
    return (*clients[run % len(clients) :], *clients[: run % len(clients)])


@contextmanager
def hub(folders: Iterable[Path]) -> Iterator[tuple[str, int]]:
    """Run the hub; yield its URL and process id."""
    repos = [f"bench/{folder.name}={folder}" for folder in folders]
    command = [sys.executable, "-m", "tests.bench.clients.hub", *repos]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.communicate()


def make(folder: Path, mebibytes: int, files: int) -> dict[str, Path]:
    """Create the files; return folders by their name in the table."""
    kinds = {f"{mebibytes} MiB": folder / "large", f"{files:,} files": folder / "small"}
    (folder / "large").mkdir()
    with (folder / "large/model.safetensors").open("wb") as file:
        for _ in range(mebibytes):
            file.write(os.urandom(MIB))
    sizes = random.Random(1)
    for number in range(files):
        path = folder / f"small/part-{number // 100:03}/{number:05}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(sizes.randrange(4096, 40 * 1024 + 1)))
    return kinds


def report(what: str, found: Mapping[str, list[Figures]]) -> None:
    for figure, (label, unit, scale) in FIGURES.items():
        for client, runs in found.items():
            values = [run[figure] / scale for run in runs]
            # Ratios per round: the other load of the machine changes between rounds.
            ratios = [run[figure] / own[figure] for run, own in zip(runs, found["trainjob"], strict=True)]
            ratio = None if client == "trainjob" else float(f"{statistics.median(ratios):.3g}")
            emit(f"{what}: {label}", float(f"{statistics.median(values):.3g}"), unit, client, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the large file (%(default)s)")
    parser.add_argument("--files", type=int, default=5000, help="number of small files, of 4 to 40 KiB (%(default)s)")
    parser.add_argument(
        "--stores", type=Path, default=STORES, help="Python of an environment with the other clients (%(default)s)"
    )
    arguments = parser.parse_args()
    if not arguments.stores.exists():
        raise SystemExit(f"{arguments.stores} is missing: make .venv-stores/stamp")
    emit("load average before", round(os.getloadavg()[0], 2))
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as directory:
        kinds = make(Path(directory), arguments.mebibytes, arguments.files)
        with SeaweedFS(bucket="bench") as server, hub(kinds.values()) as (url, hub_pid):
            environment = {**server.environment(), "HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1"}
            for folder in kinds.values():
                once(arguments.stores, environment, "obstore", "up", str(folder), server.uri(folder.name))
            found: dict[str, dict[str, list[Figures]]] = {}
            for run in range(arguments.runs):
                for (kind, verb), clients in CLIENTS.items():
                    for client, (what, folder) in product(turned(clients, run), kinds.items()):
                        python = Path(sys.executable) if client == "trainjob" else arguments.stores
                        new = f"{run}-{kind}-{clients.index(client)}-{folder.name}"
                        here, there = folder, server.uri(f"up-{new}")
                        if verb == "down":
                            here, there = Path(directory, new), server.uri(folder.name)
                            here.mkdir()
                        if kind == "hub":
                            there = f"hf://bench/{folder.name}"
                        pid = hub_pid if kind == "hub" else server.pid
                        figures = once(python, environment, client, verb, str(here), there, server=pid)
                        title = f"{what} {verb}" + (", from a hub" if kind == "hub" else "")
                        found.setdefault(title, {name: [] for name in clients})[client].append(figures)
                        if verb == "down":
                            check(folder, here)
            for title, by_client in found.items():
                report(title, by_client)
    emit("load average after", round(os.getloadavg()[0], 2))


if __name__ == "__main__":
    main()
