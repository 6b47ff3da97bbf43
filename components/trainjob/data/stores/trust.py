"""Trusted certificates, loaded once per process: loading takes 20 to 70 ms, and every copy opens stores."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import httpx


def by_httpx() -> ssl.SSLContext:
    """The CAs of ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``; certifi's if neither is set."""
    return _loaded(httpx.create_ssl_context, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


def by_system() -> ssl.SSLContext:
    """The system's CAs, or ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``; certifi's if none are found."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None:
        return by_httpx()
    return _loaded(ssl.create_default_context, paths.cafile, paths.capath)


def _loaded(load: Callable[[], ssl.SSLContext], file: str | None, directory: str | None) -> ssl.SSLContext:
    """Load certificates, again if a path has changed: certificates are renewed while a process runs."""
    return _context(load, file, _changed(file), directory, _changed(directory))


def _changed(path: str | None) -> int:
    try:
        return Path(path).stat().st_mtime_ns if path else 0
    except OSError:
        return 0


@lru_cache(maxsize=8)
def _context(
    load: Callable[[], ssl.SSLContext], file: str | None, file_changed: int, directory: str | None, dir_changed: int
) -> ssl.SSLContext:
    del file, file_changed, directory, dir_changed
    return load()
