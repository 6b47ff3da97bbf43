"""A task that launches one TrainJob and waits for it: the part that all operators of this package share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from airflow.providers.common.compat.sdk import (
    AirflowNotFoundException,
    AirflowSkipException,
    AirflowTaskTimeout,
    conf,
)

from trainjob import WaitOptions
from trainjob_airflow import assets, lineage, links
from trainjob_airflow.arguments import Seconds, check_place, check_switches, check_texts
from trainjob_airflow.compat import TaskDeferralError, TaskDeferralTimeout
from trainjob_airflow.events import unpack
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, TrainJobTimeout, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import (
    begin_deferral,
    end_deferral,
    has_succeeded,
    is_wanted,
    key_of,
    labels_of_task,
    publish_job,
    was_cleared,
)
from trainjob_airflow.running import DeadlineReached, RunningJob
from trainjob_airflow.templates import StrictTemplates, secrets_in

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef, TrainJobClient, TrainJobResult, TrainJobSpec

OnKill = Literal["cancel", "suspend", "keep"]
OnCrash = Literal["suspend", "cancel", "keep"]
_T = TypeVar("_T")

_KILL_SECONDS = 3.5  # Airflow sends SIGKILL 5 s after the SIGTERM that calls on_kill()
_CANCEL_SECONDS = 60.0
_BACKSTOP = timedelta(minutes=5)  # after execution_timeout, for a triggerer that is not there at all
_LAST_LOOK = 5.0  # seconds after a deadline that nobody was there to see: the job may have ended before it
_MAX_RESUMED = 3


class TrainJobTask(StrictTemplates):
    """Launches the job that `job_spec` tells, waits for its end in a worker or in the triggerer, returns its result.

    See `trainjob_airflow.operators.trainjob.TrainJobOperator` for the arguments.
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
        fail_fast: bool = False,
        fail_on_first_crash: bool = False,
        on_crash_action: OnCrash = "suspend",
        on_kill_action: OnKill = "cancel",
        cancel_on_timeout: bool = True,
        retry_user_errors: bool = True,
        get_logs: bool = True,
        wait_for_completion: bool = True,
        skip_on_exit_code: int | Collection[int] | None = None,
        **kwargs: Any,
    ) -> None:
        given = dict(locals())
        super().__init__(**kwargs)
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.deferrable = deferrable
        self.wait_options = WaitOptions.parse(given)
        if on_crash_action not in ("suspend", "cancel", "keep"):
            raise ValueError(f"on_crash_action is 'suspend', 'cancel' or 'keep', not {on_crash_action!r}")
        self.on_crash_action = on_crash_action
        if on_kill_action not in ("cancel", "suspend", "keep"):
            raise ValueError(f"on_kill_action is 'cancel', 'suspend' or 'keep', not {on_kill_action!r}")
        self.on_kill_action = on_kill_action
        if not kwargs.get("_airflow_from_mapped"):  # whose values are decided in the run
            check_place(namespace, trainjob_conn_id)
            check_texts(required=True, trainjob_conn_id=trainjob_conn_id)
            check_switches(
                deferrable=deferrable,
                cancel_on_timeout=cancel_on_timeout,
                retry_user_errors=retry_user_errors,
                get_logs=get_logs,
                wait_for_completion=wait_for_completion,
            )
        self.cancel_on_timeout = cancel_on_timeout
        self.retry_user_errors = retry_user_errors
        self.get_logs = get_logs
        self.wait_for_completion = wait_for_completion
        codes = [skip_on_exit_code] if isinstance(skip_on_exit_code, int) else [*(skip_on_exit_code or ())]
        if wrong := [code for code in codes if not isinstance(code, int) or not 0 < code < 256]:
            raise ValueError(f"skip_on_exit_code: {wrong[0]!r} is no exit code of a failure (1 to 255)")
        self.skip_on_exit_code = codes
        self.on_success_callback = [*self.on_success_callback, _acknowledge]
        self.links: dict[str, str] = {}
        self._running: RunningJob | None = None
        self._delivered: JobRef | None = None
        self._told: dict[str, Any] = {}

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """What to run, from fields that are rendered.

        Args:
            key: The identity of the task.
            context: Of the task.

        Raises:
            TrainJobError, OSError: it cannot be a job.
        """
        raise NotImplementedError

    def execute(self, context: Context) -> Any:
        """Launch or adopt the job, then wait here or in the triggerer."""
        return self._run(context, defer=self.deferrable)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Go on after the trigger's event."""
        from trainjob import JobRef
        from trainjob.errors import RankCrashed
        from trainjob.serialization import unpack_diagnosis, unpack_evidence
        from trainjob.waiting import conclude

        ref = JobRef(event["namespace"], event["name"], event["uid"], event["attempt"])
        with self._busy(context, ref.namespace, key_of(context), ref) as running:
            if event["status"] == "timeout":
                self._give_up(running, event["message"], again=event["retryable"])
            if event["status"] == "error":
                self._resume(context, running, ref, event)
            if event["status"] == "crashed":
                raise RankCrashed(unpack_diagnosis(event["diagnosis"]))
            client = running.client
            # What the trigger saw stands: the job may have been removed since (ttlSecondsAfterFinished, a person).
            final, crash = unpack(event.get("final")), unpack_evidence(event.get("crash"))
            return self._deliver(context, client.call(lambda: conclude(client.backend, ref, final, crash)), ref)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Airflow's way back from deferral, also where the triggerer itself failed."""
        end_deferral(context)
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralTimeout, TaskDeferralError) as error:
            # The trigger could not be loaded there, or no triggerer was running until the backstop. The job goes on
            # all the while: adopt it and wait here.
            self.log.warning("the triggerer failed (%s); going on in this worker", error)
            return self._run(context, defer=False)

    def on_kill(self) -> None:
        """Called inside a signal handler: by a kill and by the graceful end of the worker alike.

        Which of the two it is only Airflow's API can tell, and a signal handler must not ask it: the connection to the
        supervisor is not reentrant. So the wait ends here, and what is to be done is decided outside of the handler.
        """
        if self._running is not None:
            self._running.stop_waiting()

    def sample_spec(self) -> tuple[TrainJobSpec | None, list[str]]:
        """What a run of this moment would launch, as far as it is known without one, and the paths of the rest.

        Raises:
            TrainJobError: it could not be a job, whatever the run decides.
            TrainJobFatal: a template is wrong, or uses a name that is not defined.
        """
        raise NotImplementedError

    def dry_run(self) -> None:
        """Print the TrainJob object that a run of this moment would create.

        Works before there is a run: templates are rendered with sample values. What only a run knows, such as XComs, is
        left out and listed in a comment.
        """
        import yaml

        from trainjob.manifest import render

        spec, missing = self.sample_spec()
        if missing:
            print(f"# decided in the run: {', '.join(missing)}")  # noqa: T201 - what it is for
        if spec is not None:
            manifest = render(spec, f"airflow/dry-run/{self.dag_id}/{self.task_id}", 1, self.namespace or "default")
            print(yaml.safe_dump(manifest, sort_keys=False))  # noqa: T201 - what it is for

    def _run(self, context: Context, *, defer: bool) -> Any:
        from trainjob import TrainJobResult

        key = key_of(context)
        spec = self._spec(key, context)
        with self._busy(context, self.namespace, key) as running:
            if self.on_kill_action == "cancel" and was_cleared(context):
                running.cancel("delete", _CANCEL_SECONDS)
            ref = running.launch(spec, max(1, context["ti"].try_number), self._origin(context))
            self.log.info("TrainJob %s (attempt %d, uid %s)", ref, ref.attempt, ref.uid)
            _stats().incr("trainjob.launched", tags=_tags(context))
            publish_job(context, ref)
            self._link(context, ref)
            links.push(context, self)
            # Airflow (3.3.2) can take the event of a trigger that fires at once for a lost task ("state mismatch"), so
            # each try of a task whose job has ended meanwhile would fail.
            if defer and self.wait_for_completion and not running.has_ended():
                self._defer(context, ref)
            if not self.wait_for_completion:
                return TrainJobResult(ref.namespace, ref.name, ref.uid, ref.attempt).as_dict()
            deadline = self._deadline(context)
            seconds = (deadline - datetime.now(UTC)).total_seconds() - self._margin() if deadline else None
            if seconds is not None and seconds <= 0:
                seconds = _LAST_LOOK
            try:
                result = running.wait(ref, self.wait_options, self.log, logs=self.get_logs, seconds=seconds)
            except DeadlineReached:
                self._give_up(running, f"TrainJob {ref} did not end within execution_timeout")
            return self._deliver(context, result, ref)

    def _origin(self, context: Context) -> dict[str, str]:
        """Labels that say which task a job is for, and that it is suspended when no task waits for it any more."""
        from trainjob.unattended import SUSPEND

        waited_for = self.wait_for_completion and self.on_kill_action != "keep"
        return labels_of_task(context) | (SUSPEND if waited_for else {})

    @contextmanager
    def _busy(
        self, context: Context, namespace: str | None, key: str, ref: JobRef | None = None
    ) -> Iterator[RunningJob]:
        """Be busy with the job of `key`: reachable for `on_kill`, and with errors in Airflow's terms."""
        from trainjob.errors import RankCrashed, TimedOut, TrainJobError, TrainJobFailed

        try:
            with self._client(namespace) as client:
                running = self._running = RunningJob(client, key, ref)
                try:
                    yield running
                except AirflowTaskTimeout:  # Airflow's own timer, which starts a moment later than ours
                    self._give_up(running, f"{running} did not end within execution_timeout")
                except CancelledError:
                    self._killed(context, running)
                except TimedOut as error:
                    self._give_up(running, str(error), again=error.retry.retryable)
                except TrainJobError as error:
                    self._tell(str(error))
                    if isinstance(error, TrainJobFailed) and error.diagnosis.exit_code in self.skip_on_exit_code:
                        raise AirflowSkipException(str(error)) from None
                    failure = airflow_error(error, user_errors=self.retry_user_errors)
                    _stats().incr("trainjob.failed", tags=_tags(context) | {"retry": str(error.retry)})
                    if isinstance(error, RankCrashed) and running.ref is not None:
                        self._tell(running.give_up(running.ref, error.diagnosis, self.on_crash_action))
                    raise failure from None
                finally:
                    self._running = None
        except AirflowTaskTimeout as late:  # went off while a timeout of our own was on its way out
            raise _earlier(late) from None

    def _defer(self, context: Context, ref: JobRef, resumed: int = 0) -> NoReturn:
        from trainjob_airflow.triggers.trainjob import TrainJobTrigger

        deadline = self._deadline(context)
        target = self._of_connection(TrainJobHook.target)
        begin_deferral(context)
        self.defer(
            trigger=TrainJobTrigger(
                trainjob_conn_id=self.trainjob_conn_id,
                namespace=ref.namespace,
                name=ref.name,
                uid=ref.uid,
                attempt=ref.attempt,
                deadline=deadline.isoformat() if deadline else None,
                on_kill_action=self.on_kill_action,
                get_logs=self.get_logs,
                resumed=resumed,
                target=target,
                **self.wait_options.as_json(),
            ),
            method_name="execute_complete",
            # The trigger itself keeps the deadline, since Airflow's timeout ends it without on_kill().
            timeout=deadline - datetime.now(UTC) + _BACKSTOP if deadline else None,
        )
        raise AssertionError("defer() raises")

    def _resume(self, context: Context, running: RunningJob, ref: JobRef, event: Mapping[str, Any]) -> None:
        """An outage is no verdict on the job: defer again, some times; then leave it to the next try.

        Returns only if the job has ended.
        """
        from trainjob import TrainJobError

        message = f"TrainJob {ref} could not be watched: {event['message']}"
        if not event["retryable"]:
            raise TrainJobFatal(message)
        if event["resumed"] >= _MAX_RESUMED:
            raise TrainJobFailure(message)
        self.log.warning("%s", message)
        with suppress(TrainJobError):  # the outage continues: defer again
            if running.has_ended():
                return
        self._defer(context, ref, event["resumed"] + 1)

    def _killed(self, context: Context, running: RunningJob) -> NoReturn:
        """A person ended this try, or its worker is going away: only the first is meant for the job."""
        if is_wanted(context):
            message = f"the worker is going away, and {running} goes on: the next try adopts it"
        elif self.on_kill_action == "keep":
            message = f"the task was killed; {running} goes on (on_kill_action='keep')"
        else:
            try:
                ended = running.cancel("suspend" if self.on_kill_action == "suspend" else "delete", _KILL_SECONDS)
                message = f"the task was killed: {running} {'has ended' if ended else 'was told to end'}"
            except Exception as error:  # noqa: BLE001 - whatever it is, this process ends now
                message = f"the task was killed, but {running} could not be told to end: {error}"
        self.log.warning("%s", message)
        raise TrainJobFailure(message) from None

    def _give_up(self, running: RunningJob, message: str, *, again: bool = True) -> NoReturn:
        """A timeout ran out, or there is nothing to wait for; whether another try may help."""
        if self.cancel_on_timeout:
            try:
                ended = running.cancel("delete", _CANCEL_SECONDS)
            except AirflowTaskTimeout:  # of Airflow's own timer, in the middle of this; it fires only once
                ended = running.cancel("delete", _CANCEL_SECONDS)
            message += "; it was cancelled" if ended else "; it was told to end and has not ended yet"
        else:
            message += "; it goes on (cancel_on_timeout=False)"
        self._tell(message)
        raise TrainJobTimeout(message) if again else TrainJobFatal(message)

    def _link(self, context: Context, ref: JobRef, **more: Any) -> None:
        """Know the addresses of the links from here on."""
        values = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "started": context["ti"].start_date}
        self.links = links.format_urls(TrainJobHook(self.trainjob_conn_id).links(), values | more)
        if self.do_xcom_push:
            self.links.setdefault(links.TrainJobLink.template, links.xcom_page(context["ti"]))

    def _deliver(self, context: Context, result: TrainJobResult, ref: JobRef) -> Any:
        """What `execute` returns. The job is marked once Airflow has it, see `_acknowledge`."""
        self._delivered = ref
        told = result.as_dict()
        told = self._told = {**told, "outputs": {**self.declared_outputs(context), **told["outputs"]}}
        self._link(context, ref, **self.version_of(told))
        assets.set_extra(context, self, told | {"metrics": self.metrics_of(told)})
        for name, seconds in told["seconds"].items():
            _stats().timing(f"trainjob.{name}", timedelta(seconds=seconds), tags=_tags(context))
        return self.returned(context, told)

    def returned(self, context: Context, result: dict[str, Any]) -> Any:
        """The XCom ``return_value`` of a task whose job has ended.

        Args:
            context: Of the task.
            result: The result of the job.
        """
        del context
        return result

    def declared_outputs(self, context: Context) -> Mapping[str, Any]:
        """Where the job was asked to write, name -> URI: outputs also of a script that reports none."""
        del context
        return {}

    def version_of(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """``model`` and ``version`` that came of the job, for the link to the registry; nothing if none did.

        Args:
            told: What `execute` returns.
        """
        del told
        return {}

    def data_of(self, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """URIs that the job read, and those that it wrote, for OpenLineage.

        Args:
            told: What `execute` returns.
        """
        del told
        return [], []

    def metrics_of(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is measured of what came of the job, for asset events.

        Args:
            told: What `execute` returns.
        """
        metrics: Mapping[str, Any] = told["metrics"]
        return metrics

    def acknowledge(self) -> None:
        """Note on the job that its result has arrived: its key asked for again means "once more"."""
        from trainjob import TrainJobError
        from trainjob.lifecycle import mark_delivered

        ref = self._delivered
        if ref is None:
            return
        try:
            with self._client(ref.namespace) as client:
                client.call(lambda: mark_delivered(client.backend, ref))
        except (TrainJobError, TrainJobFatal, TrainJobFailure) as error:
            self.log.warning(
                "TrainJob %s could not be marked as delivered: a clear gives its result again: %s", ref, error
            )

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """What OpenLineage hears of a task that has ended (`apache-airflow-providers-openlineage` calls it)."""
        del task_instance
        read, written = self.data_of(self._told) if self._told else ((), ())
        return lineage.facets(read, written, self._told)

    def _spec(self, key: str, context: Context) -> TrainJobSpec:
        from trainjob import InvalidSpec, TrainJobError

        try:
            spec = assets.with_partition(self.job_spec(key, context), context)
            if secrets := [*secrets_in(spec)]:
                raise InvalidSpec(secrets)
            return spec
        except (TrainJobError, OSError) as error:
            self._tell(str(error))
            raise TrainJobFatal(str(error)) from None

    def _client(self, namespace: str | None) -> TrainJobClient:
        return self._of_connection(lambda hook: hook.client(namespace))

    def _of_connection(self, ask: Callable[[TrainJobHook], _T]) -> _T:
        from trainjob import TrainJobError

        try:
            return ask(TrainJobHook(self.trainjob_conn_id))
        except AirflowNotFoundException as error:
            raise TrainJobFatal(str(error)) from None
        except TrainJobError as error:
            raise airflow_error(error) from None

    def _deadline(self, context: Context) -> datetime | None:
        """When ``execution_timeout`` is over: counted from the start of the try, which deferral does not change."""
        if self.execution_timeout is None:
            return None
        start: datetime = context["ti"].start_date or datetime.now(UTC)
        return start.astimezone(UTC) + self.execution_timeout

    def _margin(self) -> float:
        """Seconds before Airflow's own timer, which interrupts whatever is being done: room to cancel in peace."""
        return min(1.0, 0.1 * self.execution_timeout.total_seconds()) if self.execution_timeout else 0.0

    def _tell(self, text: str) -> None:
        """Each line is a line of the log; the exception's own text would be one long one."""
        for line in text.splitlines():
            self.log.error("%s", line)


def _stats() -> Any:
    from airflow.providers.common.compat.sdk import Stats  # what a DAG file need not pay for

    return Stats


def _tags(context: Context) -> dict[str, str]:
    ti = context["ti"]
    return {"dag_id": ti.dag_id, "task_id": ti.task_id}


def _acknowledge(context: Context) -> None:
    """Called once Airflow was told of the task's success: a worker that dies before that loses nothing."""
    task = context["ti"].task  # context["task"] is not the copy that was executed in Airflow 3.0
    if isinstance(task, TrainJobTask) and has_succeeded(context):
        task.acknowledge()


def _earlier(late: BaseException) -> BaseException:
    """The timeout that was being raised when Airflow's own timer went off; `late` itself where there was none."""
    error: BaseException | None = late
    while error is not None and not isinstance(error, TrainJobTimeout):
        error = error.__context__
    return error or late
