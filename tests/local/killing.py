"""Helpers of `tests.local.test_kills`: run and kill the programs, and read what they left.

The data that a reader would accept as complete is read by other code than the code under test.
"""

from __future__ import annotations

import copy as copying
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import close_session
from tests.fakes import model_registry as registries
from tests.fakes.faults import Fault, Kind, Proxy
from tests.fakes.hub import Hub
from tests.fakes.model_registry_store import Store
from tests.local.forks import FORKS
from tests.stores import kinds

from trainjob.data import file_manifest, read_manifest
from trainjob.data.__main__ import main
from trainjob.registry import connect

Content = Mapping[str, bytes]


def program(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """``python -m trainjob.data`` with low thresholds: files of some hundred kB have many parts."""
    from huggingface_hub import constants

    from trainjob.data import ranges, transfer
    from trainjob.data.stores import parts
    from trainjob.data.stores.oci import store, uploads

    os.environ.update(environment)
    constants.HF_HUB_DISABLE_XET = True
    parts.BLOCK, transfer._RESUMED, ranges.PART = 1 << 16, 1 << 18, 1 << 17
    store.SMALL, uploads.SINGLE, uploads.PART = 1 << 16, 1 << 17, 1 << 20
    sys.exit(main(arguments))


@dataclass
class Trap:
    """Kills the process at one of its requests.

    Attributes:
        at: Server of that request (``store`` or ``registry``), and its number; None kills at no request.
        requests: Number of requests to each server.
        pid: Process id, once it is known.
    """

    at: tuple[str, int] | None = None
    requests: Counter[str] = field(default_factory=Counter)
    pid: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, server: str) -> bool:
        """Count a request; return whether the process was killed at it."""
        with self._lock:
            self.requests[server] += 1
            if (server, self.requests[server]) != self.at:
                return False
        while self.pid is None:
            time.sleep(0.0002)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return True


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    trap: Trap,
    kill: tuple[Callable[[], bool], float] | None = None,
) -> tuple[float, bool]:
    """Run the program, or kill it some seconds after an event; return the duration and whether it was killed."""
    trap.pid, trap.requests = None, Counter()
    process = FORKS.Process(target=program, args=(arguments, environment))
    began = time.monotonic()
    process.start()
    trap.pid = process.pid
    if kill is not None:
        happened, seconds = kill
        while process.is_alive() and not happened():
            time.sleep(0.002)
        process.join(seconds)
        process.kill()
    process.join()
    took, killed = time.monotonic() - began, process.exitcode != 0
    # 255: killed before the fork server had recorded its process id.
    assert process.exitcode in ((0, -signal.SIGKILL, 255) if kill is not None else (0,)), arguments
    process.close()
    return took, killed


# ------------------------------------------------------------ stores


