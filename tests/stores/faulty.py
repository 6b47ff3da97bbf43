"""Stores whose faults are set in the same way, for tests that hold for every store."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
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

from trainjob._support import retrying

Fault = dict[str, Any]
"""``status`` with ``headers`` and ``body``, ``cut`` after a number of bytes, ``stall``; empty: no fault."""


class FaultyStore(ABC):
    """A directory in a store, and the faults of its requests.

    Attributes:
        scheme: Scheme of its locations.
        matched: Number of requests so far to which the faults apply.
        reads: Beginnings of the requests that read a large file.
        writes: Beginnings of the requests that write.
    """

    scheme: str
    reads: str
    writes: str

    def __init__(self) -> None:
        self.matched = 0
        self._matches = ""
        self._fault: Callable[[int], Fault] = lambda number: {}

    @abstractmethod
    def uri(self, path: str = "") -> str:
        """The location of a path in it."""

    @abstractmethod
    def put(self, files: dict[str, bytes]) -> None:
        """Replace its content with these files."""

    @abstractmethod
    def held(self) -> dict[str, bytes]:
        """All its files."""

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Change a file, also during a download."""

    def on_read(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each read of a large file, by its number from 1."""
        self.matched, self._matches, self._fault = 0, self.reads, fault

    def on_write(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each write, by its number from 1."""
        self.matched, self._matches, self._fault = 0, self.writes, fault

    def of(self, request: str) -> Fault:
        """The fault of a request."""
        if not self._matches or not request.startswith(self._matches):
            return {}
        self.matched += 1
        return self._fault(self.matched)


class FaultyCloud(FaultyStore):
    """A directory in an object store, or on the same server by plain HTTP."""

    reads, writes = "GET /models/d/big", "PUT /models/d/"

    def __init__(self, scheme: str, server: Clouds) -> None:
        super().__init__()
        self.scheme, self._server = scheme, server
        server.fault = lambda request, number: self.of(request)

    def uri(self, path: str = "") -> str:
        if self.scheme == "http":
            return f"{self._server.url}/models/d/{path}"
        return f"{self.scheme}://models/d/{path}"

    def put(self, files: dict[str, bytes]) -> None:
        self._server.buckets["models"] = {f"d/{path}": data for path, data in files.items()}

    def held(self) -> dict[str, bytes]:
        return {path.removeprefix("d/"): data for path, data in self._server.buckets["models"].items()}

    def replace(self, path: str, data: bytes) -> None:
        self._server.buckets["models"][f"d/{path}"] = data


class FaultyHub(FaultyStore):
    """A repository of the Hub."""

    scheme, reads, writes = "hf", "GET /cdn/", "PUT /put/"

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub
        hub.fault = lambda method, path, count: self.of(f"{method} {path}")

    def uri(self, path: str = "") -> str:
        return f"hf://org/m/{path}".rstrip("/")

    def put(self, files: dict[str, bytes]) -> None:
        self._hub.repo("org/m").commit(files)

    def held(self) -> dict[str, bytes]:
        repo = self._hub.repos.get("org/m")
        files = repo.commits[repo.branches["main"]] if repo else {}
        return {path: data for path, data in files.items() if path != ".gitattributes"}

    def replace(self, path: str, data: bytes) -> None:
        repo = self._hub.repos["org/m"]
        repo.commits[repo.branches["main"]][path] = data


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
            yield FaultyHub(hub)
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
        yield FaultyCloud(scheme, server)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
