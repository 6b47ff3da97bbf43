"""The base class of all operators: a task that launches one TrainJob and waits for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from airflow.providers.common.compat.sdk import AirflowSkipException, AirflowTaskTimeout, conf

from trainjob_airflow import assets, links
from trainjob_airflow.arguments import Seconds, check_place, check_switches, check_texts, is_mapped_element
from trainjob_airflow.compat import TaskDeferralError, TaskDeferralTimeout
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, airflow_error, own_timeout
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import (
    begin_deferral,
    end_deferral,
    has_retry,
    has_succeeded,
    is_wanted,
    key_of,
    key_of_earlier_try,
    labels_of_instance,
    labels_of_run,
    labels_of_task,
    may_have_another_key,
    warn_about_name,
    was_cleared,
)
from trainjob_airflow.operators.reporting import ReportingTask
from trainjob_airflow.running import RunningJob, connected, has_ended, seconds_to_wait
from trainjob_airflow.stats import stats, tags_of
from trainjob_airflow.step import Step, outage_of
from trainjob_airflow.templates import secrets_in

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef, TimedOut, TrainJobClient, TrainJobError, TrainJobSpec
    from trainjob._jobs.steps import StepPolicy
    from trainjob._manifest.attempts import CancelAction

OnKill = Literal["cancel", "suspend", "keep"]
OnCrash = Literal["suspend", "cancel", "keep"]
_T = TypeVar("_T")

_KILL_SECONDS = 3.5  # Airflow sends SIGKILL 5 s after the SIGTERM that calls on_kill()
CANCEL_SECONDS = 60.0
BACKSTOP = timedelta(minutes=5)  # after execution_timeout, in case no triggerer runs
MAX_RESUMED = 3
_RANKS_PAUSE = 10.0  # seconds between two launches of a deferred task while ranks of an earlier attempt end


class TrainJobTask(ReportingTask):
    """Launches the job of `job_spec`, waits for its end in a worker or in the triggerer, and returns its result.

    `trainjob_airflow.operators.trainjob.TrainJobOperator` documents the arguments.
    """

    operator_extra_links = links.LINKS
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        namespace: str | None = None,
        trainjob_conn_id: str = TrainJobHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        queue_timeout: Seconds = None,
        start_timeout: Seconds = None,
        run_timeout: Seconds = None,
        fail_fast: bool = False,
        fail_on_first_crash: bool = False,
        on_crash_action: OnCrash = "suspend",
        on_kill_action: OnKill = "suspend",
        cancel_on_timeout: bool = True,
        retry_user_errors: bool = True,
        get_logs: bool = True,
        wait_for_completion: bool = True,
        skip_on_exit_code: int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> None:
        given = dict(locals())
        from trainjob import WaitOptions  # here, so that an import of this module does not import `trainjob`
        from trainjob._spec.arguments import wrong_value

        super().__init__(namespace=namespace, trainjob_conn_id=trainjob_conn_id, **kwargs)
        self.deferrable = deferrable
        self.wait_options = WaitOptions.parse(given)
        for name in ("on_crash_action", "on_kill_action", "cancel_on_timeout", "retry_user_errors"):
            if message := wrong_value(name, given[name]):
                raise ValueError(f"{name} {message}")
        self.on_crash_action = on_crash_action
        self.on_kill_action = on_kill_action
        if not is_mapped_element(self):  # mapped arguments have values only at run time
            check_place(namespace, trainjob_conn_id)
            check_texts(required=True, trainjob_conn_id=trainjob_conn_id)
            check_switches(deferrable=deferrable, get_logs=get_logs, wait_for_completion=wait_for_completion)
        self.cancel_on_timeout = cancel_on_timeout
        self.retry_user_errors = retry_user_errors
        self.get_logs = get_logs
        self.wait_for_completion = wait_for_completion
        codes = [skip_on_exit_code] if isinstance(skip_on_exit_code, int) else [*(skip_on_exit_code or ())]
        if wrong := [code for code in codes if not isinstance(code, int) or not 0 < code < 256]:
            raise ValueError(f"skip_on_exit_code must be 1 to 255, the exit code of a failure, not {wrong[0]!r}")
        self.skip_on_exit_code = codes
        self.on_success_callback = [*self.on_success_callback, _acknowledge]
        self._running: RunningJob | None = None
        self._ranks_until: datetime | None = None
        self._began: int | None = None
        self._resumed = self._killed = False

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """Build the spec of the job from rendered fields.

        Args:
            key: The identity of the task.
            context: Of the task.

        Raises:
            TrainJobError, OSError: The fields are not a valid job.
        """
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Launch or adopt the job, then wait in this worker or in the triggerer."""
        return self._run(context, defer=self.deferrable)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Continue after the trigger's event."""
        from trainjob import JobRef

        ref, outage = JobRef(*event["job"]), outage_of(event, self.log)
        if outage is not None and not outage.retry.retryable:
            return self._run(context, defer=False)
        with self._connected(context, ref.namespace, event["key"], ref) as running:
            if event["followed"]:
                self._publish(context, running, ref)
            if training := self._training(context, running, ref):
                training.resume()
            if outage is not None:
                self._defer_again(context, running, event, outage)
                event = self._wait(context, running, ref)
            return self._end(context, running, event)

    def execute_after_ranks(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Launch again after a pause in which ranks of an earlier attempt may have ended."""
        self._ranks_until = datetime.fromisoformat(event["until"])
        self._began = event["began"]
        return self._run(context, defer=True)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after a deferral, also if the triggerer itself failed; Airflow calls it."""
        end_deferral(context)
        self._resumed = True
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralTimeout, TaskDeferralError) as error:
            # The triggerer could not load the trigger, or no triggerer ran until the backstop. The job keeps running:
            # adopt it and wait here.
            self.log.warning("the triggerer failed (%s); waiting in this worker instead", error)
            return self._run(context, defer=False)

    def on_kill(self) -> None:
        """Interrupt the wait; called in a signal handler by a kill and by the graceful end of the worker.

        Only Airflow's API distinguishes the two, and a signal handler must not call it: the connection to the
        supervisor is not reentrant. `_handle_kill` decides after the handler has returned.
        """
        self._killed = True
        if self._running is not None:
            self._running.stop_waiting()

    def _run(self, context: Context, *, defer: bool) -> Any:
        from trainjob import Evidence, TrainJobResult

        warn_about_name(self.log)
        key = self._key(context)
        spec = self._spec(key, context)
        with self._connected(context, self.namespace, key) as running:
            if self.on_kill_action != "keep" and was_cleared(context):
                running.stop_earlier_tries(self._stops_by, CANCEL_SECONDS)
            ref = self._launch(context, running, spec, defer=defer)
            stats().incr("trainjob.launched", tags=tags_of(context["ti"]))
            self._publish(context, running, ref)
            trainjob = running.look()
            if training := self._training(context, running, ref):
                training.begin(Evidence(trainjob), running.client.backend.now())
            # Airflow (3.3.2) can treat a task whose trigger fires at once as lost ("state mismatch"): each try of a
            # task whose job has already ended would fail.
            if defer and self.wait_for_completion and not has_ended(trainjob):
                self._defer(context, running, ref, phase=training.phase if training else "")
            if not self.wait_for_completion:
                self._delivered = ref
                return TrainJobResult(ref.namespace, ref.name, ref.uid, ref.attempt).as_dict()
            return self._end(context, running, self._wait(context, running, ref))

    def _wait(self, context: Context, running: RunningJob, ref: JobRef) -> Mapping[str, Any]:
        """Wait in this worker; returns what `Step.outcome` does."""
        training = running.training
        policy = self._policy(context)
        step = Step(ref, running.key, self.wait_options, policy, self.log, get_logs=self.get_logs, training=training)
        if training is not None:
            step.earlier = training.stored
        seconds = seconds_to_wait(self._deadline(context), self._margin())
        return running.wait(step, seconds, partial(self._publish, context, running))

    def _end(self, context: Context, running: Any, event: Mapping[str, Any]) -> Any:
        """What `execute` returns, after what `Step.outcome` has returned in this worker or in the triggerer.

        Raises:
            TrainJobError: The job failed, or the task has timed out.
        """
        from trainjob._jobs.steps import unpack_error

        if running.training is not None:
            running.training.end(event["page"])
        if "error" in event:
            raise unpack_error(event["error"])
        return self._deliver(context, event["result"], running.ref)

    def _policy(self, context: Context) -> StepPolicy:
        from trainjob._jobs.steps import StepPolicy

        return StepPolicy(
            self.on_crash_action,
            cancel_on_timeout=self.cancel_on_timeout,
            tried=max(1, context["ti"].try_number),
            is_retried=has_retry(context),
        )

    def _key(self, context: Context) -> str:
        """The key of this task instance, also if the deployment was renamed after an earlier try (Airflow before 3.3).

        Raises:
            TrainJobFailure: The jobs cannot be listed.
        """
        from trainjob.job import MANAGED_BY

        key, ti = key_of(context), context["ti"]
        if not may_have_another_key(context, resumed=self._resumed):
            return key
        labels = {MANAGED_BY: "trainjob", **labels_of_instance(ti, ti.task_id, ti.map_index)}
        with connected(self.trainjob_conn_id, self.namespace) as client:
            jobs = client.call(lambda: client.backend.find(client.namespace, labels))
        return key_of_earlier_try(jobs, context, key)

    def _launch(self, context: Context, running: RunningJob, spec: TrainJobSpec, *, defer: bool) -> JobRef:
        """Launch or adopt the job; a deferrable task waits in the triggerer while ranks of an earlier attempt end.

        After the time that the ranks have to end, it waits once more in the launch, which then creates the job. All
        these launches obey a cancel since the first one began.
        """
        from trainjob import RanksRemain

        origin, until = self._origin(context), self._ranks_until
        here = not defer or (until is not None and datetime.now(UTC) >= until)
        try:
            return running.launch(spec, origin, wait_for_ranks=here, began=self._began, timeouts=self.wait_options)
        except RanksRemain as error:
            from trainjob_airflow.triggers.pause import PauseTrigger

            self.log.info("%s", error)
            until = until or datetime.now(UTC) + timedelta(seconds=error.seconds)
            deadline = self._deadline(context)
            self.defer(
                trigger=PauseTrigger(seconds=_RANKS_PAUSE, event={"until": until.isoformat(), "began": error.began}),
                method_name="execute_after_ranks",
                timeout=deadline - datetime.now(UTC) + BACKSTOP if deadline else None,
            )
            raise AssertionError("defer() raises") from None

    def _origin(self, context: Context) -> dict[str, str]:
        """Labels that identify the task, and that have the job suspended when nothing waits for it any longer."""
        from trainjob._manifest.unattended import SUSPEND

        return labels_of_task(context) | labels_of_run(context) | (SUSPEND if self.on_kill_action != "keep" else {})

    @contextmanager
    def _connected(self, context: Context, namespace: str | None, key: str, ref: JobRef | None = None) -> Iterator[Any]:
        """Hold the client for this job: lets `on_kill` interrupt, maps errors to Airflow's."""
        from trainjob import TimedOut, TrainJobError

        try:
            with self._client(namespace) as client:
                running = self._running = self._held(client, key, ref, max(1, context["ti"].try_number))
                if self._killed:  # before there was anything to interrupt
                    running.stop_waiting()
                try:
                    yield running
                except AirflowTaskTimeout:  # of Airflow's timer, before the job was launched
                    late = TimedOut(f"{running} did not end within execution_timeout")
                    self._fail(context, running, self._ended(running, late))
                except CancelledError:
                    self._handle_kill(context, running)
                except TimedOut as error:  # the wait for a job has ended it
                    self._fail(context, running, error if running.ref is not None else self._ended(running, error))
                except TrainJobError as error:
                    self._store_end(running)
                    self._fail(context, running, error)
                finally:
                    self._running = None
        except AirflowTaskTimeout as airflow_timeout:  # may fire while a TrainJobTimeout propagates
            raise own_timeout(airflow_timeout) from None

    def _fail(self, context: Context, running: RunningJob, error: TrainJobError) -> NoReturn:
        """Fail this try, or skip the task, by an error whose job has been ended as the arguments say."""
        from trainjob import TimedOut, TrainJobFailed

        failure: Exception = airflow_error(error, user_errors=self.retry_user_errors)
        if isinstance(error, TimedOut):
            self._log_error(str(failure))
        else:
            self._log_failure(error)
            for note in getattr(error, "__notes__", ()):
                self._log_error(note)
            if isinstance(error, TrainJobFailed) and error.diagnosis.exit_code in self.skip_on_exit_code:
                failure = AirflowSkipException(str(error))
            else:
                stats().incr("trainjob.failed", tags=tags_of(context["ti"]) | {"retry": str(error.retry)})
        if isinstance(error, TrainJobFailed | TimedOut) and self._policy(context).ends(error):
            self._publish_end(context, running, error.goodput)
        raise failure from None

    def _held(self, client: TrainJobClient, key: str, ref: JobRef | None, tried: int) -> Any:
        """What `_connected` yields: a `RunningJob`, or that of another kind of work."""
        return RunningJob(client, key, ref, tried)

    def _defer(self, context: Context, running: RunningJob, ref: JobRef, resumed: int = 0, phase: str = "") -> NoReturn:
        from trainjob_airflow.triggers.trainjob import TrainJobTrigger

        deadline = self._deadline(context)
        target = self._call_hook(TrainJobHook.target)
        begin_deferral(context)
        self.defer(
            trigger=TrainJobTrigger(
                trainjob_conn_id=self.trainjob_conn_id,
                job=[ref.namespace, ref.name, ref.uid, ref.attempt],
                deadline=deadline.isoformat() if deadline else None,
                on_kill_action=self.on_kill_action,
                get_logs=self.get_logs,
                resumed=resumed,
                target=target,
                stored=phase if self.do_xcom_push else None,
                key=running.key,
                policy=asdict(self._policy(context)),
                **self.wait_options.as_json(),
            ),
            method_name="execute_complete",
            # The trigger itself enforces the deadline, because Airflow's timeout ends it without on_kill().
            timeout=deadline - datetime.now(UTC) + BACKSTOP if deadline else None,
        )
        raise AssertionError("defer() raises")

    def _defer_again(self, context: Context, running: Any, event: Mapping[str, Any], error: TrainJobError) -> None:
        """Defer again after an outage, at most three times; then fail this try. Returns only if the job has ended."""
        from trainjob import JobRef, TrainJobError

        ref = JobRef(*event["job"])
        if event["resumed"] >= MAX_RESUMED:
            raise TrainJobFailure(f"TrainJob {ref} could not be watched: {error}")
        with suppress(TrainJobError):  # the outage continues
            if has_ended(running.look()):
                return
        if running.training is not None:
            running.training.end(event["page"])
        self._defer(context, running, ref, event["resumed"] + 1)

    @property
    def _stops_by(self) -> CancelAction:
        from trainjob._manifest.attempts import stops_by

        return stops_by(self.on_kill_action)

    def _handle_kill(self, context: Context, running: RunningJob) -> NoReturn:
        """Apply `on_kill_action` if a person ended this try; keep the job if only the worker terminates."""
        if is_wanted(context):
            message = f"the worker is terminating; {running} keeps running, and the next try adopts it"
        elif self.on_kill_action == "keep":
            message = f"the task was killed; {running} keeps running (on_kill_action='keep')"
        else:
            try:
                stopped = running.stop(self._stops_by, _KILL_SECONDS)
                message = f"the task was killed: {running} {'has ended' if stopped.ended else 'is terminating'}"
                if stopped.spent is not None:
                    self._publish_end(context, running, stopped.spent.summary())
            except Exception as error:  # noqa: BLE001 - any error; this process ends now
                why = f"it took longer than {_KILL_SECONDS} s" if isinstance(error, TimeoutError) else error
                message = f"the task was killed, but {running} could not be cancelled: {why}{running.advice}"
        self.log.warning("%s", message)
        raise TrainJobFailure(message) from None

    def _ended(self, running: RunningJob, error: TimedOut) -> TimedOut:
        """Cancel what no `Step` has ended, a launch or a study, unless it is to be kept; a note of `error` says so."""
        if not self.cancel_on_timeout:
            with suppress(AirflowTaskTimeout):
                self._store_end(running)
            if running.is_created:
                error.add_note("it keeps running")
            return error
        try:
            self._store_end(running)
            ended = running.stop("cancel", CANCEL_SECONDS).ended
        except AirflowTaskTimeout:  # of Airflow's timer, during this call; it fires only once
            ended = running.stop("cancel", CANCEL_SECONDS).ended
        job = "it" if running.is_created else "its creation"
        error.add_note(f"{job} was cancelled" if ended else f"{job} was cancelled and is still terminating")
        return error

    def _store_end(self, running: RunningJob) -> None:
        """Store the last state of what `running` has launched, unless the end of its wait does."""

    def _spec(self, key: str, context: Context) -> TrainJobSpec:
        from trainjob import InvalidSpec, TrainJobError

        try:
            spec = assets.with_partition(self.job_spec(key, context), context)
            if secrets := [*secrets_in(spec)]:
                raise InvalidSpec(secrets)
            return spec
        except (TrainJobError, OSError) as error:
            self._log_error(str(error))
            raise TrainJobFatal(str(error)) from None

    def _deadline(self, context: Context) -> datetime | None:
        """The end of ``execution_timeout``, counted from the start of the try, which deferral does not change."""
        if self.execution_timeout is None:
            return None
        start: datetime = context["ti"].start_date or datetime.now(UTC)
        return start.astimezone(UTC) + self.execution_timeout

    def _margin(self) -> float:
        """Seconds before Airflow's timer fires, so that it does not interrupt the cancelling."""
        return min(1.0, 0.1 * self.execution_timeout.total_seconds()) if self.execution_timeout else 0.0


def _acknowledge(context: Context) -> None:
    """Acknowledge after Airflow has recorded the success: if the worker dies before, the next try gets the result."""
    task = context["ti"].task  # context["task"] is not the copy that was executed in Airflow 3.0
    if isinstance(task, TrainJobTask) and has_succeeded(context):
        task.acknowledge()
