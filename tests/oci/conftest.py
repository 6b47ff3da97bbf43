from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.faults import Proxy
from tests.oci.registry import Server, registry
from tests.trees import files, tree

from trainjob._support import retrying
from trainjob.data import copy
from trainjob.data.file_manifest import ContentManifest

MEBI = 1024 * 1024


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A registry without authentication for all tests; each test uses other repositories."""
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.host)
    with proxy.running():
        yield proxy


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A repository of this test."""
    return "t" + "".join(char if char.isalnum() else "-" for char in request.node.name.lower()).strip("-").replace(
        "--", "-"
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shorten the pauses between retries; remove credentials of this machine."""
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.02))
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def content() -> dict[str, bytes]:
    """A small model: two large files, small ones of each kind."""
    chance = random.Random(7)
    return {
        "model-00001-of-00002.safetensors": chance.randbytes(9 * MEBI + 17),
        "sub/dir/model-00002-of-00002.safetensors": chance.randbytes(5 * MEBI),
        "config.json": b"{}",
        "tokenizer.model": chance.randbytes(70_000),
        "README.md": b"# A model\n",
        "LICENSE": b"Apache-2.0\n",
        "code/modeling.py": b"print()\n",
        "empty": b"",
        "n" * 120 + ".json": b"[]",
        "ünï cödé.txt": b"u",
    }


@pytest.fixture
def source(tmp_path: Path, content: dict[str, bytes]) -> Path:
    return tree(tmp_path / "source", content)


@dataclass
class Repository:
    """A repository behind a proxy, and the model that tests push to it.

    Attributes:
        at: Its location without a tag.
        source: Directory of the model.
        content: Files of the model.
        folder: Where pulls go.
    """

    at: str
    source: Path
    content: dict[str, bytes]
    folder: Path

    @property
    def uri(self) -> str:
        """The location of its first tag."""
        return f"{self.at}:1"

    def push(self, to: str = ":1") -> ContentManifest:
        """Push the model to this tag, or with a path to another repository."""
        return copy(str(self.source), f"{self.at}{to}")

    def pulled(self, tag: str = ":1", *, digest: str | None = None) -> dict[str, bytes]:
        """The files of a pull into an empty directory."""
        target = Path(tempfile.mkdtemp(dir=self.folder))
        copy(f"{self.at}{tag}", str(target), digest=digest)
        return files(target)


@pytest.fixture
def at(name: str, source: Path, content: dict[str, bytes], tmp_path: Path) -> Callable[[str], Repository]:
    """The repository of this test at a host."""
    return lambda host: Repository(f"oci://{host}/{name}", source, content, tmp_path)


@pytest.fixture
def repository(proxy: Proxy, at: Callable[[str], Repository]) -> Repository:
    return at(proxy.host)
