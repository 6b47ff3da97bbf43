"""The processes of a world: what the command line, Airflow, KFP, a study, people and the reaper call.

A process that is killed sends nothing more, and none of its code has an effect.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import anyio
from tests.fakes.kube.objects import NAMESPACE
from tests.simulation.settings import Settings
from tests.simulation.transport import Connection, Sent

from trainjob import JobRef, TimedOut, TrainJobFailed, WaitOptions
from trainjob._backends.credentials import Access, Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel, cancel_key, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.reaper import reap
from trainjob._jobs.records import mark_delivered
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import CancelAction, is_replaced
from trainjob._manifest.unattended import SUSPEND
from trainjob.errors import RankCrashed, RanksRemain, SpecMismatch
from trainjob.job import labels_of
from trainjob.status import Observation, observe

LAUNCHERS = ("cli", "airflow", "kfp", "tune")
STOPS = ("cancel", "cancelref", "airflowstop", "kfpstop", "onkill")
STOPS_OF_A_TRY = ("airflowstop", "onkill")
"""Stops that launches of later tries do not obey."""

_KILL_SECONDS = 3.5  # that a killed task of Airflow has
_TIMEOUTS: dict[str, dict[str, Any]] = {
    "timeout": {"queue_timeout": timedelta(minutes=10)},
    "start": {"start_timeout": timedelta(seconds=15)},
}
_DEFERRED_SECONDS = 10.0  # until the trigger of a deferred task looks for ranks again


@dataclass
class Launch:
    """One call of `trainjob.launch`.

    Attributes:
        begin: Length of the server's log before it.
        end: Length of the server's log after it; None while it runs.
        uid: UID of the job that it returned; empty if it returned none.
        error: Name of the error that it raised; empty if it raised none.
    """

    begin: int
    end: int | None = None
    uid: str = ""
    error: str = ""


@dataclass(eq=False)
class Process:
    """One process.

    Attributes:
        name: ``p1``, ``p2``, … in their order.
        kind: One of `LAUNCHERS`, of `STOPS`, ``wait`` or ``reap``.
        key: The key that it works on.
        option: ``delete`` or ``suspend`` of a stop; of a launcher ``timeout`` or ``start``: its queue_timeout or
            start_timeout.
        tried: The caller's try.
        settings: The settings of the world.
        stage: What it does: ``start``, ``launch``, ``ranks``, ``wait``, ``give up``, ``cancel``, ``deliver``, ``end``.
        dead: Whether it was killed.
        done: Whether it has ended by itself.
        outcome: ``success``, ``failed``, ``crashed``, ``timed out``, ``stopped``, ``reaped`` or ``none``.
        error: What it raised.
        ref: The job that it has launched or waits for.
        observation: The latest observation of that job.
        launches: Its launches.
        begin: Length of the server's log when it began.
        end: The same when it ended.
        tasks: Its tasks.
        sent: Method, plural and name in each request that it has sent.
        unanswered: Plural -> number of its requests without a reply.
    """

    name: str
    kind: str
    key: str
    option: str
    tried: int
    settings: Settings
    take: Callable[[Sent], None]
    log_length: Callable[[], int]
    stage: str = "start"
    dead: bool = False
    done: bool = False
    outcome: str = ""
    error: BaseException | None = None
    ref: JobRef | None = None
    observation: Observation | None = None
    launches: list[Launch] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    sent: list[tuple[str, str, str]] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Connect the real backend to the simulated server."""
        self.begin = self.log_length()
        self.backend = KubernetesBackend(Credentials(host="http://server"), shared=self.settings.shared)
        connection = Connection(self, self.take)
        access = Access("", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "", None, ())

        async def connect(refused: Access | None) -> tuple[Connection, Access]:
            del refused
            return connection, access

        self.backend._client._connect = connect  # type: ignore[method-assign,assignment]

    @property
    def is_living(self) -> bool:
        """Whether it was neither killed nor has ended."""
        return not self.dead and not self.done

    @property
    def is_launching(self) -> bool:
        """Whether it lives, and its launch is on its way."""
        return self.is_living and self.stage in ("launch", "ranks")

    @property
    def action(self) -> CancelAction:
        """What a stop does with the jobs."""
        return "suspend" if self.option == "suspend" else "cancel"

    async def run(self) -> None:
        """Do what a process of this kind does, and record how it ends."""
        try:
            outcome = await _BODIES[self.kind](self)
        except Exception as error:  # noqa: BLE001 - judged by the properties
            if self.dead:
                return
            self.error = error
        else:
            self.outcome = outcome
        if not self.dead:
            self.done = True
            self.end = self.log_length()
            await self.backend.aclose()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs any more."""
        self.dead = True
        for task in list(self.tasks):
            task.cancel()

    def follow(self, ref: JobRef) -> None:
        """Wait for another attempt from now on."""
        self.ref = ref

    def observe(self, observation: Observation, notice: str) -> None:
        """Keep what a person sees."""
        del notice
        self.observation = observation

    def __str__(self) -> str:
        how = "killed" if self.dead else self.outcome or repr(self.error) if self.done else "lives"
        return f"{self.name} {self.kind} of {self.key}: {self.stage}, {how}"


# --- launchers


async def _launched(process: Process) -> JobRef:
    """Launch as the command line, Airflow, KFP or a study does."""
    call = Launch(process.log_length())
    process.launches.append(call)
    process.stage = "launch"
    try:
        ref = await launch(
            process.backend,
            process.settings.spec(process.key, int(process.name.removeprefix("p"))),
            process.key,
            namespace=NAMESPACE,
            **_launch_arguments(process),
        )
        call.uid = ref.uid
    except Exception as error:
        call.error = type(error).__name__
        raise
    finally:
        call.end = process.log_length()
    process.ref = ref
    return ref


def _launch_arguments(process: Process) -> dict[str, Any]:
    if process.kind == "tune":
        return {"last_try": 2, "after_failure": "infrastructure", "origin": SUSPEND}
    common = {"origin": SUSPEND, "timeouts": _options(process)}
    if process.kind == "airflow":
        return common | {"tried": process.tried, "wait_for_ranks": not process.settings.deferrable}
    if process.kind == "kfp":
        return common | {"tried": process.tried, "after_failure": "retry" if process.tried == 1 else "verdict"}
    return common


def _options(process: Process) -> WaitOptions:
    return WaitOptions(fail_on_first_crash=process.settings.first_crash, **_TIMEOUTS.get(process.option, {}))


async def _launcher(process: Process) -> str:
    while True:
        try:
            ref = await _launched(process)
            break
        except RanksRemain:  # of a deferrable task: its trigger looks again
            process.stage = "ranks"
            await anyio.sleep(_DEFERRED_SECONDS)
        except TimedOut:
            await _stop_after_timeout(process)
            return "timed out"
        except (TrainJobFailed, SpecMismatch) as error:
            if isinstance(error, SpecMismatch) and not process.settings.edited:
                raise
            process.stage = "end"
            return "failed"
    process.stage = "wait"
    try:
        await wait(process.backend, ref, _options(process), on_change=process.observe, on_follow=process.follow)
    except RankCrashed as error:
        process.stage = "give up"
        assert process.ref is not None
        await give_up(process.backend, process.ref, error.diagnosis, process.settings.on_crash)
        process.stage = "end"
        return "crashed"
    except TimedOut:
        await _stop_after_timeout(process)
        return "timed out"
    except TrainJobFailed:
        process.stage = "end"
        return "failed"
    assert process.ref is not None
    if process.kind in ("cli", "airflow"):  # an execution of KFP has one result, also for a pod that is restarted
        process.stage = "deliver"
        await mark_delivered(process.backend, process.ref)
    process.stage = "end"
    return "success"


async def _stop_after_timeout(process: Process) -> None:
    """Stop the job as the integration does. Of a launch that has timed out only Airflow cancels the key."""
    if process.kind == "airflow" and process.ref is None:
        await _on_kill(process)
    elif process.kind != "cli" and process.ref is not None:
        present = await process.backend.get(NAMESPACE, process.ref.name) if process.kind == "airflow" else None
        if present is None or not is_replaced(present):
            process.stage = "cancel"
            await cancel(process.backend, process.ref)
    process.stage = "end"


# --- waiters, stops and the reaper


async def _waiter(process: Process) -> str:
    """``trainjob wait``, a sensor, a component of KFP: waits for a job that somebody else has launched."""
    process.stage = "look"
    jobs = await process.backend.find(NAMESPACE, labels_of(process.key))
    running = [JobRef.of(job) for job in jobs if not observe(job).phase.terminal]
    if not running:
        return "none"
    process.ref = max(running, key=lambda ref: ref.attempt)
    process.stage = "wait"
    try:
        await wait(process.backend, process.ref, on_change=process.observe, on_follow=process.follow)
    except TrainJobFailed:
        process.stage = "end"
        return "failed"
    process.stage = "end"
    return "success"


async def _cancel_key(process: Process) -> str:
    """``trainjob cancel --key``."""
    process.stage = "cancel"
    await cancel_key(process.backend, process.key, namespace=NAMESPACE, action=process.action)
    process.stage = "end"
    return "stopped"


async def _cancel_ref(process: Process) -> str:
    """``trainjob cancel NAME``: the latest attempt."""
    process.stage = "look"
    refs = [JobRef.of(job) for job in await process.backend.find(NAMESPACE, labels_of(process.key))]
    if not refs:
        return "none"
    process.ref = max(refs, key=lambda ref: ref.attempt)
    process.stage = "cancel"
    await cancel(process.backend, process.ref, process.action)
    process.stage = "end"
    return "stopped"


async def _on_kill(process: Process) -> str:
    """The kill or the clear of one try of a task, which later tries do not obey."""
    process.stage = "cancel"
    await cancel_key(process.backend, process.key, namespace=NAMESPACE, action=process.action, tried=process.tried)
    process.stage = "end"
    return "stopped"


async def _airflow_stop(process: Process) -> str:
    """A killed task whose launch has not returned: the provider's own stop, and its time."""
    running: Any = _airflow_running()
    client = SimpleNamespace(backend=process.backend, namespace=NAMESPACE)
    process.stage = "cancel"
    async with asyncio.timeout(_KILL_SECONDS):
        await running.RunningJob(client, process.key, tried=process.tried)._stop(process.action, _KILL_SECONDS)
    process.stage = "end"
    return "stopped"


