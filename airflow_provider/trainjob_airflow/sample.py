"""Tasks as a run would see them, without a run: templates are rendered with sample values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trainjob_airflow.templates import SAMPLE, is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator, Context

_T = TypeVar("_T", bound="BaseOperator")


class Sample(str):
    """A value that only a run knows. Templates can use it like the real value; its text has a mark.

    It is a str, which JSON and filters of Jinja take. All its public attributes are samples, including methods of str.

    Args:
        path: The expression that returns the value, to be shown to people.
    """

    def __new__(cls, path: str) -> Sample:
        """The text with the mark."""
        made = super().__new__(cls, f"{SAMPLE}{path}⟩")
        made._path = path
        return made

    _path: str

    def __getattribute__(self, name: str) -> Any:
        """A sample, unless the context has set the attribute."""
        if name.startswith("_"):
            return super().__getattribute__(name)
        if name in ("unsafe_callable", "alters_data"):  # Jinja's sandbox reads these before it calls an object
            return False
        if name == "encode":  # its callers accept nothing but bytes
            return str(self).encode
        if name in ("startswith", "endswith"):  # as in comparisons; the C code of some callers takes bools only
            return self._compared
        return vars(self).get(name, Sample(f"{self._path}.{name}"))

    def __getitem__(self, key: object) -> Sample:
        return Sample(f"{self._path}[{key!r}]")

    def __call__(self, *args: object, **kwargs: object) -> Sample:
        """The returned value is a sample, too."""
        del args, kwargs
        return Sample(f"{self._path}(…)")

    def __str__(self) -> str:
        return f"{SAMPLE}{self._path}⟩"

    def __format__(self, specification: str) -> str:
        del specification
        return str(self)

    def __iter__(self) -> Iterator[Sample]:
        yield self[0]

    def __len__(self) -> int:
        return 1

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def _computed(self, other: object = None) -> Sample:
        del other
        return Sample(self._path)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __neg__ = __pos__ = __abs__ = __round__ = _computed

    def _compared(self, *others: object) -> bool:
        del others
        return True

    __lt__ = __le__ = __gt__ = __ge__ = _compared


def rendered(task: _T) -> _T:
    """Copy a task and render its templates as for a run that starts now.

    Values that only a run knows (XComs, variables, connections, the conf of the DAG run, parameters without a default)
    become text with a mark, which `trainjob_airflow.templates.is_open` recognizes.

    Raises:
        TrainJobFatal: A template is invalid, or uses an undefined name.
    """
    made = copy.copy(task)
    for name in made.template_fields:
        setattr(made, name, _without_xcoms(getattr(made, name)))
    made.render_template_fields(sample_context(task))
    for name in made.template_fields:
        setattr(made, name, _without_samples(getattr(made, name)))
    return made


def _without_samples(value: Any) -> Any:
    if isinstance(value, Sample):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _without_samples(part) for name, part in value.items()}
    return [_without_samples(part) for part in value] if isinstance(value, list | tuple) else value


def _without_xcoms(value: Any) -> Any:
    if hasattr(value, "iter_references"):
        tasks = sorted({task.task_id for task, _ in value.iter_references()})
        return str(Sample(f"XCom of {', '.join(tasks)}" if tasks else "parameter"))
    if isinstance(value, Mapping):
        return {name: _without_xcoms(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_xcoms(part) for part in value]
    return value


def sample_context(task: BaseOperator) -> Context:
    """The context of a run that starts now."""
    import pendulum
    from airflow.sdk import Context as Known
    from airflow.sdk.execution_time import macros

    now = pendulum.now("UTC")  # as Airflow has times in a run: templates use its methods
    dag = task.get_dag()
    run_id = f"manual__{now.isoformat()}"
    known: dict[str, Any] = {name: Sample(name) for name in Known.__annotations__}
    known |= dict.fromkeys(("partition_key", "partition_date", "task_state_store", "exception", "reason"))
    ids = {"dag_id": task.dag_id, "task_id": task.task_id, "run_id": run_id, "map_index": -1, "try_number": 1}
    ti = Sample("ti")
    vars(ti).update(ids)
    run = Sample("dag_run")
    vars(run).update(dag_id=task.dag_id, run_id=run_id, logical_date=now, conf=Sample("dag_run.conf"))
    made = known | {
        "dag": dag or SimpleNamespace(dag_id=task.dag_id),
        "dag_run": run,
        "ds": now.strftime("%Y-%m-%d"),
        "ds_nodash": now.strftime("%Y%m%d"),
        "ts": now.isoformat(),
        "ts_nodash": now.strftime("%Y%m%dT%H%M%S"),
        "ts_nodash_with_tz": now.strftime("%Y%m%dT%H%M%S%z"),
        "logical_date": now,
        "data_interval_start": now,
        "data_interval_end": now,
        "run_id": run_id,
        "params": {name: _parameter(name, param) for name, param in _params(task).items()},
        "macros": SimpleNamespace(**{**vars(macros), "json": SimpleNamespace(**{**vars(json), "loads": _loaded})}),
        "task": task,
        "ti": ti,
        "task_instance": ti,
        "try_number": 1,
    }
    return cast("Context", made)  # a TypedDict of all keys that a context can have


def _loaded(text: Any, **options: Any) -> Any:
    """``json.loads`` of a template; a text that only a run knows has a value that only a run knows."""
    return Sample("macros.json.loads(…)") if is_open(text) else json.loads(text, **options)


def _params(task: BaseOperator) -> dict[str, Any]:
    """The parameters of the DAG and the task, as `Param` objects."""
    dag = task.get_dag()
    given: list[Any] = [task.params, *([dag.params] if dag is not None else [])]
    return {name: params.get_param(name) for params in reversed(given) for name in params}


def _parameter(name: str, param: Any) -> Any:
    value = param.value
    # `ArgNotSet` is the class in some versions of Airflow, an instance in others.
    return Sample(f"params.{name}") if "ArgNotSet" in (type(value).__name__, getattr(value, "__name__", "")) else value


def unknown_paths(fields: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The paths of values that only a run knows."""
    for name, value in fields.items():
        where = f"{path}{'' if str(name).startswith('[') else '.'}{name}" if path else str(name)
        if is_open(name) or is_open(value):
            yield where
        elif isinstance(value, Mapping):
            yield from unknown_paths(value, where)
        elif isinstance(value, list | tuple):
            yield from unknown_paths({f"[{i}]": part for i, part in enumerate(value)}, where)
