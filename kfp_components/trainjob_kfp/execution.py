"""The execution that a step's process belongs to, read from KFP's executor input in the process's arguments."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainjob import ConfigurationError, Problem, Settings
from trainjob._jobs.launching import AfterFailure
from trainjob._manifest.workflow_labels import KFP_PIPELINE, KFP_RUN, KFP_TASK, kfp_label
from trainjob._spec.texts import EXACT, as_text
from trainjob._spec.validation import field_name
from trainjob._support.foreign import Limits, Unreadable, mapping_of
from trainjob.job import key_hash

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOCAL_RUN = re.compile(r"(.+)-\d{4}(?:-\d{2}){5}-\d{6}")  # kfp.local.executor_input_utils (KFP 2.17)
# A parameter has the limits of a spec.
_INPUT = Limits(64 << 20, depth=256, values=1_000_000, finite=False, of="an executor input")
WORKSPACE = "/kfp-workspace"
"""Where KFP mounts a run's workspace (``component.WorkspaceMountPath``)."""

ADDED = "trainjob--"
"""Name prefix of the parameters for values inside of arguments, see `trainjob_kfp.channels.pass_by_reference`."""

REFERENCE = re.compile(r"\[\[trainjob:([^\]]+)\]\]|\{\{\$\.inputs\.parameters\['([^']+)'\]\}\}")
"""A parameter of the step inside a text: as `reference` writes it, and KFP's placeholder."""

TRAINING_FIELDS = (
    *("runtime", "image", "num_nodes", "num_proc_per_node", "resources_per_node"),
    *("labels", "stall_timeout", "on_retry"),
)
"""Arguments of a training that are fields of its spec, unchanged."""

TRAINING_ARGUMENTS = (*TRAINING_FIELDS, "command", "args", "env", "inputs", "outputs", "checkpoints")
"""All arguments of a training that are fields of its spec."""


@dataclass(frozen=True)
class Execution:
    """One execution of one step of one run; all its tries share it.

    Attributes:
        key: The key that identifies the step's work in `trainjob.launch`.
        run: Id of the run; with kfp.local ``<pipeline>-<time>``.
        task: Name of the task in its pipeline.
        pipeline: Name of the pipeline.
        parameters: All input parameters, including those that KFP's compiler added.
        local: Whether kfp.local runs the step.
    """

    key: str
    run: str
    task: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    local: bool = False
    pipeline: str = ""

    @classmethod
    def of(cls, argv: Sequence[str]) -> Execution:
        """Read the execution from the arguments of a step's process.

        The driver generates a UUID per execution and puts it into the URIs of all outputs, ``<root>/<pipeline>/<run
        id>/<task>/<uuid>/<output>``. These URIs stay the same when the pod is retried, deleted or restarted by "Retry
        run"; environment, pod name and task id change (KFP 2.17). Only ``executor-logs-<n>`` counts the tries, so the
        part after the UUID is ignored.

        Raises:
            ConfigurationError: KFP did not start the process, or the location of the outputs has an unknown form. The
                key is not guessed: it could be the key of another run.
        """
        given = input_of(argv)
        outputs = (given.get("outputs") or {}).get("artifacts") or {}
        uris = [artifact["uri"] for artifacts in outputs.values() for artifact in artifacts.get("artifacts") or []]
        # On a KFP backend every step has at least the artifact executor-logs; with kfp.local, use the output file.
        uris = uris or [(given.get("outputs") or {}).get("outputFile", "")]
        parts: list[str] = uris[0].rstrip("/").split("/")[:-1]
        pipeline, run, task, last = ["", "", "", "", *parts][-4:]
        parameters = (given.get("inputs") or {}).get("parameterValues") or {}
        if _UUID.fullmatch(last) and _UUID.fullmatch(run):
            return cls(f"kfp/{run}/{last}/{task}", run, task, parameters, pipeline=pipeline)
        # kfp.local: <root>/<pipeline>-<time>/[for-loop-1-iteration-0/]<task>/<output>
        local = _of_local_run(parts)
        if len(local) < 2:
            raise ConfigurationError(
                f"cannot determine the run of this step: the location of its outputs, {uris[0]}, has neither the form "
                "of a KFP backend (…/<pipeline>/<run id>/<task>/<uuid>/<output>) nor that of kfp.local "
                "(…/<pipeline>-<time>/<task>/<output>)"
            )
        run, *loops, task = local
        iteration = "/".join([*loops, key_hash(json.dumps(parameters, sort_keys=True))])
        pipeline = _LOCAL_RUN.sub(r"\1", run)
        return cls(f"kfp/{run}/{iteration}/{task}", run, task, parameters, local=True, pipeline=pipeline)

    def after_failure(self, *, user_errors: bool) -> AfterFailure:
        """How to treat an earlier attempt that failed.

        KFP retries every failure (``set_retry``), so on its retries the diagnosis decides. A first try that finds a
        failed attempt was started by a person with "Retry run", probably after a change.

        Args:
            user_errors: Whether to retry failures of the training code that are not certain to repeat.
        """
        if int(os.environ.get("KFP_RETRY_INDEX") or 0) <= 0:
            return "retry"
        return "verdict" if user_errors else "infrastructure"

    @property
    def tried(self) -> int | None:
        """Number of KFP's try, from 1; None if it is unknown. "Retry run" counts from 1 again."""
        index = os.environ.get("KFP_RETRY_INDEX") or ""
        return int(index) + 1 if index.isdecimal() else None

    def plain(self, value: Any) -> Any:
        """The `value` of a parameter as it was written in the pipeline, with the values that it refers to.

        KFP passes all numbers in lists and dicts as floats. Where a pipeline was compiled without the components of
        this package, KFP's launcher replaces placeholders in them in one pass over a map in random order, so some can
        remain. KFP's driver replaces the placeholders of a run only where one is the complete text, and the placeholder
        of the workspace only in texts, not in lists and dicts (driver/resolve.go, KFP 2.17).
        """
        restored = _restored(value, self._insert)
        return as_text(restored) if isinstance(value, str) else restored

    def _insert(self, text: str) -> Any:
        """A text with the values that it refers to; the value itself if the text is only a reference to it."""

        def value_of(found: re.Match[str]) -> Any:
            name = found[1] or found[2]
            return _restored(self.parameters[name], self._resolve) if name in self.parameters else found[0]

        if whole := REFERENCE.fullmatch(text):
            return value_of(whole)
        parts, end = [], 0
        for found in REFERENCE.finditer(text):
            parts += [self._resolve(text[end : found.start()]), as_text(value_of(found))]
            end = found.end()
        return "".join([*parts, self._resolve(text[end:])])

    def _resolve(self, text: str) -> str:
        """A text without KFP's placeholders for the workspace's path, the run's id and the task's name."""
        for placeholder, value in self._placeholders.items():
            text = text.replace(placeholder, value)
        return text

    @property
    def _placeholders(self) -> dict[str, str]:
        return {
            "{{$.workspace_path}}": WORKSPACE,
            "{{$.pipeline_job_uuid}}": self.run,
            "{{$.pipeline_task_name}}": self.task,
        }


