"""`TrainJobHook`: where TrainJobs run, from an Airflow connection or from the environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Connection

    from trainjob import Backend, TrainJobClient
    from trainjob.backends.kubernetes.credentials import Credentials


@dataclass(frozen=True)
class Target:
    """What a connection says.

    Attributes:
        backend: Name of the backend; None where ``TRAINJOB_BACKEND`` decides.
        namespace: Of jobs that name none; None where ``TRAINJOB_NAMESPACE`` or the backend decides.
        credentials: Of the cluster; None where its kubeconfig or the pod's own service account is found as usual.
        links: Field of the connection -> address of a link, see `trainjob_airflow.links`.
    """

    backend: str | None = None
    namespace: str | None = None
    credentials: Credentials | None = None
    links: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, public: Mapping[str, Any]) -> Target:
        """What `public` has returned, in another process."""
        from trainjob.backends.kubernetes.credentials import Credentials

        given = public["credentials"]
        return cls(public["backend"], public["namespace"], None if given is None else Credentials(**given))

    def public(self) -> dict[str, Any] | None:
        """Itself as JSON, without links; None where a secret is in it, or an address, which may have one."""
        given = self.credentials
        if given is not None and (given.kubeconfig_text or given.host or given.token):
            return None
        said = {each.name: getattr(given, each.name) for each in fields(given)} if given is not None else {}
        kept = {name: value for name, value in said.items() if value is not None}
        return {"backend": self.backend, "namespace": self.namespace, "credentials": kept or None}


_SHARED: dict[tuple[asyncio.AbstractEventLoop, Target], tuple[Backend, int]] = {}
"""By event loop and connection: a backend, and how many use it."""


class TrainJobHook(BaseHook):
    """Gives out backends and clients.

    Args:
        trainjob_conn_id: Connection of type ``trainjob``, or a ``kubernetes`` one as other providers have it. What it
            leaves out, and all of it where the *default* connection does not exist, is decided by ``TRAINJOB_*``
            and by the kubeconfig or service account of the worker and the triggerer.
        target: What `public` said of that connection, which is then not looked up.
    """

    conn_name_attr = "trainjob_conn_id"
    default_conn_name = "trainjob_default"
    conn_type = "trainjob"
    hook_name = "Kubeflow TrainJob"

    def __init__(
        self, trainjob_conn_id: str = default_conn_name, target: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.trainjob_conn_id = trainjob_conn_id
        self._known = None if target is None else Target.of(target)

    def get_conn(self) -> TrainJobClient:
        """The same as `client`."""
        return self.client()

    def client(self, namespace: str | None = None) -> TrainJobClient:
        """A synchronous client; use it as a context manager.

        Args:
            namespace: Namespace of the jobs, instead of the connection's.

        Raises:
            AirflowNotFoundException: A connection other than the default one was named, and there is none.
            ConfigurationError: The backend is unknown or not configured, or the connection is wrong.
        """
        from trainjob import TrainJobClient, connect  # pydantic, anyio: not in a DAG file

        target = self._target()
        return TrainJobClient(connect(target.backend, credentials=target.credentials), namespace or target.namespace)

    async def backend(self) -> Backend:
        """The backend, for code on an event loop (triggers). Close it after use: ``await backend.aclose()``.

        Raises:
            AirflowNotFoundException: See `client`.
            ConfigurationError: See `client`.
        """
        from trainjob import connect

        target = await self._atarget()
        return connect(target.backend, credentials=target.credentials)

    @asynccontextmanager
    async def shared_backend(self) -> AsyncIterator[Backend]:
        """The backend that all triggers of this process share while they run, for code on an event loop.

        On a cluster they share one watch of TrainJobs and one of pods for each namespace, however many they are.

        Raises:
            AirflowNotFoundException: See `client`.
            ConfigurationError: See `client`.
        """
        from trainjob import connect

        target = await self._atarget()
        key = (asyncio.get_running_loop(), target)
        backend, users = _SHARED.get(key) or (connect(target.backend, shared=True, credentials=target.credentials), 0)
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
        from trainjob import Settings

        return (await self._atarget()).namespace or Settings().namespace

    def public(self) -> dict[str, Any] | None:
        """What the connection says, for the arguments of a trigger; None where a secret is part of it.

        A triggerer that has to ask for one connection loads Airflow's execution API for that: 80 MB (3.3.2).

        Raises:
            AirflowNotFoundException: See `client`.
            ConfigurationError: The connection is wrong.
        """
        return self._target().public()

    def links(self) -> Mapping[str, str]:
        """Addresses of links, as templates; see `trainjob_airflow.links`."""
        return self._target().links

    def test_connection(self) -> tuple[bool, str]:
        """Whether jobs can be listed."""
        from trainjob import TrainJobError

        try:
            with self.client() as client:
                jobs = client.list()
                return True, f"{len(jobs)} TrainJob(s) of Airflow in namespace {client.namespace}"
        except (TrainJobError, AirflowNotFoundException) as error:
            return False, str(error)

    def _target(self) -> Target:
        if self._known is None:
            try:
                connection = self.get_connection(self.trainjob_conn_id)
            except AirflowNotFoundException:
                self._known = self._without_connection()
            else:
                self._known = _read(connection, connection.extra_dejson)
        return self._known

    async def _atarget(self) -> Target:
        """The same on an event loop, where Airflow's synchronous calls would deadlock (apache/airflow#71891)."""
        from airflow.providers.common.compat.connection import (
            get_async_connection,
            get_async_extra_dejson,
        )

        if self._known is None:
            try:
                connection = await get_async_connection(self.trainjob_conn_id)
            except AirflowNotFoundException:
                self._known = self._without_connection()
            else:
                self._known = _read(connection, await get_async_extra_dejson(connection))
        return self._known

    def _without_connection(self) -> Target:
        if self.trainjob_conn_id != self.default_conn_name:
            raise AirflowNotFoundException(
                f"there is no connection {self.trainjob_conn_id!r}; create one of type trainjob, or leave "
                "trainjob_conn_id out to take TRAINJOB_BACKEND and TRAINJOB_NAMESPACE from the environment"
            )
        return Target()


