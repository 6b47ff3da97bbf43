"""The event loop thread of the synchronous client."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier, get_ident

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tests.contract.memory import MemoryBackend

from trainjob import InvalidSpec, JobRef, Phase, TrainJobClient
from trainjob._manifest.attempts import REPLACES
from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec
from trainjob.job import TRY
from trainjob.status import observe

THREADS = 8
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


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


def test_a_launch_records_the_try_of_its_caller() -> None:
    backend = MemoryBackend()
    with TrainJobClient(backend, "ns") as client:
        ref = client.launch(SPEC, "key", tried=3)
    assert backend.job(ref)["metadata"]["annotations"][TRY] == "3"


def test_a_key_is_cancelled_with_all_its_attempts() -> None:
    backend = MemoryBackend()
    with TrainJobClient(backend, "ns") as client:
        ref = client.launch(SPEC, "key")
        suspended = client.cancel_key("key", "suspend")
        assert (suspended.jobs, suspended.ended) == ((ref,), True)
        assert observe(backend.job(ref)).phase is Phase.SUSPENDED
        assert client.cancel_key("key").jobs == (ref,)
        assert backend.jobs == {}
        assert client.cancel_key("key").jobs == ()
        with pytest.raises(InvalidSpec):
            client.cancel_key(" ")


def test_a_wait_follows_the_attempt_that_counts() -> None:
    backend = MemoryBackend()
    followed: list[JobRef] = []
    with TrainJobClient(backend, "ns") as client:
        first = client.launch(SPEC, "key")
        second = render(SPEC, "key", 2, "ns")
        second["metadata"]["annotations"][REPLACES] = first.uid
        made = JobRef.of(client.call(lambda: backend.create(second)))
        backend.end(made)
        client.call(lambda: backend.delete(first))
        result = client.wait(first, on_follow=followed.append)
    assert followed == [made]
    assert (result.name, result.uid) == (made.name, made.uid)
