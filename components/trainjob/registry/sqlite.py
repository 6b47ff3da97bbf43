"""The SQLite file of an embedded registry: created atomically, written by one process at a time."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import local

from trainjob._support import durable
from trainjob.errors import ConfigurationError, RegistryUnavailable

_CREATION = 180.0
"""Seconds to wait for another process that creates the database: it takes 3 s, and 30 s on a busy machine."""

_held = local()


def path_of(uri: str) -> Path:
    """The absolute path of ``sqlite:////abs.db`` or ``sqlite:///relative.db``."""
    name = uri.removeprefix("sqlite:///")
    if name == uri or not name or name.startswith(":") or "?" in name:
        raise ConfigurationError(f"{uri!r} has no file; write mlflow+sqlite:////absolute/path.db")
    return Path(name).expanduser().absolute()


def create(path: Path, build: Callable[[str], object]) -> None:
    """Create the database by ``build``, unless it exists.

    MLflow creates its schema in about fifty steps without a transaction, and cannot continue after a killed process. So
    the schema is created in a temporary file, which is renamed when it is complete. The temporary file is in memory if
    possible: each step is a flush to disk, which takes most of the time (5 s against 1.4 s).
    """
    if _exists(path):
        return
    with locked(path, _CREATION):
        if _exists(path):
            return
        draft = path.with_name(f".{path.name}.draft")
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 - a private directory inside it
        try:
            with tempfile.TemporaryDirectory(prefix="trainjob-", dir=memory) as folder:
                made = Path(folder) / "registry.db"
                build(f"sqlite:///{made}")
                with draft.open("wb") as file:
                    file.write(made.read_bytes())
                    os.fsync(file.fileno())
            draft.replace(path)
            durable.sync(path.parent)
        except OSError as error:
            raise ConfigurationError(f"cannot create the registry {path}: {error.strerror or error}") from None


def _exists(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigurationError(f"cannot use the registry {path}: {error.strerror}") from None


def probe(path: Path, lock_timeout: float) -> None:
    """Wait until the database can be written.

    MLflow would wait for a lock in three places with separate timeouts, two minutes in total.

    Raises:
        RegistryUnavailable: The database was locked for ``lock_timeout`` seconds.
        ConfigurationError: The file is not a SQLite database, or not writable.
    """
    try:
        with closing(sqlite3.connect(path, timeout=max(lock_timeout, 0.0), isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise RegistryUnavailable(f"the registry {path} is locked by another program: {error}") from None
        raise ConfigurationError(f"cannot use the registry {path}: {error}") from None
    except sqlite3.DatabaseError as error:
        raise ConfigurationError(f"{path} is not a registry: {error}") from None


@contextmanager
def locked(path: Path, lock_timeout: float) -> Iterator[None]:
    """Lock the file beside the database; the lock ends with its process. May be nested.

    Raises:
        RegistryUnavailable: Another process held the lock for ``lock_timeout`` seconds.
        ConfigurationError: The lock file cannot be created.
    """
    held: set[Path] = _held.__dict__.setdefault("paths", set())
    if path in held:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigurationError(f"cannot use the registry {path}: {error.strerror}") from None
    try:
        _lock(file, path, lock_timeout)
        held.add(path)
        try:
            yield
        finally:
            held.discard(path)
    finally:
        os.close(file)


def _lock(file: int, path: Path, lock_timeout: float) -> None:
    deadline = time.monotonic() + lock_timeout
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise RegistryUnavailable(f"the registry {path} was locked by another process for {lock_timeout:g} s")
        time.sleep(0.05)
