"""Fixtures of all tests: a separate TRAINJOB_HOME, no settings from the environment, no processes left at the end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from tests import campaigns, debian
from tests.contract.processes import marked, supervisors

from trainjob.data.stores.base import ReadableStore

# A shell without job control starts background processes with SIGINT ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine, correct code can exceed hypothesis' limits: 200 ms for an example, and the time to draw ten.
_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=_slow)
hypothesis.settings.load_profile("busy")


_CAMPAIGN = ("cluster/test_gangs.py", "cluster/test_trainer_versions.py", "cluster/test_used_resources.py")
collect_ignore = [] if campaigns.FULL else [*_CAMPAIGN, "stores/test_kserve.py"]
"""Left to `make campaign`: optional schedulers, older Trainers, metrics-server, and another reader of what we write."""
FOLDERS = {"cluster", "containers", "oci", "page"}
"""Folders whose tests all need what the marker `full` names."""
FIXTURES = {
    "browser",
    "clients",
    "closed_registry",
    "mlflow_url",
    "open_registry",
    "site",
    "small_disk",
    "tiny",
}
"""Fixtures that need it: Chromium, PyTorch, Debian's servers, other environments, a mount."""
PARAMETERS = {"local": {"oci"}, "stores": {"oci", "oci-password"}, "registry": {"mlflow-server", "server"}}
"""Folder -> values of parameters for which a fixture starts one of Debian's servers."""


@pytest.hookimpl(tryfirst=True)  # before pytest reads ``-m``
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as `full` by what they use; those that take long are marked where they are."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        values = {
            each for each in vars(getattr(item, "callspec", item)).get("params", {}).values() if isinstance(each, str)
        }
        needs = FIXTURES.intersection(getattr(item, "fixturenames", ())) or PARAMETERS.get(folder, set()) & values
        if folder in FOLDERS or needs:
            item.add_marker(pytest.mark.full)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are not marked as `full` may not use Debian's programs."""
    debian.quick_test = "" if item.get_closest_marker("full") else item.nodeid


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``TRAINJOB_HOME`` of this test; all other settings are unset."""
    for name in ("BACKEND", "NAMESPACE", "REGISTRY", "WORKSPACE", "LOCAL_ENVIRONMENTS", "OCI_PLAIN_HTTP"):
        monkeypatch.delenv(f"TRAINJOB_{name}", raising=False)
    directory = tmp_path / "trainjob-home"
    monkeypatch.setenv("TRAINJOB_HOME", str(directory))
    return directory


@pytest.fixture
def by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read large files by ranges from the first byte on, as if one connection were too slow."""

    def nothing(store: ReadableStore, path: str, start: int, *_: object) -> Generator[bytes, None, int]:
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
    """Event loop of tests marked ``anyio``: that of Airflow, KFP and the synchronous client."""
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def no_process_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session if processes of its jobs still run at its end."""
    yield
    under, deadline = tmp_path_factory.getbasetemp(), time.monotonic() + 10
    while (left := marked(under=under) | supervisors(under)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes of jobs outlived the tests: {left}"
