"""`TrainJobCancelOperator`: stops the TrainJobs that another task of the same DAG run launched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from trainjob_airflow.arguments import check_place, is_mapped_element, positive_seconds
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import is_of_this_run, labels_of_instance, launched_keys
from trainjob_airflow.operators.base import TrainJobTask
from trainjob_airflow.running import connected
from trainjob_airflow.templates import StrictTemplates, is_open

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import TrainJobClient
    from trainjob._backends.base import TrainJob
    from trainjob._manifest.attempts import CancelAction

_ACTIONS = "cancel", "suspend"

_AT_ONCE = 16
"""Jobs of a mapped task that are stopped at the same time: each polls the API server until its pods have ended."""


class TrainJobCancelOperator(StrictTemplates):
    """Stops the TrainJobs that a task of the same DAG run launched, and waits until their pods have ended.

    The operator stops all attempts of the task that run, wait or are suspended. If there are none, because the training
    has ended or was not launched, it succeeds. In a mapped task group it stops the jobs with its own map index,
    elsewhere the jobs of all map indexes. A launch that is on its way obeys, too, if its task has published the key, or
    if a job of the key is active.

    A job of another deployment of Airflow is not stopped, also if its DAG and its run have the same names. A job of
    this deployment is found by the key that its task has published, also after ``[api] base_url`` was changed.

    Use it as a teardown of a task with ``wait_for_completion=False``::

        cancel.as_teardown(setups=train)

    Airflow runs a teardown only if one of its setups succeeded. After a task that waits for its job, use
    ``trigger_rule="all_done"``.

    Args:
        launched_by: ID of the task that launched the jobs, or a list of IDs.
        action: ``cancel`` deletes the jobs. ``suspend`` keeps them, and the next try of the task that launched them
            resumes them; a job in a Kueue queue is deleted, since Kueue would start it again.
        namespace: Namespace of the jobs; the launching task's if left out.
        trainjob_conn_id: Connection of type ``trainjob``; the launching task's if left out.
        stop_timeout: How long the pods of a job may take to end, as ``timedelta`` or seconds. Then the operator fails,
            and its next try waits again.
        **kwargs: Arguments of `BaseOperator`.

    Returns (XCom):
        Names of the TrainJobs that were stopped.

    Raises:
        ValueError: An argument is invalid; when the DAG is parsed.
        TrainJobFatal: The DAG has no task of that ID, or the task launches no TrainJob (no retry).
        TrainJobFailure: The pods of a job did not end within `stop_timeout`, or the cluster could not be reached.
    """

    template_fields: Sequence[str] = ("launched_by", "action", "namespace", "trainjob_conn_id")
    ui_color = "#d7e8fc"

    def __init__(
        self,
        *,
        launched_by: str | Sequence[str],
        action: str = "cancel",
        namespace: str | None = None,
        trainjob_conn_id: str | None = None,
        stop_timeout: timedelta | float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.launched_by = launched_by
        self.action = action
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.stop_timeout = positive_seconds("stop_timeout", stop_timeout)
        if not is_mapped_element(self):  # mapped arguments have values only at run time
            self.check_literals()

    def check_literals(self) -> None:
        """Check literals when the DAG is parsed; templates are checked after rendering.

        Raises:
            ConfigurationError: The namespace is not a valid name.
            ValueError: Another argument is invalid.
        """
        if not is_open(self.action) and self.action not in _ACTIONS:
            raise ValueError(f"action must be 'cancel' or 'suspend', not {self.action!r}")
        check_place(self.namespace, self.trainjob_conn_id)
        if is_open(self.launched_by):
            return
        ids = self._ids() if isinstance(self.launched_by, str | Collection) else []
        if not ids or not all(isinstance(each, str) and each for each in ids):
            raise ValueError(f"launched_by must be a task ID or a list of task IDs, not {self.launched_by!r}")

    def sample_spec(self) -> tuple[None, list[str]]:
        """Check what a run started now would stop; no spec, and the paths that only a run knows.

        Raises:
            ValueError: An argument is invalid.
            TrainJobFatal: The DAG has no such task, or a template is invalid.
        """
        from trainjob_airflow.sample import rendered, unknown_paths

        made = rendered(self)
        made.check_literals()
        for task_id in made._ids():
            if not is_open(task_id):
                made._launcher(task_id)
        return None, [*unknown_paths({name: getattr(made, name) for name in made.template_fields})]

    def execute(self, context: Context) -> list[str]:
        """Find the jobs and stop them."""
        try:
            self.check_literals()
        except ValueError as error:
            raise TrainJobFatal(str(error)) from None
        ti = context["ti"]
        stopped: list[str] = []
        for (conn_id, namespace), tasks in self._places(context).items():
            places = [(task.task_id, self._map_index(task, ti)) for task in tasks]
            labels = [labels_of_instance(ti, *place) for place in places]
            launched = {key for place in places for key in launched_keys(context, *place)}
            with connected(conn_id, namespace) as client:
                keys = client.call(partial(self._find, client, labels, launched, context))
                stopped += client.call(partial(self._stop, client, keys))
        if not stopped:
            self.log.info("no TrainJob of %s needs to be stopped", ", ".join(self._ids()))
        return sorted(stopped)

    async def _find(
        self, client: TrainJobClient, labels: Sequence[dict[str, str]], launched: Collection[str], context: Context
    ) -> dict[str, list[TrainJob]]:
        """The jobs of the tasks that have not ended, by key; each key that the tasks have published, also without jobs.

        Args:
            client: Client of the namespace.
            labels: Labels of the jobs of each task.
            launched: Keys that the tasks have published.
            context: Of this task.
        """
        from trainjob import JobRef
        from trainjob._support.kube_objects import mapping
        from trainjob.job import KEY, MANAGED_BY
        from trainjob.status import observe

        keys: dict[str, list[TrainJob]] = defaultdict(list, {key: [] for key in launched})
        for wanted in labels:
            for job in await client.backend.find(client.namespace, {MANAGED_BY: "trainjob", **wanted}):
                if observe(job).phase.terminal:
                    continue
                key = str(mapping(job, "metadata", "annotations").get(KEY))
                if is_of_this_run(job, context, launched):
                    keys[key].append(job)
                else:
                    self.log.warning(
                        "TrainJob %s is not stopped: it has the labels of task %s in this run, but by its key %s "
                        "another deployment of Airflow may have launched it; if it was this one, stop it: "
                        "trainjob cancel %s -n %s",
                        JobRef.of(job),
                        wanted["task_id"],
                        key,
                        job["metadata"]["name"],
                        client.namespace,
                    )
        return keys

    async def _stop(self, client: TrainJobClient, keys: Mapping[str, Sequence[TrainJob]]) -> list[str]:
        """Stop all attempts of each key, also one whose launch is on its way; returns their names."""
        import anyio

        from trainjob import JobRef, TrainJobError, cancel, cancel_key
        from trainjob.status import observe

        backend, action = client.backend, cast("CancelAction", self.action)
        seconds = self.stop_timeout or 0
        stopped: set[JobRef] = set()
        remaining: set[JobRef] = set()
        errors: list[TrainJobError] = []
        limit = anyio.CapacityLimiter(_AT_ONCE)

        async def stop(key: str, jobs: Sequence[TrainJob]) -> None:
            found = {JobRef.of(job): observe(job).phase for job in jobs}
            for ref, phase in found.items():
                self.log.info("TrainJob %s (attempt %d) is %s: %s", ref, ref.attempt, phase, self.action)
            try:
                async with limit:
                    done = await cancel_key(
                        backend, key, namespace=client.namespace, action=action, timeout_seconds=seconds
                    )
                    stopped.update(found, done.jobs)
                    if not done.ended:
                        remaining.update(done.jobs)
                    for ref in found.keys() - set(done.jobs):  # its deletion was requested before
                        if not await cancel(backend, ref, action, timeout_seconds=seconds):
                            remaining.add(ref)
            except TrainJobError as error:  # the other jobs are still stopped
                errors.append(error)

        async with anyio.create_task_group() as group:
            for key, jobs in keys.items():
                group.start_soon(stop, key, jobs)
        if errors:
            raise errors[0]
        if remaining:
            raise TrainJobFailure(
                f"pods of TrainJob {', '.join(sorted(map(str, remaining)))} have not ended {seconds:g} s after the job "
                "was stopped; the next try waits again (increase stop_timeout for pods with a long grace period)"
            )
        return [ref.name for ref in stopped]

    def _places(self, context: Context) -> dict[tuple[str, str | None], list[Any]]:
        """Connection and namespace -> the tasks that launch their jobs there."""
        places: dict[tuple[str, str | None], list[Any]] = defaultdict(list)
        for task in map(self._launcher, self._ids()):
            conn_id = self.trainjob_conn_id or self._argument(task, "trainjob_conn_id", context)
            namespace = self.namespace or self._argument(task, "namespace", context)
            places[conn_id or TrainJobHook.default_conn_name, namespace].append(task)
        return places

    def _ids(self) -> list[str]:
        return [self.launched_by] if isinstance(self.launched_by, str) else [*self.launched_by]

    def _launcher(self, task_id: str) -> Any:
        """The task of that ID.

        Raises:
            TrainJobFatal: The DAG has no such task, or it launches no TrainJob.
        """
        dag = self.get_dag()
        launchers = {task.task_id: task for task in (dag.tasks if dag is not None else ()) if _launches(task)}
        if task_id not in launchers:
            raise TrainJobFatal(
                f"launched_by: DAG {self.dag_id} has no task {task_id!r} that launches a TrainJob; "
                f"tasks that do: {', '.join(sorted(launchers)) or 'none'}"
            )
        return launchers[task_id]

    def _argument(self, task: Any, name: str, context: Context) -> Any:
        """An argument of another task, rendered for this one.

        Raises:
            TrainJobFatal: The argument is mapped, so each map index has its own value.
        """
        if not task.is_mapped:
            return self.render_template(getattr(task, name), context)
        mapped = task._get_specified_expand_input().value
        if any(name in each for each in ([mapped] if isinstance(mapped, dict) else mapped) if isinstance(each, dict)):
            raise TrainJobFatal(f"{name} of task {task.task_id} is mapped; set {name} of {self.task_id}")
        return self.render_template(task.partial_kwargs.get(name), context)

    def _map_index(self, task: Any, ti: Any) -> int | None:
        """The map index whose jobs to stop, if both tasks are in the same mapped group; None: all map indexes."""
        ours, theirs = self.get_closest_mapped_task_group(), task.get_closest_mapped_task_group()
        same = ours is not None and theirs is not None and ours.group_id == theirs.group_id
        return int(ti.map_index) if same else None


def _launches(task: Any) -> bool:
    kind = getattr(task, "operator_class", type(task))
    return isinstance(kind, type) and issubclass(kind, TrainJobTask)
