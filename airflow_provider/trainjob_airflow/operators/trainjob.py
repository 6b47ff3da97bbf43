"""`TrainJobOperator`: runs one TrainJob as one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainjob_airflow.arguments import is_mapped_element
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.operators.base import TrainJobTask
from trainjob_airflow.templates import is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import TrainJobSpec

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
    *("inputs", "outputs", "checkpoints", "initializer", "pod", "runtime_patches", "labels", "annotations"),
    *("active_deadline_seconds", "stall_timeout", "suspend", "managed_by", "unattended", "unattended_after"),
    "on_retry",
)


class TrainJobOperator(TrainJobTask):
    """Launches one TrainJob, waits for its end and returns what it reports.

    Each try that needs a job launches it exactly once: if the worker of a try dies, the job keeps running, and the next
    try adopts it. After a failed job, the next try launches a new one.

    Describe the job either by the fields of a spec or by `spec`; all of them are templates. Literals are checked when
    the DAG is parsed, templates after rendering. `trainjob.TrainJobSpec` documents the fields.

    Args:
        spec: A complete spec instead of its fields: a `TrainJobSpec`, a mapping, YAML text, or the path of a YAML file
            relative to the DAG file. Mappings, text and files are templates, and may be complete TrainJob objects.
        runtime: Name of a ClusterTrainingRuntime, such as ``torch-distributed``.
        image: Container image of the nodes; the runtime's if left out.
        command: Entry point of each node. ``$(NAME)`` expands to an environment variable, ``$$`` is a ``$``.
        args: Arguments of the command, or of the runtime's entry point.
        torchtune: Changes of torchtune's recipe, for Trainer's torchtune runtimes, instead of a command.
        num_nodes: Number of nodes. The runtime's if left out.
        num_proc_per_node: Processes on each node. Only some runtimes start several (torchrun, mpirun).
        resources_per_node: Resources of each node, such as cpu, memory and gpu. ``{"cpu": 4, "gpu": 1}`` for requests
            and limits alike, or ``{"requests": …, "limits": …}``.
        env: Environment variables of the nodes; secrets by reference. That is ``{"NAME": {"valueFrom": …}}``.
        inputs: URIs that the training reads, by name; the nodes have each as ``TRAINJOB_INPUT_<NAME>``.
        outputs: URIs that the training writes, by name; the nodes have each as ``TRAINJOB_OUTPUT_<NAME>``.
        checkpoints: Location of checkpoints, from which an interrupted training resumes. ``pvc://claim/path`` or a URI;
            each task instance has its own directory there, the same for all its tries.
        initializer: Trainer's initializers.
        pod: Changes to the pods of all nodes: a PodSpec, or a pod template with ``metadata`` and ``spec``, as a mapping
            or as a model of the ``kubernetes`` package. The training container is ``node``.
        runtime_patches: Changes to single steps of the runtime.
        labels: Labels of the TrainJob, such as ``kueue.x-k8s.io/queue-name``.
        annotations: Annotations of the TrainJob.
        active_deadline_seconds: Seconds after which Trainer fails the job.
        stall_timeout: Longest time without progress of any rank; after it the step fails and names the rank that hangs.
            It is a ``timedelta``, seconds or text such as ``15m``. The error shows the rank's stack, and
            `on_crash_action` is applied.
        suspend: Create the job suspended.
        managed_by: Controller that manages the job.
        unattended: Action when no task has waited for the job for `unattended_after`: ``suspend`` (the next task that
            waits resumes it), ``cancel`` or ``keep``. The default is ``suspend``, or ``keep`` if the task does not wait
            or `on_kill_action` is ``keep``.
        unattended_after: One minute to seven days, as ``timedelta``, seconds or text such as ``2h``. Default: an
            hour.
        on_retry: Changes of the next attempt after a failure, by its category. ``{"out_of_memory": {"max_memory":
            "64Gi"}, "node_lost": {"max_excluded_nodes": 3}}``, see `trainjob._spec.OnRetry`.
        namespace: Kubernetes namespace; the connection's if left out.
        trainjob_conn_id: Connection of type ``trainjob``. If the default one does not exist, ``TRAINJOB_*`` in the
            environment decides.
        deferrable: Wait in the triggerer, without a worker.
        queue_timeout: Longest time that the job waits for admission (Kueue). It is a ``timedelta``, seconds or text
            such as ``1h30m``; there is no limit if it is None.
        start_timeout: Longest time from admission to the first running rank. There is no limit if it is None.
        run_timeout: Longest time from admission to the end. It counts over all tries of the task;
            ``execution_timeout`` counts anew for each try, and includes the time in a queue. There is no limit if it is
            None.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove. Examples
            are a missing queue, more GPUs than the queue will ever have, a missing image, refused pods. The task is not
            retried.
        fail_on_first_crash: Fail as soon as a rank crashes. The error has its exit code and last log lines. Trainer's
            runtimes restart a crashed rank again and again, so the job fails minutes later or never. Without this
            option, a crash is a warning in the task's log. On the local backend a crash always ends the job at once.
        on_crash_action: Action on a job after `fail_on_first_crash` or `stall_timeout`. ``suspend`` stops it and keeps
            the object with the diagnosis; the next try is a new job. (A job that Kueue manages is deleted, since Kueue
            would start it again.) ``cancel`` deletes it. ``keep`` keeps it running; the next try adopts it and finds
            the same crash. It is separate from `on_kill_action`: a job that is kept when workers end need not be kept
            after a crash.
        on_kill_action: Action on the job when a person ends the step: marks or clears the task. ``suspend``
            stops its ranks and keeps it for the next try to resume (one that Kueue manages is deleted, since Kueue
            would start it again), ``cancel`` deletes it, ``keep`` keeps it running. If only the worker terminates, the
            job always keeps running and the next try adopts it.
        cancel_on_timeout: Cancel a job that exceeds a timeout. If False, the next try adopts it.
        retry_user_errors: Retry after a failure of the training code that may not recur (an exception, an exit
            code). Failures that would recur are never retried (a missing module, an invalid argument, missing
            permissions).
            Failures of the infrastructure are always retried (a lost node, an outage, a preemption).
        get_logs: Copy the log lines of all ranks to the task's log while they are written.
        wait_for_completion: Wait for the end of the job. If False, the task succeeds once the job is launched; use
            `TrainJobSensor` to wait for the job. A job for which nothing waits is suspended after an hour
            (`unattended_after`), unless `on_kill_action` is ``keep``. A clear of the task trains again once the job is
            complete.
        skip_on_exit_code: Exit code or codes; if the first failing rank has one of them, the task is skipped.
        **kwargs: Arguments of `BaseOperator`. ``execution_timeout`` counts from the start of the try, also while
            deferred.

    Returns (XCom):
        ``{"namespace", "name", "uid", "attempt", "metrics", "outputs", "seconds", "history", "goodput"}``,
        see `trainjob.TrainJobResult`.

    Raises:
        InvalidSpec: Literals are invalid; when the DAG is parsed.
        TrainJobFatal: Every try would fail: the spec or the setup is invalid, a module is missing (an
            ``AirflowFailException``: no retry).
        TrainJobFailure: Another try may succeed (retried if ``retries`` is set).
        TrainJobTimeout: A timeout expired (retried if ``retries`` is set).
    """

    template_fields: Sequence[str] = ("spec", *_SPEC_FIELDS, "namespace", "trainjob_conn_id")
    template_fields_renderers = {  # noqa: RUF012 - as BaseOperator declares it
        "spec": "yaml",
        "env": "json",
        "inputs": "json",
        "outputs": "json",
        "torchtune": "json",
        "initializer": "json",
        "pod": "json",
        "runtime_patches": "json",
        "on_retry": "json",
        "resources_per_node": "json",
    }

    def __init__(
        self,
        *,
        spec: TrainJobSpec | Mapping[str, Any] | str | Path | None = None,
        runtime: str | Mapping[str, Any] | None = None,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        torchtune: Mapping[str, Any] | str | None = None,
        num_nodes: int | str | None = None,
        num_proc_per_node: int | str | None = None,
        resources_per_node: Mapping[str, Any] | str | None = None,
        env: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | None = None,
        inputs: Mapping[str, str] | str | None = None,
        outputs: Mapping[str, str] | str | None = None,
        checkpoints: str | None = None,
        initializer: Mapping[str, Any] | str | None = None,
        pod: Any = None,
        runtime_patches: Sequence[Mapping[str, Any]] | str | None = None,
        labels: Mapping[str, str] | str | None = None,
        annotations: Mapping[str, str] | str | None = None,
        active_deadline_seconds: int | str | None = None,
        stall_timeout: timedelta | float | str | None = None,
        suspend: bool | str | None = None,
        managed_by: str | None = None,
        unattended: str | None = None,
        unattended_after: timedelta | float | str | None = None,
        on_retry: Mapping[str, Any] | str | None = None,
        **kwargs: Any,
    ) -> None:
        from trainjob._spec.pods import WRITTEN_AS
        from trainjob._spec.reading import check_limits, plain_models

        for name in kwargs.keys() & WRITTEN_AS.keys() - {"resources", "queue"}:  # arguments of BaseOperator
            raise ValueError(f"TrainJobOperator has no argument {name}: {WRITTEN_AS[name]}")
        check_limits(
            [None if isinstance(spec, str) else spec, pod, env, resources_per_node, initializer, runtime_patches]
        )
        super().__init__(**kwargs)
        self.spec = plain_models(spec)
        self.runtime = runtime
        self.image = image
        self.command = command
        self.args = args
        self.torchtune = torchtune
        self.num_nodes = num_nodes
        self.num_proc_per_node = num_proc_per_node
        self.resources_per_node = plain_models(resources_per_node)
        self.env = plain_models(env)
        self.inputs: Any = inputs
        self.outputs: Any = outputs
        self.checkpoints = checkpoints
        self.initializer: Any = plain_models(initializer)
        self.pod = plain_models(pod)
        self.runtime_patches = plain_models(runtime_patches)
        self.labels = labels
        self.annotations = annotations
        self.active_deadline_seconds = active_deadline_seconds
        self.stall_timeout = stall_timeout
        self.suspend = suspend
        self.managed_by = managed_by
        self.unattended = unattended
        self.unattended_after = unattended_after
        self.on_retry = on_retry
        given = [name for name in _SPEC_FIELDS if getattr(self, name) is not None]
        if spec is not None and given:
            raise ValueError(f"spec cannot be combined with {', '.join(given)}: set them in spec")
        if not is_mapped_element(self):  # mapped arguments have values only at run time
            self.check_literals()

    def check_literals(self) -> None:
        """Check the spec for errors that no template can fix, when the DAG is parsed.

        Raises:
            TrainJobError: The spec is invalid; the error has all problems.
        """
        from trainjob._spec.literals import check_literals

        fields = self.written_fields(None)
        if fields is not None:
            check_literals(fields, is_open)

    def written_fields(self, context: Context | None) -> Mapping[str, Any] | None:
        """The current fields of the spec, from arguments, `spec` or its file; None if a template contains all of them.

        Args:
            context: Renders the spec's YAML file; without it the file is not read.
        """
        from trainjob import TrainJobSpec
        from trainjob._spec.reading import load_spec

        spec, name = self.spec, ""
        if spec is None:
            return self.literal_fields()
        if isinstance(spec, str | Path) and _is_path(spec):
            if context is None:
                return None
            name, spec = str(spec), self._file(spec, context)
        if isinstance(spec, TrainJobSpec):
            return spec.model_dump(mode="json", exclude_unset=True)
        if isinstance(spec, str):
            return None if "{{" in spec or "{%" in spec else load_spec(spec, name)
        return spec if isinstance(spec, Mapping) else None

    def sample_spec(self) -> tuple[TrainJobSpec | None, list[str]]:
        """The known part of the spec of a run that starts now, and the paths of values that only a run knows."""
        from trainjob._spec.literals import check_literals
        from trainjob_airflow.sample import rendered, sample_context, unknown_paths

        made = rendered(self)
        made.check_literals()
        fields = made.written_fields(sample_context(self))
        if fields is None:
            return None, ["spec"]
        if made.spec is None:
            fields = made.spec_fields(f"airflow/dry-run/{self.dag_id}/{self.task_id}")
            written: Mapping[str, Any] = {name: getattr(made, name) for name in made.template_fields}
        else:
            written = fields
        return check_literals(fields, is_open), [*unknown_paths(written)]

    def literal_fields(self) -> dict[str, Any]:
        """The fields of the spec that are set in the DAG."""
        return {name: value for name in _SPEC_FIELDS if (value := getattr(self, name)) is not None}

    def spec_fields(self, key: str) -> dict[str, Any]:
        """The rendered fields of the spec that are set. Operators for one kind of job override it."""
        del key
        return self.literal_fields()

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """Build the spec of the job from rendered fields, or from `spec`."""
        from trainjob import TrainJobSpec  # imports pydantic, which DAG files do not need
        from trainjob._spec.reading import load_spec

        source = self.spec_fields(key) if self.spec is None else self.spec
        if isinstance(source, str | Path) and _is_path(source):
            source = load_spec(self._file(source, context), str(source))
        return TrainJobSpec.parse(source)

    def declared_outputs(self, context: Context) -> Mapping[str, Any]:
        """Name -> URI of the outputs in the spec."""
        fields = self.written_fields(context) or {}
        outputs = fields.get("outputs")
        return outputs if isinstance(outputs, Mapping) else {}

    def _file(self, name: str | Path, context: Context) -> str:
        """The rendered text of the spec's file."""
        from jinja2 import TemplateError

        from trainjob._spec.reading import read_spec_file

        # Not by template_ext: Airflow would then treat every argument that ends in .yaml as a template file.
        data = read_spec_file(Path(self.dag.folder) / name, str(name))
        try:
            return str(self.render_template(data.decode(), context))
        except UnicodeDecodeError as error:
            raise TrainJobFatal(f"the template {name} is not text in UTF-8: {error}") from None
        except TemplateError as error:
            raise TrainJobFatal(f"the template {name} cannot be rendered: {error}") from None

    def _do_render_template_fields(self, *args: Any, **kwargs: Any) -> None:
        """Render as Airflow does, including templates in a `TrainJobSpec` object; errors fail without a retry."""
        dump = getattr(self.spec, "model_dump", None)
        if dump is not None:
            self.spec = dump(mode="json", exclude_unset=True)
        super()._do_render_template_fields(*args, **kwargs)

    def data_of(self, result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Inputs and initializers as read; outputs of the spec and reported outputs as written."""
        initializers = (self.initializer or {}).values()
        sources = [each if isinstance(each, str) else (each or {}).get("storage_uri", "") for each in initializers]
        written = {**(self.outputs or {}), **result["outputs"]}
        return [*(self.inputs or {}).values(), *sources], [uri for uri in written.values() if "://" in str(uri)]


def _is_path(source: str | Path) -> bool:
    return isinstance(source, Path) or (source.endswith((".yaml", ".yml")) and "\n" not in source)
