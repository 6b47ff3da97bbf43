"""One push or pull of one client, in a process of its own: its seconds and its largest memory.

::

    python tests/bench/clients/oci.py ours|oras push|pull FOLDER HOST/REPOSITORY:TAG
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path


def ours(verb: str, folder: str, name: str) -> Callable[[], object]:
    from trainjob.data import copy

    return lambda: copy(folder, f"oci://{name}") if verb == "push" else copy(f"oci://{name}", folder)


def oras(verb: str, folder: str, name: str) -> Callable[[], object]:
    import oras.client  # type: ignore[import-not-found,import-untyped,unused-ignore]

    client = oras.client.OrasClient(insecure=True)
    if verb == "pull":
        return lambda: client.pull(target=name, outdir=folder)
    files = [str(path) for path in sorted(Path(folder).iterdir())]
    return lambda: client.push(target=name, files=files, disable_path_validation=True)


def main(client: str, verb: str, folder: str, name: str) -> None:
    run = {"ours": ours, "oras": oras}[client](verb, folder, name)
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"seconds": seconds, "memory": usage.ru_maxrss * 1024, "cpu": usage.ru_utime + usage.ru_stime}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
