"""The key of a task instance: the same for all its tries, so that each try finds the same job by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import conf

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef
    from trainjob._backends.base import TrainJob
    from trainjob_airflow.tasklog import Log

_KEY, _JOB, _DEFERRED = "trainjob_key", "trainjob", "trainjob_deferred"

RUN_START = "airflow.apache.org/run-start"
"""Label of a job: when its DAG run started, to the microsecond. It distinguishes the runs of two deployments."""

_UNNAMED = "airflow"  # the deployment if no setting names it
_WARNED = set[str]()  # names of deployments that this process has warned about

# Set by a person, or by a clear of a running task (restarting). All other states lead to another try: a scheduler
# resets the tasks of a lost scheduler (`adopt_or_reset_orphaned_tasks`), and retries tasks whose heartbeat timed out.
_UNWANTED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed", "restarting"})


def key_of(context: Context) -> str:
    """The key of this task instance.

    Where Airflow stores task state (3.3), all tries use the key of the first one, even if the deployment is renamed.
    In older versions this is the key by the current ``[trainjob] deployment`` and ``[api] base_url``, and
    `key_of_earlier_try` finds that of a job which was launched before they were changed.

    In a loop of tasks (Airflow 3.4) each iteration has its own key.
    """
    store = _store(context) if not _iteration(context) else None
    stored = store.get(_KEY) if store is not None else None
    if isinstance(stored, str):
        return stored
    key = f"airflow/{deployment()}{_place(context)}"
    if store is not None:
        store.set(_KEY, key)
    return key


def may_have_another_key(context: Context, *, resumed: bool) -> bool:
    """Whether this task instance may have launched under another key than `key_of`.

    Airflow before 3.3 stores no key, and an iteration of a loop has none that is stored.

    Args:
        context: Of the task.
        resumed: Whether this try has been deferred.
    """
    is_stored = _store(context) is not None and not _iteration(context)
    return not is_stored and (resumed or context["ti"].try_number > 1)


def key_of_earlier_try(jobs: Iterable[TrainJob], context: Context, key: str) -> str:
    """The key under which an earlier try of this task instance has launched; `key` if there is no other one.

    Only a job of this run of this deployment counts: one with the same `RUN_START`.

    Args:
        jobs: Jobs with the labels of this task instance.
        context: Of the task.
        key: The key by the current settings.
    """
    run = labels_of_run(context)
    own = [job for job in jobs if run and run.items() <= _labels(job).items()]
    keys = {_key(job): str(job["metadata"]["creationTimestamp"]) for job in own}
    keys = {each: created for each, created in keys.items() if each.endswith(_place(context))}
    return key if key in keys else max(keys, key=lambda each: keys[each], default=key)


def launched_keys(context: Context, task_id: str, map_index: int | None) -> set[str]:
    """Keys under which a task of this run has launched its jobs, as it published them. Calls Airflow.

    Args:
        context: Of this task.
        task_id: The other task.
        map_index: Map index of the other task; all map indexes if None.
    """
    from airflow.providers.common.compat.sdk import XCom

    ti = context["ti"]
    if map_index is None:
        published = XCom.get_all(key=_JOB, dag_id=ti.dag_id, task_id=task_id, run_id=ti.run_id) or []
    else:
        published = [ti.xcom_pull(task_ids=task_id, key=_JOB, map_indexes=map_index)]
    return {str(each["key"]) for each in published if isinstance(each, Mapping) and "key" in each}


def is_of_this_run(trainjob: TrainJob, context: Context, launched: Collection[str]) -> bool:
    """Whether a job with the labels of a task of this run was launched by this deployment of Airflow.

    The labels of tasks cannot distinguish two deployments whose DAGs and runs have the same names. The settings that
    name the deployment may have changed since the launch.

    Args:
        trainjob: The job.
        context: Of a task of the run.
        launched: What `launched_keys` returned for the task.
    """
    key, run, ti = _key(trainjob), labels_of_run(context), context["ti"]
    if key in launched or (run and run.items() <= _labels(trainjob).items()):
        return True
    return key.startswith(f"airflow/{deployment()}/{ti.dag_id}/{ti.run_id}/")


def labels_of_run(context: Context) -> dict[str, str]:
    """Label with the start of the DAG run; none if that is unknown."""
    run: Any = context.get("dag_run")
    started = getattr(run, "start_date", None)
    return {RUN_START: f"{started:%Y%m%dT%H%M%S.%f}"} if started is not None else {}


def _place(context: Context) -> str:
    """The end of the key, which no setting changes."""
    ti = context["ti"]
    return f"/{ti.dag_id}/{ti.run_id}/{ti.map_index}{_iteration(context)}/{ti.task_id}"


def _labels(trainjob: TrainJob) -> Mapping[str, Any]:
    return trainjob["metadata"].get("labels") or {}


def _key(trainjob: TrainJob) -> str:
    from trainjob.job import KEY

    return str((trainjob["metadata"].get("annotations") or {}).get(KEY))


def _iteration(context: Context) -> str:
    """The iteration of a loop of tasks, as a part of the key; empty outside of loops.

    Airflow 3.4 runs the same task instance again under ``loop.region_id`` (new for each rerun) and ``loop.index``.
    """
    loop: Any = context.get("loop")
    return f"/{loop.region_id}/{loop.index}" if loop is not None else ""


def labels_of_task(context: Context) -> dict[str, str]:
    """Labels that identify the task and the try, as Airflow's `KubernetesPodOperator` puts them on its pods."""
    from trainjob._manifest.workflow_labels import airflow_label

    ti = context["ti"]
    return {**labels_of_instance(ti, ti.task_id, ti.map_index), "try_number": airflow_label(str(ti.try_number))}


