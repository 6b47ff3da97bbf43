"""SIGKILL at random instants of the initialize and export programs, and what they make of it when run again.

``TRAINJOB_CHAOS_RUNS`` sets the number of kills (30), ``TRAINJOB_CHAOS_SEED`` repeats a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.local.forks import FORKS

from trainjob.data import content, read_manifest
from trainjob.data.__main__ import main
from trainjob.data.transfer import scan
from trainjob.registry import Registry, connect

pytestmark = pytest.mark.timeout(900)

RUNS = int(os.environ.get("TRAINJOB_CHAOS_RUNS", "30"))
SEED = int(os.environ.get("TRAINJOB_CHAOS_SEED", str(random.randrange(2**32))))


@pytest.fixture
def chance() -> random.Random:
    print(f"TRAINJOB_CHAOS_SEED={SEED}")
    return random.Random(SEED)


def _run(arguments: list[str], kill: tuple[Callable[[], bool], float] | None = None) -> float:
    """Run the program, or kill it so many seconds after something has happened; the seconds that it took."""
    process = FORKS.Process(target=main, args=(arguments,))
    process.start()
    began = time.monotonic()
    if kill is not None:
        happened, seconds = kill
        while process.is_alive() and not happened():
            time.sleep(0.001)
        process.join(seconds)
        process.kill()
    process.join()
    assert kill is not None or process.exitcode == 0
    process.close()
    return time.monotonic() - began


def _started() -> bool:
    return True


def _any(folder: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any(folder.glob(pattern))


def _typical(run: Callable[[int], float]) -> float:
    run(0)
    return run(1)


def _whole(location: Path) -> bool:
    """Whether it says that it is whole; and then it has to be."""
    manifest = read_manifest(str(location))
    if manifest is None:
        return False
    for file in manifest.files:
        data = (location / file.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256), file.path
    return True


def test_initialize(chance: random.Random, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(60):
        (source / str(number % 5)).mkdir(parents=True, exist_ok=True)
        (source / str(number % 5) / str(number)).write_bytes(chance.randbytes(40_000))
    digest = scan(str(source)).digest

    def arguments(number: int) -> list[str]:
        return ["initialize-dataset", "--source", str(source), "--target", str(tmp_path / f"target{number}")]

    typical = _typical(lambda number: _run(arguments(-1 - number)))
    halves = 0
    for number in range(RUNS):
        target = tmp_path / f"target{number}"
        # Most of the time goes by before the first file: every other kill waits for that.
        when = (_any(tmp_path, target.name), 0.05) if number % 2 else (_started, 1.1 * typical)
        _run(arguments(number), (when[0], chance.uniform(0, when[1])))
        halves += target.exists() and not _whole(target)
        _run(arguments(number))
        assert _whole(target)
        assert not (target / content.WORK).exists()
        assert scan(str(target)).digest == digest
        shutil.rmtree(target)
    print(f"{halves} of {RUNS} kills left half a target")
    assert halves or RUNS < 10, f"no kill hit the transfer ({typical:.3f} s)"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("registry") / "empty.db"
    connect(f"mlflow+sqlite:///{path}")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(12):
        header = json.dumps({f"w{number}": {"dtype": "U8", "shape": [50_000], "data_offsets": [0, 50_000]}}).encode()
        data = struct.pack("<Q", len(header)) + header + bytes([number]) * 50_000
        (folder / f"model-{number}.safetensors").write_bytes(data)
    return folder


def _consistent(registry: Registry) -> int:
    """The number of versions, each of which has to be a finished export."""
    versions = registry.list("m")
    for version in versions:
        assert _whole(Path(version.uri.removeprefix("file://")))
        manifest = read_manifest(version.uri)
        assert manifest is not None
        assert version.digest == manifest.digest
        assert version.metrics == {"acc": 0.5}
    return len(versions)


def test_export(chance: random.Random, tmp_path: Path, empty: Path, model: Path) -> None:
    def arguments(number: int) -> list[str]:
        return [
            "export", "--source", str(model), "--target", str(tmp_path / f"{number}"),
            "--name", "m", "--export-id", "a", "--metrics", '{"acc": 0.5}', "--alias", "champion", "--metric", "acc",
            "--registry", f"mlflow+sqlite:///{database(number)}",
        ]  # fmt: skip

    def database(number: int) -> Path:
        return tmp_path / f"{number}" / "registry.db"

    def run(number: int) -> float:
        database(number).parent.mkdir()
        shutil.copy(empty, database(number))
        return _run(arguments(number))

    typical = _typical(lambda number: run(-1 - number))
    left = {"nothing": 0, "half a target": 0, "a target": 0, "a version": 0, "an alias": 0}
    for number in range(RUNS):
        database(number).parent.mkdir()
        shutil.copy(empty, database(number))
        folder = tmp_path / f"{number}"
        when = [
            (_started, 1.1 * typical),
            (_any(folder, "m/*"), 0.05),
            (_any(folder, f"m/*/{content.NAME}"), 0.1),
            (_any(folder, "registry.db-journal"), 0.05),
        ][number % 4]
        _run(arguments(number), (when[0], chance.uniform(0, when[1])))
        registry = connect(f"mlflow+sqlite:///{database(number)}")
        versions = _consistent(registry)
        assert versions <= 1
        targets = list((folder / "m").glob("*"))
        if versions:
            left["an alias" if registry.list("m")[0].aliases else "a version"] += 1
        elif targets:
            left["a target" if _whole(targets[0]) else "half a target"] += 1
        else:
            left["nothing"] += 1
        _run(arguments(number))
        assert _consistent(registry) == 1
        assert registry.resolve("m", "champion").version == "1"
        assert len(list((tmp_path / f"{number}" / "m").glob("*"))) == 1
        assert not list((tmp_path / f"{number}").rglob(content.WORK))
        shutil.rmtree(tmp_path / f"{number}" / "m")
    print(f"{RUNS} kills left {left} ({typical:.3f} s)")
    assert left["half a target"] + left["a target"] + left["a version"] or RUNS < 10, "no kill hit the export"


def test_export_that_creates_the_registry(chance: random.Random, tmp_path: Path, model: Path) -> None:
    """MLflow's schema is made in many steps, none of which may be left half done."""
    for number in range(max(1, RUNS // 10)):
        folder = tmp_path / f"{number}"
        arguments = [
            "export", "--source", str(model), "--target", str(folder), "--name", "m", "--export-id", "a",
            "--metrics", '{"acc": 0.5}', "--registry", f"mlflow+sqlite:///{folder}/registry.db",
        ]  # fmt: skip
        _run(arguments, (_started, chance.uniform(0, 3)))
        _run(arguments)
        assert _consistent(connect(f"mlflow+sqlite:///{folder}/registry.db")) == 1
        assert {path.name for path in folder.iterdir()} == {"m", "registry.db", "registry.db.lock"}


def test_two_exports_at_once(tmp_path: Path, empty: Path, model: Path) -> None:
    shutil.copy(empty, tmp_path / "registry.db")
    arguments = [
        "export", "--source", str(model), "--target", str(tmp_path / "models"), "--name", "m", "--export-id", "a",
        "--metrics", '{"acc": 0.5}', "--alias", "champion", "--metric", "acc",
        "--registry", f"mlflow+sqlite:///{tmp_path}/registry.db",
    ]  # fmt: skip
    running = [FORKS.Process(target=main, args=(arguments,)) for _ in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join()
        assert process.exitcode == 0
        process.close()
    registry = connect(f"mlflow+sqlite:///{tmp_path}/registry.db")
    assert _consistent(registry) == 1
    assert registry.resolve("m", "champion").version == "1"
