"""Helpers of `tests.local.test_kills`: run and kill the programs, and read what they left.

The data that a reader would accept as complete is read by other code than the code under test, where possible.
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
from typing import Any, Protocol

from huggingface_hub import close_session
from tests.fakes import model_registry as registries
from tests.fakes.faults import Fault, Kind, Proxy, Seen
from tests.fakes.hub import Hub
from tests.fakes.model_registry_store import Store
from tests.local.forks import FORKS
from tests.seaweedfs import SeaweedFS

from trainjob.data import copy, file_manifest, read_manifest
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
        at: Server of that request (``place`` or ``registry``), and its number; None kills at no request.
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


class Place(Protocol):
    """A store for the targets of many runs."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of the program."""
        ...

    def uri(self, name: str) -> str:
        """URI of a target; for a repository of images without a tag."""
        ...

    def put(self, uri: str, files: Content) -> None:
        """Write complete content with its manifest."""
        ...

    def held(self, uri: str) -> Content | None:
        """All files if the target has a manifest; otherwise None."""
        ...

    def left(self, uri: str) -> set[str]:
        """Names of all files, including those of trainjob."""
        ...


def manifest_of(files: Content) -> bytes:
    """The manifest of a copy of these files."""
    return file_manifest.build(
        file_manifest.File(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()
    ).to_json()


def _named(manifest: bytes, read: Callable[[str], bytes]) -> Content:
    files = {}
    for file in json.loads(manifest)["files"]:
        files[file["path"]] = data = read(file["path"])
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"]), file["path"]
    return files


class Folder:
    """Directories."""

    environment: Mapping[str, str] = {}

    def __init__(self, root: Path) -> None:
        self.root = root

    def uri(self, name: str) -> str:
        return str(self.root / name)

    def put(self, uri: str, files: Content) -> None:
        for path, data in {**files, file_manifest.NAME: manifest_of(files)}.items():
            Path(uri, path).parent.mkdir(parents=True, exist_ok=True)
            Path(uri, path).write_bytes(data)

    def held(self, uri: str) -> Content | None:
        folder = Path(uri)
        try:
            manifest = (folder / file_manifest.NAME).read_bytes()
        except FileNotFoundError:
            return None
        return _named(manifest, lambda path: (folder / path).read_bytes())

    def left(self, uri: str) -> set[str]:
        return {str(path.relative_to(uri)) for path in Path(uri).rglob("*") if path.is_file()}

    def inodes(self, uri: str) -> set[tuple[str, int]]:
        """Names and inodes, which distinguish rewritten files from earlier ones."""
        found = set()
        for path in Path(uri).rglob("*"):
            with suppress(FileNotFoundError):
                found.add((path.name, path.stat().st_ino))
        return found


class Bucket:
    """Prefixes of an S3 bucket."""

    def __init__(self, server: SeaweedFS, proxy: Proxy) -> None:
        self._server, self._client = server, server.client
        self.environment = {**server.environment(), "AWS_ENDPOINT_URL": f"http://{proxy.host}"}

    def uri(self, name: str) -> str:
        return self._server.uri(name)

    def _at(self, uri: str, path: str = "") -> str:
        return f"{uri.removeprefix(self.uri(''))}/{path}"

    def put(self, uri: str, files: Content) -> None:
        for path, data in {**files, file_manifest.NAME: manifest_of(files)}.items():
            self._client.put_object(Bucket=self._server.bucket, Key=self._at(uri, path), Body=data)

    def held(self, uri: str) -> Content | None:
        def read(path: str) -> bytes:
            return bytes(self._client.get_object(Bucket=self._server.bucket, Key=self._at(uri, path))["Body"].read())

        return _named(read(file_manifest.NAME), read) if file_manifest.NAME in self.left(uri) else None

    def left(self, uri: str) -> set[str]:
        prefix = self._at(uri)
        found = self._client.list_objects_v2(Bucket=self._server.bucket, Prefix=prefix).get("Contents", [])
        return {each["Key"].removeprefix(prefix) for each in found}


class Images:
    """Repositories of a container registry; only the code under test can read these."""

    environment: Mapping[str, str] = {}

    def __init__(self, upstream: str, proxy: Proxy, scratch: Path) -> None:
        self._upstream, self._proxy, self._scratch = upstream, proxy, scratch

    def uri(self, name: str) -> str:
        return f"oci://{self._proxy.host}/{name}"

    def _direct(self, uri: str) -> str:
        return uri.replace(self._proxy.host, self._upstream)

    def put(self, uri: str, files: Content) -> None:
        Folder(self._scratch).put(str(self._scratch / "in"), files)
        copy(str(self._scratch / "in"), self._direct(uri))
        shutil.rmtree(self._scratch / "in")

    def held(self, uri: str) -> Content | None:
        if read_manifest(self._direct(uri)) is None:
            return None
        folder = self._scratch / "out"
        copy(self._direct(uri), str(folder))
        files = Folder(self._scratch).held(str(folder))
        shutil.rmtree(folder)
        return files

    def left(self, uri: str) -> set[str]:
        manifest = read_manifest(self._direct(uri))
        return {file_manifest.NAME, *(file.path for file in manifest.files)} if manifest else set()


class Repositories:
    """Repositories of the Hugging Face Hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": ""}

    def uri(self, name: str) -> str:
        return f"hf://org/{name}"

    def _files(self, uri: str) -> Content:
        org, name, *inside = uri.removeprefix("hf://").split("/")
        repo = self._hub.repos.get(f"{org}/{name}")
        prefix = "".join(f"{each}/" for each in inside)
        files = repo.commits[repo.branches["main"]] if repo else {}
        return {path.removeprefix(prefix): data for path, data in files.items() if path.startswith(prefix)}

    def put(self, uri: str, files: Content) -> None:
        self._hub.repo(uri.removeprefix("hf://")).commit({**files, file_manifest.NAME: manifest_of(files)})

    def held(self, uri: str) -> Content | None:
        files = self._files(uri)
        return _named(files[file_manifest.NAME], files.__getitem__) if file_manifest.NAME in files else None

    def left(self, uri: str) -> set[str]:
        return set(self._files(uri)) - {".gitattributes"}


# ------------------------------------------------------------ traps between a program and its servers


@contextmanager
def trapped(
    trap: Trap, proxies: Sequence[Proxy], hub: Hub, fake: registries.FakeRegistry | None, chance: random.Random
) -> Iterator[None]:
    """Let these servers count requests and kill the process at one of them.

    That request arrives, is refused, is cut, or arrives and its reply is lost.
    """
    at = chance.randrange(4)
    of_proxies = [None, Fault(Kind.CUT), Fault(Kind.CUT_BODY, after=chance.randrange(200_000)), Fault(Kind.DROP)][at]
    faults: list[dict[str, Any]] = [{}, {"status": 503}, {"cut": 100}, {"lost": True}]
    of_hub = faults[at]
    of_fake = [None, registries.Fault(cut=True), registries.Fault(), registries.LOST][at]

    def proxied(_: Seen) -> Fault | None:
        return of_proxies if trap.request("place") else None

    for proxy in proxies:
        proxy.plan = proxied
    hub.fault = lambda *_: of_hub if trap.request("place") else {}
    if fake is not None:
        fake.fault = lambda _: of_fake if trap.request("registry") else None
    close_session()  # the session of this process, which has read the previous state
    try:
        yield
    finally:
        servers: list[Proxy | Hub | registries.FakeRegistry] = [*proxies, hub, *([fake] if fake else [])]
        for server in servers:
            server.settle()
        for proxy in proxies:
            proxy.plan = lambda _: None
        hub.fault = lambda *_: {}


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

    def __init__(self, register_champion: Callable[[str], None]) -> None:
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
