"""What a task publishes about its job: in its log, as XComs, links, metrics, assets and lineage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob_airflow import assets, lineage, links
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import publish_job
from trainjob_airflow.running import RunningJob
from trainjob_airflow.stats import send_goodput, send_stragglers, stats, tags_of
from trainjob_airflow.tasklog import write_group, write_result
from trainjob_airflow.templates import StrictTemplates
from trainjob_airflow.training import TaskTraining

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import JobRef, TrainJobClient, TrainJobError, TrainJobSpec

_T = TypeVar("_T")


class ReportingTask(StrictTemplates):
    """Publishes what is known about the job of a task.

    Args:
        namespace: Namespace of the job; the connection's if None.
        trainjob_conn_id: Connection.
        **kwargs: Arguments of `BaseOperator`.
    """

    def __init__(self, *, namespace: str | None, trainjob_conn_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.namespace = namespace
        self.trainjob_conn_id = trainjob_conn_id
        self.links: dict[str, str] = {}
        self._delivered: JobRef | None = None
        self._result: dict[str, Any] = {}
        self._failed: dict[str, Any] = {}

    def sample_spec(self) -> tuple[TrainJobSpec | None, list[str]]:
        """The known part of the spec of a run that starts now, and the paths of values that only a run knows.

        Raises:
            TrainJobError: The known part is invalid.
            TrainJobFatal: A template is invalid, or uses an undefined name.
        """
        raise NotImplementedError

    def dry_run(self) -> None:
        """Print the TrainJob object that a run started now would create.

        It needs no run: templates are rendered with sample values. Values that only a run knows, such as XComs, are
        left out and listed in a comment.
        """
        import yaml

        from trainjob._manifest.render import render

        spec, unknown = self.sample_spec()
        if unknown:
            print(f"# known only at run time: {', '.join(unknown)}")  # noqa: T201 - a command prints
        if spec is not None:
            manifest = render(spec, f"airflow/dry-run/{self.dag_id}/{self.task_id}", 1, self.namespace or "default")
            print(yaml.safe_dump(manifest, sort_keys=False))  # noqa: T201 - a command prints

    def _training(self, context: Context, running: RunningJob, ref: JobRef) -> TaskTraining | None:
        """What this task stores about its job; None if it stores nothing."""
        if self.do_xcom_push:
            running.training = TaskTraining(context, ref, self.trainjob_conn_id, running.key)
        return running.training

    def _publish(self, context: Context, running: RunningJob, ref: JobRef) -> None:
        """Publish the attempt that counts: as XCom, as links and in the log."""
        publish_job(context, ref, running.key)
        self._link(context, ref)
        links.push(context, self)
        self._log_launch(context, ref, running.key, adopted=ref == running.adopted)

    def _publish_end(self, context: Context, running: RunningJob, spent: Mapping[str, Any]) -> None:
        """Publish how the time of a job was spent whose try fails: in the log, as metrics and to OpenLineage."""
        from trainjob._jobs.results import spent_text

        ref = running.ref
        if ref is not None and spent:
            self._failed = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "goodput": spent}
            self.log.info("%s", spent_text(spent))
            send_goodput(context["ti"], spent)

    def _link(self, context: Context, ref: JobRef, **more: Any) -> None:
        """Set the URLs of the links."""
        values = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "started": context["ti"].start_date}
        self.links = links.format_urls(TrainJobHook(self.trainjob_conn_id).links(), values | more)
        if self.do_xcom_push:
            self.links.setdefault(links.TrainJobLink.template, links.xcom_page(context["ti"]))

    def _log_launch(self, context: Context, ref: JobRef, key: str, *, adopted: bool) -> None:
        xcoms = links.xcom_page(context["ti"])  # the link to it is on the same page as the log
        known = {name: url for name, url in self.links.items() if url != xcoms}
        urls = [f"{link.name}: {known[link.template]}" for link in links.LINKS if link.template in known]
        lines = [f"uid: {ref.uid}", f"key: {key}", f"more about it: trainjob diagnose {ref}", *urls]
        write_group(self.log, f"TrainJob {ref} (attempt {ref.attempt}{', adopted' if adopted else ''})", lines)

    def _deliver(self, context: Context, result: Mapping[str, Any], ref: JobRef) -> Any:
        """What `execute` returns. `_acknowledge` marks the job as delivered once Airflow has recorded the success."""
        self._delivered = ref
        merged = self._result = {**result, "outputs": {**self.declared_outputs(context), **result["outputs"]}}
        write_result(self.log, merged)
        self._link(context, ref, **self.version_of(merged))
        assets.set_extra(context, self, merged | {"metrics": self.metrics_of(merged)})
        for name, seconds in merged["seconds"].items():
            stats().timing(f"trainjob.{name}", timedelta(seconds=seconds), tags=tags_of(context["ti"]))
        send_goodput(context["ti"], result.get("goodput", {}))
        send_stragglers(context["ti"], result.get("stragglers", ()))
        return self.returned(context, merged)

    def returned(self, context: Context, result: dict[str, Any]) -> Any:
        """The XCom ``return_value`` of a task whose job has ended.

        Args:
            context: Of the task.
            result: The result of the job.
        """
        del context
        return result

    def declared_outputs(self, context: Context) -> Mapping[str, Any]:
        """Name -> URI of the outputs in the spec, which the result has even if the script reports none."""
        del context
        return {}

    def version_of(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """``model`` and ``version`` that the job registered, for the link to the registry; empty if none.

        Args:
            result: What `execute` returns.
        """
        del result
        return {}

    def data_of(self, result: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """URIs that the job read, and URIs that it wrote, for OpenLineage.

        Args:
            result: What `execute` returns.
        """
        del result
        return [], []

    def metrics_of(self, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Metrics for asset events.

        Args:
            result: What `execute` returns.
        """
        metrics: Mapping[str, Any] = result["metrics"]
        return metrics

    def acknowledge(self) -> None:
        """Mark the job as delivered: another launch with its key then starts a new job."""
        from trainjob import TrainJobError
        from trainjob._jobs.records import mark_delivered

        ref = self._delivered
        if ref is None:
            return
        try:
            with self._client(ref.namespace) as client:
                client.call(lambda: mark_delivered(client.backend, ref))
        except (TrainJobError, TrainJobFatal, TrainJobFailure) as error:
            self.log.warning(
                "TrainJob %s could not be marked as delivered, so a clear will return its result again: %s", ref, error
            )

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Lineage of a finished task; `apache-airflow-providers-openlineage` calls it."""
        del task_instance
        read, written = self.data_of(self._result) if self._result else ((), ())
        return lineage.facets(read, written, self._result)

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> Any:
        """The job of a failed task and its goodput; `apache-airflow-providers-openlineage` calls it."""
        del task_instance
        return lineage.facets((), (), self._failed)

    def _client(self, namespace: str | None) -> TrainJobClient:
        return self._call_hook(lambda hook: hook.client(namespace))

    def _call_hook(self, call: Callable[[TrainJobHook], _T]) -> _T:
        from trainjob import TrainJobError

        try:
            return call(TrainJobHook(self.trainjob_conn_id))
        except AirflowNotFoundException as error:
            raise TrainJobFatal(str(error)) from None
        except TrainJobError as error:
            raise airflow_error(error) from None

    def _log_error(self, text: str) -> None:
        """Log each line separately; Airflow logs the text of an exception as one line."""
        for line in text.splitlines():
            self.log.error("%s", line)

    def _log_failure(self, error: TrainJobError) -> None:
        """Log an error; that of a failed job begins with why it failed, since the log has its name already."""
        from trainjob import TrainJobFailed

        text = str(error)
        if isinstance(error, TrainJobFailed):
            text = text.removeprefix(f"TrainJob {error.diagnosis.job} failed: ")
        self._log_error(text)
