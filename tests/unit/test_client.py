"""The event loop thread of the synchronous client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event, get_ident

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import kubeconfig

from trainjob import (
    ConfigurationError,
    InvalidSpec,
    JobRef,
    NotFound,
    Phase,
    RunTimeout,
    TrainJobClient,
    WaitOptions,
)
from trainjob._spec import TrainJobSpec
from trainjob._support.loop_thread import LoopThread
from trainjob.status import observe

THREADS = 8
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


def test_concurrent_first_calls_share_one_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two loops, the garbage collector closed one of them, and with it the client."""

    def slowly() -> LoopThread:
        time.sleep(0.05)
        return LoopThread()

    monkeypatch.setattr("trainjob.client.LoopThread", slowly)
    barrier = Barrier(THREADS)

    async def where() -> int:
        return get_ident()

    with TrainJobClient(DirectBackend(), "ns") as client, ThreadPoolExecutor(THREADS) as pool:

        def use(_: int) -> int:
            barrier.wait(10)
            return client.call(where)

        assert len(set(pool.map(use, range(THREADS)))) == 1
        assert client.list() == []


SCRIPT = """
import asyncio, os, signal, sys, time
import anyio.to_thread
from trainjob import TrainJobClient
client = TrainJobClient({backend!r}, "ns")
async def work():
    await anyio.to_thread.run_sync(time.sleep, 0.01)
    return "worked"
print(client.call(work), flush=True)
{rest}
"""
HOLD = """async def hold():
    try:
        await asyncio.sleep(600)
    finally:
        print("cleaned up", flush=True)
pass"""


SCRIPTS = {
    "nothing": ("", "worked\n"),
    "busy": ("client.start(lambda: asyncio.sleep(600))", "worked\n"),
    "thread": ("client.start(lambda: anyio.to_thread.run_sync(time.sleep, 1)); client.call(work)", "worked\n"),
    "closed": ("client.close(); print(client.call(work))", "worked\nworked\n"),
    "forked": ("pid = os.fork(); print(client.call(work), flush=True); pid and os.waitpid(pid, 0)", "worked\n" * 3),
    "cleans up": (f"{HOLD}; client.start(hold); client.call(work)", "worked\ncleaned up\n"),
    "fork cleans up": (
        f"{HOLD}; pid = os.fork(); client.start(hold); client.call(work); pid and os.waitpid(pid, 0)",
        "worked\n" + "cleaned up\n" * 2,
    ),
    "daemon": (
        "import threading\ndef hold(): client.call(lambda: asyncio.sleep(600))\n"
        "threading.Thread(target=hold, daemon=True).start(); client.call(work)",
        "worked\n",
    ),
    "the loop is blocked": ("async def block(): time.sleep(300)\nclient.start(block)", "worked\n"),
    "signal": (
        "signal.signal(signal.SIGALRM, lambda *_: print(client.start(work).result(), flush=True));"
        "signal.setitimer(signal.ITIMER_REAL, 0.1); client.call(lambda: asyncio.sleep(0.3))",
        "worked\n" * 2,
    ),
    "context": (
        "import contextvars; v = contextvars.ContextVar('v'); v.set('mine')\n"
        "async def read(): return v.get()\nprint(client.call(read))",
        "worked\nmine\n",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["local", "kubernetes"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_its_last_line(backend: str, name: str, tmp_path: Path) -> None:
    rest, printed = SCRIPTS[name]
    config = kubeconfig(tmp_path / "config", "https://127.0.0.1:1", token="t")
    environment = {**os.environ, "KUBECONFIG": str(config), "TRAINJOB_HOME": str(tmp_path / "home")}
    script = SCRIPT.format(backend=backend, rest=rest)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_a_client_of_a_backend_that_the_caller_connected_is_not_used_after_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with TrainJobClient(DirectBackend(), "ns") as client:
        monkeypatch.setattr("os.getpid", lambda: -1)
        with pytest.raises(ConfigurationError, match="made before the process was forked: make one in the child"):
            client.list()
        monkeypatch.undo()
        assert client.list() == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_exits_does_not_hang(error: BaseException) -> None:
    async def exits() -> None:
        raise error

    client = TrainJobClient(DirectBackend(), "ns")
    with pytest.raises(type(error)):
        client.call(exits)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["close", "cancel"])
def test_what_is_cancelled_cannot_wait_on(end: str) -> None:
    begun, left = Event(), Event()

    async def stubborn() -> None:
        begun.set()
        try:
            await anyio.sleep(600)
        finally:
            try:
                await anyio.sleep(600)
            finally:
                left.set()

    with TrainJobClient(DirectBackend(), "ns") as client:
        running = client.start(stubborn)
        assert begun.wait(10)
        if end == "cancel":
            assert running.cancel()
        else:
            client.close()
        assert left.wait(10)
        with pytest.raises(CancelledError):
            running.result(10)


def test_a_call_on_the_event_loop_is_refused() -> None:
    with TrainJobClient(DirectBackend(), "ns") as client:

        async def nested() -> object:
            return client.list()

        with pytest.raises(RuntimeError, match="cannot be called from the event loop thread"):
            client.call(nested)


# --- a name, a key or a reference


def test_a_job_is_named_by_its_reference_name_or_key() -> None:
    backend = DirectBackend()
    with TrainJobClient(backend, "ns") as client:
        ref = client.launch(SPEC, "nightly/train")
        assert client.find("nightly/train") == client.find(ref.name) == ref
        backend.end(ref)
        for each in (ref, ref.name, "nightly/train"):
            present = client.get(each)
            assert present is not None
            assert JobRef.of(present) == ref
            assert client.wait(each).name == ref.name
            assert client.diagnose(each).ref == JobRef("ns", ref.name, ref.uid, 1)
            assert list(client.logs(each)) == []
            assert client.cancel(each)
        assert client.get("other") is None
        for missing in (client.find, client.wait, client.cancel, client.diagnose):
            with pytest.raises(NotFound, match=r"^there is no TrainJob ns/other(, nor one of the key 'other'|$)"):
                missing("other")
            with pytest.raises(InvalidSpec, match="is blank"):
                missing(" ")


def test_a_key_stands_for_the_attempt_that_counts() -> None:
    backend = DirectBackend()
    with TrainJobClient(backend, "ns") as client:
        first = client.launch(SPEC, "key")
        backend.end(first, 1)
        assert client.find("key") == first, "the latest one, since none counts"
        second = client.launch(SPEC, "key")
        assert client.find("key") == second != first


# --- launch and wait in one


def test_run_launches_and_waits() -> None:
    backend = DirectBackend()
    with TrainJobClient(backend, "ns") as client:
        assert client.launch(SPEC).name != client.launch(SPEC).name, "without a key it is another job each time"
        backend.end(client.launch(SPEC, "key"))
        assert client.run(SPEC, "key", run_timeout="1h").name == client.find("key").name
        with pytest.raises(RunTimeout, match="did not end within run_timeout"):
            client.run(SPEC, "other", run_timeout=timedelta(milliseconds=1))


def test_timeouts_are_written_once() -> None:
    with TrainJobClient(DirectBackend(), "ns") as client:
        ref = client.launch(SPEC, "key")
        with pytest.raises(
            ConfigurationError, match=r"^run_timeout: write it as an argument or in options, not as both$"
        ):
            client.wait(ref, WaitOptions(), run_timeout=5)


def test_a_key_is_cancelled_with_all_its_attempts() -> None:
    backend = DirectBackend()
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
