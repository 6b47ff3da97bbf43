"""How to reach an API server, as the ``kubernetes`` package finds it.

That is a kubeconfig with context and exec plugins, or the pod's own service account. Nothing of the package's global
state is used, so that several clusters can be in one process.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from trainjob.errors import ConfigurationError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """What a connection needs.

    Attributes:
        host: URL of the API server, with a path if it is behind one.
        verify: TLS settings, the client certificate included.
        authorization: Value of the header; empty where the certificate says who we are.
        proxy: URL of a proxy; None for a direct connection.
        server_name: Name to expect in the server's certificate, if not the host's.
        identity: Equal for accesses that can share a connection.
    """

    host: str
    verify: ssl.SSLContext
    authorization: str = field(repr=False)
    proxy: str | None
    server_name: str | None
    identity: tuple[object, ...]


@dataclass(frozen=True)
class Credentials:
    """Where credentials come from. Nothing is read before `load`.

    Attributes:
        kubeconfig: Path; ``KUBECONFIG`` or ``~/.kube/config`` if None.
        context: Context of the kubeconfig; its current one if None.
        host: URL of an API server, instead of a kubeconfig.
        token: Bearer token for `host`.
        ca_file: CA certificates for `host`.
        verify: False switches the verification of the server's certificate off, as the caller's own decision.
    """

    kubeconfig: str | None = None
    context: str | None = None
    host: str | None = None
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    verify: bool = True

    def load(self) -> Access:
        """Read everything afresh: files, and what an exec plugin says. Blocks.

        Raises:
            ConfigurationError: nothing is configured, or it cannot be read.
        """
        try:
            # 45 to 90 MB: only processes that talk to a cluster pay for it.
            from kubernetes import config  # noqa: PLC0415
            from kubernetes.client import Configuration  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError("the kubernetes package is missing: pip install 'trainjob[kubernetes]'") from error
        found: Any = Configuration()
        found.host = None
        if self.host:
            found.host, found.ssl_ca_cert = self.host, self.ca_file
            if self.token:
                found.api_key["authorization"] = f"Bearer {self.token}"
        else:
            try:
                if self.kubeconfig or self.context or not self._in_cluster():
                    config.load_kube_config(self.kubeconfig, context=self.context, client_configuration=found)
                else:
                    config.load_incluster_config(client_configuration=found)
            except (config.ConfigException, OSError, yaml.YAMLError, TypeError, KeyError) as error:
                why = str(error).rstrip(".")
                raise ConfigurationError(
                    f"no cluster is configured: {why}. Set KUBECONFIG, or run on this machine instead: "
                    "TRAINJOB_BACKEND=local"
                ) from error
        if self.verify is False:
            found.verify_ssl = False
        cluster = self._cluster()
        return _access(found, cluster.get("proxy-url"), cluster.get("tls-server-name"))

    def source(self) -> str:
        """Where they come from, in words; no secret is in it."""
        if self.host:
            return f"given for {self.host}"
        if not (self.kubeconfig or self.context) and self._in_cluster():
            return "service account of this pod"
        return f"kubeconfig {self._path()}, context {self.context or self._file().get('current-context')}"

    def token_file(self) -> Path | None:
        """The file that the token is read from, where that is known; it may be replaced at any time."""
        if self.host:
            return None
        if not (self.kubeconfig or self.context) and self._in_cluster():
            return _SERVICE_ACCOUNT / "token"
        return self._token_file_of_kubeconfig()

    def namespace(self) -> str | None:
        """The namespace of the context or of the pod, if it says one."""
        if self.host:
            return None
        if not (self.kubeconfig or self.context) and self._in_cluster():
            return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
        return (self._context().get("context") or {}).get("namespace")

    @staticmethod
    def _in_cluster() -> bool:
        """In a pod, and no kubeconfig was pointed at."""
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not os.environ.get("KUBECONFIG")

    def _path(self) -> Path:
        path = self.kubeconfig or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0] or "~/.kube/config"
        return Path(path).expanduser()

    def _file(self) -> dict[str, Any]:
        try:
            loaded = yaml.safe_load(self._path().read_text())
        except (OSError, yaml.YAMLError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def _context(self) -> dict[str, Any]:
        file = self._file()
        return _named(file.get("contexts"), self.context or file.get("current-context"))

    def _cluster(self) -> dict[str, Any]:
        """The kubeconfig's cluster, for what only newer releases of the kubernetes package know."""
        if self.host or (not (self.kubeconfig or self.context) and self._in_cluster()):
            return {}
        cluster = _named(self._file().get("clusters"), (self._context().get("context") or {}).get("cluster"))
        return cluster.get("cluster") or {}

    def _token_file_of_kubeconfig(self) -> Path | None:
        user = _named(self._file().get("users"), (self._context().get("context") or {}).get("user"))
        path = (user.get("user") or {}).get("tokenFile")
        return Path(path) if path else None


def _named(entries: object, name: object) -> dict[str, Any]:
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name:
            return entry
    return {}


def _access(found: Any, proxy_url: str | None, server_name: str | None) -> Access:
    token = ""
    for identifier in ("authorization", "BearerToken"):  # up to 36; from 37 on
        token = token or found.get_api_key_with_prefix(identifier) or ""
    if token and " " not in token:
        token = f"Bearer {token}"
    if not token and found.username:
        token = found.get_basic_auth_token()
    if found.verify_ssl:
        context = ssl.create_default_context(cafile=found.ssl_ca_cert or None)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # cluster CAs often lack the key usage that 3.13 insists on
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.cert_file:
        context.load_cert_chain(found.cert_file, found.key_file or None)
    files = (found.ssl_ca_cert, found.cert_file, found.key_file)
    proxy = proxy_url or _proxy(found.host)
    identity = (found.host, found.verify_ssl, proxy, server_name, *map(_content, files))
    return Access(found.host.rstrip("/"), context, token, proxy, server_name, identity)


def _content(path: str | None) -> bytes:
    """The kubernetes package writes certificates to new temporary files at each load, so names say nothing."""
    return Path(path).read_bytes() if path else b""


def _proxy(host: str) -> str | None:
    """The proxy of the environment, unless ``no_proxy`` covers the host (which the kubernetes package overlooks)."""
    parts = urlsplit(host)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