async def _kfp_stop(process: Process) -> str:
    """SIGTERM of a step of KFP whose launch has not returned: the component's own stop."""
    from trainjob_kfp.stopping import StopWithStep

    client: Any = SimpleNamespace(backend=process.backend, namespace=NAMESPACE)
    process.stage = "cancel"
    await StopWithStep(client, process.key, process.option).request()
    process.stage = "end"
    return "stopped"


async def _kfp_sigterm(process: Process) -> str:
    """SIGTERM of a step of KFP that waits: the request that it had prepared, which names no version of the job."""
    from trainjob_kfp.stop_requests import StopRequests

    prepared: list[Mapping[str, Any]] = []
    process.stage = "look"
    job = (await process.backend.find(NAMESPACE, labels_of(process.key)))[-1]
    process.ref = JobRef.of(job)

    async def prepare(_: JobRef, patch: Mapping[str, Any] | None) -> Any:
        prepared.extend([] if patch is None else [patch])
        return SimpleNamespace(warm=_warm, close=lambda: None)

    backend = SimpleNamespace(cluster=SimpleNamespace(prepared_request=prepare), cancels=process.backend.cancels)
    client: Any = SimpleNamespace(backend=backend, namespace=NAMESPACE)
    with anyio.move_on_after(1):
        await StopRequests(job, process.option).keep_ready(client)
    process.stage = "cancel"
    await process.backend.patch(process.ref, *prepared)
    process.stage = "end"
    return "stopped"


async def _warm() -> None: ...


async def _reap(process: Process) -> str:
    process.stage = "reap"
    await reap(process.backend, NAMESPACE)
    process.stage = "end"
    return "reaped"


def _airflow_running() -> Any:
    from trainjob_airflow import running

    return running


def load(kind: str) -> None:
    """Import the integration that a kind of process belongs to."""
    if kind.startswith("airflow"):
        _airflow_running()
    elif kind.startswith("kfp"):
        from trainjob_kfp import stopping

        del stopping


_BODIES: dict[str, Callable[[Process], Awaitable[str]]] = {
    **dict.fromkeys(LAUNCHERS, _launcher),
    "wait": _waiter,
    "cancel": _cancel_key,
    "cancelref": _cancel_ref,
    "onkill": _on_kill,
    "airflowstop": _airflow_stop,
    "kfpstop": _kfp_stop,
    "kfpsigterm": _kfp_sigterm,
    "reap": _reap,
}
