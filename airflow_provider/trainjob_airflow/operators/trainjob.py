"""`TrainJobOperator`: one TrainJob as one task."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    *("inputs", "outputs", "checkpoints", "initializer", "runtime_patches", "labels", "annotations"),
    *("active_deadline_seconds", "suspend", "managed_by", "unattended", "unattended_after"),
)
_MANAGER = "trainjob.dev/airflow"
_POD = {
    "volumes": "volumes",
    "node_selector": "nodeSelector",
    "tolerations": "tolerations",
    "affinity": "affinity",
    "service_account_name": "serviceAccountName",
    "image_pull_secrets": "imagePullSecrets",
    "security_context": "securityContext",
}
_POD_FIELDS = (*_POD, "volume_mounts", "pod_labels", "pod_annotations")
"""Arguments that change the pods of all nodes, by one entry of ``runtimePatches``."""
_PATCHED = re.compile(
    r"runtime_patches\[0\]\.trainingRuntimeSpec\.template\.spec\.replicatedJobs\[\d+\]\.template\.spec\.template\."
    r"(?:(metadata\.\w+)|spec\.(?:containers\[0\]\.)?(\w+))"
)
_METADATA = {"metadata.labels": "pod_labels", "metadata.annotations": "pod_annotations"}


class TrainJobOperator(TrainJobTask):
    """Launches one TrainJob, waits for its end and returns what it reports.

    The job is launched exactly once for each try that needs one: a try whose worker died leaves the job running, and
    the next try goes on with that same job. A job that failed is tried again as a new job.

    What the job should be is said either by the fields of a spec or by `spec`, all of them templates. Literals
    are checked when the DAG is parsed, templates once they are rendered; see `trainjob.TrainJobSpec` for their meaning.

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
        unattended: What happens to the job when no task has waited for it for `unattended_after`: ``suspend`` (the
            next waiter resumes it), ``delete`` or ``keep``. If left out, it is suspended, or kept where the task
            does not wait or `on_kill_action` is ``keep``.
        unattended_after: One minute to seven days, as ``timedelta``, seconds or ISO 8601; an hour if left out.
        namespace: Kubernetes namespace; the connection's if left out.
        trainjob_conn_id: Connection of type ``trainjob``. Where the default one does not exist, ``TRAINJOB_*`` in the
            environment decides.
        deferrable: Wait in the triggerer, without a worker.
        volumes: Volumes of the pods of all nodes. These and the next arguments become one of `runtime_patches`; like
            those of `KubernetesPodOperator` they take mappings as in the API or models of the ``kubernetes`` package.
        volume_mounts: Mounts of the training container.
        node_selector: Labels that a node must have.
        tolerations: Taints of nodes that are accepted.
        affinity: See Kubernetes.
        service_account_name: Service account of the pods.
        image_pull_secrets: Secrets for image registries, as ``{"name": …}``.
        security_context: Of the pods.
        pod_labels: Labels of the pods.
        pod_annotations: Annotations of the pods.
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
        on_kill_action: What becomes of the job when a person marks the task or clears it: ``cancel`` deletes it,
            ``suspend`` keeps it for the next try to go on with, ``keep`` lets it go on. A worker that goes away leaves
            the job alone in any case; the next try adopts it.
        cancel_on_timeout: Whether a job that outlasts one of the timeouts is cancelled; else the next try adopts it.
        retry_user_errors: Whether Airflow retries a training that failed by itself in a way that another try may not
            meet again (an exception, an exit code). What is certain to fail again is never retried (a missing module,
            a wrong argument, missing rights), what came from outside always (a lost node, an outage, preemption).
        get_logs: Whether the lines of all ranks go to the task's log while they are written.
        wait_for_completion: Wait for the end; else the task succeeds once the job is launched, and a `TrainJobSensor`
            can wait for it.
        skip_on_exit_code: Exit code, or several, of the first failing rank that skip the task instead of failing it.
        **kwargs: Of `BaseOperator`. ``execution_timeout`` counts from the start of the try, also while deferred.

    Returns (XCom):
        ``{"namespace", "name", "uid", "attempt", "metrics", "outputs", "seconds", "history"}``, see
        `trainjob.TrainJobResult`.

    Raises:
        InvalidSpec: Literals are wrong; when the DAG is parsed.
        TrainJobFatal: It is certain to fail again: the spec or the set-up is wrong, a module is missing (an
            ``AirflowFailException``: no retry).
        TrainJobFailure: Another try may end differently (retried, if ``retries`` is set).
        TrainJobTimeout: A timeout ran out (retried likewise).
    """

    template_fields: Sequence[str] = ("spec", *_SPEC_FIELDS, *_POD_FIELDS, "namespace", "trainjob_conn_id")
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
        unattended: str | None = None,
        unattended_after: timedelta | float | str | None = None,
        volumes: Sequence[Any] | None = None,
        volume_mounts: Sequence[Any] | None = None,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Any] | None = None,
        affinity: Any = None,
        service_account_name: str | None = None,
        image_pull_secrets: Sequence[Any] | None = None,
        security_context: Any = None,
        pod_labels: Mapping[str, str] | None = None,
        pod_annotations: Mapping[str, str] | None = None,
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
        self.unattended = unattended
        self.unattended_after = unattended_after
        from trainjob.spec.reading import check_limits

        check_limits([volumes, volume_mounts, tolerations, affinity, image_pull_secrets, security_context])
        self.volumes = as_json(volumes)
        self.volume_mounts = as_json(volume_mounts)
        self.node_selector = node_selector
        self.tolerations = as_json(tolerations)
        self.affinity = as_json(affinity)
        self.service_account_name = service_account_name
        self.image_pull_secrets = as_json(image_pull_secrets)
        self.security_context = as_json(security_context)
        self.pod_labels = pod_labels
        self.pod_annotations = pod_annotations
        given = [name for name in (*_SPEC_FIELDS, *_POD_FIELDS) if getattr(self, name) is not None]
        if spec is not None and given:
            raise ValueError(f"spec cannot be combined with {', '.join(given)}: write them into it")
        if not kwargs.get("_airflow_from_mapped"):  # whose values are decided in the run
            self.check_literals()

    def check_literals(self) -> None:
        """Refuse when the DAG is parsed what no template can make good.

        Raises:
            TrainJobError: with every problem.
        """
        from trainjob.spec.literals import check_literals

        fields = self.written_fields(None)
        if fields is not None:
            with self._argument_names():
                check_literals(fields, is_open)

    def written_fields(self, context: Context | None) -> Mapping[str, Any] | None:
        """The fields of the spec as they stand, wherever they are written; None where templates decide over them.

        Args:
            context: Renders the spec's YAML file; None: the file is not read.
        """
        from trainjob import TrainJobSpec
        from trainjob.spec.reading import load

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
            return None if "{{" in spec or "{%" in spec else load(spec, name)
        return spec if isinstance(spec, Mapping) else None

    def sample_spec(self) -> tuple[TrainJobSpec | None, list[str]]:
        """See `TrainJobTask`."""
        from trainjob.spec.literals import check_literals
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
        with made._argument_names():
            return check_literals(fields, is_open), [*unknown_paths(written)]

    def literal_fields(self) -> dict[str, Any]:
        """The fields of the spec that were given, as they are written in the DAG."""
        fields = {name: value for name in _SPEC_FIELDS if (value := getattr(self, name)) is not None}
        patch, others = self._pod_patch(), fields.get("runtime_patches", [])
        if patch is None or is_open(others):
            return fields
        return fields | {"runtime_patches": [*others, patch]}

    def _pod_patch(self) -> dict[str, Any] | None:
        """The patch that the arguments about pods make; None if there are none."""
        from trainjob.spec import for_every_node

        pod = {name: value for field, name in _POD.items() if (value := getattr(self, field)) is not None}
        if self.volume_mounts is not None:
            pod["containers"] = [{"name": "node", "volumeMounts": self.volume_mounts}]
        given = {"labels": self.pod_labels, "annotations": self.pod_annotations}
        metadata = {name: value for name, value in given.items() if value}
        if not pod and not metadata:
            return None
        runtime = self.runtime.get("name") if isinstance(self.runtime, Mapping) else self.runtime
        return for_every_node(str(runtime), pod, _MANAGER, metadata)

    @contextmanager
    def _argument_names(self) -> Iterator[None]:
        """Report a problem of the patch that `_pod_patch` makes under the name of the argument."""
        from pydantic.alias_generators import to_snake

        from trainjob.errors import InvalidSpec

        try:
            yield
        except InvalidSpec as error:
            if self.runtime_patches is not None:  # whose problems have such paths, too
                raise
            named = {
                replace(each, path=_PATCHED.sub(lambda found: _METADATA.get(found[1]) or to_snake(found[2]), each.path))
                for each in error.problems
            }
            raise InvalidSpec(sorted(named, key=str)) from None

    def spec_fields(self, key: str) -> dict[str, Any]:
        """The rendered fields of the spec that were given. Operators for one kind of job override it."""
        del key
        return self.literal_fields()

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """See `TrainJobTask`."""
        from trainjob import TrainJobSpec  # pydantic: not in a DAG file
        from trainjob.spec.reading import load

        source = self.spec_fields(key) if self.spec is None else self.spec
        if isinstance(source, str | Path) and _is_path(source):
            source = load(self._file(source, context), str(source))
        with self._argument_names():
            return TrainJobSpec.parse(source)

    def declared_outputs(self, context: Context) -> Mapping[str, Any]:
        """See `TrainJobTask`."""
        fields = self.written_fields(context) or {}
        outputs = fields.get("outputs")
        return outputs if isinstance(outputs, Mapping) else {}

    def _file(self, name: str | Path, context: Context) -> str:
        """The text of a spec's file, rendered."""
        from jinja2 import TemplateError

        from trainjob.spec.reading import content

        # Not by template_ext: Airflow would then take every argument that ends in .yaml for a template file.
        data = content(Path(self.dag.folder) / name, str(name))
        try:
            return str(self.render_template(data.decode(), context))
        except UnicodeDecodeError as error:
            raise TrainJobFatal(f"the template {name} is not text in UTF-8: {error}") from None
        except TemplateError as error:
            raise TrainJobFatal(f"the template {name} cannot be rendered: {error}") from None

    def _do_render_template_fields(self, *args: Any, **kwargs: Any) -> None:
        """See `StrictTemplates`; templates inside a `TrainJobSpec` object count as well."""
        dump = getattr(self.spec, "model_dump", None)
        if dump is not None:
            self.spec = dump(mode="json", exclude_unset=True)
        super()._do_render_template_fields(*args, **kwargs)

    def data_of(self, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """See `TrainJobTask`: inputs and initializers; outputs that were asked for or reported."""
        initializers = (self.initializer or {}).values()
        sources = [each if isinstance(each, str) else (each or {}).get("storage_uri", "") for each in initializers]
        written = {**(self.outputs or {}), **told["outputs"]}
        return [*(self.inputs or {}).values(), *sources], [uri for uri in written.values() if "://" in str(uri)]


def as_json(value: Any) -> Any:
    """A model of the ``kubernetes`` package, or a list of such, as in the API: templates are rendered in texts."""
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    names = getattr(value, "attribute_map", None)
    if names is None:
        return value
    parts = {name: as_json(getattr(value, field)) for field, name in names.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _is_path(source: str | Path) -> bool:
    return isinstance(source, Path) or (source.endswith((".yaml", ".yml")) and "\n" not in source)
