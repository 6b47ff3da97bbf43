"""Processes of one machine, simulated: real code on real files, in threads of which one runs at a time.

Each process stops before each of its calls that other processes can see: a change of a file, a lock, a request. The
scheduler decides which process goes on, and which one is killed there. A killed process does nothing more: each later
call raises, so that its ``finally`` and ``except`` blocks have no effect. Its descriptors are closed, which releases
its locks, as the kernel does. Time is virtual: it passes when no process can do anything else.

The same calls in the same order give the same result. Nothing here depends on the operating system's scheduler.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import selectors
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from tests.simulation.shrinking import fewer


class Killed(BaseException):
    """SIGKILL. Not an Exception: the simulated code must not handle it."""


class Stuck(AssertionError):
    """No process can continue, or one never waits."""


class Process:
    """A function that runs in steps.

    Attributes:
        name: For schedules and messages.
        at: What it does when it continues.
        wake: Virtual time until which it sleeps; 0 if it does not sleep.
        waits: Whether it waits for a lock.
        done: Whether it has returned, failed or been killed.
        killed: Whether it was killed.
        result: What it has returned.
        error: What it has raised.
        steps: Number of its steps so far.
    """

    def __init__(self, machine: Machine, name: str, function: Callable[[], Any], number: int) -> None:
        self.name, self.number = name, number
        self.at = "start"
        self.wake = 0.0
        self.waits = False
        self.done = self.killed = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.steps = 0
        self._machine, self._function = machine, function
        self._progress = -1
        self._torn = False
        self._go = _closed()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "killed" if self.killed else "ended" if self.done else f"at {self.at}"
        return f"{self.name} ({state})"

    @property
    def ready(self) -> bool:
        """Whether a step can do something."""
        if self.done or self.wake > self._machine.now:
            return False
        return not self.waits or self._progress != self._machine.progress

    def step(self) -> None:
        """Continue until the next stop."""
        if not self.done:
            self.steps += 1
            self._machine.resume(self)

    def kill(self, *, torn: bool = False) -> None:
        """Kill it before its next call; with ``torn``, in the middle of it if it writes bytes."""
        if not self.done:
            self.killed, self._torn = True, torn
            self._machine.resume(self)

    # --- in its own thread

    def stop(
        self, at: str, *, waits: bool = False, wake: float = 0.0, tear: Callable[[], object] | None = None
    ) -> None:
        """Wait until the scheduler continues this process; `tear` is the first half of what it does then."""
        if not self.killed:
            self.at, self.waits, self.wake, self._progress = at, waits, wake, self._machine.progress
            self._machine.give_back()
            self._go.acquire()
        if self.killed:
            if self._torn and tear is not None:
                tear()
            self._torn = False
            raise Killed

    def release(self) -> None:
        self._go.release()

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive(), f"{self} does not end"

    def _run(self) -> None:
        self._go.acquire()
        self._machine.current.process = self
        try:
            if not self.killed:
                self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - the world looks at it
            if not self.killed:
                self.error = error
        finally:
            self.done = True
            self._machine.close_left(self)
            self._machine.give_back()


class Machine:
    """Files, locks, a clock, and the processes that use them.

    Args:
        seed: For names that programs draw at random.

    Attributes:
        processes: All processes so far.
        now: Virtual Unix time.
        progress: Number of steps that may have changed what a waiting process waits for.
    """

    def __init__(self, seed: object = 0) -> None:
        self.processes: list[Process] = []
        self.began = self.now = float(int(time.time()))
        self.progress = 0
        self.current = threading.local()
        self._opened: dict[int, tuple[Process, int]] = {}  # descriptor -> who opened it last, inode
        self._random = random.Random(f"names {seed}")
        self._back = _closed()

    def start(self, name: str, function: Callable[[], Any]) -> Process:
        """Make a process; it runs when the scheduler says so."""
        process = Process(self, name, function, len(self.processes))
        self.processes.append(process)
        return process

    def resume(self, process: Process) -> None:
        """Let a process run until its next stop."""
        if not process.waits or process.killed:
            self.progress += 1
        process.release()
        if not self._back.acquire(timeout=60):
            raise Stuck(f"{process} waits for something outside the simulation")
        if process.done:
            self.progress += 1
            process.join()

    def give_back(self) -> None:
        self._back.release()

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.done]

    def ready(self) -> list[Process]:
        """The processes that can do something; the clock moves on if all sleep. Raises Stuck in a deadlock."""
        while alive := self.alive:
            if found := [process for process in alive if process.ready]:
                return found
            wakes = [process.wake for process in alive if process.wake > self.now]
            if not wakes:
                raise Stuck(f"no process can continue: {alive}")
            self.now = min(wakes)
            self.progress += 1
        return []

    def finish(self) -> None:
        """Kill all processes that are left."""
        for process in self.alive:
            process.kill()

    def close_left(self, process: Process) -> None:
        """Close the descriptors that a process has left open, as the kernel does at its end."""
        for descriptor, (owner, inode) in [*self._opened.items()]:
            if owner is process:
                del self._opened[descriptor]
                with suppress(OSError):  # it was closed
                    if os.fstat(descriptor).st_ino == inode:
                        os.close(descriptor)

    def process(self) -> Process | None:
        """The process whose thread this is; None for the scheduler and the tests."""
        found: Process | None = getattr(self.current, "process", None)
        return found

    def stop(self, at: str) -> None:
        """Stop the current process; nothing outside a process."""
        if (process := self.process()) is not None:
            process.stop(at)

    def sleep(self, seconds: float, at: str = "sleep") -> None:
        """Let the current process sleep in virtual time."""
        process = self.process()
        if process is None:
            _sleep(seconds)
        else:
            process.stop(at, wake=self.now + max(seconds, 1e-6))

    # --- the operating system

    @contextmanager
    def installed(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Replace what the simulated code calls. Threads of no process get the original."""
        for name in ("replace", "rename", "unlink", "link", "mkdir", "rmdir"):
            patch.setattr(os, name, self._stopping(getattr(os, name), name))
        patch.setattr(os, "open", self._opening(os.open))
        patch.setattr(os, "write", self._writing(os.write))
        patch.setattr(os, "fsync", self._free(os.fsync, lambda *_: None))  # a power failure is not simulated
        patch.setattr(os, "getpid", self._free(os.getpid, self._pid))
        patch.setattr(fcntl, "flock", self._locking(fcntl.flock))
        patch.setattr(time, "sleep", self.sleep)
        patch.setattr(time, "time", self._free(time.time, lambda: self.now))
        patch.setattr(time, "monotonic", self._free(time.monotonic, lambda: self.now - self.began))
        patch.setattr(time, "time_ns", self._free(time.time_ns, lambda: int(self.now * 1e9)))
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=self._random.getrandbits(128), version=4))
        patch.setattr("secrets.token_hex", lambda count=16: f"{self._random.getrandbits(8 * count):0{2 * count}x}")
        try:
            yield
        finally:
            self.finish()

    def _pid(self) -> int:
        process = self.process()
        return 1_000_000 + (process.number if process else 0)

    def _free(self, original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        """A function without a stop, which is another one in processes."""
        return lambda *arguments: original(*arguments) if self.process() is None else other(*arguments)

    def _stopping(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.stop(f"{name} {_short(arguments)}")
            return original(*arguments, **options)

        return call

    def _opening(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC):
                self.stop(f"create {_short((path,))}")
            descriptor = original(path, flags, *arguments, **options)
            if (process := self.process()) is not None:
                self._opened[descriptor] = process, os.fstat(descriptor).st_ino
            return descriptor

        return call

    def _writing(self, original: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def call(file: int, data: Any) -> int:
            if (process := self.process()) is not None:
                process.stop("write", tear=lambda: original(file, memoryview(data)[: len(data) // 2]))
            return original(file, data)

        return call

    def _locking(self, original: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
        def call(file: Any, operation: int) -> None:
            process = self.process()
            if process is None or operation & fcntl.LOCK_UN:
                original(file, operation)
                return
            waits = False
            while True:
                process.stop("lock", waits=waits)
                try:
                    original(file, operation | fcntl.LOCK_NB)
                except BlockingIOError:
                    if operation & fcntl.LOCK_NB:
                        raise
                    waits = True
                else:
                    return

        return call


class _Selector(selectors.SelectSelector):
    """Waits in virtual time. The loops of simulated processes have no file descriptors to wait for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self.over = False  # whether the loop only ends what is left

    def select(self, timeout: float | None = None) -> Any:
        process = self._machine.process()
        if process is not None and not self.over:
            if process.killed:
                raise Killed
            if timeout is None or timeout > 0:
                self._machine.sleep(3600.0 if timeout is None else timeout, "wait")
        return super().select(0)


def run_async(machine: Machine, main: Callable[[], Any]) -> Any:
    """Run a coroutine function in the current process, with an event loop in virtual time."""
    selector = _Selector(machine)
    loop = asyncio.SelectorEventLoop(selector)
    vars(loop)["_clock_resolution"] = 1e-6  # the virtual clock's
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main())
    finally:
        selector.over = True
        if (process := machine.process()) is not None and process.killed:
            loop.set_exception_handler(lambda *_: None)  # it reports nothing any more
        loop.run_until_complete(_end_tasks(loop))
        asyncio.set_event_loop(None)
        loop.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()


def _closed() -> threading.Lock:
    """A lock that one thread releases for another one: faster than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _short(arguments: Sequence[Any]) -> str:
    """The last parts of paths, without random names."""
    parts = [os.fspath(each).rpartition("/")[2] for each in arguments if isinstance(each, (str, os.PathLike))]
    return " ".join(part if len(part) < 30 else f"…{part[-6:]}" for part in parts)


_sleep = time.sleep


# ------------------------------------------------------------ schedules


class World:
    """What a schedule acts on. Each action is a line of text, so that a schedule is a script.

    Attributes:
        violations: Kind -> text of the first violation of each broken property.
        trace: The actions so far.
    """

    def __init__(self) -> None:
        self.violations: dict[str, str] = {}
        self.trace: list[str] = []

    def found(self, kind: str, text: str) -> None:
        """Record a violation."""
        self.violations.setdefault(kind, text)

    def choose(self, chance: random.Random) -> str:
        """The next action."""
        raise NotImplementedError

    def act(self, action: str) -> bool:
        """Carry out an action; False if it does not apply, as may be in a shrunk script."""
        raise NotImplementedError

    def check(self) -> None:
        """Check the properties that hold at any time."""

    def drain(self) -> None:
        """Let everything end, and check the properties that hold then."""


Worlds = Callable[[int], Any]
"""Makes the context manager of a world from a seed."""


def run(worlds: Worlds, seed: int, script: Sequence[str] | None = None, actions: int = 40) -> Any:
    """Run one schedule: that of the seed, or a script in the world of the seed. Returns the world."""
    with worlds(seed) as world:
        chance = random.Random(f"actions {seed}")
        try:
            for number in range(actions if script is None else len(script)):
                action = world.choose(chance) if script is None else script[number]
                if world.act(action):
                    world.trace.append(action)
                    world.check()
            world.drain()
        except Stuck as error:
            world.found("stuck", str(error))
        return world


def shrink(worlds: Worlds, seed: int, kind: str, actions: int = 40) -> list[str]:
    """The shortest script found that breaks the same property in the world of the seed."""
    script = list(run(worlds, seed, actions=actions).trace)

    def broken(shorter: Sequence[str]) -> bool:
        return kind in run(worlds, seed, shorter).violations

    assert broken(script), f"the script of seed {seed} does not repeat its schedule"
    return fewer(script, broken)


def explore(
    worlds: Worlds, seeds: Sequence[int], describe: Callable[[int], str], actions: int = 40
) -> Mapping[str, int]:
    """Run the schedules of these seeds; fails with the shrunk script of the first violation."""
    steps = 0
    for seed in seeds:
        world = run(worlds, seed, actions=actions)
        steps += sum(process.steps for process in world.machine.processes)
        for kind, text in world.violations.items():
            script = shrink(worlds, seed, kind, actions)
            shown = run(worlds, seed, script).violations.get(kind, text)
            lines = "\n".join(f"    {line}" for line in script)
            pytest.fail(f"{kind}: {shown}\n{describe(seed)}\n{lines}", pytrace=False)
    return {"schedules": len(seeds), "steps": steps}
