"""`TrainJobHook`: connects to where TrainJobs run, by an Airflow connection or by the environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Connection

    from trainjob import Backend, TrainJobClient
    from trainjob._backends.credentials import Credentials


@dataclass(frozen=True)
class Target:
    """The settings of a connection.

    Attributes:
        backend: Name of the backend; ``TRAINJOB_BACKEND`` decides if None.
        namespace: Default namespace of jobs; ``TRAINJOB_NAMESPACE`` or the backend decides if None.
        credentials: Of the cluster; None: the kubeconfig or the pod's service account is used.
        links: Field of the connection -> URL template of a link, see `trainjob_airflow.links`.
    """

    backend: str | None = None
    namespace: str | None = None
    credentials: Credentials | None = None
    links: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def from_json(cls, packed: Mapping[str, Any]) -> Target:
        """Restore what `as_json` returned."""
        from trainjob._backends.credentials import Credentials

        credentials = packed["credentials"]
        return cls(packed["backend"], packed["namespace"], None if credentials is None else Credentials(**credentials))

    def as_json(self) -> dict[str, Any] | None:
        """The settings as JSON values, without links; None if they hold a secret or an API server's URL.

        A URL can contain a password.
        """
        credentials = self.credentials
        if credentials is None:
            return {"backend": self.backend, "namespace": self.namespace, "credentials": None}
        if credentials.kubeconfig_text or credentials.host or credentials.token:
            return None
        values = {each.name: getattr(credentials, each.name) for each in fields(credentials)}
        packed = {name: value for name, value in values.items() if value is not None}
        return {"backend": self.backend, "namespace": self.namespace, "credentials": packed}


_SHARED: dict[tuple[asyncio.AbstractEventLoop, Target], tuple[Backend, int]] = {}
"""Event loop and connection -> a backend and the number of its users."""


class TrainJobHook(BaseHook):
    """Creates backends and clients from an Airflow connection.

    Args:
        trainjob_conn_id: Connection of type ``trainjob`` or ``kubernetes``. ``TRAINJOB_*`` and the kubeconfig or
            service account of the worker and the triggerer decide about fields that are left empty, and about all of
            them if the *default* connection does not exist.
        target: What the method `target` returned for that connection, which is then not looked up.
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
        self._known = None if target is None else Target.from_json(target)

    def get_conn(self) -> TrainJobClient:
        """Return `client()`."""
        return self.client()

    def client(self, namespace: str | None = None, *, shared: bool = False) -> TrainJobClient:
        """Return a synchronous client; use it as a context manager.

        Args:
            namespace: Namespace of the jobs; the connection's if left out.
            shared: Let all waits of the client share one watch, for many jobs at the same time.

        Raises:
            AirflowNotFoundException: The connection does not exist, and it is not the default one.
            ConfigurationError: The connection is invalid, or its backend is not installed.
        """
        from trainjob import TrainJobClient, connect  # imports pydantic and anyio, which DAG files do not need

        target = self._resolve()
        backend = connect(target.backend, shared=shared, credentials=target.credentials)
        return TrainJobClient(backend, namespace or self._namespace(target))

    async def backend(self) -> Backend:
        """Return a backend, for code on an event loop (triggers). Close it after use: ``await backend.aclose()``.

        Raises:
            AirflowNotFoundException: The connection does not exist, and it is not the default one.
            ConfigurationError: The connection is invalid, or its backend is not installed.
        """
        from trainjob import connect

        target = await self._aresolve()
        return connect(target.backend, credentials=target.credentials)

    @asynccontextmanager
    async def shared_backend(self) -> AsyncIterator[Backend]:
        """The backend that all triggers of this process share while they run, for code on an event loop.

        On a cluster, all of them share one watch of TrainJobs and one of pods for each namespace.

        Raises:
            AirflowNotFoundException: The connection does not exist, and it is not the default one.
            ConfigurationError: The connection is invalid, or its backend is not installed.
        """
        from trainjob import connect

        target = await self._aresolve()
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
        """The default namespace of jobs, for code on an event loop; None: the backend's default."""
        from trainjob import Settings

        return self._namespace(await self._aresolve()) or Settings().namespace

    def target(self) -> dict[str, Any] | None:
        """The connection's settings as an argument of a trigger; None if they hold a secret.

        With it a triggerer does not look the connection up. One look-up loads Airflow's execution API: 80 MB (3.3.2).

        Raises:
            AirflowNotFoundException: The connection does not exist, and it is not the default one.
            ConfigurationError: The connection is invalid.
        """
        return self._resolve().as_json()

    def links(self) -> Mapping[str, str]:
        """Field of the connection -> URL template of a link, see `trainjob_airflow.links`."""
        return self._resolve().links

    def test_connection(self) -> tuple[bool, str]:
        """Test the connection by listing jobs."""
        from trainjob import TrainJobError

        try:
            with self.client() as client:
                jobs = client.list()
                return True, f"{len(jobs)} TrainJob(s) of Airflow in namespace {client.namespace}"
        except (TrainJobError, AirflowNotFoundException) as error:
            return False, str(error)

    def _resolve(self) -> Target:
        if self._known is None:
            try:
                connection = self._look_up()
            except AirflowNotFoundException:
                self._known = self._without_connection()
            else:
                self._known = _read(connection, connection.extra_dejson)
        return self._known

    def _look_up(self) -> Connection:
        return self.get_connection(self.trainjob_conn_id)

    async def _aresolve(self) -> Target:
        """Resolve on an event loop, where Airflow's synchronous calls would deadlock (apache/airflow#71891)."""
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

    def _namespace(self, target: Target) -> str | None:
        from trainjob import ConfigurationError, names

        if not target.namespace:
            return None
        try:
            return names.namespace(target.namespace)
        except ConfigurationError as error:
            raise ConfigurationError(f"connection {self.trainjob_conn_id}: namespace: {error}") from None

    def _without_connection(self) -> Target:
        if self.trainjob_conn_id != self.default_conn_name:
            raise AirflowNotFoundException(
                f"connection {self.trainjob_conn_id!r} does not exist: create it with type trainjob, or leave "
                "trainjob_conn_id out to use TRAINJOB_BACKEND and TRAINJOB_NAMESPACE of the environment"
            )
        return Target()


