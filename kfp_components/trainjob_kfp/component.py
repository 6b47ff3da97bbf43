"""The decorator of this package's components: their image, what they pass on to their TrainJob, what a cache misses."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

from kfp import dsl
from kfp.dsl.component_task_config import TaskConfigField, TaskConfigPassthrough
from kfp.dsl.pipeline_channel import PipelineParameterChannel
from kfp.dsl.pipeline_task import TaskState

from trainjob_kfp.image import STEP_IMAGE
from trainjob_kfp.literals import check_arguments

NOT_IN_THE_CACHES_KEY = ("set_env_variable", "set_accelerator_type", "set_accelerator_limit")
"""What can be set on a task and decides over what is trained, and is no part of the key of KFP's cache (measured on
2.17: with another of them the result of an earlier run is taken)."""


class UnseenByCache(UserWarning):
    """Something is set on a task that KFP's cache does not look at."""


RESOURCES = ("set_accelerator_limit", "set_cpu_limit", "set_cpu_request", "set_memory_limit", "set_memory_request")


class LostByKfp(UserWarning):
    """A resource is set on a task that KFP (2.17) does not pass on: a parameter of the pipeline that is no text."""


def step(configured: Literal["job", "both", "pod"]) -> Callable[[Callable[..., Any]], Any]:
    """A lightweight component over the step image, which has this package: its source is a shim, and no pip runs.

    Args:
        configured: For whom is what a pipeline's author sets on a task (resources, node selectors, volumes, …): for its
            TrainJob, so that GPUs are not asked for twice; for both, where the step's pod may do the work itself
            (``in_pod``); for the pod. Environment is for both if for the job: proxies, certificates, ``TRAINJOB_*``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        component = dsl.component(
            function,
            base_image=STEP_IMAGE,
            install_kfp_package=False,
            packages_to_install=[],
            task_config_passthroughs=None if configured == "pod" else passthroughs(alone=configured == "job"),
        )
        return noticing(component, own=True)

    return decorate


def passthroughs(*, alone: bool) -> list[TaskConfigPassthrough]:
    """Everything that can be passed on to a TrainJob; `alone`: and that the step's pod does not get then."""
    return [TaskConfigPassthrough(each, not alone or each is TaskConfigField.ENV) for each in TaskConfigField]


def noticing(component: Any, *, own: bool = False) -> Any:
    """`component`, whose tasks warn (`UnseenByCache`) of what the cache does not see.

    Where the task's caching is off before, or has a key of its own, nothing is said.

    Args:
        component: Which.
        own: Whether it is one of this package's. Their arguments are checked when they are called, and KFP's cache is
            off unless a pipeline turns it on for a task: what they do depends on what lies at locations and in
            registries, which is no part of the cache's key.
    """
    kind = type(component)
    component.__class__ = type(kind.__name__, (kind,), {"__call__": _call(kind.__call__, own=own)})
    return component


def _call(original: Callable[..., Any], *, own: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if own:
            check_arguments(self.name, kwargs)
        task = original(self, *args, **kwargs)
        if own and task.state is TaskState.FUTURE:  # outside of a pipeline kfp.local has run it by now, without a cache
            task.set_caching_options(False)
        for name in NOT_IN_THE_CACHES_KEY:
            setattr(task, name, _warning(task, name))
        for name in RESOURCES:
            setattr(task, name, _of_text(task, name))
        return task

    return call


def _warning(task: Any, name: str) -> Callable[..., Any]:
    original = getattr(task, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if task._task_spec.enable_caching and not getattr(task._task_spec, "cache_key", None):
            warnings.warn(
                f"{task.name}.{name}(…) is no part of the key of KFP's cache: a run that differs in nothing else takes "
                "an earlier run's model. Give it as a parameter of the component (env, resources_per_node), or call "
                "set_caching_options(False) first",
                UnseenByCache,
                stacklevel=2,
            )
        return original(*args, **kwargs)

    return method


def _of_text(task: Any, name: str) -> Callable[..., Any]:
    original = getattr(task, name)

    @functools.wraps(original)
    def method(value: Any) -> Any:
        if isinstance(value, PipelineParameterChannel) and str(value.channel_type).lower() != "string":
            warnings.warn(
                f"{task.name}.{name}({value.name}): KFP does not pass on a pipeline parameter that is no text, so that "
                f"the TrainJob would get none; declare {value.name} as str, or give a constant",
                LostByKfp,
                stacklevel=2,
            )
        return original(value)

    return method
