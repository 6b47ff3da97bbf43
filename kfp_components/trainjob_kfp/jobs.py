"""The TrainJob of a step: launch or adopt it, wait for it, and report its progress and its failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainjob import (
    ConfigurationError,
    Diagnosis,
    InvalidSpec,
    InvalidWaitOptions,
    JobRef,
    LogLine,
    Observation,
    OwnerReference,
    Phase,
    Problem,
    RankCrashed,
    Settings,
    TimedOut,
    TrainJobClient,
    TrainJobError,
    TrainJobFailed,
    TrainJobResult,
    TrainJobSpec,
    WaitOptions,
    connect as connect_backend,
)
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.progress_log import (
    PROGRESS_SECONDS,
    LogSink,
    ProgressLogger,
)
from trainjob._jobs.results import spent_text
from trainjob._jobs.steps import KEEP, StepPolicy, finish
from trainjob._manifest.unattended import of_step
from trainjob._pages.live import take_document
from trainjob._pages.page import page_html
from trainjob._spec.arguments import wrong_value
from trainjob_kfp.execution import Execution, origin_of
from trainjob_kfp.steplog import write_line
from trainjob_kfp.stopping import StopWithStep, command_of

_NO_DEADLINE = "0001-"  # start of ARGO_DEADLINE on a first try: Go's zero time


def connect(parameters: Mapping[str, Any]) -> TrainJobClient:
    """A client of the ``backend`` and ``namespace`` of a component."""
    return TrainJobClient(parameters["backend"] or None, parameters["namespace"] or None)


def connect_shared(parameters: Mapping[str, Any]) -> TrainJobClient:
    """The same for many jobs at once: their waiters share one watch."""
    return TrainJobClient(connect_backend(parameters["backend"] or None, shared=True), parameters["namespace"] or None)


AddToDocument = Callable[[TrainJobResult, dict[str, Any]], dict[str, Any]]
"""Adds what a step knows to the document of its job, from which the page is made."""


def unchanged(result: TrainJobResult, document: dict[str, Any]) -> dict[str, Any]:
    """Add nothing."""
    del result
    return document


def run_job(
    execution: Execution,
    spec: TrainJobSpec,
    parameters: Mapping[str, Any],
    report: Path | None = None,
    add: AddToDocument = unchanged,
) -> TrainJobResult:
    """Launch or adopt the execution's TrainJob and wait for its end.

    Args:
        execution: The execution of the step.
        spec: The spec of the job.
        parameters: ``queue_timeout``, ``start_timeout``, ``run_timeout``, ``cancel_on_timeout``, ``on_kill_action``,
            ``backend``, ``namespace`` of the component, and ``fail_on_first_crash``, ``on_crash_action``,
            ``retry_user_errors`` if it has them.
        report: Path of the HTML page about the complete job.
        add: Adds to the document of the page.

    Raises:
        TrainJobError: the job cannot be launched or has failed. A job that exceeds a timeout, or that fails the step
            at its first crash, is stopped if the parameters say so.
    """
    options = wait_options_of(parameters)
    with connect(parameters) as client, StopWithStep(client, execution.key, parameters["on_kill_action"]) as stop:
        if parameters["owned_by_run"]:
            spec = spec.model_copy(update={"owner_reference": workflow_of_this_pod(client)})
        again = execution.after_failure(user_errors=bool(parameters.get("retry_user_errors", True)))
        origin = origin_of(execution) | of_step(parameters["on_kill_action"])
        with offered_report(client, crash_deletes=parameters.get("on_crash_action") == "cancel"):
            adopted: list[JobRef] = []
            ref = client.launch(
                spec,
                execution.key,
                tried=execution.tried,
                after_failure=again,
                origin=origin,
                on_adopt=adopted.append,
                timeouts=options,
            )
            stop.job = client.get(ref)
            client.start(stop.keep_ready)
            write_job(client, ref, adopted=bool(adopted))
            _log_deadline()

            # Never marked as delivered: the execution has one result, also for a pod that is restarted after it.
            policy = StepPolicy(
                parameters.get("on_crash_action", "suspend"), cancel_on_timeout=parameters["cancel_on_timeout"]
            )
            return finish_and_report(client, ref, options, report, add, policy=policy, on_follow=stop.follow)


def write_job(client: TrainJobClient, ref: JobRef, *, adopted: bool = False) -> None:
    """Log the job and where to see it: KFP (2.17) shows artifacts only after the end of their step."""
    write_line(f"TrainJob {ref} (attempt {ref.attempt}{', adopted' if adopted else ''}, uid {ref.uid})")
    if address := address_of(ref.namespace, ref.name, ref.uid):
        write_line(f"TrainJob {ref}: {address}")  # KFP's UI shows it as a link
    write_line(f"watch it: {command_of(client)} ui -n {ref.namespace} (job {ref.name})")


@contextmanager
def offered_report(client: TrainJobClient, *, crash_deletes: bool = False) -> Iterator[None]:
    """Add the command that makes the page of a failed job to its error: KFP (2.17) drops the outputs of failed steps.

    Args:
        client: A client of the job's backend and namespace.
        crash_deletes: Whether a job that fails its step by a crash of a rank is deleted.
    """
    try:
        yield
    except TrainJobFailed as error:
        gone = error.diagnosis.phase is Phase.DELETED or (crash_deletes and isinstance(error, RankCrashed))
        if not gone:
            job = error.diagnosis.job
            error.add_note(f"report: {command_of(client)} report {job} -o {job.rpartition('/')[2]}.html")
        raise


def finish_and_report(
    client: TrainJobClient,
    ref: JobRef,
    options: WaitOptions,
    report: Path | None,
    add: AddToDocument = unchanged,
    *,
    policy: StepPolicy = KEEP,
    on_follow: Callable[[JobRef], None] | None = None,
) -> TrainJobResult:
    """Wait for a job, log its progress, and write an HTML page about it once it is complete.

    Args:
        client: A client of the job's backend and namespace.
        ref: The job. If another attempt of its key replaces it, that one is waited for.
        options: When to stop waiting before the job has ended.
        report: Path of the page.
        add: Adds to the document of the page.
        policy: What becomes of the job if the step fails before the job has ended.
        on_follow: Called with the attempt that is waited for from now on, on the event loop of the client.

    Raises:
        TrainJobError: the job has failed, or the wait has ended by an option.
    """

    def logger_of(job: JobRef) -> ProgressLogger:
        return ProgressLogger(LogSink(write_line, job=f"TrainJob {job}"), progress_seconds=PROGRESS_SECONDS)

    log, history = logger_of(ref), MetricHistory()

    def change(observation: Observation, notice: str) -> None:
        history.observe(observation, client.backend.now().timestamp())
        log.change(observation, notice)

    def line(written: LogLine) -> None:
        log.line(written)

    def crash(diagnosis: Diagnosis) -> None:
        log.crash(diagnosis)

    def follow(job: JobRef) -> None:
        nonlocal ref, history, log
        write_line(f"TrainJob {ref} was replaced by {job}, which is waited for from now on")
        ref, history, log = job, MetricHistory(), logger_of(job)
        if on_follow is not None:
            on_follow(job)

    try:
        result = client.call(
            lambda: finish(
                client.backend,
                ref,
                options,
                policy,
                on_change=change,
                on_log=line,
                on_crash=crash,
                on_follow=follow,
            )
        )
    except (TrainJobFailed, TimedOut) as error:
        if spent := spent_text(error.goodput):  # KFP (2.17) drops the outputs of failed steps, metrics included
            write_line(f"TrainJob {ref}: {spent}")
        raise
    if report is not None:
        try:
            document = client.call(lambda: take_document(client.backend, ref.namespace, ref.name, history=history))
            page = page_html(add(result, document))
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(page, encoding="utf-8")
        except (TrainJobError, OSError) as error:  # the training is complete; a missing report must not fail the step
            write_line(f"cannot write the report about TrainJob {ref}: {error}")
    return result


def workflow_of_this_pod(client: TrainJobClient) -> OwnerReference:
    """The Argo Workflow that created this step's pod.

    Raises:
        ConfigurationError: the process is not in a pod of a KFP backend, or the job is in another namespace.
    """
    cluster, pod = client.backend.cluster, os.environ.get("KFP_POD_NAME", "")
    if not pod or cluster is None:
        raise ConfigurationError(
            "owned_by_run needs a step on a KFP backend, but this process is not in a pod of one; leave it out"
        )
    where = cluster.default_namespace
    if where != client.namespace:
        raise ConfigurationError(
            f"owned_by_run: the run is in namespace {where} and the job in {client.namespace}, but Kubernetes deletes "
            "an object at once if its owner is in another namespace; leave namespace out, or use a cleanup task"
        )
    for owner in client.call(lambda: cluster.owners_of_pod(where, pod)):
        if owner["kind"] == "Workflow":
            return OwnerReference.model_validate({name: owner[name] for name in ("apiVersion", "kind", "name", "uid")})
    raise ConfigurationError(f"owned_by_run: pod {where}/{pod} has no Workflow as its owner")


def address_of(namespace: str, name: str, uid: str) -> str:
    """The address of the job in a dashboard, by ``TRAINJOB_JOB_URL``; empty if that is not set or is invalid."""
    known = {"namespace": quote(namespace, safe=""), "name": quote(name, safe=""), "uid": quote(uid, safe="")}
    try:
        return Settings().job_url.format_map(known)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        write_line(f"TRAINJOB_JOB_URL is invalid ({error!r}): use only {{namespace}}, {{name}} and {{uid}} in braces")
        return ""


def _log_deadline() -> None:
    """Log when KFP terminates this try, if it is a retry: the limit counts from the start of the first try."""
    deadline = os.environ.get("ARGO_DEADLINE", "")
    if deadline and not deadline.startswith(_NO_DEADLINE):
        write_line(
            f"KFP terminates this step at {deadline}, even if the TrainJob still runs: the time limit of its retry "
            "policy counts from the first try; use trainjob_kfp.retry(task, times), which allows a month"
        )


def wait_options_of(parameters: Mapping[str, Any]) -> WaitOptions:
    """The wait options among a component's parameters; a timeout of 0 is no limit.

    Raises:
        InvalidSpec: a number is negative, or an action is unknown.
    """
    options, problems = WaitOptions(), []
    try:
        options = WaitOptions.parse({name: value for name, value in parameters.items() if value != 0})
    except InvalidWaitOptions as error:
        problems = [
            Problem(name, f"is {value} seconds", "give 1 or more, or 0 for no limit")
            for name, value in error.invalid.items()
        ]
    for name in ("on_kill_action", "on_crash_action"):
        if name in parameters and (wrong := wrong_value(name, parameters[name])):
            problems.append(Problem(name, wrong))
    if problems:
        raise InvalidSpec(problems)
    return options
