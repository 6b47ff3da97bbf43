"""Migrated databases, created once on this machine: a migration takes 4 to 6 s of CPU."""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.testcluster.build import cache_directory


def registry(file: Path) -> str:
    """URL of an empty registry in `file`, a SQLite database of MLflow; without MLflow the file is not created."""
    if find_spec("mlflow") is not None:
        stored = cached(f"mlflow-{version('mlflow-skinny')}.db")
        if not stored.exists():
            _make(stored)
        shutil.copy(stored, file)
    return address(file)


def address(file: Path) -> str:
    """URL of a registry in this file."""
    return f"mlflow+sqlite:///{file}"


def cached(name: str) -> Path:
    """Path of a cached database, which need not exist."""
    return cache_directory().with_name("databases") / name


def _make(stored: Path) -> None:
    from trainjob.registry import connect

    stored.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stored.parent) as scratch:
        made = Path(scratch) / "registry.db"
        assert connect(address(made)).list("nosuch") == []
        made.replace(stored)
