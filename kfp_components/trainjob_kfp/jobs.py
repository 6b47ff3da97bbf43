"""One TrainJob from within a step: launch or adopt it, show it, stop it when the step is stopped, say why it failed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import anyio

from trainjob import (
    Budgets,
    InvalidSpec,
    Observation,
    Phase,
    TrainJobClient,
    TrainJobError,
    TrainJobFailed,
    TrainJobResult,
    TrainJobSpec,
)
from trainjob.backends.base import TrainJob
from trainjob.crashes import warning
from trainjob.diagnosis import Diagnosis
from trainjob.errors import Problem, RankCrashed, TimedOut
from trainjob.launch import CancelAction, give_up, request_cancel
from trainjob.manifest import JobRef, labels_of
from trainjob.status import observe
from trainjob_kfp.execution import Execution

ACTIONS = ("suspend", "cancel", "keep")
"""What can become of a job when its step ends before it."""

_MAX_MESSAGE = 4096  # kubelet: MaxContainerTerminationMessageLength; it cuts off the rest
_CANCEL_SECONDS = 10.0  # kfp.local and plain pods leave that long; on a KFP backend it is 0.03 to 1.7 s


def say(what: object) -> None:
    """A line for the step's log, at once."""
    print(what, flush=True)  # noqa: T201 - the step's log is its stdout


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn an error into the last lines of the log, the termination message, and exit code 1."""
    try:
        yield
    except TrainJobError as error:
        text = str(error) if isinstance(error, TrainJobFailed) else f"error: {error}"
        _terminate_with(text)
        say(text)
        sys.exit(1)  # a traceback would show our frames, which are not to blame, below the reason


def _terminate_with(text: str) -> None:
    """Leave `text` as the container's termination message, the only text of a failed step that reaches the Workflow."""
    given = os.environ.get("TRAINJOB_TERMINATION_LOG")
    path = Path(given or "/dev/termination-log")
    if not given and not ("KUBERNETES_SERVICE_HOST" in os.environ and path.exists()):
        return
    message = text.encode()[:_MAX_MESSAGE].decode("utf-8", "ignore")
    try:
        path.write_text(message, encoding="utf-8")
    except OSError as error:
        say(f"cannot write {path}: {error}")


def run_job(execution: Execution, spec: TrainJobSpec, parameters: Mapping[str, Any]) -> TrainJobResult:
    """Launch or adopt the execution's TrainJob and wait for its end.

    Args:
        execution: Which piece of work it is.
        spec: What to run.
        parameters: ``queue_timeout``, ``start_timeout``, ``run_timeout``, ``cancel_on_timeout``, ``on_kill_action``,
            ``backend``, ``namespace`` as the components have them, and ``fail_on_first_crash``, ``on_crash_action``
            where they do.

    Raises:
        TrainJobError: see `trainjob.launch`; a job that ran out of a budget, or is given up at its first crash, is
            stopped, if so chosen.
    """
    budgets = _budgets(parameters)
    with (
        TrainJobClient(parameters["backend"] or None, parameters["namespace"] or None) as client,
        StopWithStep(client, execution.key, parameters["on_kill_action"]) as stop,
    ):
        ref = client.launch(spec, execution.key, after_failure=execution.after_failure)
        stop.job = client.get(ref)
        say(f"TrainJob {ref} (attempt {ref.attempt}, uid {ref.uid})")
        try:
            # Never marked as delivered: this execution has one result, also for a pod that is started again after it.
            return client.wait(ref, budgets, on_change=_Narrator(ref), on_log=say, on_crash=_say_crash)
        except RankCrashed as error:
            why, action = error.diagnosis, parameters["on_crash_action"]
            say(f"TrainJob {client.call(lambda: give_up(client.backend, ref, why, action))}")
            raise
        except TimedOut:
            if parameters["cancel_on_timeout"]:
                client.cancel(ref)
            raise


