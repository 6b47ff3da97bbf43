"""Run a test cluster until Ctrl-C; point any client at it with the KUBECONFIG that is printed."""

from __future__ import annotations

import argparse
import signal
from contextlib import suppress
from pathlib import Path

from tests.testcluster import build
from tests.testcluster.control_plane import Cluster


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.testcluster", description=__doc__)
    parser.add_argument("--dir", type=Path, help="directory of the cluster (a temporary one)")
    parser.add_argument("--real-node", action="store_true", help="with a node that runs real pods (as root)")
    parser.add_argument("--no-kueue", action="store_true", help="without Kueue")
    parser.add_argument("--nodes", type=int, default=4, help="simulated nodes of 8 GPUs (%(default)s)")
    parser.add_argument(
        "--older", choices=build.OLDER, default="", help="with an older release of Trainer and JobSet, or of Kubernetes"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    cluster = Cluster(
        given.dir,
        kueue=not given.no_kueue,
        simulated_nodes=given.nodes,
        real_node=given.real_node,
        older=given.older,
    )
    with suppress(KeyboardInterrupt), cluster:
        for name, version in cluster.versions().items():
            print(f"{name:26} {version}")
        print(f"\nup; Ctrl-C stops it\n\nexport KUBECONFIG={cluster.kubeconfig}", flush=True)
        while True:
            signal.pause()


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
