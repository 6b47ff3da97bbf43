"""Manual test cluster: ``python -m tests.testcluster up``, then any client with its KUBECONFIG, then ``down``."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.processes import runs
from tests.testcluster import build
from tests.testcluster.control_plane import Cluster, clean

_STATE = "state.json"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.testcluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    default = Path(tempfile.gettempdir()) / f"trainjob-cluster-by-hand-{os.getuid()}"
    for name, text in _HELP.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--dir", type=Path, default=default, help="directory of the cluster (%(default)s)")
        if name in ("up", "serve"):
            command.add_argument("--real-node", action="store_true", help="with a node that runs real pods (as root)")
            command.add_argument("--no-kueue", action="store_true", help="without Kueue")
            command.add_argument("--nodes", type=int, default=4, help="simulated nodes of 8 GPUs (%(default)s)")
            command.add_argument(
                "--trainer",
                choices=build.TRAINERS,
                default=build.NEWEST,
                help="release of Trainer, with its version of JobSet (%(default)s)",
            )
    arguments = parser.parse_args()
    arguments.dir = arguments.dir.absolute()
    sys.exit({"up": up, "serve": serve, "down": down, "status": status}[arguments.command](arguments))


_HELP = {
    "up": "start a cluster in the background",
    "serve": "run a cluster until SIGTERM or Ctrl-C",
    "down": "stop the cluster and remove its files",
    "status": "show the running components",
}


def up(arguments: argparse.Namespace) -> int:
    """Start `serve` in the background and wait until the cluster is ready."""
    if _is_up(arguments.dir):
        print(f"a cluster is already up in {arguments.dir}")
        return 1
    clean(arguments.dir)
    build.ensure(*build.groups(arguments.trainer, node=arguments.real_node))
    flags = [*(["--real-node"] if arguments.real_node else []), *(["--no-kueue"] if arguments.no_kueue else [])]
    flags += ["--trainer", arguments.trainer]
    command = [sys.executable, "-m", __package__, "serve", "--dir", str(arguments.dir), "--nodes", str(arguments.nodes)]
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            [*command, *flags], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        while (state := _state(arguments.dir)) is None:
            if server.poll() is not None:
                output.seek(0)
                print(output.read().decode(errors="replace"), file=sys.stderr)
                return 1
            time.sleep(0.05)
    print(f"up in {sum(state['seconds'].values()):.1f} s; point clients at it with\n")
    print(f"    export KUBECONFIG={state['kubeconfig']}\n")
    return 0


def serve(arguments: argparse.Namespace) -> int:
    """Run a cluster until SIGTERM or Ctrl-C."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, _interrupt)
    options: dict[str, Any] = {"kueue": not arguments.no_kueue, "real_node": arguments.real_node}
    options["trainer"] = arguments.trainer
    with suppress(KeyboardInterrupt), Cluster(arguments.dir, simulated_nodes=arguments.nodes, **options) as cluster:
        state = {
            "pid": os.getpid(),
            "kubeconfig": str(cluster.kubeconfig),
            "seconds": {name: took for name, took in cluster.seconds.items() if name != "api"},
            "components": {name: each.pid for name, each in cluster.components.items()},
            "versions": cluster.versions(),
        }
        unfinished = arguments.dir / f".{_STATE}"
        unfinished.write_text(json.dumps(state, indent=2))
        unfinished.replace(arguments.dir / _STATE)
        while True:
            signal.pause()
    return 0


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def down(arguments: argparse.Namespace) -> int:
    """Stop the cluster; after a crash, remove its files."""
    state = _state(arguments.dir)
    if state is None and not arguments.dir.exists():
        print(f"no cluster in {arguments.dir}")
        return 0
    if _is_up(arguments.dir) and state is not None:
        os.kill(state["pid"], signal.SIGTERM)
        deadline = time.monotonic() + 30
        while _is_up(arguments.dir):
            if time.monotonic() > deadline:
                os.kill(state["pid"], signal.SIGKILL)  # the components end with it
                break
            time.sleep(0.05)
    clean(arguments.dir)
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Print the running components; exit status 3 if there is no cluster, as `systemctl status`."""
    state = _state(arguments.dir)
    if state is None or not _is_up(arguments.dir):
        print(f"no cluster is up in {arguments.dir}")
        return 3
    for name, pid in state["components"].items():
        print(f"{name:26} {state['versions'].get(name, ''):10} {'runs' if runs(pid) else 'has ended'}, pid {pid}")
    print(f"\nexport KUBECONFIG={state['kubeconfig']}")
    return 0


def _state(directory: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((directory / _STATE).read_text()))
    except FileNotFoundError:
        return None


def _is_up(directory: Path) -> bool:
    """Whether the process of the cluster runs: it holds a lock, which the kernel releases when the process ends."""
    try:
        with (directory / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


if __name__ == "__main__":
    main()
