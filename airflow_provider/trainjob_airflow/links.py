"""Links of a task: its job, the job's logs, the model's version. Their addresses are templates of the connection.

Without ``job_url``, the link to the job leads to the task's own XComs, where the job's identity is from its launch on.

Airflow asks for them at the end of each phase of a task, also when it is deferred; `push` gives them as soon as the job
exists.
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
    """A link whose address the operator knows."""

    template = ""
    """Name of the connection's field with the address."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address; empty where the connection has none, or there is no job yet."""
        del ti_key
        return str(getattr(operator, "links", {}).get(self.template, ""))


class TrainJobLink(_Link):
    """The TrainJob in a dashboard, else the XComs of the task."""

    name = "TrainJob"
    template = "job_url"


class TrainJobLogsLink(_Link):
    """Logs of its ranks in a log store."""

    name = "TrainJob logs"
    template = "logs_url"


class ModelVersionLink(_Link):
    """The version of the model in its registry."""

    name = "Model version"
    template = "model_url"


LINKS: tuple[_Link, ...] = (TrainJobLink(), TrainJobLogsLink())
MODEL_LINK = ModelVersionLink()


def addresses(templates: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """The addresses that can be told with `values`.

    Args:
        templates: Field of the connection -> address with ``{namespace}``, ``{name}``, ``{uid}``, ``{started}``,
            ``{model}``, ``{version}`` in it, each of which is quoted for URLs.
        values: By those names.
    """
    known = {name: quote(str(value), safe="") for name, value in values.items()}
    found = {}
    for link in (*LINKS, MODEL_LINK):
        template = templates.get(link.template)
        if isinstance(template, str) and template:
            try:
                found[link.template] = template.format_map(known)
            except (KeyError, IndexError, ValueError):  # not known yet, or no such name: there is no link then
                continue
    return found


def xcom_page(ti: Any) -> str:
    """Address of the XComs of a task instance in Airflow's UI; the same in Airflow 3.0 to 3.3.

    Without ``[api] base_url`` it is a path, which browsers resolve.
    """
    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    index = f"/mapped/{ti.map_index}" if ti.map_index is not None and ti.map_index >= 0 else ""
    dag_id, run_id, task_id = (quote(value, safe="") for value in (ti.dag_id, ti.run_id, ti.task_id))
    return f"{base}/dags/{dag_id}/runs/{run_id}/tasks/{task_id}{index}/xcom"


def push(context: Context, operator: BaseOperator) -> None:
    """Show the operator's links now, and not only when its task ends."""
    for link in operator.operator_extra_links:
        if address := link.get_link(operator, ti_key=cast("TaskInstanceKey", context["ti"])):  # as Airflow itself does
            context["ti"].xcom_push(key=link.xcom_key, value=address)
