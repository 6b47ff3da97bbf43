"""Databases as they are after all migrations, made once on this machine: a migration takes 4 to 6 s of CPU."""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.testcluster.build import cache_directory


def registry(file: Path) -> str:
    """Address of an empty registry in `file`, which is a SQLite database of MLflow; without MLflow there is no file."""
    if find_spec("mlflow") is not None:
        kept = cached(f"mlflow-{version('mlflow-skinny')}.db")
        if not kept.exists():
            _make(kept)
        shutil.copy(kept, file)
    return address(file)


def address(file: Path) -> str:
    """Of a registry in this file."""
    return f"mlflow+sqlite:///{file}"


def cached(name: str) -> Path:
    """Where a database is kept, which need not exist."""
    return cache_directory().with_name("databases") / name


def _make(kept: Path) -> None:
    from trainjob.registry import connect

    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        made = Path(scratch) / "registry.db"
        assert connect(address(made)).list("nosuch") == []
        made.replace(kept)
