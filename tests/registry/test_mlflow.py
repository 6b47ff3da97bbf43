from __future__ import annotations

import logging
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryConflict, RegistryUnavailable
from trainjob.registry import Registry, connect
from trainjob.registry.alias_claims import Claim
from trainjob.registry.mlflow import MlflowRegistry
from trainjob.registry.mlflow_environment import without_warnings

DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def registry(database: Path) -> Registry:
    return connect(f"sqlite:///{database}")


def test_a_version_is_registered_once(registry: Registry, capfd: pytest.CaptureFixture[str]) -> None:
    first = registry.register(
        "digits", "s3://b/digits/1", export_id="run 'a'\"`1", digest=DIGEST, metrics={"acc": 0.9, "val/loss": 1e-9},
        tags={"trainjob.run": "r", "trainjob.digest": "not mine to set"},
    )  # fmt: skip
    assert (first.name, first.version, first.uri, first.digest) == ("digits", "1", "s3://b/digits/1", DIGEST)
    assert first.metrics == {"acc": 0.9, "val/loss": 1e-9}
    assert first.tags["trainjob.export_id"] == "run 'a'\"`1"
    assert first.tags["trainjob.run"] == "r"
    assert abs(first.created - time.time()) < 60
    again = registry.register("digits", "s3://b/digits/1", export_id="run 'a'\"`1", digest=DIGEST, metrics={"acc": 0.9})
    assert again == first
    assert registry.register("digits", "s3://b/digits/2", export_id="b", digest=DIGEST).version == "2"
    assert [version.version for version in registry.list("digits")] == ["1", "2"]
    assert registry.list("other") == []
    assert capfd.readouterr() == ("", "")


def test_other_content_under_the_same_id_is_a_conflict(registry: Registry) -> None:
    registry.register("m", "s3://b/1", export_id="a", digest=DIGEST)
    with pytest.raises(RegistryConflict, match="new export_id"):
        registry.register("m", "s3://b/1", export_id="a", digest="sha256:" + "b" * 64)
    with pytest.raises(RegistryConflict):
        registry.register("m", "s3://b/2", export_id="a", digest=DIGEST)
    assert len(registry.list("m")) == 1


def test_resolve(registry: Registry) -> None:
    for name, version in (("m", "1"), ("m", "champion"), ("m", "latest")):
        with pytest.raises(ModelNotFound):
            registry.resolve(name, version)
    for number in "12":
        registry.register("m", f"s3://b/{number}", export_id=number, digest=DIGEST)
    with pytest.raises(ModelNotFound, match="alias 'champion'"):
        registry.resolve("m", "champion")
    with pytest.raises(ModelNotFound):
        registry.resolve("m", "3")
    assert registry.promote("m", "1", alias="champion").promoted
    assert registry.resolve("m", "champion").uri == "s3://b/1"
    assert registry.resolve("m", "champion").aliases == ("champion",)
    assert registry.list("m")[0].aliases == ("champion",)
    assert registry.resolve("m", "latest").version == "2"
    assert registry.resolve("m", "2").uri == "s3://b/2"
    for bad in ("../x", "m/x", "a:b"):
        with pytest.raises(ConfigurationError):
            registry.resolve(bad, "1")


def test_promote(registry: Registry) -> None:
    for number, accuracy in enumerate((0.8, 0.7, 0.9), 1):
        registry.register("m", f"s3://b/{number}", export_id=str(number), digest=DIGEST, metrics={"acc": accuracy})

    def promote(version: str, *, dry_run: bool = False) -> tuple[bool, str | None]:
        verdict = registry.promote("m", version, alias="champion", metric="acc", dry_run=dry_run)
        return verdict.promoted, verdict.previous

    assert promote("1") == (True, None)
    assert promote("1") == (True, "1")
    assert promote("2") == (False, "1")
    assert promote("3", dry_run=True) == (True, "1")
    assert registry.resolve("m", "champion").version == "1"
    assert promote("3") == (True, "1")
    assert registry.resolve("m", "champion").version == "3"
    with pytest.raises(ModelNotFound):
        promote("4")
    with pytest.raises(ConfigurationError, match="no metric 'loss'"):
        registry.promote("m", "1", alias="champion", metric="loss")


