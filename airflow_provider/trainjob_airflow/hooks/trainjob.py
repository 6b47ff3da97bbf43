"""`TrainJobHook`: where TrainJobs run, from an Airflow connection or from the environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

if TYPE_CHECKING:
    from trainjob import Backend, TrainJobClient


_SHARED: dict[tuple[asyncio.AbstractEventLoop, str | None], tuple[Backend, int]] = {}
"""By event loop and name: a backend, and how many use it."""


class TrainJobHook(BaseHook):
    """Gives out backends and clients.

    Args:
        trainjob_conn_id: Connection of type ``trainjob``; its extra may hold ``backend`` and ``namespace``. What it
            leaves out, and all of it where the *default* connection does not exist, is decided by ``TRAINJOB_*``
            in the environment of the worker and the triggerer.
    """

    conn_name_attr = "trainjob_conn_id"
    default_conn_name = "trainjob_default"
    conn_type = "trainjob"
    hook_name = "Kubeflow TrainJob"

    def __init__(self, trainjob_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trainjob_conn_id = trainjob_conn_id
        self._extra: dict[str, Any] | None = None

    def get_conn(self) -> TrainJobClient:
        """The same as `client`."""
        return self.client()

    def client(self, namespace: str | None = None) -> TrainJobClient:
        """A synchronous client; use it as a context manager.

        Args:
            namespace: Namespace of the jobs, instead of the connection's.

        Raises:
            AirflowNotFoundException: A connection other than the default one was named, and there is none.
            ConfigurationError: The backend is unknown or not configured.
        """
        from trainjob import TrainJobClient  # noqa: PLC0415 - pydantic, anyio: not in a DAG file

        extra = self._settings()
        return TrainJobClient(extra.get("backend") or None, namespace or extra.get("namespace") or None)

    async def backend(self) -> Backend:
        """The backend, for code on an event loop (triggers). Close it after use: ``await backend.aclose()``.

        Raises:
            AirflowNotFoundException: See `client`.
            ConfigurationError: See `client`.
        """
        from trainjob import connect  # noqa: PLC0415

        return connect((await self._asettings()).get("backend") or None)

    @asynccontextmanager
    async def shared_backend(self) -> AsyncIterator[Backend]:
        """The backend that all triggers of this process share while they run, for code on an event loop.

        On a cluster they share one watch of TrainJobs and one of pods for each namespace, however many they are.

        Raises:
            AirflowNotFoundException: See `client`.
            ConfigurationError: See `client`.
        """
        from trainjob import connect  # noqa: PLC0415

        name = (await self._asettings()).get("backend") or None
        key = (asyncio.get_running_loop(), name)
        backend, users = _SHARED.get(key) or (connect(name, shared=True), 0)
        _SHARED[key] = (backend, users + 1)
        try:
            yield backend
        finally:
            backend, users = _SHARED.pop(key)
            if users > 1:
                _SHARED[key] = (backend, users - 1)
            else:
                await backend.aclose()

    async def namespace(self) -> str | None:
        """Namespace of jobs that name none, for code on an event loop; the backend's own if None."""
        from trainjob import Settings  # noqa: PLC0415

        return (await self._asettings()).get("namespace") or Settings().namespace

    def test_connection(self) -> tuple[bool, str]:
        """Whether jobs can be listed."""
        from trainjob import TrainJobError  # noqa: PLC0415

        try:
            with self.client() as client:
                jobs = client.list()
                return True, f"{len(jobs)} TrainJob(s) of Airflow in namespace {client.namespace}"
        except (TrainJobError, AirflowNotFoundException) as error:
            return False, str(error)

    def _settings(self) -> dict[str, Any]:
        if self._extra is None:
            try:
                self._extra = dict(self.get_connection(self.trainjob_conn_id).extra_dejson)
            except AirflowNotFoundException:
                self._extra = self._without_connection()
        return self._extra

    async def _asettings(self) -> dict[str, Any]:
        """The same on an event loop, where Airflow's synchronous calls would deadlock (apache/airflow#71891)."""
        from airflow.providers.common.compat.connection import (  # noqa: PLC0415
            get_async_connection,
            get_async_extra_dejson,
        )

        if self._extra is None:
            try:
                self._extra = dict(await get_async_extra_dejson(await get_async_connection(self.trainjob_conn_id)))
            except AirflowNotFoundException:
                self._extra = self._without_connection()
        return self._extra

    def _without_connection(self) -> dict[str, Any]:
        if self.trainjob_conn_id != self.default_conn_name:
            raise AirflowNotFoundException(
                f"there is no connection {self.trainjob_conn_id!r}; create one of type trainjob, or leave "
                "trainjob_conn_id out to take TRAINJOB_BACKEND and TRAINJOB_NAMESPACE from the environment"
            )
        return {}
