"""`TrainJobSpec`: all settings of one TrainJob."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from trainjob._spec import torchtune
from trainjob._spec.base import Part
from trainjob._spec.checks import (
    argument_problems,
    checkpoint_directory_problems,
    checkpoint_problems,
    env_problems,
    location_problems,
    metadata_problems,
    secret_texts,
)
from trainjob._spec.function import Function
from trainjob._spec.initializers import Initializer
from trainjob._spec.manifest import authored, manifest_problems
from trainjob._spec.on_retry import OnRetry
from trainjob._spec.parts import Count, Env, OwnerReference, Resources, RuntimeRef, env_api, resource_problems
from trainjob._spec.pods import WRITTEN_AS, PodTemplate, RuntimePatches, patch_problems, template_problems, volumes_of
from trainjob._spec.reading import check_limits, load_spec, plain_models
from trainjob._spec.torchtune import TorchTuneConfig
from trainjob._spec.validation import Validation
from trainjob._support.durations import parse_duration
from trainjob._support.masking import source_holds_secret
from trainjob._support.volumes import CHECKPOINT_VARIABLE
from trainjob.errors import InvalidSpec, Problem
from trainjob.job import LONGEST_UNATTENDED, SHORTEST_UNATTENDED

SHORTEST_STALL, LONGEST_STALL = timedelta(seconds=1), timedelta(days=7)

_BESIDE_MANIFEST = {"manifest", "unattended", "unattended_after", "stall_timeout"}


# As in the reference grammar of github.com/distribution/reference, without its limit of lengths.
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:\d+)?/|\[[0-9a-fA-F:]+\](:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[A-Za-z][A-Za-z0-9+._-]*:[0-9a-fA-F]{32,})?"
)


def _is_image(value: str) -> str:
    if value and not _IMAGE.fullmatch(value):
        raise ValueError(f"{value!r} is not an image name such as registry.example/team/train:1.2")
    return value


def _function(value: object) -> object:
    return Function.of(value) if callable(value) and not isinstance(value, Function) else value


def _duration(value: object) -> object:
    try:
        if isinstance(value, bool):
            raise ValueError
        return parse_duration(value) if isinstance(value, str) else value
    except ValueError:
        raise PydanticKnownError("time_delta_type") from None  # without the value, which may be a secret


Duration = Annotated[timedelta, BeforeValidator(_duration)]


class TrainJobSpec(Part):
    """All settings of one TrainJob.

    Raises:
        InvalidSpec: With every problem, its path, and what to write instead. The constructor checks each field by
            itself, and the size of the spec; `parse` and `check` also check rules that concern several fields.
    """

    written_as: ClassVar[Mapping[str, str]] = WRITTEN_AS
    unknown_field: ClassVar[str] = "fields that a spec does not have can be set in a whole manifest"

    runtime: RuntimeRef | None = None
    """Name of a ClusterTrainingRuntime, such as torch-distributed. It may be a `RuntimeRef`."""

    image: Annotated[str, Field(max_length=500), AfterValidator(_is_image)] | None = None
    """Container image of the nodes; the runtime's if left out."""

    command: Annotated[list[str], Field(max_length=128)] = Field(default_factory=list)
    """Entry point of each node. As in a pod, ``$(NAME)`` is replaced by an environment variable, ``$$`` is a ``$``."""

    args: Annotated[list[str], Field(max_length=128)] = Field(default_factory=list)
    """Arguments of the command, or of the runtime's entry point."""

    func: Annotated[Function | None, BeforeValidator(_function)] = None
    """A Python function to run instead of a command. Its return value on rank 0 becomes `TrainJobResult.returned`, if
    it is JSON of at most 4 KiB. Other values are lost, with a warning in the log of rank 0."""

    func_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `func`, as JSON values."""

    packages_to_install: list[str] = Field(default_factory=list)
    """Requirements that pip installs on each node before `func` runs."""

    pip_index_urls: list[str] = Field(default_factory=list)
    """Package indexes for `packages_to_install`: the first replaces pip's default index, the others are added."""

    torchtune: TorchTuneConfig | None = None
    """Changes to torchtune's recipe on one of Trainer's torchtune runtimes; `args` may add to them."""

    env: Env = Field(default_factory=dict)
    """Environment variables of the nodes; secrets by reference. ``{"NAME": "value"}`` or
    ``{"NAME": {"valueFrom": …}}``."""

    inputs: dict[str, str] = Field(default_factory=dict)
    """URIs that the training reads, by name; the nodes have each as ``TRAINJOB_INPUT_<NAME>``. For example
    ``{"dataset": "s3://…", "model": ""}`` (an empty URI means no input) and ``$(TRAINJOB_INPUT_DATASET)`` in args. A
    PVC volume, ``pvc://claim/path``, is mounted on every node and passed as ``file:///…``."""

    outputs: dict[str, str] = Field(default_factory=dict)
    """URIs that the training writes, by name; the nodes have each as ``TRAINJOB_OUTPUT_<NAME>``. PVC volumes as in
    `inputs`."""

    checkpoints: str | None = None
    """Location of checkpoints, from which an interrupted training resumes. ``pvc://claim/path`` (mounted on every
    node), ``s3://…``, ``file:///…``. Attempts of a key that are asked to do the same share a directory below it; the
    nodes get it as ``TRAINJOB_CHECKPOINT``, a path or, for an object store, a URI. To continue from another directory,
    set that variable in `env`. See docs/how-to/checkpoints.md."""

    num_nodes: Count | None = None
    """Number of nodes. Each is a pod; the runtime's if left out, which is 1 in those that Trainer ships."""

    num_proc_per_node: Count | None = None
    """Processes on each node. Only some runtimes start several (torchrun, mpirun); the runtime's if left out."""

    resources_per_node: Resources | None = None
    """Resources of each node, such as cpu, memory and gpu. ``{"cpu": 4, "memory": "16Gi", "gpu": 1}`` for requests and
    limits alike, or ``{"requests": …, "limits": …}``."""

    initializer: Initializer | None = None
    """Trainer's own initializers."""

    pod: Annotated[dict[str, Any], PodTemplate] | None = None
    """Changes to the pods of all nodes: volumes, node selector, tolerations, service account, labels, and others. A
    PodSpec, or a template with ``metadata`` and ``spec``, as in the API, in snake_case, or as a model of the
    ``kubernetes`` package. The training container is ``node``, also where no name is given. Trainer merges it into the
    runtime's; what it cannot change for one job is refused."""

    runtime_patches: Annotated[list[dict[str, Any]], RuntimePatches] = Field(default_factory=list)
    """Changes to single steps of the runtime, merged by Trainer (``spec.runtimePatches``): initializers, launcher, and
    the labels of the JobSet."""

    suspend: bool = False
    """Create the job suspended."""

    active_deadline_seconds: Count | None = None
    """Seconds after creation, or after the latest resume, at which Trainer fails the job."""

    stall_timeout: Annotated[Duration, Field(ge=SHORTEST_STALL, le=LONGEST_STALL)] | None = None
    """Longest time without progress of any rank; after it the step fails and names the rank that hangs. Seconds, or
    text such as ``15m`` or ``PT15M``. It should be several times the longest pause of a healthy training, such as an
    evaluation. Before the second step the limit is twice as long. The process that waits for the job checks it, see
    docs/how-to/hangs.md."""

    managed_by: Literal["trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"] | None = None
    """The controller that manages the job."""

    unattended: Literal["keep", "suspend", "cancel"] | None = None
    """Action when nobody has waited for the job for `unattended_after`: keep, suspend (the next waiter resumes the job)
    or delete it. Default: jobs of waiting Airflow tasks and KFP steps are suspended, all others are kept. On a cluster,
    ``trainjob reap`` executes it, see docs/how-to/unattended-jobs.md."""

    unattended_after: Annotated[Duration, Field(ge=SHORTEST_UNATTENDED, le=LONGEST_UNATTENDED)] | None = None
    """One minute to seven days, as seconds, or text such as ``2h`` or ``PT2H``. Default: one hour. The reaper of
    `trainjob install` runs every ten minutes, so the action may follow up to twelve minutes later."""

    on_retry: OnRetry | None = None
    """Changes of the next attempt after a failure, by its category. More memory, without the lost node, another queue,
    fewer nodes, see docs/how-to/change-retries.md. It is not part of the job's identity."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the TrainJob, such as ``kueue.x-k8s.io/queue-name``. Trainer does not pass them on to pods."""

    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the TrainJob."""

    owner_reference: OwnerReference | None = None
    """An object of the same namespace, such as a workflow. Kubernetes deletes the TrainJob with it."""

    manifest: Annotated[dict[str, Any], AfterValidator(authored)] | None = None
    """A complete TrainJob object instead of the fields above, sent unchanged except for its name, and what `unattended`
    and `stall_timeout` add. One that was read from a cluster is sent without what the cluster added."""

    @model_validator(mode="before")
    @classmethod
    def _within_limits(cls, value: object) -> object:
        check_limits(value)
        return plain_models(value)

    @classmethod
    def refusal(cls, problems: Sequence[Problem]) -> InvalidSpec:
        """The error of the constructor."""
        return InvalidSpec(problems)

    @classmethod
    def parse(cls, source: TrainJobSpec | Mapping[str, Any] | str | Path) -> TrainJobSpec:
        """Read and check a spec.

        Args:
            source: Fields of a spec, or a complete TrainJob object, as a mapping, YAML text or the path of a YAML file.

        Raises:
            InvalidSpec: With every problem.
        """
        if isinstance(source, TrainJobSpec):
            return source.check()
        fields = load_spec(source)
        if "apiVersion" in fields or "kind" in fields:
            fields = {"manifest": fields}
        validation = Validation(cls, fields)
        if validation.model is not None and not validation.problems:
            return validation.model.check()
        problems = list(validation.problems)
        if validation.model is not None and "manifest" not in validation.refused:
            problems += validation.model._problems(validation.refused)
        raise InvalidSpec(list(dict.fromkeys(problems)))

    def check(self) -> Self:
        """Check rules that concern several fields.

        Returns:
            The spec itself.

        Raises:
            InvalidSpec: With every problem.
        """
        if problems := [*self._problems(())]:
            raise InvalidSpec(problems)
        return self

    def _problems(self, refused: Collection[str]) -> Iterator[Problem]:
        """Problems of rules that concern several fields; `refused` are names of fields that have an invalid value."""
        if self.manifest is None:
            yield from self._field_problems(refused)
            return
        for field in sorted(self.model_fields_set - _BESIDE_MANIFEST):
            yield Problem(field, "cannot be combined with a whole manifest", "write it into the manifest")
        yield from manifest_problems(self.manifest)

    def _field_problems(self, incomplete: Collection[str]) -> Iterator[Problem]:
        if self.unattended_after is not None and self.unattended == "keep":
            yield Problem("unattended_after", "has no effect if unattended is keep")
        if self.runtime is None and "runtime" not in incomplete:
            yield Problem("runtime", "is missing", "name a ClusterTrainingRuntime such as torch-distributed")
        yield from self._func_problems(incomplete)
        yield from metadata_problems(self.labels, self.annotations)
        yield from self._env_problems(incomplete)
        yield from argument_problems({"command": self.command, "args": self.args})
        yield from self._torchtune_problems(incomplete)
        if self.initializer is not None:
            yield from self.initializer.problems()
        yield from location_problems(self.inputs, "inputs")
        yield from location_problems(self.outputs, "outputs")
        if self.checkpoints is not None:
            yield from checkpoint_problems(self.checkpoints)
        yield from self._pod_problems()
        if self.resources_per_node is not None:
            yield from resource_problems(self.resources_per_node.model_dump(), "resources_per_node")
        if self.on_retry is not None:
            yield from self.on_retry.problems(self.resources_per_node, self.num_nodes, self.labels, incomplete)

    def _env_problems(self, incomplete: Collection[str]) -> Iterator[Problem]:
        env, path = dict(self.env), f"env.{CHECKPOINT_VARIABLE}"
        directory = env.pop(CHECKPOINT_VARIABLE, None)
        if directory is not None and self.checkpoints is not None:
            yield from checkpoint_directory_problems(directory, self.checkpoints, path)
        elif directory is not None and "checkpoints" not in incomplete:
            yield Problem(path, "is set from checkpoints", "set checkpoints to the location of the directory, too")
        yield from env_problems(env_api(env), "env", reserved=True)

    def _func_problems(self, incomplete: Collection[str]) -> Iterator[Problem]:
        if self.func is not None and (self.command or self.args):
            yield Problem("func", "cannot be combined with command or args", "pass func_args")
        if self.func is None:
            for field in ("func_args", "packages_to_install", "pip_index_urls"):
                if getattr(self, field) and "func" not in incomplete:
                    yield Problem(field, "needs func", "install packages in the image, or set func")
        else:
            if not self.packages_to_install and self.pip_index_urls and "packages_to_install" not in incomplete:
                yield Problem("pip_index_urls", "has no effect without packages_to_install")
            if "func_args" not in incomplete:
                yield from self.func.argument_problems(self.func_args)
        try:
            json.dumps(self.func_args, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield Problem("func_args", f"cannot be written as JSON: {error}", "use numbers, text, lists and dicts")
            return
        for field in ("func_args", "packages_to_install", "pip_index_urls"):
            for path in secret_texts(getattr(self, field), field):
                yield Problem(path, "is a literal secret", "read it from an environment variable of env")
        if self.func is not None and source_holds_secret(self.func.source):
            yield Problem("func", "contains a secret in its source", "read it from an environment variable of env")

    def _torchtune_problems(self, incomplete: Collection[str]) -> Iterator[Problem]:
        args, lora = self.args, "args"
        if self.torchtune is not None:
            args, lora = [*args, *self.torchtune.args(None)], "torchtune.peft_config"
            for path in secret_texts(self.torchtune.model_dump(), "torchtune"):
                yield Problem(path, "contains a secret, which everyone who can see the job can read")
            if self.command or self.func is not None:
                yield Problem("torchtune", "cannot be combined with command or func", "set other options in args")
        elif self.command != torchtune.COMMAND:
            return
        trainer = {
            "numNodes": self.num_nodes,
            "numProcPerNode": self.num_proc_per_node,
            "resourcesPerNode": self.resources_per_node and self.resources_per_node.api(),
        }
        paths = {"runtime": "runtime", "num_nodes": "num_nodes", "args": "args", "lora": lora}
        if self.runtime is not None and not {"runtime", "torchtune", *paths} & {*incomplete}:
            yield from torchtune.problems(self.runtime.name, trainer, args, paths)

    def _pod_problems(self) -> Iterator[Problem]:
        shipped = self.runtime is not None and self.runtime.kind == "ClusterTrainingRuntime"
        runtime = self.runtime.name if self.runtime is not None and shipped else ""
        yield from patch_problems(self.runtime_patches, "runtime_patches", runtime)
        pod = self.pod or {}
        yield from template_problems(pod, "pod", runtime, volumes_of(self.runtime_patches, [pod]))
        for value, where in ((pod.get("spec"), "pod"), (self.runtime_patches, "runtime_patches")):
            for path in secret_texts(value, where):
                if ".env" not in path and ".metadata." not in path:  # checked by name above
                    yield Problem(path, "is a literal secret", "refer to a Secret of the namespace")
