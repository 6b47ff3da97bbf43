"""Which piece of work a task is: the same for all its tries, so that the job's name follows from it."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import conf

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef

_LABEL = 63  # characters of a label's value
_KEY, _JOB, _DEFERRED = "trainjob_key", "trainjob", "trainjob_deferred"

# Marked by a person, or cleared while it ran (restarting). All other states lead to another try: a scheduler resets the
# tasks of one that was lost (`adopt_or_reset_orphaned_tasks`), and retries those whose worker was silent for too long.
_UNWANTED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed", "restarting"})


def key_of(context: Context) -> str:
    """The key of this task instance.

    Where Airflow keeps a state for tasks (3.3), the key of the first try stands, whatever the deployment is called by
    then; elsewhere it is the same as long as ``[trainjob] deployment`` and ``[api] base_url`` are.

    In a loop of tasks (Airflow 3.4) each iteration is a piece of work.
    """
    loop = _iteration(context)
    store = _store(context) if not loop else None
    stored = store.get(_KEY) if store is not None else None
    if isinstance(stored, str):
        return stored
    ti = context["ti"]
    key = f"airflow/{deployment()}/{ti.dag_id}/{ti.run_id}/{ti.map_index}{loop}/{ti.task_id}"
    if store is not None:
        store.set(_KEY, key)
    return key


def _iteration(context: Context) -> str:
    """Which iteration of a loop of tasks this is, as a part of the key; empty outside of loops.

    Airflow 3.4 runs the same task instance again under ``loop.region_id`` (new for each rerun) and ``loop.index``.
    """
    loop: Any = context.get("loop")
    return f"/{loop.region_id}/{loop.index}" if loop is not None else ""


def labels_of_task(context: Context) -> dict[str, str]:
    """Labels that say which try of which task this is, as Airflow's `KubernetesPodOperator` puts them on its pods."""
    ti = context["ti"]
    return {**labels_of_instance(ti, ti.task_id, ti.map_index), "try_number": _label(str(ti.try_number))}


def labels_of_instance(ti: Any, task_id: str, map_index: int | None) -> dict[str, str]:
    """Labels of the jobs of all tries of a task in the run of `ti`.

    Args:
        ti: A task instance of that run.
        task_id: The task.
        map_index: Whose jobs of a mapped task; those of all map indexes if None.
    """
    values = {"dag_id": ti.dag_id, "task_id": task_id, "run_id": ti.run_id}
    if map_index is not None and map_index >= 0:
        values["map_index"] = str(map_index)
    return {name: _label(value) for name, value in values.items()}


def is_of_this_deployment(key: str, context: Context) -> bool:
    """Whether a key, see `key_of`, is that of a task of this run in this Airflow deployment.

    The labels of a job do not tell two deployments apart whose DAGs and runs have the same names.
    """
    ti = context["ti"]
    return key.startswith(f"airflow/{deployment()}/{ti.dag_id}/{ti.run_id}/")


def _label(value: str) -> str:
    """A value that Kubernetes takes, made as `KubernetesPodOperator` makes it, so that one selector finds both."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "", value).strip("_.-")
    if safe == value and len(safe) <= _LABEL:
        return safe
    digest = hashlib.md5(value.encode(), usedforsecurity=False).hexdigest()[:9]
    return f"{safe[: _LABEL - len(digest) - 1]}-{digest}"


def remember(context: Context, ref: JobRef) -> None:
    """Show people in Airflow's UI, and other tasks, which job the task has; nothing of this task depends on it."""
    job: Any = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": ref.attempt}
    store = _store(context)
    if store is not None:
        store.set(_JOB, job)
    if context["ti"].task.do_xcom_push:
        context["ti"].xcom_push(key=_JOB, value=job)


def begin_deferral(context: Context) -> None:
    """Note that this try is about to wait in the triggerer."""
    store = _store(context)
    if store is not None:
        store.set(_DEFERRED, context["ti"].try_number)


def end_deferral(context: Context) -> None:
    """Note that this try is back."""
    store = _store(context)
    if store is not None:
        store.delete(_DEFERRED)


def was_cleared(context: Context) -> bool:
    """Whether this is the first try since a person cleared the task while it waited in the triggerer.

    The trigger hears of that within seconds, but this try may begin before, and would go on with the job. (False before
    Airflow 3.3.)
    """
    store, ti = _store(context), context["ti"]
    # A clear grants as many tries again as the task has (`clear_task_instances`).
    first = ti.try_number > 1 and ti.try_number == ti.max_tries - (context["task"].retries or 0) + 1
    return store is not None and first and store.get(_DEFERRED) is not None


def deployment() -> str:
    """What parts the jobs of two Airflows that share a namespace (apache/airflow#33057)."""
    chosen = conf.get("trainjob", "deployment", fallback="") or conf.get("api", "base_url", fallback="")
    return chosen or "airflow"


def _store(context: Context) -> Any:
    """The state that Airflow keeps of this task instance through retries and clears; None before 3.3."""
    return context.get("task_state_store")


def is_wanted(context: Context) -> bool:
    """Whether Airflow goes on with this task, now or in another try, so that a SIGTERM was meant for the worker alone.

    True where Airflow cannot be asked: to keep a job that nobody wants is less harm than to end one that somebody
    wants, and the next try adopts it.
    """
    try:
        return not _UNWANTED.issuperset(states_of(context["ti"]))
    except Exception:  # noqa: BLE001 - whatever it is, this process ends now
        return True


def has_succeeded(context: Context) -> bool:
    """Whether Airflow has the success of this try. True where it cannot be asked.

    Where a trigger's event comes before the worker that deferred the task has ended, the scheduler takes the try that
    goes on for failed, and gives its result up (3.3.2, `SchedulerJobRunner.process_executor_events`).
    """
    try:
        return "success" in states_of(context["ti"])
    except Exception:  # noqa: BLE001 - it was told, and nobody says otherwise
        return True


def states_of(ti: Any) -> list[str]:
    """States that Airflow has for a task instance: one, or none if it is gone. Asks its API; blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, map_index=ti.map_index, task_ids=[ti.task_id], run_ids=[ti.run_id]
    )
    return [str(state) for state in found.get(ti.run_id, {}).values()]