_LINKS = ("job_url", "logs_url", "model_url")


def _read(connection: Connection, extra: Mapping[str, Any]) -> Target:
    """The settings of a connection of type ``trainjob`` or ``kubernetes``; fields that both have share their names.

    Raises:
        ConfigurationError: Its type is another one, or its fields are invalid or exclude each other.
    """
    from trainjob import ConfigurationError
    from trainjob._backends import BACKENDS

    if connection.conn_type not in ("trainjob", "kubernetes"):
        raise ConfigurationError(
            f"connection {connection.conn_id} has type {connection.conn_type!r}; "
            "use a connection of type 'trainjob' or 'kubernetes'"
        )
    # Airflow 1 and 2 gave the fields of a kubernetes connection a long prefix, which many connections still have.
    values = {
        name.removeprefix("extra__kubernetes__"): value for name, value in extra.items() if value not in (None, "")
    }
    backend = values.get("backend") or ("kubernetes" if connection.conn_type == "kubernetes" else None)
    if backend is not None and backend not in BACKENDS:
        raise ConfigurationError(
            f"connection {connection.conn_id}: backend is {backend!r}; set it to {' or '.join(BACKENDS)}"
        )
    links = {name: str(values[name]) for name in _LINKS if name in values}
    return Target(backend, values.get("namespace"), _credentials(connection, values), links)


