"""Measures push and pull of models with a container registry, compared with oras-py.

``python -m tests.bench.oci [--runs N] [--mebibytes N] [--no-peer]``

Starts Debian's docker-registry on this machine and pushes a model of four files of random bytes, then pulls it into an
empty directory: each in a separate process and each time in a new repository, trainjob and oras-py in turns. oras-py is
in a separate environment (``make .venv-oci/stamp``). Seconds and CPU are those of the call, memory is the maximum of
the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from tests.bench.figures import ROOT, Output, environment_of
from tests.oci.registry import PROGRAM, registry

FILES = 4
UNITS = {"time": "s", "CPU of the client": "s", "memory": "MB"}


def once(python: str, client: str, verb: str, folder: Path, name: str) -> dict[str, float]:
    command = [python, "-m", "tests.bench.clients.oci", client, verb, str(folder), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the model (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="skip oras-py")
    arguments = parser.parse_args()
    if shutil.which(PROGRAM) is None:
        raise SystemExit(f"{PROGRAM} is not installed")
    output = Output("oci")
    clients = {"trainjob": sys.executable} | ({} if arguments.no_peer else {"oras": environment_of("oci")})
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as directory:
        model, target = Path(directory, "model"), Path(directory, "pulled")
        model.mkdir()
        for number in range(FILES):
            size = arguments.mebibytes // FILES
            (model / f"model-{number}.safetensors").write_bytes(b"".join(os.urandom(1 << 20) for _ in range(size)))
        with registry(Path(directory, "registry")) as server:
            for run in range(arguments.runs):
                for client, python in clients.items():
                    name = f"{server.host}/{client}/{run}:1"
                    found[client, "push"].append(once(python, client, "push", model, name))
                    found[client, "pull"].append(once(python, client, "pull", target, name))
                    subprocess.run(["diff", "-rq", "--exclude=MANIFEST.json", model, target], check=True)
                    shutil.rmtree(target)
                shutil.rmtree(server.folder / "data")
    for verb in ("push", "pull"):
        for metric, unit in UNITS.items():
            ours, oras = ([each[metric] for each in found[client, verb]] for client in ("trainjob", "oras"))
            peer = median(oras) if oras else None
            output.emit(f"{verb} of {arguments.mebibytes} MiB: {metric}", median(ours), unit, peer)


if __name__ == "__main__":
    main()
