"""``distributed``: any lightweight component, run by all ranks of a TrainJob."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Literal

from kfp.dsl import python_component

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
    """A component with the same inputs and outputs, whose function all ranks of a TrainJob run.

    ::

        @dsl.component(base_image="pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime")
        def fit(epochs: int, model: dsl.Output[dsl.Model]) -> float: ...

        fit_on_eight = distributed(fit, runtime="torch-distributed", num_nodes=2, resources_per_node={"gpu": 4})

    The function runs in the component's own image, under ``torchrun`` or ``mpirun`` where the runtime is one of theirs,
    with the runtime's variables. What rank 0 returns and writes are the step's outputs. Artifacts are brought to and
    taken from the nodes by this package, which the image then needs (``trainjob[storage]``, also by the component's
    ``packages_to_install``); a component with parameters alone, and metrics, needs only what KFP installs. What rank 0
    returns travels in its termination message, which has room for 4096 bytes of JSON.

    Args:
        component: Made by ``dsl.component``.
        runtime: Name of a ClusterTrainingRuntime.
        num_nodes: Number of nodes.
        num_proc_per_node: Processes on each node; the runtime's if 0.
        resources_per_node: As ``{"cpu": 4, "memory": "16Gi", "gpu": 1}``; or set them on the task.
        spec: Everything else that a TrainJobSpec can hold, ``env`` included.
        queue_timeout: See `trainjob_kfp.train`, also for all that follow.
        start_timeout: See there.
        run_timeout: See there.
        fail_fast: See there.
        fail_on_first_crash: See there.
        on_crash_action: See there.
        on_kill_action: See there.
        cancel_on_timeout: See there.
        retry_user_errors: See there.
        owned_by_run: See there.
        backend: See there.
        namespace: See there.

    Raises:
        TypeError: it is no lightweight component.
        ValueError: it has an input called ``task_config``, which is needed here.
    """
    options = {name: value for name, value in locals().items() if name not in ("component", "resources_per_node")}
    options |= {"resources_per_node": dict(resources_per_node or {}), "spec": dict(spec or {})}
    made = copy.deepcopy(component.component_spec) if isinstance(component, python_component.PythonComponent) else None
    container = made.implementation.container if made is not None else None
    words = [*(container.command or [])] if container is not None else []
    start = next((i for i, word in enumerate(words) if isinstance(word, str) and _EXECUTOR in word), None)
    if made is None or container is None or start is None or start + 1 >= len(words):
        raise TypeError(f"distributed() takes a lightweight component (@dsl.component), not {component!r}")
    if _CONFIG in (made.inputs or {}):
        raise ValueError(f"{made.name} has an input {_CONFIG}: what is set on the task goes to the TrainJob here")
    options["image"] = container.image
    # In front of the shell that starts the function is, or is not, one that installs packages.
    options["before"], options["source"] = words[: start - 2], words[start + 1]
    options["function"] = component.python_func.__name__
    options["executor"] = _EXECUTOR  # by this word kfp.local knows what it can run without a container
    container.image = STEP_IMAGE
    # The variable leaves out KFP's authoring half, a second of the step's start, as it does in KFP's own executor.
    container.command = ["env", "_KFP_RUNTIME=true", "python3", "-m", "trainjob_kfp.distribution"]
    container.args = ["--executor_input", "{{$}}", "--options", json.dumps(options)]
    made.inputs = {**(made.inputs or {}), _CONFIG: copy.deepcopy(train.component_spec.inputs[_CONFIG])}
    made.task_config_passthroughs = passthroughs(job_only=True)
    return with_warnings(python_component.PythonComponent(made, component.python_func))
