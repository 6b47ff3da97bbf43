"""The event loop thread of the synchronous client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier, get_ident

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tests.contract.memory import MemoryBackend

from trainjob import TrainJobClient

THREADS = 8


def test_concurrent_first_calls_share_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two loops, the garbage collector closed one of them, and with it the client."""

    def slowly() -> AbstractContextManager[BlockingPortal]:
        time.sleep(0.05)
        return start_blocking_portal()

    monkeypatch.setattr("trainjob.client.start_blocking_portal", slowly)
    barrier = Barrier(THREADS)

    async def where() -> int:
        return get_ident()

    with TrainJobClient(MemoryBackend(), "ns") as client, ThreadPoolExecutor(THREADS) as pool:

        def use(_: int) -> int:
            barrier.wait(10)
            return client.call(where)

        assert len(set(pool.map(use, range(THREADS)))) == 1
        assert client.list() == []
