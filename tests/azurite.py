"""Azurite, Microsoft's server of the Azure Blob API: from npm, in the versions of `testcluster/modules/azurite`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
from email.utils import formatdate
from pathlib import Path
from typing import Self

from tests.processes import Component, free_port, listens, wait_until
from tests.testcluster import build

PACKAGE = build.MODULES / "azurite"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's built-in account, which its documentation publishes."""
CONTAINER = "models"


def installed() -> Path:
    """Directory of the installed package, beside the cluster's programs; npm installs it once."""
    lock = (PACKAGE / "package-lock.json").read_bytes()
    target = build.cache_directory() / f"azurite-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not target.exists():
        with build.lock():
            unfinished = target.with_name(".azurite.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(PACKAGE, unfinished)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=unfinished, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            unfinished.replace(target)
    return target / "node_modules" / "azurite"


class Azurite:
    """Context manager for a server with an empty container. The kernel kills it when this process is killed.

    Args:
        folder: Folder for its data.

    Attributes:
        host: ``127.0.0.1:port``.
    """

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.host = f"127.0.0.1:{self._port}"
        command = ["node", str(installed() / "dist/src/blob/main.js"), "--location", str(folder)]
        command += ["--blobHost", "127.0.0.1", "--blobPort", str(self._port), "--silent", "--disableTelemetry"]
        # It knows the versions of the API up to its own release; clients name newer ones.
        self._server = Component("azurite", [*command, "--skipApiVersionCheck"], folder, {})

    def __enter__(self) -> Self:
        self._server.start()
        wait_until("Azurite listens", lambda: listens(self._port), among=[self._server])
        self._create_container()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()

    def _create_container(self) -> None:
        """obstore has no call for it."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        text = f"PUT{chr(10) * 12}{signed}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        client = http.client.HTTPConnection(self.host, timeout=30)
        client.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers={**headers, "Content-Length": "0"})
        assert client.getresponse().status == 201
        client.close()

    def environment(self, host: str = "") -> dict[str, str]:
        """Settings of a client, at another address that forwards to the server if given."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://{host or self.host}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }
