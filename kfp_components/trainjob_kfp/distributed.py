"""``distributed``: run a lightweight component on all ranks of a TrainJob."""

from __future__ import annotations

import copy
import json
import symtable
import typing
from collections.abc import Mapping
from typing import Any, Literal

from kfp import dsl
from kfp.dsl import python_component

from trainjob._spec.function import Function
from trainjob_kfp.component import passthroughs, with_warnings
from trainjob_kfp.image import STEP_IMAGE
from trainjob_kfp.train import train

_EXECUTOR = "kfp.dsl.executor_main"
_CONFIG = "task_config"


def distributed(
    component: Any,
    *,
    runtime: str,
    num_nodes: int = 1,
    num_proc_per_node: int = 0,
    resources_per_node: Mapping[str, Any] | None = None,
    checkpoints: str = "",
    labels: Mapping[str, str] | None = None,
    stall_timeout: int = 0,
    on_retry: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    queue_timeout: int = 0,
    start_timeout: int = 0,
    run_timeout: int = 0,
    fail_fast: bool = False,
    fail_on_first_crash: bool = False,
    on_crash_action: Literal["suspend", "cancel", "keep"] = "suspend",
    on_kill_action: Literal["suspend", "cancel", "keep"] = "suspend",
    cancel_on_timeout: bool = True,
    retry_user_errors: bool = True,
    owned_by_run: bool = False,
    backend: str = "",
    namespace: str = "",
) -> Any:
    """Make a component with the same inputs and outputs whose function runs on all ranks of a TrainJob.

    ::

        @dsl.component(base_image="pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime")
        def fit(epochs: int, model: dsl.Output[dsl.Model]) -> float: ...

        fit_on_eight = distributed(fit, runtime="torch-distributed", num_nodes=2, resources_per_node={"gpu": 4})

    The function runs in the component's image, under ``torchrun`` or ``mpirun`` if the runtime uses them, with the
    runtime's variables. The values that rank 0 returns and the artifacts that it writes are the step's outputs. This
    package downloads and uploads artifacts on the nodes, so the image then needs ``trainjob[storage]``, for example by
    the component's ``packages_to_install``; a component with only parameters and metrics needs only what KFP installs.
    Rank 0 passes its return values in its termination message, which holds 4096 bytes of JSON. An output that KFP
    cannot store, such as NaN or a whole number of more than 64 digits, is missing, and the step's log reports it.

    Args:
        component: A component of ``dsl.component``.
        runtime: Name of a ClusterTrainingRuntime, such as torch-distributed.
        num_nodes: Number of nodes.
        num_proc_per_node: Processes on each node; the runtime's if 0.
        resources_per_node: Resources of each node, such as cpu, memory and gpu: ``{"cpu": 4, "memory": "16Gi",
            "gpu": 1}``; they can also be set on the task.
        checkpoints: Location of checkpoints, from which an interrupted training resumes.
        labels: Labels of the TrainJob, such as ``kueue.x-k8s.io/queue-name``.
        stall_timeout: Longest time without progress of any rank; after it the step fails and names the rank that hangs.
            In seconds; 0 for no limit.
        on_retry: Changes of the next attempt after a failure, by its category.
        spec: Other fields of the TrainJobSpec, including ``env``.
        queue_timeout: Longest time that the job waits for admission (Kueue), in seconds; 0 for no limit.
        start_timeout: Longest time from admission to the first running rank, in seconds; 0 for no limit.
        run_timeout: Longest time from admission to the end, in seconds; 0 for no limit.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove.
        fail_on_first_crash: Fail as soon as a rank crashes.
        on_crash_action: Action on a job after ``fail_on_first_crash`` or ``stall_timeout``.
        on_kill_action: Action on the job when a person ends the step.
        cancel_on_timeout: Cancel a job that exceeds a timeout.
        retry_user_errors: Retry after a failure of the training code that may not recur.
        owned_by_run: Let Kubernetes delete the job together with the run's Workflow.
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the job; the value of TRAINJOB_NAMESPACE if empty.

    Returns:
        The component.

    Raises:
        TypeError: `component` is not a lightweight component.
        ValueError: `component` has an input ``task_config``, a name that `distributed` adds, or its function uses names
            that the module which KFP makes of it does not have.
    """
    mappings = {"resources_per_node": resources_per_node, "labels": labels, "on_retry": on_retry, "spec": spec}
    options = {name: value for name, value in locals().items() if name not in ("component", "mappings")}
    options |= {name: dict(value or {}) for name, value in mappings.items()}
    made = copy.deepcopy(component.component_spec) if isinstance(component, python_component.PythonComponent) else None
    container = made.implementation.container if made is not None else None
    words = [*(container.command or [])] if container is not None else []
    start = next((i for i, word in enumerate(words) if isinstance(word, str) and _EXECUTOR in word), None)
    if made is None or container is None or start is None or start + 1 >= len(words):
        raise TypeError(f"distributed() takes a lightweight component (@dsl.component), not {component!r}")
    if _CONFIG in (made.inputs or {}):
        raise ValueError(f"{made.name} has an input {_CONFIG}, which distributed() adds itself; rename the input")
    options["image"] = container.image
    # A shell that installs packages can precede the shell that starts the function.
    options["before"], options["source"] = words[: start - 2], words[start + 1]
    options["function"] = component.python_func.__name__
    Function.of(component.python_func, arguments="", known=_names_of_module(options["source"]))
    options["executor"] = _EXECUTOR  # kfp.local recognizes by this word what it can run without a container
    container.image = STEP_IMAGE
    # The variable skips KFP's authoring API, a second of the step's start, as in KFP's executor.
    container.command = ["env", "_KFP_RUNTIME=true", "python3", "-m", "trainjob_kfp.distribution"]
    container.args = ["--executor_input", "{{$}}", "--options", json.dumps(options)]
    made.inputs = {**(made.inputs or {}), _CONFIG: copy.deepcopy(train.component_spec.inputs[_CONFIG])}
    made.task_config_passthroughs = passthroughs(job_only=True)
    return with_warnings(python_component.PythonComponent(made, component.python_func))


def _names_of_module(source: str) -> set[str]:
    """Names in the module that KFP makes of a function: its imports, and `additional_funcs` of the component."""
    symbols = symtable.symtable(source, "component", "exec").get_symbols()
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    return bound.union(dsl.__all__, typing.__all__)  # of `import *`
