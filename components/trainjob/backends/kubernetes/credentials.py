"""How to reach an API server: a kubeconfig, or the service account of the pod.

The ``kubernetes`` package is imported only for exec plugins and auth providers, by another process.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from trainjob.backends.kubernetes import kubeconfig
from trainjob.backends.kubernetes.kubeconfig import KubeConfig
from trainjob.errors import ConfigurationError, missing

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TRIES = 5

_T = TypeVar("_T")


class _HalfWritten(ConfigurationError):
    """A certificate, key or token is not whole: perhaps another thread or program is just writing it."""


def _when_written(read: Callable[[], _T]) -> _T:
    for _ in range(_TRIES):
        with suppress(_HalfWritten):
            return read()
    return read()


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
        kubeconfig: Path; the files of ``KUBECONFIG``, merged as kubectl does, or ``~/.kube/config`` if None.
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

    def load(self) -> Access:
        """Read everything afresh: files, and the output of an exec plugin. Blocks.

        Raises:
            ConfigurationError: nothing is configured, or it cannot be read.
        """
        return _when_written(self._load)

    def _load(self) -> Access:
        cluster: dict[str, Any] = {}
        if self.host:
            try:
                authority = _content(self.ca_file)
            except OSError as error:
                raise ConfigurationError(f"the CA certificates of {self.host} cannot be read: {error}") from error
            found = _Found(self.host, f"Bearer {self.token}" if self.token else "", authority)
        elif self._is_in_cluster():
            found = _of_pod()
        else:
            cluster, user = self._chosen()
            found = self._ask_package() if _needs_package(user) else _of_user(cluster, user)
        try:
            return _access(found, self.verify, cluster.get("proxy-url"), cluster.get("tls-server-name"))
        except ssl.SSLError as error:
            raise _HalfWritten(f"certificate or key cannot be read: {error}") from error

    def _ask_package(self) -> _Found:
        """Have another process run an exec plugin or auth provider by the ``kubernetes`` package.

        Importing it takes 35 MB and 0.6 s. The plugin inherits standard input and error: it may ask for a password.
        """
        with tempfile.TemporaryFile("w+") as request:  # not an argument: a kubeconfig's text has secrets
            json.dump(asdict(self), request)
            request.flush()
            request.seek(0)
            # -P: the working directory, which may be another user's, is not searched for modules.
            command = [sys.executable, "-P", "-m", __name__, str(request.fileno())]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, pass_fds=[request.fileno()])
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise ConfigurationError(
                f"a kubeconfig could not be read: {command} ended with {done.returncode}"
            ) from None
        if "error" in answer:
            raise ConfigurationError(answer["error"])
        return _Found(**answer)

    def by_package(self, directory: str) -> _Found:
        """What the ``kubernetes`` package finds, which writes files into `directory`.

        Raises:
            ConfigurationError: it is missing, there is no kubeconfig, or one that it does not understand.
        """
        try:
            from kubernetes import config  # noqa: PLC0415 - see `_ask_package`
            from kubernetes.client import Configuration  # noqa: PLC0415 - as above
        except ImportError as error:
            what = "an exec plugin or auth provider of the kubeconfig"
            raise missing(what, "the package kubernetes", "kubernetes") from error
        found: Any = Configuration()
        found.host = None
        options = {"context": self.context, "client_configuration": found, "temp_file_path": directory}
        try:
            if self.kubeconfig_text:
                config.load_kube_config_from_dict(yaml.safe_load(self.kubeconfig_text), **options)
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
        where = (
            "that was given" if self.kubeconfig_text else os.pathsep.join(map(str, kubeconfig.paths(self.kubeconfig)))
        )
        return f"kubeconfig {where}, context {self.context or self._read().current_context or None}"

    def token_file(self) -> Path | None:
        """The file that the token is read from, where that is known; it may be replaced at any time."""
        if self.host:
            return None
        if self._is_in_cluster():
            return _SERVICE_ACCOUNT / "token"
        config = self._read()
        path = config.users.get(str(self._context(config).get("user")), {}).get("tokenFile")
        return Path(path) if path else None

    def namespace(self) -> str | None:
        """The namespace of the context or of the pod, if it says one."""
        if self.host:
            return None
        if self._is_in_cluster():
            try:
                return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
            except OSError:  # no pod, or one without a service account: `load` says so
                return None
        return self._context(self._read()).get("namespace")

    def _is_in_cluster(self) -> bool:
        """In a pod, and no kubeconfig was pointed at."""
        if self.in_cluster is not None:
            return self.in_cluster
        given = self.kubeconfig or self.kubeconfig_text or self.context or os.environ.get("KUBECONFIG")
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not given

    def _read(self) -> KubeConfig:
        """The kubeconfig; an empty one where it cannot be read, which `load` reports."""
        try:
            return self._kubeconfig()
        except ConfigurationError:
            return KubeConfig()

    def _kubeconfig(self) -> KubeConfig:
        if self.kubeconfig_text:
            return KubeConfig.of_text(self.kubeconfig_text)
        return KubeConfig.of_files(kubeconfig.paths(self.kubeconfig))

    def _context(self, config: KubeConfig) -> dict[str, Any]:
        return config.contexts.get(self.context or config.current_context, {})

    def _chosen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Cluster and user of the context.

        Raises:
            ConfigurationError: there is no kubeconfig, or none of that context, cluster or user.
        """
        try:
            config = self._kubeconfig()
        except ConfigurationError as error:
            raise error if self.kubeconfig_text else _no_cluster(str(error)) from None
        name = self.context or config.current_context
        if not name:
            raise _no_cluster(f"{self.source()}: it sets no current-context")
        context = _entry(config.contexts, name, "context", self.source())
        return (
            _entry(config.clusters, context.get("cluster"), "cluster", self.source()),
            _entry(config.users, context.get("user"), "user", self.source()) if context.get("user") else {},
        )