def _credentials(connection: Connection, values: Mapping[str, Any]) -> Credentials | None:
    from trainjob import ConfigurationError
    from trainjob._backends.credentials import Credentials

    is_own = connection.conn_type == "trainjob"
    host, token = (_server(connection), connection.password) if is_own else (None, None)
    if is_own:
        _check_extra(connection, values)
    text_field = "secret_kube_config" if values.get("secret_kube_config") else "kube_config"
    kubeconfig = values.get(text_field)
    in_cluster = _is_true(values.get("in_cluster"))
    clusters = {
        "in_cluster": in_cluster,
        "kube_config_path": values.get("kube_config_path"),
        text_field: kubeconfig is not None,
        "host": host,
    }
    chosen = [name for name, value in clusters.items() if value]
    if len(chosen) > 1:
        raise ConfigurationError(f"connection {connection.conn_id}: set only one of {', '.join(chosen)}")
    if token and not host:
        raise ConfigurationError(
            f"connection {connection.conn_id}: password (bearer token) needs host (API server): set host to the URL of "
            "the API server, such as https://cluster.example:6443"
        )
    settings: dict[str, Any] = {
        "kubeconfig": values.get("kube_config_path"),
        "kubeconfig_text": kubeconfig if isinstance(kubeconfig, str | None) else json.dumps(kubeconfig),
        "context": values.get("cluster_context"),
        "in_cluster": True if in_cluster else None,
        "host": host,
        "token": token,
        "ca_file": values.get("ca_file"),
    }
    given = {name: value for name, value in settings.items() if value is not None and value != ""}
    if _is_true(values.get("disable_verify_ssl")):
        given["verify"] = False
    return Credentials(**given) if given else None


def _server(connection: Connection) -> str | None:
    """URL of the API server. A secrets backend that stores a URI gives its host, port and scheme separately.

    Raises:
        ConfigurationError: host, port and schema exclude each other.
    """
    from ipaddress import IPv6Address
    from urllib.parse import urlsplit

    from trainjob import ConfigurationError
    from trainjob._support.urls import is_url

    host, port, schema = connection.host or "", connection.port, connection.schema or ""
    scheme, _, place = host.rpartition("://")
    with suppress(ValueError):
        place = f"[{IPv6Address(place)}]"  # the host of a URI, which Airflow stores without its brackets
    wrong = ""
    if host and not is_url(f"https://{place}", "https"):
        problem = "host is not the host or URL of an API server: write https://host:6443"
        raise ConfigurationError(f"connection {connection.conn_id}: {problem}")
    given = urlsplit(f"//{place}")
    if not host and (port or schema):
        wrong = "port and schema need host"
    elif schema and (schema not in ("http", "https") or scheme not in ("", schema)):
        wrong = f"schema is {schema!r}; remove it, or set it to the scheme of host: http or https"
    elif port and given.netloc.rpartition(":")[2].isdigit() and given.port != port:
        wrong = f"port is {port}, but host has {given.port}; remove one of them"
    if wrong:
        raise ConfigurationError(f"connection {connection.conn_id}: {wrong}")
    if not host:
        return None
    netloc = f"{given.netloc}:{port}" if port and given.port is None else given.netloc
    return f"{scheme or schema or 'https'}://{netloc}{given.path}"


def _check_extra(connection: Connection, values: Mapping[str, Any]) -> None:
    """Refuse unknown fields: with a misspelled ``namespace``, a job would run in another one.

    Raises:
        ConfigurationError: With the most similar field.
    """
    from difflib import get_close_matches

    from trainjob import ConfigurationError
    from trainjob_airflow.get_provider_info import get_provider_info

    known = {*get_provider_info()["connection-types"][0]["conn-fields"], "kube_config"}
    for name in sorted(values.keys() - known):
        near = get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"fields: {', '.join(sorted(known))}"
        raise ConfigurationError(f"connection {connection.conn_id}: extra has no field {name!r}: {advice}")


def _is_true(value: object) -> bool:
    return value is True or str(value).lower() == "true"
