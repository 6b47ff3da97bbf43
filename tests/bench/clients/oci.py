"""One push or pull of one client in a separate process; prints its seconds, memory, and sent bytes.

::

    python -m tests.bench.clients.oci ours|oras push|pull FOLDER HOST/REPOSITORY:TAG
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.clients.usage import measure


def ours(verb: str, folder: str, name: str) -> Callable[[], object]:
    from importlib import import_module

    from trainjob.data import copy

    import_module("trainjob.data.stores.oci.store")  # otherwise `copy` imports it
    return lambda: copy(folder, f"oci://{name}") if verb == "push" else copy(f"oci://{name}", folder)


def oras(verb: str, folder: str, name: str) -> Callable[[], object]:
    import oras.client  # type: ignore[import-not-found,import-untyped,unused-ignore]

    client = oras.client.OrasClient(insecure=True)
    if verb == "pull":
        return lambda: client.pull(target=name, outdir=folder)
    files = [str(path) for path in sorted(Path(folder).iterdir())]
    return lambda: client.push(target=name, files=files, disable_path_validation=True)


def main(client: str, verb: str, folder: str, name: str) -> None:
    measure({"ours": ours, "oras": oras}[client](verb, folder, name))


if __name__ == "__main__":
    main(*sys.argv[1:])
