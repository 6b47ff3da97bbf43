"""Checks the TrainJob tasks of DAG files without running them, for CI: ``trainjob check [--cluster] DAGS``.

In a test::

    from trainjob_airflow.check import check_dags

    def test_dags() -> None:
        assert [each for each in check_dags("dags") if each.problem] == []
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob_airflow.templates import is_open

if TYPE_CHECKING:
    from trainjob import TrainJobSpec
    from trainjob._backends.base import TrainJob
    from trainjob._backends.credentials import Credentials
    from trainjob._doctor import Finding
    from trainjob_airflow.operators.base import TrainJobTask

_MAPPED = 20
"""Elements of a mapped argument that are checked; further elements are alike."""
_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: |$)", re.MULTILINE)


@dataclass(frozen=True)
class Checked:
    """The result of a task, of a namespace, or of a file that could not be imported.

    Attributes:
        where: ``dag.task``, ``dag.task[2]`` for an element of a mapped task, or the path of a file.
        problem: What is wrong; empty if nothing is.
        open: Arguments that were not checked, because only a run knows their values.
        notes: Warnings, and what could not be checked on the cluster.
        retryable: Whether the problem may disappear by itself: the cluster could not be reached.
    """

    where: str
    problem: str = ""
    open: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    retryable: bool = False


@dataclass(frozen=True)
class _Job:
    """A task, checked as if its run started now.

    Attributes:
        checked: The result without a cluster.
        task: The task with its templates rendered; None if it launches no job or its check failed.
        spec: The known part of the job's spec.
    """

    checked: Checked
    task: TrainJobTask | None = None
    spec: TrainJobSpec | None = None


def check_dags(folder: str | Path, *, cluster: bool = False) -> Iterator[Checked]:
    """Check all TrainJob tasks of a folder of DAG files, or of one file.

    Templates are rendered with sample values, and the resulting specs are checked as in a run.

    Args:
        folder: Folder of the DAG files, or one file.
        cluster: Also check on the cluster of each task's connection that the runtime, LocalQueue and Secrets that the
            task names exist, and that you have permission to launch and wait in its namespace. Adds one result for
            each namespace. Connections are read from ``AIRFLOW_CONN_<ID>``; without `trainjob_default`,
            ``TRAINJOB_*`` and the kubeconfig decide. Nothing is created.
    """
    bag = _bag(Path(folder))
    for path, error in sorted(bag.import_errors.items()):
        yield Checked(str(path), _last_exception(error))
    jobs = (
        job
        for dag_id, dag in sorted(bag.dags.items())
        for task in dag.tasks
        for job in _check(f"{dag_id}.{task.task_id}", task)
    )
    yield from _on_clusters([*jobs]) if cluster else (job.checked for job in jobs)


def _check(where: str, task: Any) -> Iterator[_Job]:
    from trainjob_airflow.operators.base import TrainJobTask
    from trainjob_airflow.operators.cancel import TrainJobCancelOperator
    from trainjob_airflow.sensors.trainjob import TrainJobSensor

    kind = getattr(task, "operator_class", type(task))
    if not isinstance(kind, type) or not issubclass(kind, TrainJobTask | TrainJobSensor | TrainJobCancelOperator):
        return
    if not task.is_mapped:
        yield _checked(where, lambda: task)
        return
    is_decorated = hasattr(task, "op_kwargs_expand_input")
    for number, element in enumerate(_elements(task)):
        values = {"op_kwargs": element} if is_decorated else element
        yield _checked(f"{where}[{number}]", lambda values=values: task.unmap(values))


def _checked(where: str, make: Any) -> _Job:
    from trainjob import TrainJobError
    from trainjob_airflow.exceptions import TrainJobFatal
    from trainjob_airflow.operators.base import TrainJobTask
    from trainjob_airflow.sample import rendered

    try:
        task = make()
        spec, unknown = task.sample_spec()
        launches = isinstance(task, TrainJobTask)
        return _Job(Checked(where, open=tuple(unknown)), rendered(task) if launches else None, spec)
    except (TrainJobError, TrainJobFatal, OSError, ValueError, TypeError) as error:
        return _Job(Checked(where, str(error)))


def _on_clusters(jobs: list[_Job]) -> Iterator[Checked]:
    """One result for each namespace of a cluster, then all jobs with the findings of their clusters."""
    from trainjob import TrainJobError

    places: dict[tuple[Credentials, str], dict[str, TrainJob]] = {}
    found: dict[str, list[Finding]] = {}
    notes: dict[str, str] = {}
    for job in jobs:
        where = job.checked.where
        try:
            place = _place(job)
        except (TrainJobError, AirflowNotFoundException) as error:
            notes[where] = f"not checked on a cluster: {error}"
            continue
        if isinstance(place, str):
            notes[where] = place
        elif place is not None and job.spec is not None:
            places.setdefault(place, {})[where] = _object(job, job.spec, place[1])
    for (credentials, namespace), objects in places.items():
        where = f"namespace {namespace}"
        # Two clusters can have namespaces of the same name.
        where += f" ({credentials.source()})" if len({each for each, _ in places}) > 1 else ""
        findings = asyncio.run(_examined(credentials, namespace, objects))
        yield _with_findings(Checked(where), findings.pop("", []))
        found |= findings
    for job in jobs:
        checked = _with_findings(job.checked, found.get(job.checked.where, []))
        note = notes.get(job.checked.where)
        yield replace(checked, notes=(*checked.notes, note)) if note else checked


def _place(job: _Job) -> tuple[Credentials, str] | str | None:
    """Cluster and namespace of a job, or the reason why they cannot be checked; None if the task launches no job.

    Raises:
        AirflowNotFoundException: The connection does not exist here.
        ConfigurationError: The connection is invalid, or no cluster is configured.
    """
    from trainjob_airflow.hooks.trainjob import TrainJobHook

    if job.task is None:
        return None
    if job.spec is None:
        return "not checked on a cluster: the spec is known only at run time"
    task = job.task
    if is_open(task.namespace) or is_open(task.trainjob_conn_id):
        return "not checked on a cluster: the namespace or connection is known only at run time"
    with TrainJobHook(task.trainjob_conn_id).client(task.namespace) as client:
        credentials: Credentials | None = getattr(client.backend, "credentials", None)
        if credentials is None:
            return "not checked on a cluster: the job runs on the local backend"
        return credentials, client.namespace


def _object(job: _Job, spec: TrainJobSpec, namespace: str) -> TrainJob:
    """The TrainJob object; without its runtime if only a run knows it."""
    from trainjob._manifest.render import render

    made = render(spec, f"airflow/check/{job.checked.where}", 1, namespace)
    if any(path.partition(".")[0] == "runtime" for path in job.checked.open):
        del made["spec"]["runtimeRef"]
    return made


async def _examined(credentials: Credentials, namespace: str, jobs: Mapping[str, TrainJob]) -> dict[str, list[Finding]]:
    from trainjob._doctor.cluster import examine_jobs

    findings: dict[str, list[Finding]] = {}
    async with aclosing(examine_jobs(credentials, namespace, jobs)) as examined:
        async for where, finding in examined:
            findings.setdefault(where, []).append(finding)
    return findings


def _with_findings(checked: Checked, findings: list[Finding]) -> Checked:
    from trainjob._doctor import Level

    texts: dict[Level, list[str]] = {level: [] for level in Level}
    for each in findings:
        texts[each.level].append(f"{each.message}; {each.advice}" if each.advice else each.message)
    failures = [each for each in findings if each.level is Level.FAILURE]
    problem = "\n".join(filter(None, [checked.problem, *dict.fromkeys(texts[Level.FAILURE])]))
    notes = (*checked.notes, *dict.fromkeys(texts[Level.WARNING]), *dict.fromkeys(texts[Level.SKIPPED]))
    retryable = bool(failures) and not checked.problem and all(each.retry.retryable for each in failures)
    return replace(checked, problem=problem, notes=notes, retryable=retryable)


def _elements(task: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each mapped instance of a task that the DAG file contains."""
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
    try:
        return DagBag(folder)
    except RuntimeError as error:  # a symbolic link into a folder above, such as lib64 of a virtual environment
        from trainjob import ConfigurationError

        raise ConfigurationError(f"{error}; list the folders without DAGs in {folder}/.airflowignore") from None


def _last_exception(error: str) -> str:
    """The last exception of a traceback, with all lines of its message."""
    found = list(_EXCEPTION.finditer(error))
    return error[found[-1].start() :].strip() if found else error.strip()