_LINKS = ("job_url", "logs_url", "model_url")


def _read(connection: Connection, extra: Mapping[str, Any]) -> Target:
    """What a connection of type ``trainjob`` or ``kubernetes`` says; the fields they share have the same names.

    Raises:
        ConfigurationError: It is of another type, or its fields contradict each other.
    """
    from trainjob.errors import ConfigurationError

    if connection.conn_type not in ("trainjob", "kubernetes"):
        raise ConfigurationError(
            f"connection {connection.conn_id} is of type {connection.conn_type!r}; "
            "TrainJobs need one of type 'trainjob' or 'kubernetes'"
        )
    # Airflow 1 and 2 put the fields of a kubernetes connection under long names, and many still stand so.
    given = {
        name.removeprefix("extra__kubernetes__"): value for name, value in extra.items() if value not in (None, "")
    }
    backend = given.get("backend") or ("kubernetes" if connection.conn_type == "kubernetes" else None)
    links = {name: str(given[name]) for name in _LINKS if name in given}
    return Target(backend, given.get("namespace"), _credentials(connection, given), links)


def _credentials(connection: Connection, given: Mapping[str, Any]) -> Credentials | None:
    from trainjob.backends.kubernetes.credentials import Credentials
    from trainjob.errors import ConfigurationError

    kubeconfig = given.get("secret_kube_config") or given.get("kube_config")
    fields: dict[str, Any] = {
        "kubeconfig": given.get("kube_config_path"),
        "kubeconfig_text": kubeconfig if isinstance(kubeconfig, str | None) else json.dumps(kubeconfig),
        "context": given.get("cluster_context"),
        "in_cluster": True if _is_true(given.get("in_cluster")) else None,
        "host": connection.host if connection.conn_type == "trainjob" else None,
        "token": connection.password if connection.conn_type == "trainjob" else None,
        "ca_file": given.get("ca_file"),
    }
    said = [name for name in ("in_cluster", "kubeconfig", "kubeconfig_text", "host") if fields[name]]
    if len(said) > 1:
        raise ConfigurationError(f"connection {connection.conn_id}: only one of {', '.join(said)} can say where")
    if fields["token"] and not fields["host"]:
        raise ConfigurationError(f"connection {connection.conn_id}: a token needs the URL of its API server (host)")
    found = {name: value for name, value in fields.items() if value is not None and value != ""}
    if _is_true(given.get("disable_verify_ssl")):
        found["verify"] = False
    return Credentials(**found) if found else None


def _is_true(value: object) -> bool:
    return value is True or str(value).lower() == "true"
