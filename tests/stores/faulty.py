"""Stores whose faults are set in the same way, for tests that hold for every store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import clouds as fake_clouds, hub as fake_hub
from tests.fakes.clouds import Clouds
from tests.fakes.hub import Hub
from tests.serving import serving
from tests.stores import kinds
from tests.stores.kinds import Store

from trainjob._support import retrying

Fault = dict[str, Any]
"""``status`` with ``headers`` and ``body``, ``cut`` after a number of bytes, ``stall``; empty: no fault."""


class FaultyStore:
    """A directory in a store, and the faults of its requests.

    Attributes:
        scheme: Scheme of its locations.
        matched: Number of requests so far to which the faults apply.
    """

    def __init__(self, scheme: str, server: Clouds | Hub) -> None:
        self.scheme, self.matched = scheme, 0
        self._server = server
        # Beginnings of the requests that read a large file, and of those that write.
        self._reads, self._writes = "GET /models/d/big", "PUT /models/d/"
        self._matches = ""
        self._fault: Callable[[int], Fault] = lambda number: {}
        if isinstance(server, Hub):
            self._store: Store = kinds.FakeHub(None, server)
            self._reads, self._writes = "GET /cdn/", "PUT /put/"
            server.fault = lambda method, path, count: self._of(f"{method} {path}")
        else:
            self._store = kinds.Cloud(None, server, scheme)
            server.fault = lambda request, number: self._of(request)

    def uri(self, path: str = "") -> str:
        """The location of a path in it."""
        return self._store.file("d", path).rstrip("/")

    def put(self, files: dict[str, bytes]) -> None:
        """Replace its content with these files."""
        self._store.put("d", files)

    def held(self) -> dict[str, bytes]:
        """All its files."""
        return self._store.held("d")

    def replace(self, path: str, data: bytes) -> None:
        """Change a file, also during a download."""
        if isinstance(self._server, Hub):
            repo = self._server.repos["org/d"]
            repo.commits[repo.branches["main"]][path] = data
        else:
            self._server.buckets["models"][f"d/{path}"] = data

    def on_read(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each read of a large file, by its number from 1."""
        self.matched, self._matches, self._fault = 0, self._reads, fault

    def on_write(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each write, by its number from 1."""
        self.matched, self._matches, self._fault = 0, self._writes, fault

    def _of(self, request: str) -> Fault:
        if not self._matches or not request.startswith(self._matches):
            return {}
        self.matched += 1
        return self._fault(self.matched)


@contextmanager
def faulty_store(scheme: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[FaultyStore]:
    """Open a store of scheme ``s3``, ``gs``, ``az``, ``http`` or ``hf``; shorten the timeouts of its clients."""
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    monkeypatch.setattr("trainjob.data.stores.clouds.STALL", "1s")
    monkeypatch.setattr("trainjob.data.stores.web._TIMEOUT", 1.0)
    if scheme == "hf":
        monkeypatch.setattr("trainjob.data.stores.huggingface._SILENCE", 0.3)
        with fake_hub.served(monkeypatch) as hub:
            yield FaultyStore(scheme, hub)
        return
    with serving(fake_clouds.Clouds()) as server:
        account = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        (folder / "account.json").write_text(json.dumps(account | {"private_key_id": ""}))
        for name, value in {
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true",
            "GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"), "GOOGLE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
            "AZURE_STORAGE_ENDPOINT": server.url, "AZURE_ALLOW_HTTP": "true",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield FaultyStore(scheme, server)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
