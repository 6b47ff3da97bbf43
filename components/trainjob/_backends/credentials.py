"""Address and credentials of an API server, from a kubeconfig or the pod's service account.

The ``kubernetes`` package is imported only for exec plugins and auth providers, in another process.
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

from trainjob._backends import kubeconfig
from trainjob._backends.kubeconfig import KubeConfig
from trainjob.errors import ConfigurationError, missing

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ATTEMPTS = 5

_T = TypeVar("_T")


class _Incomplete(ConfigurationError):
    """A certificate, key or token is incomplete: another thread or program may be writing it."""


def _retry_incomplete(read: Callable[[], _T]) -> _T:
    for _ in range(_ATTEMPTS):
        with suppress(_Incomplete):
            return read()
    return read()


@dataclass(frozen=True)
class _Found:
    """Settings of a kubeconfig or a pod; certificates and key as PEM, empty if not set."""

    host: str
    authorization: str = field(repr=False, default="")
    authority: str = ""
    certificate: str = ""
    key: str = field(repr=False, default="")
    verify: bool = True


@dataclass(frozen=True)
class Access:
    """Settings of a connection.

    Attributes:
        host: URL of the API server, including a path if it has one.
        verify: TLS settings, including the client certificate.
        authorization: Value of the header; empty if the client certificate authenticates.
        proxy: URL of a proxy; None for a direct connection.
        server_name: Expected name in the server's certificate, if not the host name.
        identity: Equal for settings that can share a connection.
    """

    host: str
    verify: ssl.SSLContext
    authorization: str = field(repr=False)
    proxy: str | None
    server_name: str | None
    identity: tuple[object, ...]


@dataclass(frozen=True)
class Credentials:
    """Source of credentials. No file is read before `load`.

    Attributes:
        kubeconfig: Path; None for the files of ``KUBECONFIG``, merged as by kubectl, or ``~/.kube/config``.
        kubeconfig_text: The kubeconfig as YAML or JSON, instead of a path.
        context: Context of the kubeconfig; its current one if None.
        in_cluster: True: use the service account of this pod, and no kubeconfig. None: the same in a pod, unless a
            kubeconfig, a context or ``KUBECONFIG`` is given.
        host: URL of an API server, instead of a kubeconfig.
        token: Bearer token for `host`.
        ca_file: CA certificates for `host`.
        verify: False disables the verification of the server's certificate, at the caller's risk.
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
        """Read all files again, and run the exec plugin. Blocks.

        Raises:
            ConfigurationError: No cluster is configured, or its settings cannot be read.
        """
        return _retry_incomplete(self._load)

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
            found = self._run_package() if _needs_package(user) else _of_user(cluster, user)
        try:
            return _access(found, self.verify, cluster.get("proxy-url"), cluster.get("tls-server-name"))
        except ssl.SSLError as error:
            raise _Incomplete(f"certificate or key cannot be read: {error}") from error

    def _run_package(self) -> _Found:
        """Run an exec plugin or auth provider by the ``kubernetes`` package, in another process.

        The import takes 35 MB and 0.6 s. The plugin inherits standard input and error: it may ask for a password.
        """
        with tempfile.TemporaryFile("w+") as request:  # not an argument: a kubeconfig contains secrets
            json.dump(asdict(self), request)
            request.flush()
            request.seek(0)
            # -P: do not import from the working directory, which may belong to another user.
            command = [sys.executable, "-P", "-m", __name__, str(request.fileno())]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, pass_fds=[request.fileno()])
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            raise ConfigurationError(
                f"the kubeconfig could not be read: {command} exited with code {done.returncode}"
            ) from None
        if "error" in answer:
            raise ConfigurationError(answer["error"])
        return _Found(**answer)

    def by_package(self, directory: str) -> _Found:
        """The settings that the ``kubernetes`` package reads; it writes files into `directory`.

        Raises:
            ConfigurationError: The package is missing, or it finds no valid kubeconfig.
        """
        try:
            from kubernetes import client, config  # noqa: PLC0415 - heavy, and needed in the other process only
        except ImportError as error:
            what = "an exec plugin or auth provider of the kubeconfig"
            raise missing(what, "the package kubernetes", "kubernetes") from error
        found: Any = client.Configuration()
        found.host = None
        options = {"context": self.context, "client_configuration": found, "temp_file_path": directory}
        try:
            if self.kubeconfig_text:
                config.load_kube_config_from_dict(yaml.safe_load(self.kubeconfig_text), **options)
            else:
                config.load_kube_config(self.kubeconfig, **options)
        except (config.ConfigException, OSError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
            raise _no_cluster(str(error)) from error
        authority, certificate, key = map(_read_pem, (found.ssl_ca_cert, found.cert_file, found.key_file))
        return _Found(found.host, _authorization(found), authority, certificate, key, found.verify_ssl)

    def source(self) -> str:
        """The source in words, without secrets."""
        if self.host:
            return f"given for {self.host}"
        if self._is_in_cluster():
            return "service account of this pod"
        where = (
            "that was given" if self.kubeconfig_text else os.pathsep.join(map(str, kubeconfig.paths(self.kubeconfig)))
        )
        return f"kubeconfig {where}, context {self.context or self._read().current_context or None}"

    def token_file(self) -> Path | None:
        """The file that holds the token, None if unknown; it may be replaced at any time."""
        if self.host:
            return None
        if self._is_in_cluster():
            return _SERVICE_ACCOUNT / "token"
        config = self._read()
        path = config.users.get(str(self._context(config).get("user")), {}).get("tokenFile")
        return Path(path) if path else None

    def namespace(self) -> str | None:
        """The namespace of the context or of the pod, None if not set."""
        if self.host:
            return None
        if self._is_in_cluster():
            try:
                return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
            except OSError:  # no pod, or no service account: `load` reports it
                return None
        return self._context(self._read()).get("namespace")

    def _is_in_cluster(self) -> bool:
        """Whether to use the service account of this pod."""
        if self.in_cluster is not None:
            return self.in_cluster
        given = self.kubeconfig or self.kubeconfig_text or self.context or os.environ.get("KUBECONFIG")
        return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not given

    def _read(self) -> KubeConfig:
        """The kubeconfig; an empty one if it cannot be read, which `load` reports."""
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
            ConfigurationError: There is no kubeconfig, or it lacks the context, cluster or user.
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
    """Whether an exec plugin or auth provider is needed. A token takes precedence, as in the ``kubernetes`` package."""
    return bool(user.get("auth-provider") or (user.get("exec") and not (user.get("token") or user.get("tokenFile"))))


def _of_user(cluster: dict[str, Any], user: dict[str, Any]) -> _Found:
    """Settings of a kubeconfig's fields (kubernetes.io, "kubeconfig (v1)"); data take precedence over files."""
    if not cluster.get("server"):
        raise _no_cluster("the kubeconfig's cluster has no server")
    host = str(cluster["server"]).rstrip("/")
    pems = [(cluster, "certificate-authority"), (user, "client-certificate"), (user, "client-key")]
    try:
        authority, certificate, key = (
            _checked_pem(kubeconfig.data_or_file(entry, name), f"{name} of the kubeconfig")
            if host.startswith("https")
            else ""
            for entry, name in pems
        )
        token = str(user.get("token") or "")
        if not token and user.get("tokenFile"):
            token = Path(user["tokenFile"]).read_text().strip()
            if not token:
                raise _Incomplete(f"the kubeconfig's tokenFile {user['tokenFile']} is empty")
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
    """Settings of the pod's service account (kubernetes.io, "Accessing the Kubernetes API from a Pod")."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    try:
        token, authority = (_content(_SERVICE_ACCOUNT / name).strip() for name in ("token", "ca.crt"))
    except OSError as error:
        raise _no_cluster(f"this is not a pod with a service account ({error})") from error
    if not (host and port and token and authority):
        raise _no_cluster("this is not a pod with a service account")
    return _Found(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", f"Bearer {token}", authority)


def _authorization(found: Any) -> str:
    token = ""
    for identifier in ("authorization", "BearerToken"):  # kubernetes up to 36; from 37 on
        token = token or found.get_api_key_with_prefix(identifier) or ""
    if token and " " not in token:
        token = f"Bearer {token}"
    if token.strip() == "Bearer":
        raise _Incomplete("the kubeconfig's token is empty: check the output of its exec plugin, or its tokenFile")
    return str(token or (found.get_basic_auth_token() if found.username else ""))


def _access(found: _Found, verify: bool, proxy_url: str | None, server_name: str | None) -> Access:
    verify = verify and found.verify
    if verify:
        context = ssl.create_default_context(cadata=found.authority or None)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # cluster CAs often lack the key usage that 3.13 requires
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if found.certificate:
        with tempfile.NamedTemporaryFile("w", prefix="trainjob-") as file:  # ssl reads them from files only
            file.write(f"{found.certificate}\n{found.key}")
            file.flush()
            context.load_cert_chain(file.name)
    proxy = proxy_url or _proxy(found.host)
    identity = (found.host, verify, proxy, server_name, found.authority, found.certificate, found.key)
    return Access(found.host.rstrip("/"), context, found.authorization, proxy, server_name, identity)


def _content(path: str | Path | None) -> str:
    """Text of a file without non-ASCII characters, as in comments: ssl refuses them."""
    return Path(path).read_bytes().decode("ascii", "ignore") if path else ""


def _read_pem(path: str | None) -> str:
    return _checked_pem(Path(path).read_bytes(), path) if path else ""


def _checked_pem(content: bytes, name: str) -> str:
    """PEM without non-ASCII characters, as in comments: ssl refuses them."""
    text = content.decode("ascii", "ignore")
    if content and not text.rstrip().endswith("-----"):
        raise _Incomplete(f"certificate or key cannot be read: {name} is incomplete")
    return text


def _proxy(host: str) -> str | None:
    """The proxy of the environment, unless ``no_proxy`` has the host, which the kubernetes package ignores."""
    parts = urlsplit(host)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _main(request: int) -> None:
    """Write the reply to `Credentials._run_package` to standard output."""
    with os.fdopen(request) as file, tempfile.TemporaryDirectory(prefix="trainjob-") as directory:
        try:
            given = Credentials(**json.load(file))
            answer = asdict(_retry_incomplete(lambda: given.by_package(directory)))
        except ConfigurationError as error:
            answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
