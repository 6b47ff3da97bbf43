"""Checks the TrainJob tasks of DAG files without running them, for CI: ``trainjob check DAGS``.

In a test::

    from trainjob_airflow.check import check_dags

    def test_dags() -> None:
        assert [each for each in check_dags("dags") if each.problem] == []
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainjob_airflow.operators.base import TrainJobTask

_MAPPED = 20
"""Elements of a mapped argument that are checked; more of the same kind say nothing new."""
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: |$)", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """What is known of a task, or of a file that holds no DAG.

    Attributes:
        where: ``dag.task``, ``dag.task[2]`` for an element of a mapped task, or the path of a file.
        problem: What is wrong; empty if nothing is.
        open: Arguments that a run decides, which were not checked.
    """

    where: str
    problem: str = ""
    open: tuple[str, ...] = ()


def check_dags(folder: str | Path) -> Iterator[Checked]:
    """Check all TrainJob tasks of a folder of DAG files, or of one file.

    Templates are rendered with sample values, and the specs that follow are checked as in a run.

    Args:
        folder: Of the DAG files.
    """
    bag = _bag(Path(folder))
    for path, error in sorted(bag.import_errors.items()):
        yield Checked(str(path), _last_exception(error))
    for dag_id, dag in sorted(bag.dags.items()):
        for task in dag.tasks:
            yield from _check(f"{dag_id}.{task.task_id}", task)


def _check(where: str, task: Any) -> Iterator[Checked]:
    from trainjob_airflow.operators.base import TrainJobTask
    from trainjob_airflow.operators.cancel import TrainJobCancelOperator
    from trainjob_airflow.sensors.trainjob import TrainJobSensor

    kind = getattr(task, "operator_class", type(task))
    if not isinstance(kind, type) or not issubclass(kind, TrainJobTask | TrainJobSensor | TrainJobCancelOperator):
        return
    if not task.is_mapped:
        yield _checked(where, lambda: task)
        return
    of_function = hasattr(task, "op_kwargs_expand_input")
    for number, element in enumerate(_elements(task)):
        values = {"op_kwargs": element} if of_function else element
        yield _checked(f"{where}[{number}]", lambda values=values: task.unmap(values))


def _checked(where: str, make: Any) -> Checked:
    from trainjob import TrainJobError
    from trainjob_airflow.exceptions import TrainJobFatal

    try:
        task: TrainJobTask = make()
        return Checked(where, open=tuple(task.sample_spec()[1]))
    except (TrainJobError, TrainJobFatal, OSError, ValueError, TypeError) as error:
        return Checked(where, str(error))


def _elements(task: Any) -> Iterator[dict[str, Any]]:
    """The arguments of the mapped instances of a task, as far as they are written in the DAG."""
    from trainjob_airflow.sample import Sample

    given = task._get_specified_expand_input().value
    if not isinstance(given, dict):  # expand_kwargs
        for element in list(given)[:_MAPPED] if isinstance(given, list | tuple) else ():
            if isinstance(element, dict):
                yield element
        return
    columns = {
        name: list(values)[:_MAPPED] if isinstance(values, list | tuple) else [str(Sample(f"element of {name}"))]
        for name, values in given.items()
    }
    for number in range(max(map(len, columns.values()), default=0)):
        yield {name: values[min(number, len(values) - 1)] for name, values in columns.items() if values}


def _bag(folder: Path) -> Any:
    try:
        from airflow.dag_processing.dagbag import DagBag
    except ImportError:  # before Airflow 3.2
        from airflow.models.dagbag import DagBag as OlderDagBag

        return OlderDagBag(folder, include_examples=False)
    return DagBag(folder)


def _last_exception(error: str) -> str:
    """The exception of a traceback, with all lines of its message."""
    found = list(_EXCEPTION.finditer(error))
    return error[found[-1].start() :].strip() if found else error.strip()
