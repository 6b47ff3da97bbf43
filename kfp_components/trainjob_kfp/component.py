"""The decorator of this package's components, and the warnings of their tasks about KFP's cache and lost resources."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal

from kfp import dsl
from kfp.dsl.component_task_config import TaskConfigField, TaskConfigPassthrough
from kfp.dsl.pipeline_channel import PipelineParameterChannel
from kfp.dsl.pipeline_task import TaskState

from trainjob_kfp.channels import pass_by_reference
from trainjob_kfp.image import STEP_IMAGE
from trainjob_kfp.literals import check_arguments, source_of

NOT_IN_CACHE_KEY = ("set_env_variable", "set_accelerator_type", "set_accelerator_limit")
"""Settings of a task that affect the training but are not part of the key of KFP's cache. Measured on 2.17: after a
change of one of them KFP still reuses the result of an earlier run."""


class UnseenByCache(UserWarning):
    """A setting of a task is not part of the key of KFP's cache."""


RESOURCES = ("set_accelerator_limit", "set_cpu_limit", "set_cpu_request", "set_memory_limit", "set_memory_request")


class LostByKfp(UserWarning):
    """A resource of a task is a pipeline parameter that is not of type str, which KFP (2.17) does not pass on."""


def step(configured: Literal["job", "both", "pod"]) -> Callable[[Callable[..., Any]], Any]:
    """Make a lightweight component in the step image. The image contains this package, so no step runs pip.

    Args:
        configured: Where settings of a task (resources, node selectors, volumes, …) apply. ``job``: to its TrainJob
            only, so that GPUs are not requested twice. ``both``: also to the step's pod, which can do the work itself
            (``in_pod``). ``pod``: to the step's pod only. With ``job``, environment variables apply to both: proxies,
            certificates, ``TRAINJOB_*``.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        component = dsl.component(
            function,
            base_image=STEP_IMAGE,
            install_kfp_package=False,
            packages_to_install=[],
            task_config_passthroughs=None if configured == "pod" else passthroughs(job_only=configured == "job"),
        )
        return with_warnings(component, from_this_package=True)

    return decorate


def passthroughs(*, job_only: bool) -> list[TaskConfigPassthrough]:
    """All task settings that KFP can pass to a TrainJob.

    Args:
        job_only: Do not apply them to the step's pod, except for environment variables.
    """
    return [TaskConfigPassthrough(each, not job_only or each is TaskConfigField.ENV) for each in TaskConfigField]


def with_warnings(component: Any, *, from_this_package: bool = False) -> Any:
    """Make the tasks of a component warn about lost resources (`LostByKfp`) and the cache (`UnseenByCache`).

    A task does not warn about the cache if caching is already off, or if the task has a custom cache key.

    Args:
        component: The component; it is changed.
        from_this_package: Whether this package defines the component. Such a component checks its arguments when it is
            called, and turns KFP's cache off unless a pipeline turns it on for a task: the result depends on the
            content of locations and registries, which is not part of the cache's key.

    Returns:
        The component.
    """
    kind = type(component)
    component.__class__ = type(kind.__name__, (kind,), {"__call__": _call(kind.__call__, from_this_package)})
    return component


def _call(original: Callable[..., Any], from_this_package: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if from_this_package:
            kwargs = {name: source_of(value) if callable(value) else value for name, value in kwargs.items()}
            check_arguments(self.name, kwargs)
        task = original(self, *args, **kwargs)
        # Outside a pipeline, kfp.local has already run the task, without a cache.
        if task.state is TaskState.FUTURE:
            pass_by_reference(task)
            if from_this_package:
                task.set_caching_options(False)
        for name in NOT_IN_CACHE_KEY:
            setattr(task, name, _warn_about_cache(task, name))
        for name in RESOURCES:
            setattr(task, name, _warn_about_type(task, name))
        return task

    return call


def _warn_about_cache(task: Any, name: str) -> Callable[..., Any]:
    original = getattr(task, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if task._task_spec.enable_caching and not getattr(task._task_spec, "cache_key", None):
            warnings.warn(
                f"{task.name}.{name}(…) is not part of the key of KFP's cache: a run that differs only in it reuses "
                "the model of an earlier run. Use a parameter of the component (env, resources_per_node), or call "
                "set_caching_options(False) first",
                UnseenByCache,
                stacklevel=2,
            )
        return original(*args, **kwargs)

    return method


def _warn_about_type(task: Any, name: str) -> Callable[..., Any]:
    original = getattr(task, name)

    @functools.wraps(original)
    def method(value: Any) -> Any:
        if isinstance(value, PipelineParameterChannel) and str(value.channel_type).lower() != "string":
            warnings.warn(
                f"{task.name}.{name}({value.name}): KFP passes on only pipeline parameters of type str, so the "
                f"TrainJob would not get this resource; declare {value.name} as str, or give a constant",
                LostByKfp,
                stacklevel=2,
            )
        return original(value)

    return method
