"""How to reach an API server, as the ``kubernetes`` package finds it.

That is a kubeconfig with context and exec plugins, which the package reads, or the pod's own service account. Nothing
of the package's global state is used, so that several clusters can be in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from trainjob.errors import ConfigurationError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRIES = 5


class _HalfWritten(ConfigurationError):
    """A certificate, key or token is not whole: perhaps another thread or program is just writing it."""


class _Files:
    """Where the kubernetes package writes what is inline in a kubeconfig, keys too: nobody else's, and not for long.

    It remembers each file to the end of the process, for all threads that load the same; so the directory is there for
    as long as anybody is loading. (No lock over a load: an exec plugin may hang.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading = 0
        self._directory = ""

    def __enter__(self) -> str:
        with self._lock:
            self._directory = self._directory or tempfile.mkdtemp(prefix="trainjob-")
            self._loading += 1
            return self._directory

    def __exit__(self, *_: object) -> None:
        from kubernetes.config import kube_config  # noqa: PLC0415

        with self._lock:
            self._loading -= 1
            if not self._loading:
                written = kube_config._temp_files  # what it remembers, since 2017
                for content in [content for content, path in written.items() if path.startswith(self._directory)]:
                    del written[content]
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = ""


_FILES = _Files()


@dataclass(frozen=True)
class _Found:
    """What a kubeconfig or a pod says; certificates and key as PEM, empty where there are none."""

    host: str
    authorization: str = field(repr=False, default="")
    authority: str = ""
    certificate: str = ""
    key: str = field(repr=False, default="")
    verify: bool = True


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
        kubeconfig_text: A kubeconfig itself, as YAML or JSON, instead of a path.
        context: Context of the kubeconfig; its current one if None.
        in_cluster: True for the service account of this pod, whatever kubeconfig there is; where it is None, that is
            what is taken in a pod without ``KUBECONFIG``.
        host: URL of an API server, instead of a kubeconfig.
        token: Bearer token for `host`.
        ca_file: CA certificates for `host`.
        verify: False switches the verification of the server's certificate off, as the caller's own decision.
    """

    kubeconfig: str | None = None
    kubeconfig_text: str | None = field(default=None, repr=False)
    context: str | None = None
    in_cluster: bool | None = None
    host: str | None = None
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    verify: bool = True

    def load(self, *, apart: bool = False) -> Access:
        """Read everything afresh: files, and what an exec plugin says. Blocks.

        Args:
            apart: Let the ``kubernetes`` package be imported by another process: it takes 35 MB and 0.6 s, in which
                Python runs nothing else.

        Raises:
            ConfigurationError: nothing is configured, or it cannot be read.
        """
        for _ in range(_TRIES):
            with suppress(_HalfWritten):
                return self._load(apart=apart)
        return self._load(apart=apart)

    def _load(self, *, apart: bool) -> Access:
        if self.host:
            try:
                authority = _content(self.ca_file)
            except OSError as error:
                raise ConfigurationError(f"the CA certificates of {self.host} cannot be read: {error}") from error
            found = _Found(self.host, f"Bearer {self.token}" if self.token else "", authority)
        elif self._is_in_cluster():
            found = _of_pod()
        elif apart:
            found = self._ask_apart()
        else:
            found = self.of_kubeconfig()
        cluster = self._cluster()
        try:
            return _access(found, self.verify, cluster.get("proxy-url"), cluster.get("tls-server-name"))
        except ssl.SSLError as error:
            raise _HalfWritten(f"certificate or key cannot be read: {error}") from error

    def _ask_apart(self) -> _Found:
        command = [sys.executable, "-m", __name__]
        done = subprocess.run(command, input=json.dumps(asdict(self)), stdout=subprocess.PIPE, text=True, check=False)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise ConfigurationError(
                f"a kubeconfig could not be read: {command} ended with {done.returncode}"
            ) from None
        if "error" in answer:
            raise (_HalfWritten if answer["again"] else ConfigurationError)(answer["error"])
        return _Found(**answer)

    def of_kubeconfig(self) -> _Found:
        """What the kubernetes package finds.

        Raises:
            ConfigurationError: it is missing, there is no kubeconfig, or one that it does not understand.
        """
        try:
            # 45 to 90 MB: only processes that talk to a cluster pay for it.
            from kubernetes import config  # noqa: PLC0415
            from kubernetes.client import Configuration  # noqa: PLC0415
        except ImportError as error:
            raise ConfigurationError("the kubernetes package is missing: pip install 'trainjob[kubernetes]'") from error
        if self.kubeconfig_text and not self._file():
            raise ConfigurationError("the text that was given as a kubeconfig is neither YAML nor JSON of one")
        found: Any = Configuration()
        found.host = None
        with _FILES as directory:
            options = {"context": self.context, "client_configuration": found, "temp_file_path": directory}
            try:
                if self.kubeconfig_text:
                    config.load_kube_config_from_dict(self._file(), **options)
                else:
                    config.load_kube_config(self.kubeconfig, **options)
            except (config.ConfigException, OSError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
                raise _no_cluster(str(error)) from error
            authority, certificate, key = map(_whole, (found.ssl_ca_cert, found.cert_file, found.key_file))
            return _Found(found.host, _authorization(found), authority, certificate, key, found.verify_ssl)

    def source(self) -> str:
        """Where they come from, in words; no secret is in it."""
        if self.host:
            return f"given for {self.host}"
        if self._is_in_cluster():
            return "service account of this pod"
        where = "that was given" if self.kubeconfig_text else self._path()
        return f"kubeconfig {where}, context {self.context or self._file().get('current-context')}"

    def token_file(self) -> Path | None:
        """The file that the token is read from, where that is known; it may be replaced at any time."""
        if self.host:
            return None
        if self._is_in_cluster():
            return _SERVICE_ACCOUNT / "token"
        return self._token_file_of_kubeconfig()

    def namespace(self) -> str | None:
        """The namespace of the context or of the pod, if it says one."""
        if self.host:
            return None
        if self._is_in_cluster():
            try:
                return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
            except OSError:  # no pod, or one without a service account: `load` says so
                return None
        return (self._context().get("context") or {}).get("namespace")

    def _is_in_cluster(self) -> bool:
        """In a pod, and no kubeconfig was pointed at."""
        if self.in_cluster is not None:
            return self.in_cluster
        given = self.kubeconfig or self.kubeconfig_text or self.context or os.environ.get("KUBECONFIG")
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not given

    def _path(self) -> Path:
        path = self.kubeconfig or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0] or "~/.kube/config"
        return Path(path).expanduser()

    def _file(self) -> dict[str, Any]:
        try:
            loaded = yaml.safe_load(self.kubeconfig_text or self._path().read_text())
        except (OSError, yaml.YAMLError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def _context(self) -> dict[str, Any]:
        file = self._file()
        return _named(file.get("contexts"), self.context or file.get("current-context"))

    def _cluster(self) -> dict[str, Any]:
        """The kubeconfig's cluster, for what only newer releases of the kubernetes package know."""
        if self.host or self._is_in_cluster():
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


def _no_cluster(why: str) -> ConfigurationError:
    advice = "Set KUBECONFIG, or run on this machine instead: TRAINJOB_BACKEND=local"
    return ConfigurationError(f"no cluster is configured: {why.rstrip('.')}. {advice}")


def _of_pod() -> _Found:
    """What every pod has (kubernetes.io, "Accessing the Kubernetes API from a Pod")."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    try:
        token, authority = (_content(_SERVICE_ACCOUNT / name).strip() for name in ("token", "ca.crt"))
    except OSError as error:
        raise _no_cluster(f"this is no pod with a service account ({error})") from error
    if not (host and port and token and authority):
        raise _no_cluster("this is no pod with a service account")
    return _Found(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", f"Bearer {token}", authority)


def _authorization(found: Any) -> str:
    token = ""
    for identifier in ("authorization", "BearerToken"):  # up to 36; from 37 on
        token = token or found.get_api_key_with_prefix(identifier) or ""
    if token and " " not in token:
        token = f"Bearer {token}"
    if token.strip() == "Bearer":
        raise _HalfWritten("the kubeconfig's token is empty: look at what its exec plugin prints, or at its tokenFile")
    return str(token or (found.get_basic_auth_token() if found.username else ""))


def _access(found: _Found, verify: bool, proxy_url: str | None, server_name: str | None) -> Access:
    verify = verify and found.verify
    if verify:
        context = ssl.create_default_context(cadata=found.authority or None)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # cluster CAs often lack the key usage that 3.13 insists on
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.certificate:
        with tempfile.NamedTemporaryFile("w", prefix="trainjob-") as file:  # ssl takes nothing else
            file.write(f"{found.certificate}\n{found.key}")
            file.flush()
            context.load_cert_chain(file.name)
    proxy = proxy_url or _proxy(found.host)
    identity = (found.host, verify, proxy, server_name, found.authority, found.certificate, found.key)
    return Access(found.host.rstrip("/"), context, found.authorization, proxy, server_name, identity)


def _content(path: str | Path | None) -> str:
    """Text of a file without comments in other letters, which ssl does not take."""
    return Path(path).read_bytes().decode("ascii", "ignore") if path else ""


def _whole(path: str | None) -> str:
    content = _content(path)
    if path and not content.rstrip().endswith("-----"):
        raise _HalfWritten(f"certificate or key cannot be read: {path} has no end")
    return content


def _proxy(host: str) -> str | None:
    """The proxy of the environment, unless ``no_proxy`` covers the host (which the kubernetes package overlooks)."""
    parts = urlsplit(host)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _main() -> None:
    """Answer `Credentials._ask_apart`."""
    try:
        answer = asdict(Credentials(**json.load(sys.stdin)).of_kubeconfig())
    except ConfigurationError as error:
        answer = {"error": str(error), "again": isinstance(error, _HalfWritten)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
