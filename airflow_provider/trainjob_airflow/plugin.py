"""The tab "Training" of task instances and the tab "Trainings" of DAG runs. Airflow 3.1.1 and later.

Every Airflow process imports this module, so it imports nothing; the API server imports `trainjob_airflow.web` at the
first request for a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow import __version__
from airflow.providers.common.compat.sdk import AirflowPlugin
from packaging.version import Version

from trainjob_airflow.addresses import PREFIX, root

# Airflow 3.0 has no tabs. In 3.1.0 the browser's requests for them are not authenticated: the UI deletes the cookie
# with the token and sends the token in a header, which a frame cannot.
_HAS_TABS = Version(__version__) >= Version("3.1.1")
# In the path, not in the query: Airflow 3.1 inserts values without quoting them, and a + in a query is a space. Airflow
# 3.1.1 to 3.1.5 also authorize only a dag_id in the path. The placeholder of an unmapped task stays in the address.
_RUN = "/dags/{DAG_ID}/runs/{RUN_ID}"
_TASK = _RUN + "/tasks/{TASK_ID}/{MAP_INDEX}"


class _Pages:
    """The ASGI application of the pages, which is imported at the first request."""

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        app = await asyncio.to_thread(_app)
        await app(scope, receive, send)


def _app() -> Any:
    from trainjob_airflow.web.app import app

    return app()


def _view(name: str, destination: str, route: str, path: str) -> dict[str, str]:
    return {"name": name, "destination": destination, "url_route": route, "href": f"{root()}{path}/page"}


_APP = {"app": _Pages(), "url_prefix": PREFIX, "name": "TrainJob pages"}
_VIEWS = (_view("Training", "task_instance", "training", _TASK), _view("Trainings", "dag_run", "trainings", _RUN))


class TrainJobPlugin(AirflowPlugin):
    """Adds the tabs to Airflow's UI."""

    name = "trainjob"
    if _HAS_TABS:
        fastapi_apps = [_APP]
        external_views = [*_VIEWS]
