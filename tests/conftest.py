"""What holds for every test: a home of its own, no settings from outside, and no process left when all is over."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from tests.contract.processes import marked, supervisors

from trainjob.data.stores.base import Store

# A shell without job control starts what it puts into the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Its 200 ms for one example are over on a busy machine without any fault of the code.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``TRAINJOB_HOME`` of this test; no other setting is there."""
    for name in ("BACKEND", "NAMESPACE", "REGISTRY", "WORKSPACE", "LOCAL_ENVIRONMENTS", "OCI_PLAIN_HTTP"):
        monkeypatch.delenv(f"TRAINJOB_{name}", raising=False)
    directory = tmp_path / "trainjob-home"
    monkeypatch.setenv("TRAINJOB_HOME", str(directory))
    return directory


@pytest.fixture
def by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is fast enough alone: large files are read by ranges from their first byte on."""

    def nothing(store: Store, path: str, start: int, *_: object) -> Generator[bytes, None, int]:
        yield from ()
        return start

    monkeypatch.setattr("trainjob.data.ranges._alone", nothing)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield folder
    if subprocess.run(["umount", folder], check=False).returncode:
        subprocess.run(["umount", "--lazy", folder], check=True)
        pytest.fail(f"a file of {folder} is still open")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Of tests marked ``anyio``: the loop that Airflow, KFP and the synchronous client run."""
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def no_process_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session if a process of any job that was launched in it is still there at its end."""
    yield
    under, patience = tmp_path_factory.getbasetemp(), time.monotonic() + 10
    while (left := marked(under=under) | supervisors(under)) and time.monotonic() < patience:
        time.sleep(0.1)
    assert not left, f"processes of jobs outlived the tests: {left}"
