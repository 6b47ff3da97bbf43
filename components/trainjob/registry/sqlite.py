"""The SQLite file of an embedded registry: created whole or not at all, one writer at a time."""

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

from trainjob import durable
from trainjob.errors import ConfigurationError, RegistryUnavailable

_CREATION = 180.0
"""Seconds to wait for another process that creates the database: 3 s of work, ten times that on a busy machine."""

_held = local()


def path_of(uri: str) -> Path:
    """The file of ``sqlite:////abs.db`` or ``sqlite:///relative.db``, as an absolute path."""
    name = uri.removeprefix("sqlite:///")
    if name == uri or not name or name.startswith(":") or "?" in name:
        raise ConfigurationError(f"{uri!r} names no file; write mlflow+sqlite:////absolute/path.db")
    return Path(name).expanduser().absolute()


def create(path: Path, build: Callable[[str], object]) -> None:
    """Have ``build`` make the database, unless it is there.

    MLflow makes its schema in some fifty steps that are no transaction, and cannot go on where a killed process
    stopped. So it makes it elsewhere, and the file takes its name when it is done. Elsewhere is memory where there is
    some: the many steps are as many flushes to disk, which is most of the time (5 s against 1.4 s).
    """
    if _there(path):
        return
    with locked(path, _CREATION):
        if _there(path):
            return
        draft = path.with_name(f".{path.name}.draft")
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 - a private directory in it
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


def _there(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigurationError(f"cannot use the registry {path}: {error.strerror}") from None


def probe(path: Path, lock_timeout: float) -> None:
    """Wait until the database can be written to.

    MLflow would wait for a lock in three places with budgets of their own, two minutes in all.

    Raises:
        RegistryUnavailable: It stayed locked for ``lock_timeout`` seconds.
        ConfigurationError: It is no SQLite database, or not writable.
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
    """Hold the lock file beside the database; it ends with its process. May be nested.

    Raises:
        RegistryUnavailable: Another process held it for ``lock_timeout`` seconds.
        ConfigurationError: It cannot be created.
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
        _take(file, path, lock_timeout)
        held.add(path)
        try:
            yield
        finally:
            held.discard(path)
    finally:
        os.close(file)


def _take(file: int, path: Path, lock_timeout: float) -> None:
    deadline = time.monotonic() + lock_timeout
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise RegistryUnavailable(f"the registry {path} was in use by another process for {lock_timeout:g} s")
        time.sleep(0.05)