def with_manifest(files: Content) -> dict[str, bytes]:
    """These files and their manifest, as after a complete copy."""
    listed = [file_manifest.File(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()]
    return {**files, file_manifest.NAME: file_manifest.build(listed).to_json()}


def digest(files: Content) -> str:
    return file_manifest.parse(with_manifest(files)[file_manifest.NAME], "").digest


def complete(store: kinds.Store, name: str) -> Content | None:
    """The files that the manifest lists; None without a manifest."""
    held = store.held(name)
    if file_manifest.NAME not in held:
        return None
    listed = json.loads(held[file_manifest.NAME])["files"]
    for each in listed:
        data = held[each["path"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (each["size"], each["sha256"]), each["path"]
    return {each["path"]: held[each["path"]] for each in listed}


class Images(kinds.Oci):
    """Images of any tag."""

    def uri(self, name: str) -> str:
        assert self.proxy is not None
        return f"oci://{self.proxy.host}/{name}"

    def held(self, name: str) -> dict[str, bytes]:
        return super().held(name) if read_manifest(self.uri(name)) else {}


class Repositories(kinds.FakeHub):
    """Folders of repositories of the Hugging Face Hub."""

    def held(self, name: str) -> dict[str, bytes]:
        repository, _, inside = name.partition("/")
        prefix = f"{inside}/" if inside else ""
        found = super().held(repository)
        return {path.removeprefix(prefix): data for path, data in found.items() if path.startswith(prefix)}


# ------------------------------------------------------------ traps between a program and its servers

Server = Proxy | Hub | registries.FakeRegistry


@contextmanager
def trapped(trap: Trap, servers: Sequence[Server], chance: random.Random) -> Iterator[None]:
    """Let these servers count requests and kill the process at one of them.

    That request arrives, is refused, is cut, or arrives and its reply is lost.
    """
    at = chance.randrange(4)
    of_proxies = [None, Fault(Kind.CUT), Fault(Kind.CUT_BODY, after=chance.randrange(200_000)), Fault(Kind.DROP)][at]
    faults: list[dict[str, Any]] = [{}, {"status": 503}, {"cut": 100}, {"lost": True}]
    of_hub = faults[at]
    of_fake = [None, registries.Fault(cut=True), registries.Fault(), registries.LOST][at]
    armed = True
    for server in servers:
        if isinstance(server, Proxy):
            server.plan = lambda _: of_proxies if armed and trap.request("store") else None
        elif isinstance(server, Hub):
            server.fault = lambda *_: of_hub if armed and trap.request("store") else {}
        else:
            server.fault = lambda _: of_fake if armed and trap.request("registry") else None
    close_session()  # the session of this process, which has read the previous state
    try:
        yield
    finally:
        for server in servers:
            server.settle()
        armed = False


# ------------------------------------------------------------ model registries


@dataclass(frozen=True)
class Records:
    """A registry for one run.

    Attributes:
        uri: URI for `connect`.
        rows: Counts the versions, finished or not, and checks internal state of the registry.
        state: A value that changes with each write; None if writes are not visible from outside.
        fake: The fake server, if the registry has one.
    """

    uri: str
    rows: Callable[[], int]
    state: Callable[[], object] | None = None
    fake: registries.FakeRegistry | None = None


class Mlflow:
    """MLflow registries in SQLite files, with or without a champion."""

    def __init__(self, folder: Path, register_champion: Callable[[str], None]) -> None:
        self._folder = folder
        folder.mkdir()
        connect(f"mlflow+sqlite:///{folder}/False.db")
        shutil.copy(folder / "False.db", folder / "True.db")
        register_champion(f"mlflow+sqlite:///{folder}/True.db")

    @contextmanager
    def opened(self, *, champion: bool) -> Iterator[Records]:
        """A registry for one run."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(shutil.copy(self._folder / f"{champion}.db", Path(folder, "registry.db")))

            def rows() -> int:
                query = "SELECT count(*) FROM model_versions WHERE current_stage != 'Deleted_Internal'"
                with closing(sqlite3.connect(path)) as database:
                    return int(database.execute(query).fetchone()[0])

            yield Records(f"mlflow+sqlite:///{path}", rows, lambda: path.stat().st_mtime_ns)


class Kubeflow:
    """Fake Kubeflow registries, with or without a champion."""

    def __init__(self, _: Path, register_champion: Callable[[str], None]) -> None:
        self._stores = {False: Store(), True: Store()}
        with registries.FakeRegistry(store=self._stores[True]) as fake:
            register_champion(f"kubeflow+{fake.url}")

    @contextmanager
    def opened(self, *, champion: bool) -> Iterator[Records]:
        """A registry for one run."""
        with registries.FakeRegistry(store=copying.deepcopy(self._stores[champion])) as fake:

            def rows() -> int:
                versions = fake.call("GET", "model_versions")["items"]
                artifacts = fake.call("GET", "artifacts")["items"]
                live = {each["externalId"] for each in artifacts if each.get("state") == "LIVE"}
                for version in versions:
                    aliases = [name for name in version.get("customProperties", {}) if name.startswith("alias.")]
                    assert not aliases or version["externalId"] in live, "an alias of an unfinished version"
                assert len(artifacts) <= len(versions)
                return len(versions)

            yield Records(f"kubeflow+{fake.url}", rows, fake=fake)


REGISTRIES: Mapping[str, type[Mlflow | Kubeflow]] = {"mlflow": Mlflow, "kubeflow": Kubeflow}
