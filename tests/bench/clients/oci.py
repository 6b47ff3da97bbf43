"""One push or pull of one client in a separate process; prints its seconds, CPU and memory.

``python -m tests.bench.clients.oci trainjob|oras push|pull FOLDER HOST/REPOSITORY:TAG``
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path


def trainjob(verb: str, folder: str, name: str) -> Callable[[], object]:
    from importlib import import_module

    from trainjob.data import copy

    import_module("trainjob.data.stores.oci.store")  # otherwise `copy` imports it
    return lambda: copy(folder, f"oci://{name}") if verb == "push" else copy(f"oci://{name}", folder)


def oras(verb: str, folder: str, name: str) -> Callable[[], object]:
    import oras.client  # type: ignore[import-not-found,import-untyped,unused-ignore]  # in its own environment

    client = oras.client.OrasClient(insecure=True)
    if verb == "pull":
        return lambda: client.pull(target=name, outdir=folder)
    files = [str(path) for path in sorted(Path(folder).iterdir())]
    return lambda: client.push(target=name, files=files, disable_path_validation=True)


def main(client: str, verb: str, folder: str, name: str) -> None:
    run = {"trainjob": trainjob, "oras": oras}[client](verb, folder, name)
    began, used = time.perf_counter(), time.process_time()
    run()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    # Not ru_maxrss, which a process inherits from its parent.
    memory = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert memory
    print(json.dumps({"time": seconds, "CPU of the client": used, "memory": int(memory[1]) * 1024 / 1e6}))


if __name__ == "__main__":
    main(*sys.argv[1:])