def labels_of_instance(ti: Any, task_id: str, map_index: int | None) -> dict[str, str]:
    """Labels of the jobs of all tries of a task in the run of `ti`.

    Args:
        ti: A task instance of that run.
        task_id: The task.
        map_index: Map index of a mapped task; all map indexes if None.
    """
    from trainjob._manifest.workflow_labels import airflow_label

    values = {"dag_id": ti.dag_id, "task_id": task_id, "run_id": ti.run_id}
    if map_index is not None and map_index >= 0:
        values["map_index"] = str(map_index)
    return {name: airflow_label(value) for name, value in values.items()}


def publish_job(context: Context, ref: JobRef, key: str) -> None:
    """Publish the task's job in Airflow's UI and to other tasks; this task itself does not read it."""
    job: Any = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": ref.attempt, "key": key}
    store = _store(context)
    if store is not None:
        store.set(_JOB, job)
    if context["ti"].task.do_xcom_push:
        context["ti"].xcom_push(key=_JOB, value=job)


def begin_deferral(context: Context) -> None:
    """Record that this try is about to wait in the triggerer."""
    store = _store(context)
    if store is not None:
        store.set(_DEFERRED, context["ti"].try_number)


def end_deferral(context: Context) -> None:
    """Record that this try has returned from the triggerer."""
    store = _store(context)
    if store is not None:
        store.delete(_DEFERRED)


def was_cleared(context: Context) -> bool:
    """Whether this is the first try since a person cleared the task while it waited in the triggerer.

    The trigger is notified within seconds, but this try may start earlier, and would adopt the job. Always False before
    Airflow 3.3.
    """
    store, ti = _store(context), context["ti"]
    # A clear adds as many tries as the task has (`clear_task_instances`).
    first = ti.try_number > 1 and ti.try_number == ti.max_tries - (context["task"].retries or 0) + 1
    return store is not None and first and store.get(_DEFERRED) is not None


def deployment() -> str:
    """The name that separates the jobs of two deployments in one namespace (apache/airflow#33057)."""
    chosen = conf.get("trainjob", "deployment", fallback="") or conf.get("api", "base_url", fallback="")
    return chosen or _UNNAMED


def warn_about_name(log: Log) -> None:
    """Log once in a process that the deployment has no name: another one without a name would have the same keys."""
    if deployment() == _UNNAMED and _UNNAMED not in _WARNED:
        _WARNED.add(_UNNAMED)
        log.warning(
            "this deployment of Airflow has no name: jobs of DAGs and runs with the same names, of another deployment "
            "without a name in the same namespace, are adopted as jobs of this one; set [api] base_url "
            "(AIRFLOW__API__BASE_URL) or [trainjob] deployment (AIRFLOW__TRAINJOB__DEPLOYMENT) on all workers and "
            "triggerers"
        )


def _store(context: Context) -> Any:
    """The state that Airflow keeps for this task instance across retries and clears; None before 3.3."""
    return context.get("task_state_store")


def is_wanted(context: Context) -> bool:
    """Whether Airflow continues this task, now or in another try: then a SIGTERM was meant for the worker alone.

    True if Airflow cannot be reached: an unwanted job that keeps running does less harm than a wanted job that is
    terminated, and the next try adopts the job.
    """
    with suppress(Exception):  # this process ends now, on any error
        return not _UNWANTED.issuperset(states_of(context["ti"]))
    return True


def has_retry(context: Context) -> bool:
    """Whether another try follows a failure of this one."""
    ti = context["ti"]
    return bool(ti.try_number <= ti.max_tries)


def has_succeeded(context: Context) -> bool:
    """Whether Airflow has recorded the success of this try. True if Airflow cannot be reached.

    If a trigger's event arrives before the worker that deferred the task has ended, the scheduler marks the resumed try
    as failed and drops its result (3.3.2, `SchedulerJobRunner.process_executor_events`).
    """
    with suppress(Exception):  # Airflow accepted the success, and no error contradicts it
        return "success" in states_of(context["ti"])
    return True


def states_of(ti: Any) -> list[str]:
    """States of a task instance in Airflow: one, or none if it was removed. Calls Airflow's API; blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, map_index=ti.map_index, task_ids=[ti.task_id], run_ids=[ti.run_id]
    )
    return [str(state) for state in found.get(ti.run_id, {}).values()]
