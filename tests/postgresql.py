"""A PostgreSQL server from Debian's package."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Self

from tests.processes import Component, free_port, wait_until

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
"""Directories with Debian's programs, the newest last; empty if PostgreSQL is not installed."""


class PostgreSQL:
    """Context manager for a server with an empty, temporary database. The kernel kills it when this process is killed.

    Attributes:
        url: URL for SQLAlchemy.
        server: The process; set only inside the block.
    """

    server: Component

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"postgresql+psycopg2://postgres@127.0.0.1:{self._port}/postgres"

    def __enter__(self) -> Self:
        # Not below pytest's directory: every pytest of this user makes it private again when it starts.
        self._home = tempfile.TemporaryDirectory(prefix="trainjob-postgres-", ignore_cleanup_errors=True)
        home = Path(self._home.name)
        as_postgres: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            shutil.chown(home, "postgres", "postgres")
            # A change of user clears the parent-death signal, so it is set again.
            as_postgres = ["setpriv", "--pdeathsig", "KILL", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        bin_, data = PROGRAMS[-1], str(home / "data")
        options = ["-c", "fsync=off", "-c", f"unix_socket_directories={home}", "-c", "listen_addresses=127.0.0.1"]
        command = [*as_postgres, str(bin_ / "postgres"), "-D", data, "-p", str(self._port), *options]
        self.server = Component("postgres", command, home, {})
        make = ["initdb", "-A", "trust", "-E", "UTF8", "-U", "postgres", "--no-sync", "-D", data]
        initialize = Component("initdb", [*as_postgres, str(bin_ / make[0]), *make[1:]], home, {})
        initialize.start()
        try:
            wait_until("PostgreSQL has its files", lambda: not initialize.alive, 120)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.server.kill(signal.SIGQUIT)
        self._home.cleanup()

    def start(self) -> None:
        """Start or restart the server."""
        ready = b"database system is ready to accept connections"

        def times() -> int:
            return self.server.log.read_bytes().count(ready) if self.server.log.exists() else 0

        before = times()
        self.server.start()
        wait_until("PostgreSQL answers", lambda: times() > before, 60, among=[self.server])
