"""An auth manager for tests: permissions by the name of the user."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

DENIED = {
    "nobody": {*DagAccessEntity},
    "no-xcoms": {DagAccessEntity.XCOM},
    "no-logs": {DagAccessEntity.TASK_LOGS},
}
"""User -> what the user may not read of DAGs."""
ONE_DAG = "page_finished"
"""The only DAG that the user ``one-dag`` may read."""


class StrictAuthManager(SimpleAuthManager):
    """Airflow's simple auth manager, with fewer permissions for the users in `DENIED`."""

    def is_authorized_dag(self, *, access_entity: Any = None, details: Any = None, user: Any, **more: Any) -> bool:
        """Whether a user may access a part of a DAG."""
        name = user.get_name()
        if access_entity in DENIED.get(name, ()) or (name == "one-dag" and (details is None or details.id != ONE_DAG)):
            return False
        return bool(super().is_authorized_dag(access_entity=access_entity, details=details, user=user, **more))
