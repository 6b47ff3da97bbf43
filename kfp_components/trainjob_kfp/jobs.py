"""One TrainJob from within a step: launch or adopt it, show it, and say why it failed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainjob import (
    InvalidSpec,
    InvalidWaitOptions,
    TrainJobClient,
    TrainJobError,
    TrainJobResult,
    TrainJobSpec,
    WaitOptions,
)
from trainjob.errors import ConfigurationError, Problem, RankCrashed, TimedOut
from trainjob.lifecycle import give_up
from trainjob.manifest import JobRef
from trainjob.progress_log import PROGRESS_SECONDS, LogSink, ProgressLogger
from trainjob.report import page
from trainjob.settings import Settings
from trainjob.spec import OwnerReference
from trainjob.unattended import SUSPEND
from trainjob_kfp.execution import Execution
from trainjob_kfp.steplog import say
from trainjob_kfp.stopping import StopWithStep, origin_of

ACTIONS = ("suspend", "cancel", "keep")
"""What can become of a job when its step ends before it."""

_NO_DEADLINE = "0001-"  # what ARGO_DEADLINE begins with on a first try: Go's time that is none


def connect(parameters: Mapping[str, Any]) -> TrainJobClient:
    """A client of the ``backend`` and ``namespace`` of a component."""
    return TrainJobClient(parameters["backend"] or None, parameters["namespace"] or None)


def run_job(
    execution: Execution, spec: TrainJobSpec, parameters: Mapping[str, Any], report: Path | None = None
) -> TrainJobResult:
    """Launch or adopt the execution's TrainJob and wait for its end.

    Args:
        execution: Which piece of work it is.
        spec: What to run.
        parameters: ``queue_timeout``, ``start_timeout``, ``run_timeout``, ``cancel_on_timeout``, ``on_kill_action``,
            ``backend``, ``namespace`` as the components have them, and ``fail_on_first_crash``, ``on_crash_action``,
            ``retry_user_errors`` where they do.
        report: Where to write a page about the job once it is complete.

    Raises:
        TrainJobError: see `trainjob.lifecycle`; a job that ran out of a budget, or is given up at its first crash, is
            stopped, if so chosen.
    """
    options = wait_options_of(parameters)
    with connect(parameters) as client, StopWithStep(client, execution.key, parameters["on_kill_action"]) as stop:
        if parameters["owned_by_run"]:
            spec = spec.model_copy(update={"owner_reference": workflow_of_this_pod(client)})
        again = execution.after_failure(user_errors=bool(parameters.get("retry_user_errors", True)))
        origin = origin_of(execution) | (SUSPEND if parameters["on_kill_action"] != "keep" else {})
        ref = client.launch(spec, execution.key, after_failure=again, origin=origin)
        stop.job = client.get(ref)
        client.start(stop.keep_ready)
        say(f"TrainJob {ref} (attempt {ref.attempt}, uid {ref.uid})")
        if address := address_of(ref.namespace, ref.name, ref.uid):
            say(f"TrainJob {ref}: {address}")  # KFP's UI makes a link of it
        _say_deadline()
        try:
            # Never marked as delivered: this execution has one result, also for a pod that is started again after it.
            return attend(client, ref, options, report)
        except RankCrashed as error:
            why, action = error.diagnosis, parameters["on_crash_action"]
            say(f"TrainJob {client.call(lambda: give_up(client.backend, ref, why, action))}")
            raise
        except TimedOut:
            if parameters["cancel_on_timeout"]:
                client.cancel(ref)
            raise


def attend(client: TrainJobClient, ref: JobRef, options: WaitOptions, report: Path | None) -> TrainJobResult:
    """Wait for a job and write down what happens, and a page about it once it is complete.

    Raises:
        TrainJobError: see `trainjob.waiting.wait`.
    """
    log = ProgressLogger(LogSink(say, job=f"TrainJob {ref}"), progress_seconds=PROGRESS_SECONDS)
    result = client.wait(ref, options, on_change=log.change, on_log=log.line, on_crash=log.crash)
    if report is not None:
        try:
            taken = client.diagnose(ref.name)
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(page(taken), encoding="utf-8")
        except (TrainJobError, OSError) as error:  # the training is done, and its result is what counts
            say(f"no report about TrainJob {ref}: {error}")
    return result


def workflow_of_this_pod(client: TrainJobClient) -> OwnerReference:
    """The Argo Workflow that has made this step's pod.

    Raises:
        ConfigurationError: this is no pod of a KFP backend, or the job is to be in another namespace.
    """
    cluster, pod = client.backend.cluster, os.environ.get("KFP_POD_NAME", "")
    if not pod or cluster is None:
        raise ConfigurationError("owned_by_run is for steps on a KFP backend, and this is none of its pods")
    where = cluster.default_namespace
    if where != client.namespace:
        raise ConfigurationError(
            f"owned_by_run: the run is in namespace {where} and the job in {client.namespace}, and Kubernetes deletes "
            "at once what is owned from another one; leave namespace out, or use a cleanup task"
        )
    for owner in client.call(lambda: cluster.owners_of_pod(where, pod)):
        if owner["kind"] == "Workflow":
            return OwnerReference.model_validate({name: owner[name] for name in ("apiVersion", "kind", "name", "uid")})
    raise ConfigurationError(f"owned_by_run: pod {where}/{pod} belongs to no Workflow")


def address_of(namespace: str, name: str, uid: str) -> str:
    """Where a dashboard shows the job, by ``TRAINJOB_JOB_URL``; empty where that is not set or cannot be used."""
    known = {"namespace": quote(namespace, safe=""), "name": quote(name, safe=""), "uid": quote(uid, safe="")}
    try:
        return Settings().job_url.format_map(known)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        say(f"TRAINJOB_JOB_URL cannot be used, write only {{namespace}}, {{name}} and {{uid}} in braces: {error!r}")
        return ""


def _say_deadline() -> None:
    """Say when KFP will end this try, which is a retry: the time counts from the first one's start."""
    deadline = os.environ.get("ARGO_DEADLINE", "")
    if deadline and not deadline.startswith(_NO_DEADLINE):
        say(
            f"KFP ends this step at {deadline}, whatever the TrainJob does then: its retry policy counts from the "
            "first try; trainjob_kfp.retry(task, times) allows a month"
        )


def wait_options_of(parameters: Mapping[str, Any]) -> WaitOptions:
    """The wait options among a component's parameters; a timeout of 0 is no limit.

    Raises:
        InvalidSpec: a number is negative, or there is no such action.
    """
    options, problems = WaitOptions(), []
    try:
        options = WaitOptions.parse({name: value for name, value in parameters.items() if value != 0})
    except InvalidWaitOptions as error:
        problems = [
            Problem(name, f"is {value} seconds", "give 1 or more, or 0 for no limit")
            for name, value in error.invalid.items()
        ]
    problems += [
        Problem(name, f"is {action!r}", f"give one of {', '.join(ACTIONS)}")
        for name in ("on_kill_action", "on_crash_action")
        if (action := parameters.get(name, "suspend")) not in ACTIONS
    ]
    if problems:
        raise InvalidSpec(problems)
    return options
