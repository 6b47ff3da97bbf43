"""Stores whose faults are set in the same way, for tests that hold for every store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.fakes import clouds as fake_clouds, hub as fake_hub
from tests.fakes.clouds import Clouds
from tests.fakes.hub import Hub
from tests.serving import serving

from trainjob._support import retrying

Fault = dict[str, Any]
"""``status`` with ``headers`` and ``body``, ``cut`` after a number of bytes, ``stall``; empty: no fault."""


class FaultyStore(Protocol):
    """A directory in a store.

    Attributes:
        scheme: Scheme of its locations.
    """

    scheme: str

    def uri(self, path: str = "") -> str:
        """The location of a path in it."""
        ...

    def put(self, files: dict[str, bytes]) -> None:
        """Replace its content with these files."""
        ...

    def held(self) -> dict[str, bytes]:
        """All its files."""
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Change a file, also during a download."""
        ...

    def on_read(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each read of a large file, by its number from 1."""
        ...

    def on_write(self, fault: Callable[[int], Fault]) -> None:
        """Set the fault of each write, by its number from 1."""
        ...

    @property
    def matched(self) -> int:
        """Number of requests so far to which the faults apply."""
        ...


class _Counted:
    """Chooses the fault of each request that matches, by its number."""

    def __init__(self) -> None:
        self.matched = 0
        self.matches: Callable[[str], bool] = lambda request: False
        self.fault: Callable[[int], Fault] = lambda number: {}

    def __call__(self, request: str) -> Fault:
        if not self.matches(request):
            return {}
        self.matched += 1
        return self.fault(self.matched)

    def set(self, matches: Callable[[str], bool], fault: Callable[[int], Fault]) -> None:
        self.matched, self.matches, self.fault = 0, matches, fault


class FaultyCloud:
    """A directory in an object store, or on the same server by plain HTTP."""

    def __init__(self, scheme: str, server: Clouds) -> None:
        self.scheme, self._server, self._counted = scheme, server, _Counted()
        server.fault = lambda request, number: self._counted(request)

    @property
    def matched(self) -> int:
        return self._counted.matched

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

    def on_read(self, fault: Callable[[int], Fault]) -> None:
        self._counted.set(lambda request: request.startswith("GET /models/d/big"), fault)

    def on_write(self, fault: Callable[[int], Fault]) -> None:
        self._counted.set(lambda request: request.startswith("PUT /models/d/"), fault)


class FaultyHub:
    """A repository of the Hub."""

    scheme = "hf"

    def __init__(self, hub: Hub) -> None:
        self._hub, self._counted = hub, _Counted()
        hub.fault = lambda method, path, count: self._counted(f"{method} {path}")

    @property
    def matched(self) -> int:
        return self._counted.matched

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

    def on_read(self, fault: Callable[[int], Fault]) -> None:
        self._counted.set(lambda request: request.startswith("GET /cdn/"), fault)

    def on_write(self, fault: Callable[[int], Fault]) -> None:
        self._counted.set(lambda request: request.startswith("PUT /put/"), fault)


@contextmanager
def faulty_store(scheme: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[FaultyStore]:
    """Open a store of scheme ``s3``, ``gs``, ``az``, ``http`` or ``hf``; shorten the timeouts of its clients."""
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))
    monkeypatch.setattr("trainjob.data.stores.clouds.RETRY", {"max_retries": 0})
    monkeypatch.setattr("trainjob.data.stores.clouds.STALL", "1s")
    monkeypatch.setattr("trainjob.data.stores.web._TIMEOUT", 1.0)
    if scheme == "hf":
        from huggingface_hub import close_session, constants

        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("trainjob.data.stores.huggingface._SILENCE", 0.3)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        close_session()
        with serving(fake_hub.Hub()) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            yield FaultyHub(hub)
            close_session()
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
