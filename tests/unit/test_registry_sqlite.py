"""The lock file of a registry in a SQLite file, and errors of unusable files."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from trainjob.errors import ConfigurationError, RegistryUnavailable
from trainjob.registry.sqlite import create, locked, probe


def test_a_lock_is_waited_for_until_its_timeout(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with locked(path, 1):
        pass
    taken, release, released = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with locked(path, 1), locked(path, 1):  # nested, and after an earlier one
            taken.set()
            release.wait(20)
            released.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    for seconds in (0.1, 0):
        with pytest.raises(RegistryUnavailable, match=f"locked by another process for {seconds} s"):
            locked(path, seconds).__enter__()
    threading.Timer(0.3, release.set).start()
    with locked(path, 20):
        assert released.is_set()
    thread.join(10)


def test_an_empty_file_is_initialized_once(tmp_path: Path) -> None:
    """A program that only opened the file leaves it empty; a file with content is not initialized again."""
    path = tmp_path / "some" / "where" / "mlflow.db"
    with locked(path, 1):  # creates the folders
        assert path.with_name("mlflow.db.lock").exists()
    path.touch()
    built: list[str] = []

    def build(uri: str) -> None:
        built.append(uri)
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"schema")

    for _ in range(2):
        create(path, build)
    assert len(built) == 1
    assert path.read_bytes() == b"schema"


def test_unusable_databases_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE x (y)")
        probe(path, 0)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryUnavailable, match="is locked by another program"):
            probe(path, 0)
    with pytest.raises(ConfigurationError, match="cannot use the registry"):
        probe(tmp_path / "nosuch" / "mlflow.db", 0)
    (tmp_path / "text.db").write_text("no database, but a text that is long enough to be looked at")
    with pytest.raises(ConfigurationError, match="is not a registry"):
        probe(tmp_path / "text.db", 0)
