"""Serves directories as repositories of a hub, in a separate process, until its stdin closes.

::

    python -m tests.bench.clients.hub OWNER/NAME=FOLDER...

It is the hub of the unit tests. Prints its URL.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

from tests.serving import serving
from tests.unit.huggingface.fake import Hub


def main(*repos: str) -> None:
    hub = Hub()
    for repo in repos:
        name, _, folder = repo.partition("=")
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        hub.repo(name).commit({str(path.relative_to(folder)): path.read_bytes() for path in paths})
    with serving(hub):
        for name in hub.repos:
            # It hashes its files at the first request.
            urllib.request.urlopen(f"{hub.url}/api/models/{name}/tree/main").close()
        print(hub.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