def _entry(entries: dict[str, dict[str, Any]], name: object, kind: str, source: str) -> dict[str, Any]:
    if str(name) not in entries:
        raise _no_cluster(f"{source}: there is no {kind} {name!r} (there are: {', '.join(sorted(entries)) or 'none'})")
    return entries[str(name)]


def _needs_package(user: dict[str, Any]) -> bool:
    """An exec plugin or auth provider decides; it does not where there is a token, as in the ``kubernetes`` package."""
    return bool(user.get("auth-provider") or (user.get("exec") and not (user.get("token") or user.get("tokenFile"))))


def _of_user(cluster: dict[str, Any], user: dict[str, Any]) -> _Found:
    """What the fields of a kubeconfig say (kubernetes.io, "kubeconfig (v1)"): data count before files."""
    if not cluster.get("server"):
        raise _no_cluster("the kubeconfig's cluster has no server")
    host = str(cluster["server"]).rstrip("/")
    pems = [(cluster, "certificate-authority"), (user, "client-certificate"), (user, "client-key")]
    try:
        authority, certificate, key = (
            _complete(kubeconfig.data_or_file(entry, name), f"{name} of the kubeconfig")
            if host.startswith("https")
            else ""
            for entry, name in pems
        )
        token = str(user.get("token") or "")
        if not token and user.get("tokenFile"):
            token = Path(user["tokenFile"]).read_text().strip()
            if not token:
                raise _HalfWritten(f"the kubeconfig's tokenFile {user['tokenFile']} is empty")
    except OSError as error:
        raise _no_cluster(str(error)) from error
    authorization = f"Bearer {token}" if token else ""
    if not token and "username" in user and "password" in user:
        pair = f"{user['username']}:{user['password']}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    verify = not cluster.get("insecure-skip-tls-verify")
    return _Found(host, authorization, authority, certificate, key, verify)


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
    return _complete(Path(path).read_bytes(), path) if path else ""


def _complete(content: bytes, name: str) -> str:
    """PEM without comments in other letters, which ssl does not take."""
    text = content.decode("ascii", "ignore")
    if content and not text.rstrip().endswith("-----"):
        raise _HalfWritten(f"certificate or key cannot be read: {name} has no end")
    return text


def _proxy(host: str) -> str | None:
    """The proxy of the environment, unless ``no_proxy`` covers the host (which the kubernetes package overlooks)."""
    parts = urlsplit(host)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _main(request: int) -> None:
    """Answer `Credentials._ask_package`."""
    with os.fdopen(request) as file, tempfile.TemporaryDirectory(prefix="trainjob-") as directory:
        try:
            given = Credentials(**json.load(file))
            answer = asdict(_when_written(lambda: given.by_package(directory)))
        except ConfigurationError as error:
            answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
