"""Links of a task in Airflow's UI: its TrainJob, the job's logs, the model version.

The connection's fields ``job_url``, ``logs_url`` and ``model_url`` are the templates of their URLs. Without
``job_url``, the link to the job opens the task's XComs, which hold the job's identity from its launch on.

Airflow reads the links only when a task ends or defers; `push` shows them as soon as the job exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from airflow.providers.common.compat.sdk import BaseOperatorLink, conf

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator, Context
    from airflow.sdk.types import TaskInstanceKey


class _Link(BaseOperatorLink):
    """A link whose URL is in the operator's `links`."""

    template = ""
    """The connection's field with the URL template."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL; empty if the connection has no template for it, or there is no job yet."""
        del ti_key
        return str(getattr(operator, "links", {}).get(self.template, ""))


class TrainJobLink(_Link):
    """The TrainJob in a dashboard, or the XComs of the task."""

    name = "TrainJob"
    template = "job_url"


class TrainJobLogsLink(_Link):
    """Logs of the job's ranks in a log store."""

    name = "TrainJob logs"
    template = "logs_url"


class ModelVersionLink(_Link):
    """The model version in the model registry."""

    name = "Model version"
    template = "model_url"


LINKS: tuple[_Link, ...] = (TrainJobLink(), TrainJobLogsLink())
MODEL_LINK = ModelVersionLink()


def format_urls(templates: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Fill the URL templates for which `values` has every placeholder.

    Args:
        templates: Field of the connection -> URL template with ``{namespace}``, ``{name}``, ``{uid}``, ``{started}``,
            ``{model}``, ``{version}``.
        values: Placeholder -> value, which is quoted for URLs.
    """
    quoted = {name: quote(str(value), safe="") for name, value in values.items()}
    urls = {}
    for link in (*LINKS, MODEL_LINK):
        template = templates.get(link.template)
        if isinstance(template, str) and template:
            try:
                urls[link.template] = template.format_map(quoted)
            except (KeyError, IndexError, ValueError):  # no value yet, or the template is invalid: no link
                continue
    return urls


def xcom_page(ti: Any) -> str:
    """URL of the XComs of a task instance in Airflow's UI; the same in Airflow 3.0 to 3.3.

    Without ``[api] base_url`` it is a path, which browsers resolve.
    """
    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    index = f"/mapped/{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ""
    dag_id, run_id, task_id = (quote(value, safe="") for value in (ti.dag_id, ti.run_id, ti.task_id))
    return f"{base}/dags/{dag_id}/runs/{run_id}/tasks/{task_id}{index}/xcom"


def push(context: Context, operator: BaseOperator) -> None:
    """Show the operator's links now, before its task ends or defers."""
    for link in operator.operator_extra_links:
        if address := link.get_link(operator, ti_key=cast("TaskInstanceKey", context["ti"])):  # as Airflow itself does
            context["ti"].xcom_push(key=link.xcom_key, value=address)
