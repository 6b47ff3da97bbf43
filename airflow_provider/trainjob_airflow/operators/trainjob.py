"""`TrainJobOperator`: one TrainJob as one task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from airflow.providers.common.compat.sdk import AirflowNotFoundException, AirflowTaskTimeout, BaseOperator, conf

from trainjob_airflow.events import unpack
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, TrainJobTimeout, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.running import DeadlineReached, RunningJob

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef, TrainJobClient, TrainJobResult, TrainJobSpec

OnKill = Literal["cancel", "suspend", "keep"]
OnCrash = Literal["suspend", "cancel", "keep"]
Seconds = timedelta | float | None

_KILL_SECONDS = 4.0  # Airflow sends SIGKILL 5 s after the SIGTERM that calls on_kill()
_CANCEL_SECONDS = 60.0
_BACKSTOP = timedelta(minutes=5)  # after execution_timeout, for a triggerer that is not there at all
_LAST_LOOK = 5.0  # seconds after a deadline that nobody was there to see: the job may have ended before it
_MAX_RESUMED = 3

_SPEC_FIELDS = (
    *(
        "runtime",
        "image",
        "command",
        "args",
        "torchtune",
        "num_nodes",
        "num_proc_per_node",
        "resources_per_node",
        "env",
    ),
    *("inputs", "outputs", "checkpoints", "initializer", "runtime_patches", "labels", "annotations"),
    *("active_deadline_seconds", "suspend", "managed_by"),
)


class TrainJobOperator(BaseOperator):
    """Launches one TrainJob, waits for its end and returns what it reports.

    The job is launched exactly once for each try that needs one: a try whose worker died leaves the job running, and
    the next try goes on with that same job. A job that failed is tried again as a new job.

    What the job should be is said either by the fields of a spec or by `spec`, all of them templates. They are
    checked once they are rendered; see `trainjob.TrainJobSpec` for their meaning.

    Args:
        spec: A whole spec instead of its fields: a `TrainJobSpec`, a mapping, YAML text, or the path of a YAML file
            beside the DAG file. Mappings, text and files are templates and may also be complete TrainJob objects.
        runtime: Name of a ClusterTrainingRuntime.
        image: Container image of the nodes; the runtime's if left out.
        command: Entry point of each node; ``$(NAME)`` is replaced by an environment variable, ``$$`` is a ``$``.
        args: Arguments of `command`, or of the runtime's entry point.
        torchtune: What to change of torchtune's recipe, on one of Trainer's torchtune runtimes, instead of a command.
        num_nodes: Number of nodes; the runtime's if left out.
        num_proc_per_node: Processes on each node (torchrun, mpirun).
        resources_per_node: ``{"cpu": 4, "memory": "16Gi", "gpu": 1}``, or ``{"requests": …, "limits": …}``.
        env: Environment of the nodes; secrets by ``valueFrom`` only.
        inputs: Name -> URI of what is read; the nodes find each as ``TRAINJOB_INPUT_<NAME>``.
        outputs: Name -> URI of where to write; ``TRAINJOB_OUTPUT_<NAME>``.
        checkpoints: Where the training keeps what it needs to go on after an interruption, ``pvc://claim/path`` or a
            URI; each task instance has a directory of its own there, the same for all its tries.
        initializer: Trainer's own initializers.
        runtime_patches: Changes to the runtime's pods.
        labels: Labels of the TrainJob, such as ``kueue.x-k8s.io/queue-name``.
        annotations: Annotations of the TrainJob.
        active_deadline_seconds: Seconds after which Trainer fails the job.
        suspend: Create the job suspended.
        managed_by: Which controller is in charge.
        namespace: Kubernetes namespace; the connection's if left out.
        trainjob_conn_id: Connection of type ``trainjob``. Where the default one does not exist, ``TRAINJOB_*`` in the
            environment decides.
        deferrable: Wait in the triggerer, without a worker.
        queue_timeout: How long the job may wait for admission (Kueue); for ever if left out. ``timedelta`` or seconds.
        start_timeout: How long its ranks may take to start once it is admitted; for ever if left out.
        fail_fast: Fail at once, and without a retry, where the job waits for what only a person can change: a queue
            that does not exist, more GPUs than it will ever have, an image that is not there, pods that are refused.
        fail_on_first_crash: Fail as soon as a rank has crashed, with its exit code and last lines. The runtimes that
            Trainer ships start it again and again, and the job fails minutes later if at all. Without this, a crash is
            a warning in the task's log. On the local backend a crash ends the job at once in any case.
        on_crash_action: What becomes of the job then, which would go on: ``suspend`` stops it and keeps the object,
            with the diagnosis in it (the next try is a new job; a job that Kueue manages is deleted, since Kueue would
            start it again), ``cancel`` deletes it, ``keep`` lets it go on (the next try adopts it, and finds the same
            crash). Not ``on_kill_action``: who keeps jobs because workers come and go does not want this one to go on.
        on_kill_action: What becomes of the job when the task is killed: ``cancel`` deletes it, ``suspend`` keeps it
            for the next try to go on with, ``keep`` lets it go on. Without `deferrable`, Airflow also calls a graceful
            shutdown of a worker a kill: choose ``keep`` where workers come and go, so that the next try adopts the job.
        cancel_on_timeout: Whether a job that outlasts one of the timeouts is cancelled; else the next try adopts it.
        get_logs: Whether the lines of all ranks go to the task's log while they are written.
        **kwargs: Of `BaseOperator`. ``execution_timeout`` counts from the start of the try, also while deferred.

    Returns (XCom):
        ``{"namespace", "name", "uid", "attempt", "metrics", "outputs", "seconds"}``, see `trainjob.TrainJobResult`.

    Raises:
        TrainJobFatal: The code, the spec or the set-up is wrong (an ``AirflowFailException``: no retry).
        TrainJobFailure: Another try may end differently (retried, if ``retries`` is set).
        TrainJobTimeout: A timeout ran out (retried likewise).
    """

    template_fields: Sequence[str] = ("spec", *_SPEC_FIELDS, "namespace", "trainjob_conn_id")
    template_fields_renderers = {  # noqa: RUF012 - as BaseOperator declares it
        "spec": "yaml",
        "env": "json",
        "inputs": "json",
        "outputs": "json",
        "torchtune": "json",
        "initializer": "json",
        "runtime_patches": "json",
        "resources_per_node": "json",
    }
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        spec: TrainJobSpec | Mapping[str, Any] | str | Path | None = None,
        runtime: str | Mapping[str, Any] | None = None,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        torchtune: Mapping[str, Any] | None = None,
        num_nodes: int | str | None = None,
        num_proc_per_node: int | str | None = None,
        resources_per_node: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        checkpoints: str | None = None,
        initializer: Mapping[str, Any] | None = None,
        runtime_patches: Sequence[Mapping[str, Any]] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        active_deadline_seconds: int | str | None = None,
        suspend: bool | str | None = None,
        managed_by: str | None = None,
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
        get_logs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.runtime = runtime
        self.image = image
        self.command = command
        self.args = args
        self.torchtune = torchtune
        self.num_nodes = num_nodes
        self.num_proc_per_node = num_proc_per_node
        self.resources_per_node = resources_per_node
        self.env = env
        self.inputs = inputs
        self.outputs = outputs
        self.checkpoints = checkpoints
        self.initializer = initializer
        self.runtime_patches = runtime_patches
        self.labels = labels
        self.annotations = annotations
        self.active_deadline_seconds = active_deadline_seconds
        self.suspend = suspend
        self.managed_by = managed_by
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.deferrable = deferrable
        self.queue_timeout = _seconds("queue_timeout", queue_timeout)
        self.start_timeout = _seconds("start_timeout", start_timeout)
        self.fail_fast = fail_fast
        self.fail_on_first_crash = fail_on_first_crash
        if on_crash_action not in ("suspend", "cancel", "keep"):
            raise ValueError(f"on_crash_action is 'suspend', 'cancel' or 'keep', not {on_crash_action!r}")
        self.on_crash_action = on_crash_action
        if on_kill_action not in ("cancel", "suspend", "keep"):
            raise ValueError(f"on_kill_action is 'cancel', 'suspend' or 'keep', not {on_kill_action!r}")
        self.on_kill_action = on_kill_action
        self.cancel_on_timeout = cancel_on_timeout
        self.get_logs = get_logs
        fields = [name for name in _SPEC_FIELDS if getattr(self, name) is not None]
        if spec is not None and fields:
            raise ValueError(f"spec cannot be combined with {', '.join(fields)}: write them into it")
        self._running: RunningJob | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Launch or adopt the job, then wait here or in the triggerer."""
        return self._run(context, defer=self.deferrable)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any]:
        """Go on after the trigger's event."""
        from trainjob import JobRef  # noqa: PLC0415
        from trainjob.crashes import unpack_diagnosis, unpack_evidence  # noqa: PLC0415
        from trainjob.errors import RankCrashed  # noqa: PLC0415
        from trainjob.waiting import conclude  # noqa: PLC0415

        ref = JobRef(event["namespace"], event["name"], event["uid"], event["attempt"])
        with self._busy(ref.namespace, self.key(context), ref) as running:
            if event["status"] == "timeout":
                self._give_up(running, event["message"], again=event["retryable"])
            if event["status"] == "error":
                self._resume(context, ref, event)
            if event["status"] == "crashed":
                raise RankCrashed(unpack_diagnosis(event["diagnosis"]))
            client = running.client
            # What the trigger saw stands: the job may have been removed since (ttlSecondsAfterFinished, a person).
            final, crash = unpack(event.get("final")), unpack_evidence(event.get("crash"))
            return self._deliver(client, client.call(lambda: conclude(client.backend, ref, final, crash)), ref)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Airflow's way back from deferral, also where the triggerer itself failed."""
        try:
            from airflow.sdk.exceptions import TaskDeferralError, TaskDeferralTimeout  # noqa: PLC0415
        except ImportError:  # Airflow 3.0 and 3.1
            from airflow.exceptions import (  # type: ignore[no-redef]  # noqa: PLC0415
                TaskDeferralError,
                TaskDeferralTimeout,
            )
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralTimeout, TaskDeferralError) as error:
            # The trigger could not be loaded there, or no triggerer was running until the backstop. The job goes on
            # all the while: adopt it and wait here.
            self.log.warning("the triggerer failed (%s); going on in this worker", error)
            return self._run(context, defer=False)

    def on_kill(self) -> None:
        """Called inside a signal handler, with 5 s to live.

        It must not talk to Airflow: the connection to the supervisor is not reentrant. The client's event loop runs
        in a thread of its own and works while the main thread is interrupted.
        """
        running = self._running
        if running is None:
            return
        running.stop_waiting()
        if self.on_kill_action == "keep":
            self.log.info("the task was killed; %s goes on (on_kill_action='keep')", running)
        else:
            try:
                ended = running.cancel("suspend" if self.on_kill_action == "suspend" else "delete", _KILL_SECONDS)
                self.log.info("the task was killed: %s %s", running, "has ended" if ended else "was told to end")
            except Exception as error:  # noqa: BLE001 - whatever it is, this process ends now
                self.log.warning("the task was killed, but %s could not be told to end: %s", running, error)

    def dry_run(self) -> None:
        """Print the TrainJob object that would be created; templates stay as they are."""
        import yaml  # noqa: PLC0415

        from trainjob.manifest import render  # noqa: PLC0415

        key = f"airflow/{_deployment()}/{self.dag_id}/dry-run/-1/{self.task_id}"
        spec = self._spec(key, None)
        with self._client(self.namespace) as client:
            manifest = render(spec, key, 1, client.namespace)
        print(yaml.safe_dump(manifest, sort_keys=False))  # noqa: T201 - what it is for

    def key(self, context: Context) -> str:
        """The identity of this task in this run, the same for all its tries; the job's name is made from it."""
        ti = context["ti"]
        return f"airflow/{_deployment()}/{ti.dag_id}/{ti.run_id}/{ti.map_index}/{ti.task_id}"

    def spec_fields(self, key: str) -> dict[str, Any]:
        """The rendered fields of the spec that were given. Operators for one kind of job override it."""
        del key
        return {name: value for name in _SPEC_FIELDS if (value := getattr(self, name)) is not None}

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """As Airflow does; templates inside a `TrainJobSpec` object count as well."""
        dump = getattr(self.spec, "model_dump", None)
        if dump is not None:
            self.spec = dump(mode="json", exclude_unset=True)
        super().render_template_fields(context, jinja_env)

    def _run(self, context: Context, *, defer: bool) -> dict[str, Any]:
        from trainjob import Budgets  # noqa: PLC0415

        key = self.key(context)
        spec = self._spec(key, context)
        with self._busy(self.namespace, key) as running:
            ref = running.launch(spec, max(1, context["ti"].try_number))
            self.log.info("TrainJob %s (attempt %d, uid %s)", ref, ref.attempt, ref.uid)
            if defer:
                self._defer(context, ref)
            deadline = self._deadline(context)
            seconds = (deadline - datetime.now(UTC)).total_seconds() - self._margin() if deadline else None
            if seconds is not None and seconds <= 0:
                seconds = _LAST_LOOK
            budgets = Budgets(
                _delta(self.queue_timeout),
                _delta(self.start_timeout),
                fail_fast=self.fail_fast,
                fail_on_first_crash=self.fail_on_first_crash,
            )
            try:
                result = running.wait(ref, budgets, self.log, logs=self.get_logs, seconds=seconds)
            except DeadlineReached:
                self._give_up(running, f"TrainJob {ref} did not end within execution_timeout")
            return self._deliver(running.client, result, ref)

    @contextmanager
    def _busy(self, namespace: str | None, key: str, ref: JobRef | None = None) -> Iterator[RunningJob]:
        """Be busy with the job of `key`: reachable for `on_kill`, and with errors in Airflow's terms."""
        from trainjob.errors import RankCrashed, TimedOut, TrainJobError  # noqa: PLC0415

        try:
            with self._client(namespace) as client:
                running = self._running = RunningJob(client, key, ref)
                try:
                    yield running
                except AirflowTaskTimeout:  # Airflow's own timer, which starts a moment later than ours
                    self._give_up(running, f"{running} did not end within execution_timeout")
                except CancelledError:
                    raise TrainJobFailure(f"the task was killed while it waited for {running}") from None
                except TimedOut as error:
                    self._give_up(running, str(error), again=error.retry.retryable)
                except TrainJobError as error:
                    self._tell(str(error))
                    failure = airflow_error(error)
                    if isinstance(error, RankCrashed) and running.ref is not None:
                        self._tell(running.give_up(running.ref, error.diagnosis, self.on_crash_action))
                    raise failure from None
                finally:
                    self._running = None
        except AirflowTaskTimeout as late:  # went off while a timeout of our own was on its way out
            raise _earlier(late) from None

    def _defer(self, context: Context, ref: JobRef, resumed: int = 0) -> NoReturn:
        from trainjob_airflow.triggers.trainjob import TrainJobTrigger  # noqa: PLC0415

        deadline = self._deadline(context)
        self.defer(
            trigger=TrainJobTrigger(
                trainjob_conn_id=self.trainjob_conn_id,
                namespace=ref.namespace,
                name=ref.name,
                uid=ref.uid,
                attempt=ref.attempt,
                queue_timeout=self.queue_timeout,
                start_timeout=self.start_timeout,
                fail_fast=self.fail_fast,
                fail_on_first_crash=self.fail_on_first_crash,
                deadline=deadline.isoformat() if deadline else None,
                on_kill_action=self.on_kill_action,
                get_logs=self.get_logs,
                resumed=resumed,
            ),
            method_name="execute_complete",
            # The trigger itself keeps the deadline, since Airflow's timeout ends it without on_kill().
            timeout=deadline - datetime.now(UTC) + _BACKSTOP if deadline else None,
        )
        raise AssertionError("defer() raises")

    def _resume(self, context: Context, ref: JobRef, event: Mapping[str, Any]) -> NoReturn:
        """An outage is no verdict on the job: look again, some times; then leave it to the next try."""
        message = f"TrainJob {ref} could not be watched: {event['message']}"
        if not event["retryable"]:
            raise TrainJobFatal(message)
        if event["resumed"] >= _MAX_RESUMED:
            raise TrainJobFailure(message)
        self.log.warning("%s", message)
        self._defer(context, ref, event["resumed"] + 1)

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

    def _deliver(self, client: TrainJobClient, result: TrainJobResult, ref: JobRef) -> dict[str, Any]:
        from trainjob.launch import mark_delivered  # noqa: PLC0415

        # From here on the key asked for again means "once more": a person cleared the task.
        client.call(lambda: mark_delivered(client.backend, ref))
        return result.as_dict()

    def _spec(self, key: str, context: Context | None) -> TrainJobSpec:
        from trainjob import InvalidSpec, TrainJobSpec  # noqa: PLC0415

        source = self.spec_fields(key) if self.spec is None else self.spec
        path = Path(source) if isinstance(source, str | Path) and _is_path(source) else None
        try:
            if path is not None:
                # Not by template_ext: Airflow would then take every argument that ends in .yaml for a template file.
                text = (Path(self.dag.folder) / path).read_text(encoding="utf-8")
                source = self.render_template(text, context) if context else text
            return TrainJobSpec.parse(source)
        except (InvalidSpec, OSError) as error:
            self._tell(str(error))
            raise TrainJobFatal(str(error)) from None

    def _client(self, namespace: str | None) -> TrainJobClient:
        from trainjob import TrainJobError  # noqa: PLC0415

        try:
            return TrainJobHook(self.trainjob_conn_id).client(namespace)
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


def _earlier(late: BaseException) -> BaseException:
    """The timeout that was being raised when Airflow's own timer went off; `late` itself where there was none."""
    error: BaseException | None = late
    while error is not None and not isinstance(error, TrainJobTimeout):
        error = error.__context__
    return error or late


def _is_path(source: str | Path) -> bool:
    return isinstance(source, Path) or (source.endswith((".yaml", ".yml")) and "\n" not in source)


def _deployment() -> str:
    """What parts the jobs of two Airflows that share a namespace (apache/airflow#33057)."""
    chosen = conf.get("trainjob", "deployment", fallback="") or conf.get("api", "base_url", fallback="")
    return chosen or "airflow"


def _seconds(name: str, value: Seconds) -> float | None:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise ValueError(f"{name} is a timedelta or a number of seconds above 0, not {value!r}")
    return seconds


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
