"""Launches, cancels and supervisors of the local backend at once, killed at any change of a file.

Everything of trainjob is real: `launch`, `wait`, `cancel_key`, `LocalBackend`, its files and locks, and the supervisor,
which runs as one of the simulated processes, with its guard. Replaced are the start of a process, the processes of the
ranks, which end when the schedule says so, and the clock.

Properties, from the files and the ranks alone:

* ``twice``: two attempts of a key are active.
* ``overlap``: ranks of two attempts of a key run at once.
* ``supervisors``: a job has two supervisors, or ranks that were started twice without a suspension in between.
* ``running``: a cancel of a key was the last word about it, and a job of the key runs.
* ``gpu``: two ranks have the same GPU, of which there is one.
* ``waits``: a launch, wait or cancel does not end.
* ``not started``: a launch of a key ends, and its job does not run to its end.
* ``error``: an error that is not documented.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import pytest
from tests.simulation.local_processes import Machine, Process, World, run_async
from tests.simulation.virtual import inline

from trainjob import JobRef, TrainJobFailed, TrainJobSpec
from trainjob._backends.local import conditions, supervision, supervisor as supervising, watching
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.gpus import GpuQueue
from trainjob._backends.local.ranks import MARKER, Rank
from trainjob._backends.local.store import JobFiles, job_names, now, read_json
from trainjob._jobs import launching, records, waiting
from trainjob._jobs.cancellation import cancel_key
from trainjob.errors import BackendUnavailable
from trainjob.job import KEY, labels_of
from trainjob.status import Phase, observe

NAMESPACE = "default"
SPEC = TrainJobSpec.model_validate({"runtime": "trainjob-step", "command": ["train"]})
ON_GPU = TrainJobSpec.model_validate(SPEC.model_dump(exclude_unset=True) | {"resources_per_node": {"gpu": 1}})
_MOST_STEPS = 20_000  # of one process
_GRACE = 40.0  # seconds in which everything ends that was asked to


@dataclass
class Running:
    """A rank: what is left of it if its supervisor is killed.

    Attributes:
        uid: Its job.
        key: The key of that job.
        stubborn: Whether it ends only by SIGKILL.
        gpu: Its GPU; empty if it needs none.
        code: Its exit code; None while it runs.
    """

    uid: str
    key: str
    stubborn: bool
    gpu: str = ""
    code: int | None = None


@dataclass
class Call:
    """A launch or cancel of a key.

    Attributes:
        kind: ``launch``, ``run``, ``cancel``, ``suspend`` or ``read``.
        key: The key.
        stage: ``launch`` or ``wait``.
        began: Number of steps of all processes before its first one; None if it has made none.
        over: Whether its end was seen.
    """

    kind: str
    key: str
    stage: str = "launch"
    began: int | None = None
    over: bool = False


@dataclass
class Local(World):
    """A home, and the processes that use it.

    Actions: ``launch KEY``; ``run KEY``: launch, wait and mark the result as delivered; ``cancel KEY``; ``suspend
    KEY``; ``step PROCESS [NUMBER]``; ``end PROCESS``; ``kill PROCESS``; ``rank NUMBER CODE``: a running rank ends;
    ``pass SECONDS``.
    """

    seed: int
    home: Path
    machine: Machine = field(init=False)
    ranks: list[Running] = field(default_factory=list)
    calls: dict[Process, Call] = field(default_factory=dict)
    supervisors: dict[Process, str] = field(default_factory=dict)
    announced: set[Process] = field(default_factory=set)
    steps: int = 0

    def __post_init__(self) -> None:
        World.__init__(self)
        self.machine = Machine(self.seed)
        chance = random.Random(f"local {self.seed}")
        self.keys = ["a", "b"][: chance.choice((1, 1, 2))]
        self.stubborn = chance.random() < 0.3
        on_gpu = random.Random(f"gpu {self.seed}").random() < 0.5
        self.spec, self.keys = (ON_GPU, ["a", "b"]) if on_gpu else (SPEC, self.keys)

    # --- actions

    def choose(self, chance: random.Random) -> str:
        callers = [process for process in self.machine.alive if process in self.calls]
        key = chance.choice(self.keys)
        if len(callers) < 3 and chance.random() < (0.12 if callers else 0.5):
            return f"{chance.choices(('launch', 'run', 'cancel', 'suspend'), (4, 4, 2, 1))[0]} {key}"
        running = [number for number, rank in enumerate(self.ranks) if rank.code is None]
        if running and chance.random() < 0.05:
            return f"rank {chance.choice(running)} {chance.choice((0, 0, 1))}"
        ready = [process.name for process in self.machine.alive if process.ready]
        if not ready or chance.random() < 0.1:
            return f"pass {chance.choice((0.1, 0.6, 6))}"
        kind = chance.choices(("step", "end", "kill"), (20, 4, 2))[0]
        who = chance.choice(ready)
        return f"step {who} {chance.choice((1, 2, 3, 8, 20))}" if kind == "step" else f"{kind} {who}"

    def act(self, action: str) -> bool:
        kind, what, *rest = action.split()
        match kind:
            case "launch" | "run" | "cancel" | "suspend":
                return what in self.keys and bool(self._call(kind, what))
            case "pass":
                self._pass(float(what))
                return True
            case "rank":
                return self._end_rank(int(what), int(rest[0]))
        process = next((each for each in self.machine.alive if each.name == what), None)
        if process is None:
            return False
        if kind == "kill":
            process.kill()
            self._ended(process)
            return True
        before = process.steps
        while process.ready and process.steps - before < (int(rest[0]) if rest else _MOST_STEPS):
            self._step(process)
        return process.steps > before

    def _end_rank(self, number: int, code: int) -> bool:
        if number >= len(self.ranks) or self.ranks[number].code is not None:
            return False
        self.ranks[number].code = code
        return True

    def _call(self, kind: str, key: str) -> Process:
        number = sum(each.kind == kind for each in self.calls.values())
        process = self.machine.start(f"{kind}{number}", lambda: run_async(self.machine, lambda: self._caller(call)))
        call = self.calls[process] = Call(kind, key)
        return process

    async def _caller(self, call: Call) -> Any:
        backend = LocalBackend(self.home, {})
        if call.kind == "read":
            return await backend.find(NAMESPACE, labels_of(call.key))
        if call.kind in ("cancel", "suspend"):
            action: Any = "cancel" if call.kind == "cancel" else "suspend"
            return await cancel_key(backend, call.key, namespace=NAMESPACE, action=action)
        ref = await launching.launch(backend, self.spec, call.key, namespace=NAMESPACE)
        call.stage = "wait"
        if call.kind == "launch":
            return ref
        result = await waiting.wait(backend, ref)
        done = JobRef(result.namespace, result.name, result.uid, result.attempt)
        await records.mark_delivered(backend, done)
        return done

    def _step(self, process: Process) -> None:
        if (call := self.calls.get(process)) is not None and call.began is None:
            call.began = self.steps
        self.steps += 1
        process.step()
        if process.steps > _MOST_STEPS:
            self.found("waits", f"{process} does not end")
            process.kill()
        self._ended(process)
        self._check_ranks()

    def _ended(self, process: Process) -> None:
        if process.killed and process in self.announced:
            directory, number = self.supervisors[process], process.name.removeprefix("supervisor")
            self.machine.start(f"guard{number}", lambda: self._guard(directory))
        call = self.calls.get(process)
        if not process.done or call is None or call.over:
            return
        call.over = True
        # A supervisor that is killed before its job has begun is started again, three times.
        known = isinstance(process.error, TrainJobFailed | BackendUnavailable)
        if process.error is not None and not known:
            self.found("error", f"{process.name} of {call.key}: {type(process.error).__name__}: {process.error}")

    def _pass(self, seconds: float) -> None:
        """Let time pass: each process that sleeps continues when it wakes, the others do not."""
        until = self.machine.now + seconds
        while True:
            sleeping = [each for each in self.machine.alive if each.wake and each.wake <= until]
            if not sleeping:
                break
            process = min(sleeping, key=lambda each: (each.wake, each.number))
            self.machine.now = max(self.machine.now, process.wake)
            self._step(process)
        self.machine.now = max(self.machine.now, until)

    # --- what the processes find in place of the operating system

    def supervise(self, arguments: list[str], **_: Any) -> None:
        """Start a supervisor, in place of ``subprocess.run``; return once one has the lock."""
        directory = Path(arguments[-1])
        process = self.machine.start(f"supervisor{len(self.supervisors)}", lambda: self._supervisor(process, directory))
        self.supervisors[process] = str(directory)
        caller = self.machine.process()
        assert caller is not None
        while not process.done and process not in self.announced:
            caller.stop("supervisor", waits=True)

    def _supervisor(self, process: Process, directory: Path) -> None:
        """`trainjob._backends.local.supervisor.main` without its forks."""
        files = JobFiles(directory)
        lock, trainjob = supervising._locked(files), files.read()
        if lock is None or trainjob is None or trainjob["status"]:
            if lock is not None:
                conditions.record_loss(files)  # does nothing for a finished job
            return
        conditions.write_status(files, {"jobsStatus": []}, [])
        queue = GpuQueue(files, trainjob)
        queue.enter()
        self.announced.add(process)  # here it has forked its guard, which does nothing before the supervisor ends
        supervising.Supervisor(files, trainjob, read_json(files.start) or {}, queue).run()

    def _guard(self, directory: str) -> None:
        """`trainjob._backends.local.supervisor._guard`, after the end of the supervisor."""
        files = JobFiles(Path(directory))
        if not files.finished() and (trainjob := files.read()) is not None:
            conditions.end_lost(files, trainjob["metadata"]["uid"], wait_seconds=5)

    def sweep(self, uid: str, *_: object) -> None:
        """Kill the ranks of a job."""
        self.machine.stop("kill ranks")
        for rank in [each for each in self.ranks if each.uid == uid and each.code is None]:
            rank.code = -signal.SIGKILL

    # --- properties

    def _jobs(self) -> list[tuple[JobFiles, dict[str, Any]]]:
        found = []
        for name in job_names(self.home / "jobs" / NAMESPACE):
            files = JobFiles(self.home / "jobs" / NAMESPACE / name)
            if (trainjob := files.read()) is not None:
                found.append((files, trainjob))
        return found

    def _check_ranks(self) -> None:
        for key in self.keys:
            running = {rank.uid for rank in self.ranks if rank.key == key and rank.code is None}
            if len(running) > 1:
                self.found("overlap", f"ranks of {len(running)} attempts of {key} run")
        for uid, number in Counter(rank.uid for rank in self.ranks if rank.code is None).items():
            if number > 1:
                self.found("supervisors", f"job {uid} has {number} ranks that run, in place of one")
        if len(used := [rank.uid for rank in self.ranks if rank.gpu and rank.code is None]) > 1:
            self.found("gpu", f"ranks of {used} have the only GPU")
        alive = Counter(of for each, of in self.supervisors.items() if each in self.announced and not each.done)
        for directory, number in alive.items():
            if number > 1:
                self.found("supervisors", f"{number} supervisors of {directory}")

    def check(self) -> None:
        for key in self.keys:
            active = [trainjob["metadata"]["name"] for _, trainjob in self._jobs() if _is_active(trainjob, key)]
            if len(active) > 1:
                self.found("twice", f"{active} are active")

    def drain(self) -> None:
        """End all calls, then launch each key once more."""
        self._settle(_GRACE)
        if any(process.killed for process in self.machine.processes if process.name.startswith("guard")):
            for key in self.keys:  # with its supervisor: then the next process that reads the job ends it
                self._call("read", key)
            self._settle(_GRACE)
        self._check_cancels()
        again = {key: self._call("run", key) for key in self.keys}
        for _ in range(30):
            self._settle(2.0)
            for rank in self.ranks:
                if rank.code is None:
                    rank.code = 0
            for key, process in again.items():
                if isinstance(process.error, TrainJobFailed):  # it adopted a job whose supervisor had been killed
                    again[key] = self._call("run", key)
            if all(process.done for process in self.calls):
                break
        self._settle(_GRACE)
        self.check()
        self._check_ends()

    def _check_ends(self) -> None:
        """Check what holds when each key was launched once more, without a kill."""
        for process, call in self.calls.items():
            if not process.done:
                self.found("waits", f"{process.name} of {call.key} is still in {call.stage}, at {process.at}")
        last = {call.key: process for process, call in self.calls.items()}
        for key, process in last.items():
            if process.done and (process.error is not None or process.result.name not in self._complete(key)):
                self.found("not started", f"{process.name} of {key}: {process.error!r}")
        for files, trainjob in self._jobs():
            stopped = trainjob["spec"].get("suspend") or observe(trainjob).phase is Phase.CANCELLED
            if not files.begun() and not stopped:
                self.found("not started", f"{trainjob['metadata']['name']} was created, and nobody has started it")
        if left := [rank for rank in self.ranks if rank.code is None]:
            self.found("running", f"ranks are left at the end: {left}")

    def _complete(self, key: str) -> list[str]:
        return [
            trainjob["metadata"]["name"]
            for _, trainjob in self._jobs()
            if _key(trainjob) == key and observe(trainjob).phase is Phase.COMPLETE
        ]

    def _settle(self, seconds: float) -> None:
        """Let every process continue for so long."""
        until = self.machine.now + seconds
        while True:
            ready = [each for each in self.machine.alive if each.ready]
            if ready:
                self._step(min(ready, key=lambda each: (each.steps, each.number)))
                continue
            wakes = [each.wake for each in self.machine.alive if each.wake > self.machine.now]
            if not wakes or min(wakes) > until:
                return
            self.machine.now = min(wakes)
            self.machine.progress += 1

    def _check_cancels(self) -> None:
        for key in self.keys:
            calls = {process: call for process, call in self.calls.items() if call.key == key}
            launches = [call.began or 0 for call in calls.values() if call.kind in ("launch", "run")]
            for process, call in calls.items():
                # A launch that begins after the cancel does not obey it.
                last = call.began is not None and all(began < call.began for began in launches)
                if call.kind not in ("cancel", "suspend") or process.result is None or not last:
                    continue
                running = [rank for rank in self.ranks if rank.key == key and rank.code is None]
                active = [trainjob["metadata"]["name"] for _, trainjob in self._jobs() if _is_active(trainjob, key)]
                if running or active:
                    self.found("running", f"after {process.name} of {key}: {active} with {len(running)} ranks run")


class _Rank(Rank):
    """A rank whose process belongs to the schedule."""

    world: Local

    def launch(self, command: Any, environment: Mapping[str, str], cwd: str) -> None:
        del command, cwd
        self.world.machine.stop("start rank")
        self.started = now()
        uid = environment[MARKER]
        key = next((_key(job) for _, job in self.world._jobs() if job["metadata"]["uid"] == uid), "")
        self._running = Running(uid, key, self.world.stubborn, environment.get("CUDA_VISIBLE_DEVICES", ""))
        self.world.ranks.append(self._running)

    def poll(self) -> bool:
        if self.terminated is None and (code := self._running.code) is not None:
            self.terminated = {
                "exitCode": code if code >= 0 else 128 - code,
                "reason": "Completed" if code == 0 else "Error",
                "message": "",
                "startedAt": self.started,
                "finishedAt": now(),
            }
        return self.terminated is not None

    def signal(self, number: int) -> None:
        self.world.machine.stop("signal")
        if self._running.code is None and (number == signal.SIGKILL or not self._running.stubborn):
            self._running.code = -number

    def pump(self) -> None:
        """It has no output."""


class _NoOutput:
    """A selector in place of that of the supervisor, whose ranks have no output here."""

    def register(self, *_: Any) -> None:
        pass

    def get_map(self) -> Mapping[int, Any]:
        return {}


def _key(trainjob: Mapping[str, Any]) -> str:
    return str((trainjob["metadata"].get("annotations") or {}).get(KEY, ""))


def _is_active(trainjob: Mapping[str, Any], key: str) -> bool:
    """Whether a job has begun and runs, or is about to."""
    stopping = trainjob["spec"].get("suspend") or "deletionTimestamp" in trainjob["metadata"]
    return _key(trainjob) == key and bool(trainjob["status"]) and not stopping and not observe(trainjob).phase.terminal


@contextmanager
def world(seed: int, directory: Path) -> Iterator[Local]:
    """The world of a seed."""
    home = directory / f"home-{seed}"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        made = Local(seed, home)
        patch.setattr(anyio.to_thread, "run_sync", inline)
        patch.setattr(supervision, "subprocess", SimpleNamespace(run=made.supervise, DEVNULL=-3))
        patch.setattr(supervising, "Rank", type("_WorldRank", (_Rank,), {"world": made}))
        patch.setattr(conditions, "sweep", made.sweep)
        patch.setattr(supervising, "sweep", made.sweep)
        for name, number in (("_free_port", 29_500), ("_child_exits", 0)):
            patch.setattr(supervising, name, lambda number=number: number)
        patch.setattr("trainjob._backends.local.supervisor.selectors.DefaultSelector", _NoOutput)
        patch.setattr(supervising.Supervisor, "_wait", lambda _, seconds: made.machine.sleep(seconds, "tick"))
        # A twentieth of the looks, which are the same: a second is as long for all of them.
        for module, name in ((supervising, "_TICK"), (watching, "_LOOK"), (watching, "_CHECK")):
            patch.setattr(module, name, 0.5)
        patch.setenv("TRAINJOB_LOCAL_GPUS", "1")
        patch.setattr("trainjob._backends.local.gpus.shutil.which", lambda _: None)
        os.environ.setdefault("PATH", os.defpath)
        stack.enter_context(made.machine.installed(patch))
        yield made
