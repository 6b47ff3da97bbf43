"""A read of a store that somebody takes slowly is resumed like any other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainjob._support.retrying import Backoff
from trainjob.data import ranges
from trainjob.data.stores.oci import repository
from trainjob.data.stores.oci.client import Interrupted
from trainjob.errors import StoreUnavailable


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass."""
    clock = [1000.0]
    monkeypatch.setattr("trainjob._support.retrying.time.monotonic", lambda: clock[0])

    def paused(backoff: Backoff, *_: object) -> None:
        if backoff.failure():
            raise StoreUnavailable("given up")

    monkeypatch.setattr("trainjob.data.stores.oci.repository.pause", paused)

    def wait(seconds: float) -> None:
        clock[0] += seconds

    return wait


def cut(start: int, end: int, error: type[Exception]) -> Iterator[bytes]:
    """Half of the bytes, and a cut."""
    yield b"x" * max(1, (end - start) // 2)
    if end - start > 1:
        raise error("cut")


def test_a_read_of_a_file_is_resumed(wait: Callable[[float], None]) -> None:
    store: Any = SimpleNamespace(read=lambda *_, start, **__: cut(start, 8, StoreUnavailable), location="s3://b/")
    got = 0
    no_waits: Any = SimpleNamespace(wait=lambda _: False)
    for chunk in ranges.resumed(store, "f", 0, 8, "etag", no_waits):
        got += len(chunk)
        wait(130)
    assert got == 8


def test_a_read_of_a_blob_is_resumed(wait: Callable[[float], None]) -> None:
    made: Any = object.__new__(repository.Repository)
    made._where = "oci://r/m"
    made._blob = lambda _, start, end: cut(start, end, Interrupted)
    got = 0
    for chunk in repository.Repository.blob(made, "sha256:" + "0" * 64, 8):
        got += len(chunk)
        wait(130)
    assert got == 8
