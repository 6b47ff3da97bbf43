from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.fakes.faults import Proxy
from tests.oci.registry import PROGRAM, Server, registry
from tests.trees import tree

from trainjob._support import retrying

MEBI = 1024 * 1024


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A registry without authentication for all tests; each test uses other repositories."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"needs {PROGRAM} (Debian: {PROGRAM})")
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