def _budgets(parameters: Mapping[str, Any]) -> Budgets:
    problems = [
        Problem(name, f"is {parameters[name]} seconds", "give 1 or more, or 0 for no limit")
        for name in ("queue_timeout", "start_timeout", "run_timeout")
        if parameters[name] < 0
    ]
    problems += [
        Problem(name, f"is {action!r}", f"give one of {', '.join(ACTIONS)}")
        for name in ("on_kill_action", "on_crash_action")
        if (action := parameters.get(name, "suspend")) not in ACTIONS
    ]
    if problems:
        raise InvalidSpec(problems)

    def limit(name: str) -> timedelta | None:
        return timedelta(seconds=parameters[name]) if parameters[name] else None

    impatient = bool(parameters.get("fail_on_first_crash"))
    queue, start, run = (limit(name) for name in ("queue_timeout", "start_timeout", "run_timeout"))
    return Budgets(queue, start, run, fail_on_first_crash=impatient)


def _say_crash(diagnosis: Diagnosis) -> None:
    for line in warning(diagnosis):
        say(line)


class _Narrator:
    """Writes down what changes: the phase with its reason, and the training's own progress."""

    def __init__(self, ref: JobRef) -> None:
        self._ref = ref
        self._phase: tuple[Phase, str] | None = None
        self._progress = ""

    def __call__(self, observation: Observation, notice: str) -> None:
        if notice:
            say(f"TrainJob {self._ref}: {notice}")
        phase = (observation.phase, "" if observation.phase is Phase.FAILED else observation.message)
        if phase != self._phase:
            self._phase = phase
            say(f"TrainJob {self._ref} is {observation.phase}" + (f": {phase[1]}" if phase[1] else ""))
        progress = _progress(observation)
        if progress and progress != self._progress:
            self._progress = progress
            say(f"TrainJob {self._ref}: {progress}")


def _progress(observation: Observation) -> str:
    parts = []
    if observation.progress is not None:
        parts.append(f"{observation.progress:g} %")
        if observation.remaining_seconds:
            parts.append(f"about {timedelta(seconds=round(observation.remaining_seconds))} left")
    parts += [f"{name} {_short(value)}" for name, value in observation.metrics.items()]
    return ", ".join(parts)


def _short(value: str) -> str:
    with suppress(ValueError):
        return f"{float(value):.6g}"
    return value


class StopWithStep:
    """While it is entered, SIGTERM and Ctrl-C stop the TrainJob before they end the process.

    After Terminate, Python has 0.03 to 1.7 s on a KFP backend (its parent dies at once and takes the container along),
    so the request goes out before anything else, over the connection that is open anyway.
    """

    def __init__(self, client: TrainJobClient, key: str, action: str) -> None:
        self._client, self._key, self._action = client, key, action
        self.job: TrainJob | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        del frame
        outcome = "the TrainJob goes on"
        try:
            if self._action != "keep":
                self._client.start(self.request).result(_CANCEL_SECONDS)
                outcome = f"the TrainJob was asked to stop ({self._action})"
        except Exception as error:  # noqa: BLE001 - whatever it is, the process ends now
            outcome = f"the TrainJob could not be asked to stop and may go on: {error!r}"
        finally:
            # Past Python's buffers, which whoever was interrupted may be holding.
            os.write(1, f"{signal.Signals(number).name}: {outcome}\n".encode())
            os._exit(128 + number)

    async def request(self) -> None:
        """Ask the job to stop: one request, once it is known which job it is."""
        action: CancelAction = "suspend" if self._action == "suspend" else "delete"
        if self.job is not None:
            await request_cancel(self._client.backend, self.job, action)
            return
        # In the middle of launching: the request that creates the job may be on its way.
        for _ in range(20):
            jobs = await self._client.backend.find(self._client.namespace, labels_of(self._key))
            for job in jobs:
                if not observe(job).phase.terminal:
                    await request_cancel(self._client.backend, job, action)
                    return
            await anyio.sleep(0.05)
