"""Measures push and pull of models with a container registry, compared with oras-py.

::

    python tests/bench/oci.py [--runs N] [--mebibytes N] [--oras PYTHON | --no-oras]

Starts Debian's docker-registry on this machine and pushes a model of four files of random bytes, then pulls it into an
empty directory: each in a separate process and each time in a new repository, trainjob and oras-py in turns. Then a
model of many small files. oras-py is in a separate environment (``make .venv-oci/stamp``). Seconds are those of the
call, memory is the maximum of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.stores import cpu  # noqa: E402 - the path comes first
from tests.oci.registry import PROGRAM, Server, registry  # noqa: E402 - the path comes first

ORAS = ROOT / ".venv-oci" / "bin" / "python"
FILES = 4
SMALL, KIBIBYTES = 1000, 16
FIGURES = {
    "seconds": ("time", "s", 1.0),
    "cpu": ("CPU of the client", "s", 1.0),
    "server": ("CPU of the registry", "s", 1.0),
    "least": ("both, spread over all cores", "s", 1.0),
    "memory": ("memory", "MB", 1e6),
}


def emit(metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
    ratio = float(f"{value / peer:.3g}") if isinstance(value, float | int) and peer else None
    print(
        json.dumps({"bench": "oci", "metric": metric, "value": value, "unit": unit, "peer": peer, "ratio": ratio}),
        flush=True,
    )


def once(python: Path, client: str, verb: str, folder: Path, name: str, server: int) -> dict[str, float]:
    """One push or pull; ``server`` is the process id of the registry."""
    before = cpu(server)
    command = [str(python), "-m", "tests.bench.clients.oci", client, verb, str(folder), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"{client} {verb}: {done.stderr[-2000:]}")
    used = cpu(server) - before
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"server": used, "least": (figures["cpu"] + used) / (os.cpu_count() or 1)}


def same(one: Path, other: Path) -> bool:
    command = ["diff", "-rq", "--exclude=MANIFEST.json", str(one), str(other)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def there_and_back(what: str, model: Path, clients: Mapping[str, Path], server: Server, runs: int) -> None:
    """Let each client push and pull the same model `runs` times, in turns."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    again: list[dict[str, float]] = []
    target = model.with_name("pulled")
    for run in range(runs):
        for client, python in clients.items():
            name = f"{server.host}/{client}/{run}:1"
            found.setdefault((client, "push"), []).append(once(python, client, "push", model, name, server.pid))
            found.setdefault((client, "pull"), []).append(once(python, client, "pull", target, name, server.pid))
            if not same(model, target):
                raise SystemExit(f"{client} pulled something else than it pushed")
            shutil.rmtree(target)
            if client == "ours":
                again.append(once(python, client, "push", model, name, server.pid))
        shutil.rmtree(server.folder / "data")
    for verb in ("push", "pull"):
        for figure, (label, unit, scale) in FIGURES.items():
            ours, oras = (
                [each[figure] / scale for each in found.get((client, verb), [])] for client in ("ours", "oras")
            )
            peer = round(statistics.median(oras), 2) if oras else None
            emit(f"{verb} of {what}: {label}", round(statistics.median(ours), 2), unit, peer)
    emit(f"the same {what} pushed again: time", round(statistics.median(each["seconds"] for each in again), 2), "s")
    emit(f"the same {what} pushed again: bytes sent, requests and all", max(each["sent"] for each in again), "B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the model (%(default)s)")
    parser.add_argument("--oras", type=Path, default=ORAS, help="Python of an environment with oras-py (%(default)s)")
    parser.add_argument("--no-oras", action="store_true")
    arguments = parser.parse_args()
    if shutil.which(PROGRAM) is None:
        emit("not measured", f"{PROGRAM} is not installed")
        return
    if not arguments.no_oras and not arguments.oras.exists():
        raise SystemExit(f"{arguments.oras} is missing: make .venv-oci/stamp, or --no-oras")
    clients = {"ours": Path(sys.executable)} | ({} if arguments.no_oras else {"oras": arguments.oras})
    emit("load average before", os.getloadavg()[0])
    with (
        tempfile.TemporaryDirectory(prefix="trainjob-bench-") as directory,
        registry(Path(directory, "registry")) as server,
    ):
        large, small = Path(directory, "large"), Path(directory, "small")
        large.mkdir()
        for number in range(FILES):
            with (large / f"model-{number}.safetensors").open("wb") as file:
                for _ in range(arguments.mebibytes // FILES):
                    file.write(os.urandom(1024 * 1024))
        small.mkdir()
        for number in range(SMALL):
            (small / f"{number:05}.bin").write_bytes(os.urandom(KIBIBYTES * 1024))
        there_and_back(f"{arguments.mebibytes} MiB", large, clients, server, arguments.runs)
        there_and_back(f"{SMALL:,} files of {KIBIBYTES} KiB", small, clients, server, arguments.runs)
    emit("load average after", os.getloadavg()[0])


if __name__ == "__main__":
    main()