def reference(name: str) -> str:
    """The text that stands for the value of a parameter of the step, see `Execution.plain`."""
    return f"[[trainjob:{name}]]"


def _restored(value: Any, text: Callable[[str], Any]) -> Any:
    """A value with whole numbers as such, and with `text` of each text."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    if isinstance(value, Mapping):
        return {as_text(_restored(name, text)): _restored(each, text) for name, each in value.items()}
    return [_restored(each, text) for each in value] if isinstance(value, list) else value


def run_label(run: str) -> dict[str, str]:
    """The label that selects the jobs of a run."""
    return {KFP_RUN: kfp_label(run)}


def origin_of(execution: Execution) -> dict[str, str]:
    """Labels with the pipeline, the run and the task of a job."""
    values = {KFP_PIPELINE: execution.pipeline, KFP_TASK: execution.task}
    return run_label(execution.run) | {name: kfp_label(value) for name, value in values.items() if value}


def _of_local_run(parts: Sequence[str]) -> list[str]:
    """The parts of a kfp.local path from the run's name on; empty if no part has the form of a run's name."""
    runs = [number for number, part in enumerate(parts) if _LOCAL_RUN.fullmatch(part)]
    return list(parts[runs[-1] :]) if runs else []


def input_of(argv: Sequence[str]) -> dict[str, Any]:
    """The executor input among the arguments of a step's process.

    Raises:
        ConfigurationError: KFP did not start the process, or the input is not readable.
    """
    for i, argument in enumerate(argv):
        option, _, value = argument.partition("=")
        if option == "--executor_input":
            text = value or (argv[i + 1] if i + 1 < len(argv) else "")
            try:
                return mapping_of(text, option, _INPUT)
            except Unreadable as error:
                raise ConfigurationError(f"{error}; only KFP may set this option") from None
    raise ConfigurationError(
        "this process is not a step of a pipeline: its arguments have no --executor_input; call the component in a "
        "pipeline, on a KFP backend or with kfp.local"
    )


def artifact_location(uri: str) -> str:
    """The location where a job writes the artifact with this URI.

    With kfp.local the URI is a path on the machine that runs the pipeline, which the nodes of a cluster cannot reach.
    They write to ``<TRAINJOB_WORKSPACE>/<pipeline>-<time>/<task>/<output>`` instead; in a loop the iteration comes
    before the task.
    """
    workspace = Settings().workspace or "file://"
    if uri.startswith("/") and not workspace.startswith("file://"):
        return "/".join([workspace.rstrip("/"), *_of_local_run(Path(uri).parts)])
    return location(uri)


def refused_fields(spec: Mapping[str, Any], arguments: Collection[str]) -> list[Problem]:
    """The problems of a component's ``spec`` with fields that are arguments of the component."""
    names = [name for name in map(field_name, spec) if name in arguments]
    return [
        Problem(f"spec.{name}", "is a parameter of the component", f"set the parameter {name} instead")
        for name in names
    ]


def location(uri: str) -> str:
    """The location of a KFP URI: ``file://`` for a path of kfp.local, ``s3://`` for KFP's ``minio://``."""
    if uri.startswith("minio://"):
        return "s3" + uri.removeprefix("minio")
    return Path(uri).as_uri() if uri.startswith("/") else uri
