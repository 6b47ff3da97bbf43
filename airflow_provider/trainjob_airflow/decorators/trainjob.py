"""``@task.trainjob``: runs a Python function as the training script of a TrainJob."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import DecoratedOperator, TaskDecorator, task_decorator_factory

from trainjob_airflow.operators.trainjob import TrainJobOperator

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import TrainJobSpec


class _TrainJobDecoratedOperator(DecoratedOperator, TrainJobOperator):
    """Runs the function on every node of a TrainJob; its source is sent as text, its arguments as JSON.

    A parameter with the name of a value of Airflow's context, such as ``ds`` or ``run_id``, gets that value unless the
    call sets it, as in other decorated tasks. Times are passed as ISO 8601 text.

    The value that the function returns on rank 0 is the task's XCom: JSON of at most 4 KiB. If it returns None, or a
    value that cannot be reported (logged), the XCom is that of `TrainJobOperator`. The XCom ``result`` is always that
    of `TrainJobOperator`.
    """

    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in TrainJobOperator.template_fields if name != "spec"),
        *("packages_to_install", "pip_index_urls"),
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **DecoratedOperator.template_fields_renderers,
        **TrainJobOperator.template_fields_renderers,
    }
    custom_operator_name = "@task.trainjob"

    def __init__(
        self,
        *,
        python_callable: Callable[..., object],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        packages_to_install: Sequence[str] | None = None,
        pip_index_urls: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        for field in {"spec", "command", "args", "torchtune"} & set(kwargs):
            raise TypeError(f"@task.trainjob runs the decorated function: remove {field}")
        self.packages_to_install = packages_to_install
        self.pip_index_urls = pip_index_urls
        self._from_context: dict[str, Any] | None = None
        super().__init__(python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, **kwargs)

    def literal_fields(self) -> dict[str, Any]:
        """The fields of `TrainJobOperator`, with the function and its arguments."""
        given, others = self._arguments()
        known = self._from_context
        if known is None:  # while the DAG is parsed; Airflow has checked that the context has the required others
            known = {name: "{{ " + name + " }}" for name, required in others.items() if required}
        more = {"packages_to_install": self.packages_to_install, "pip_index_urls": self.pip_index_urls}
        return {
            **super().literal_fields(),
            "func": self.python_callable,
            "func_args": known | given,
            **{name: value for name, value in more.items() if value is not None},
        }

    def job_spec(self, key: str, context: Context) -> TrainJobSpec:
        """Build the spec after filling parameters of the function from the context."""
        values = {name: context.get(name) for name in self._arguments()[1] if name in context}
        self._from_context = {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()
        }
        return super().job_spec(key, context)

    def _arguments(self) -> tuple[dict[str, Any], dict[str, bool]]:
        """The arguments of the call by name, and the other parameters: name -> whether it is required."""
        import inspect

        signature = inspect.signature(self.python_callable)
        given = dict(signature.bind_partial(*self.op_args, **self.op_kwargs).arguments)
        others = {}
        for each in signature.parameters.values():
            if each.kind is each.VAR_KEYWORD:
                given |= given.pop(each.name, {})
            elif each.name not in given and each.kind is not each.VAR_POSITIONAL:
                others[each.name] = each.default is each.empty
        return given, others

    def execute(self, context: Context) -> Any:
        """Launch the job and wait for it; `DecoratedOperator.execute` would call the function in this process."""
        return TrainJobOperator.execute(self, context)

    def returned(self, context: Context, result: dict[str, Any]) -> Any:
        """The function's return value, or the job's result if there is none."""
        if self.do_xcom_push:
            context["ti"].xcom_push(key="result", value=result)
        return result.get("returned", result)


def trainjob_task(python_callable: Callable[..., object] | None = None, **kwargs: Any) -> TaskDecorator:
    """Turn a function into a task that runs it on the nodes of a TrainJob.

    Args:
        python_callable: The function. It must import what it uses inside its body, since only its source is sent.
        **kwargs: Arguments of `TrainJobOperator` without `spec`, `command`, `args` and `torchtune`, and the fields of
            `trainjob.TrainJobSpec` for functions: `packages_to_install`, `pip_index_urls`.
    """
    return task_decorator_factory(
        python_callable=python_callable, decorated_operator_class=_TrainJobDecoratedOperator, **kwargs
    )
