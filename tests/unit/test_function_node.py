"""The program of a node of a function trainer: packages for any user, and launchers that do not exist."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import debian
from tests.unit.wheels import write_wheel

from trainjob._manifest import node

WHEEL = {"is_direct": False, "download_info": {"url": "https://x/y.whl"}, "metadata": {"name": "a", "version": "1"}}
MESSAGE = "def watch(): pass\ndef report_returned(name, value): print(name, value)\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the node."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of the runs of pip, which would install package a into a read-only environment."""
    runs: list[list[str]] = []

    def pip(arguments: list[str]) -> None:
        runs.append([each.partition("=")[0] if each.startswith("--report") else each for each in arguments])
        for each in arguments:
            if each.startswith("--report="):
                Path(each.partition("=")[2]).write_text(json.dumps({"install": [WHEEL]}))

    monkeypatch.setattr(node, "_pip", pip)
    monkeypatch.setattr(node, "_writable", lambda: False)
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PIP_CACHE_DIR", "/cache")
    return runs


def test_packages_go_into_a_writable_environment(installs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_writable", lambda: True)
    node._install(["a>=1"])
    assert installs == [["a>=1"]]
    assert os.environ["PYTHONPATH"] == "/before"


def test_what_a_read_only_environment_lacks_is_installed_beside_it_once(installs: list[list[str]]) -> None:
    for _ in range(2):  # two processes of a node
        os.environ["PYTHONPATH"], os.environ["PATH"] = "/before", "/bin"
        node._install(["--index-url=https://x", "a>=1"])
    resolved, installed = installs
    assert resolved == ["--dry-run", "--report", "--index-url=https://x", "a>=1"]
    assert [*installed[:2], *installed[3:]] == ["--no-user", "--no-deps", "--index-url=https://x", "a==1"]
    folder, before = os.environ["PYTHONPATH"].split(":")
    assert (Path(folder).is_dir(), before, os.environ["PATH"]) == (True, "/before", f"{folder}/bin:/bin")


def test_an_install_that_failed_is_repeated(installs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(node, "_pip", lambda arguments: sys.exit(1))
        with pytest.raises(SystemExit):
            node._install(["a"])
    node._install(["a"])
    assert len(installs) == 2


@pytest.mark.parametrize("taken", ["another user", "link", "writable for all", "file"])
def test_a_directory_that_others_can_write_is_not_used(
    taken: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.getuid() + (taken == "another user")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    path = temporary / f"trainjob-packages-{uid}"
    {"link": lambda: path.symlink_to(temporary), "file": path.touch}.get(taken, path.mkdir)()
    if taken == "writable for all":
        path.chmod(0o777)
    used = node._own_folder()
    assert used != path
    assert used.stat().st_mode & 0o777 == 0o700


def test_the_own_directory_is_shared_by_the_processes_of_a_user(temporary: Path) -> None:
    assert node._own_folder() == node._own_folder() == temporary / f"trainjob-packages-{os.getuid()}"


@pytest.mark.parametrize(
    ("download", "requirement"),
    [
        ({"url": "file:///w/a.whl", "archive_info": {}}, "a @ file:///w/a.whl"),
        ({"url": "https://h/r", "vcs_info": {"vcs": "git", "commit_id": "1f"}}, "a @ git+https://h/r@1f"),
        ({"url": "file:///r", "dir_info": {}, "subdirectory": "p"}, "a @ file:///r#subdirectory=p"),
    ],
)
def test_a_requirement_with_a_location_keeps_it(download: dict[str, object], requirement: str) -> None:
    assert node._requirement(WHEEL) == "a==1"
    assert node._requirement({**WHEEL, "is_direct": True, "download_info": download}) == requirement


@pytest.mark.parametrize(
    ("variable", "launcher"), [("PET_NNODES", "torchrun"), ("OMPI_MCA_orte_default_hostfile", "mpirun")]
)
def test_a_missing_launcher_is_named(variable: str, launcher: str, temporary: Path) -> None:
    words = [sys.executable, "-c", inspect.getsource(node), "", "def f(): pass"]
    words.append(json.dumps({"name": "f", "args": {}, "packages": []}))
    environment = {"PATH": str(temporary), "TMPDIR": str(temporary), variable: "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (127, f'exec: "{launcher}": executable file not found in $PATH\n')


# ---------------------------------------------------------------- real users


@pytest.fixture
def shared() -> Iterator[Path]:
    """Wheels of `first`, and of `second`, which needs it; ``lib`` has pip and an older `first`."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        pip = Path(str(find_spec("pip").origin)).parent  # type: ignore[union-attr]  # the tests' environment has pip
        shutil.copytree(pip, folder / "lib" / "pip", ignore=shutil.ignore_patterns("__pycache__"))
        write_wheel(folder, "first", "2")
        write_wheel(folder, "second", "1", "first")
        zipfile.ZipFile(write_wheel(folder, "first", "1")).extractall(folder / "lib")
        yield folder


def train() -> int:
    import os
    import subprocess
    import sys

    import first  # type: ignore[import-untyped]  # exists on the node
    import second  # type: ignore[import-not-found]  # likewise

    print(os.getuid(), first.VERSION, second.VERSION, flush=True)
    subprocess.run([sys.executable, "-c", "import second; print(second.__file__)"], check=True)
    subprocess.run(["second"], check=True)
    return 7


@pytest.mark.full
@pytest.mark.parametrize(
    ("home", "uids"),
    [({"HOME": "/"}, ("1000650000", "1000660000")), ({}, ("1000670000", "1000680000"))],
    ids=["home that is not writable", "no home"],
)
def test_any_users_install_packages_without_home(home: dict[str, str], uids: tuple[str, str], shared: Path) -> None:
    """As on OpenShift: arbitrary users of group root, who share ``/tmp``."""
    python = debian.program("/usr/bin/python3", "python3")
    options = {"name": "train", "args": {}, "packages": ["--no-index", f"--find-links={shared}", "second"]}
    words = [python, "-c", inspect.getsource(node), MESSAGE, inspect.getsource(train)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(shared / "lib"), **home}
    for uid in uids:
        user = ["setpriv", f"--reuid={uid}", "--regid=0", "--clear-groups"]
        ended = subprocess.run(
            [*user, *words, json.dumps(options)], env=environment, cwd="/", capture_output=True, text=True, check=False
        )
        assert ended.stderr == ""
        first, path, program, returned = ended.stdout.splitlines()
        assert (first, program, returned) == (f"{uid} 1 1", "1", "train 7"), "first is not installed again"
        assert path.startswith(f"/tmp/trainjob-packages-{uid}/")
        shutil.rmtree(f"/tmp/trainjob-packages-{uid}")