def test_a_promotion_on_sqlite_needs_no_claim(registry: Registry) -> None:
    """A lock serializes the writers of a file, so no conflict has to be resolved afterwards."""
    registry.register("m", "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})
    before = registry.resolve("m", "1").tags
    assert registry.promote("m", "1", alias="champion", metric="acc").promoted
    moved = {"trainjob.moving.champion": "from nothing", "trainjob.moved.champion": "settled"}
    assert registry.resolve("m", "champion").tags == {**before, **moved}


def test_a_promotion_on_a_server_leaves_a_claim(mlflow_url: str) -> None:
    """Concurrent promotions detect each other by it."""
    registry, name = connect(mlflow_url), f"claims {random.getrandbits(40):x}"
    registry.register(name, "s3://b/1", export_id="a", digest=DIGEST, metrics={"acc": 0.5})
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted
    claim = Claim.parse(registry.resolve(name, "champion").tags["trainjob.claim.champion"])
    assert (claim.metric, claim.mode) == ("acc", "max")
    assert abs(claim.order - time.time()) < 60
    assert registry.promote(name, "1", alias="champion", metric="acc").promoted, "a retry"


def test_duplicate_versions_are_removed(registry: Registry, database: Path) -> None:
    from mlflow.tracking import MlflowClient

    first = registry.register("m", "s3://b/1", export_id="a", digest=DIGEST)
    client = MlflowClient(f"sqlite:///{database}", f"sqlite:///{database}")
    # The duplicate that a lost reply and MLflow's retry leave behind.
    client.create_model_version("m", "s3://b/1", tags=dict(first.tags), await_creation_for=0)
    assert len(registry.list("m")) == 2
    assert registry.register("m", "s3://b/1", export_id="a", digest=DIGEST) == first
    assert registry.list("m") == [first]


def test_a_version_registered_by_another_program(registry: Registry, database: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}", f"sqlite:///{database}")
    client.create_registered_model("m")
    client.create_model_version("m", "s3://b/1", tags={"trainjob.metric.acc": "high"}, await_creation_for=0)
    version = registry.resolve("m", "1")
    assert (version.digest, version.metrics) == ("", {})


@pytest.fixture
def locked(database: Path) -> Iterator[None]:
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    yield
    connection.close()


@pytest.mark.usefixtures("locked")
def test_connecting_to_a_locked_database_fails_after_the_timeout(database: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="locked"):
        MlflowRegistry(f"sqlite:///{database}", lock_timeout=1)
    assert 0.9 < time.monotonic() - began < 30


def test_registering_waits_for_a_lock_that_is_released(database: Path) -> None:
    registry = MlflowRegistry(f"sqlite:///{database}", lock_timeout=20)
    connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(1.0, connection.close)
    timer.start()
    assert registry.register("m", "s3://b/1", export_id="a", digest=DIGEST).version == "1"
    timer.join()


def test_registering_in_a_locked_database_fails_after_the_timeout(database: Path) -> None:
    registry = MlflowRegistry(f"sqlite:///{database}", lock_timeout=1)
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="locked"):
        registry.register("m", "s3://b/1", export_id="a", digest=DIGEST)
    assert time.monotonic() - began < 30
    connection.close()


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"this is no database, but it is long enough to be looked at" * 20)
    with pytest.raises(ConfigurationError, match="not a registry"):
        connect(f"sqlite:///{tmp_path}/x.db")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot use the registry"):
        connect(f"sqlite:///{tmp_path}/file/x.db")


def test_an_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        registry = connect(f"mlflow+http://127.0.0.1:{taken.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1"):
            registry.resolve("m", "champion")
        assert time.monotonic() - began < 30


def test_the_settings_of_mlflow_are_restored(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    level = logging.getLogger("mlflow").level
    registry.list("m")
    assert logging.getLogger("mlflow").level == level
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_mlflow_logs_nothing_and_retries_twice_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    with without_warnings():
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            assert not logging.getLogger(name).isEnabledFor(logging.CRITICAL)
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7", "the user's own limit wins"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"


def test_without_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigurationError, match=r"trainjob\[mlflow\]"):
        connect(f"sqlite:///{tmp_path}/x.db")


@pytest.mark.full
def test_processes_that_create_the_database_at_once_register_one_version(tmp_path: Path, python: str) -> None:
    (tmp_path / "script").write_text(
        "import sys; from trainjob.registry import connect; r = connect(sys.argv[1]);"
        "print(r.register('m', 's3://b/1', export_id='a', digest='d').version)"
    )
    command = [python, f"{tmp_path}/script", f"mlflow+sqlite:///{tmp_path}/new/registry.db"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate(timeout=90) for process in running]
    assert results == [("1\n", "")] * 2
    assert len(connect(command[-1]).list("m")) == 1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["registry.db", "registry.db.lock"]
