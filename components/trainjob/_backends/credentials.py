"""Address and credentials of an API server, from a kubeconfig or the pod's service account."""

from __future__ import annotations

import base64
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from trainjob._backends import exec_plugin, kubeconfig, tls
from trainjob._backends.exec_plugin import Issued
from trainjob._backends.kubeconfig import Cluster, KubeConfig, User
from trainjob._support.proxies import proxy_for, why_unusable
from trainjob._support.urls import is_url
from trainjob.errors import ConfigurationError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ATTEMPTS = 5
_PLUGIN_SETTINGS = "client.authentication.k8s.io/exec"
"""The extension of a cluster with settings of exec plugins (client-go, ``pkg/apis/clientauthentication/v1``)."""
_TOKEN = re.compile(r"[!-~](?:[ -~]*[!-~])?")  # what h11, which quotes it otherwise, sends; RFC 6750 allows less
_UNESCAPED = "!#$&'*+-.^_`|~"  # characters of a header's name (RFC 9110, 5.6.2), without "%"

_T = TypeVar("_T")


def _retry_incomplete(read: Callable[[], _T]) -> _T:
    for _ in range(_ATTEMPTS):
        with suppress(tls.Incomplete):
            return read()
    return read()


@dataclass(frozen=True)
class _Found:
    """Settings of a kubeconfig or a pod; certificates and key as PEM, empty if not set.

    Attributes:
        name: Where they come from, for errors.
        token_file: The file of the token, and its state before the token was read.
    """

    name: str
    host: str
    token: str = field(repr=False, default="")
    authority: bytes | None = None
    certificate: bytes = b""
    key: bytes = field(repr=False, default=b"")
    verify: bool = True
    proxy: str = ""
    server_name: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    token_file: tuple[Path, tuple[int, ...]] | None = None
    issued: Issued | None = None


@dataclass(frozen=True)
class Access:
    """Settings of a connection.

    Attributes:
        host: URL of the API server, including a path if it has one.
        verify: TLS settings, including the client certificate.
        authorization: Value of the header; empty if the client certificate authenticates.
        proxy: URL of a proxy; None for a direct connection.
        identity: Equal for settings that can share a connection.
        headers: Further headers: the impersonated user, and the encoding of replies.
        is_current: Whether the token and certificate are still those of their source.
        issued: What an exec plugin has issued.
    """

    host: str
    verify: ssl.SSLContext
    authorization: str = field(repr=False)
    proxy: str | None
    identity: tuple[object, ...] = field(repr=False)
    headers: tuple[tuple[str, str], ...] = ()
    is_current: Callable[[], bool] = lambda: True
    issued: Issued | None = None

    @property
    def impersonates(self) -> bool:
        """Whether requests are those of another user (``as`` of the kubeconfig)."""
        return any(name.startswith("Impersonate-") for name, _ in self.headers)


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

    def load(self, refused: Access | None = None) -> Access:
        """Read all files again; run the exec plugin if its credentials have expired. Blocks.

        Args:
            refused: Settings whose credentials the server has refused: the exec plugin is run again.

        Raises:
            ConfigurationError: No cluster is configured, or its settings cannot be read.
        """
        try:
            return _retry_incomplete(lambda: self._load(refused.issued if refused else None))
        except ConfigurationError:
            exec_plugin.forget()  # a plugin may have issued what cannot be used
            raise

    def _load(self, refused: Issued | None) -> Access:
        if self.host:
            if not is_url(self.host, "https", "http"):
                raise ConfigurationError("the host of the API server is not a URL: write https://host:6443")
            kubeconfig.check_no_login(self.host, "the host of the API server")
            name = f"the CA certificates of {_shown(self.host)}"
            authority = _content(self.ca_file, name) if self.ca_file else None
            found = _Found(f"the connection to {_shown(self.host)}", self.host, self.token or "", authority)
        elif self._is_in_cluster():
            found = _of_pod()
        else:
            cluster, user = self._chosen()
            found = _of_kubeconfig(cluster, user, refused)
        return _access(found, self.verify)

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

    def namespace(self) -> str | None:
        """The namespace of the context or of the pod, None if not set."""
        if self.host:
            return None
        if self._is_in_cluster():
            try:
                return (_SERVICE_ACCOUNT / "namespace").read_text().strip() or None
            except OSError:  # no pod, or no service account: `load` reports it
                return None
        try:
            return self._read().context(self.context).namespace or None
        except ConfigurationError:
            return None

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

    def _chosen(self) -> tuple[Cluster, User]:
        """Cluster and user of the context.

        Raises:
            ConfigurationError: There is no kubeconfig, or its settings are missing or not supported.
        """
        try:
            config = self._kubeconfig()
        except ConfigurationError as error:
            raise error if self.kubeconfig_text else _no_cluster(str(error)) from None
        try:
            context = config.context(self.context)
        except ConfigurationError as error:
            raise _no_cluster(f"{self.source()}: {error}") from None
        try:
            return config.cluster(context), config.user(context)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.source()}: {error}") from None


def _of_kubeconfig(cluster: Cluster, user: User, refused: Issued | None) -> _Found:
    """Settings of a kubeconfig's fields, with the precedence of client-go."""
    file = Path(user.token_file) if user.token_file else None
    token_file = (file, _state(file)) if file else None
    token, issued = _token(user, file), None
    certificate = _data_or_file(user.client_certificate_data, user.client_certificate, "client-certificate")
    key = _data_or_file(user.client_key_data, user.client_key, "client-key")
    authority = _data_or_file(
        cluster.certificate_authority_data, cluster.certificate_authority, "certificate-authority"
    )
    if user.exec and not (token or certificate or key):
        issued = exec_plugin.issue(user.exec, _cluster_of_plugin(cluster, authority), refused)
        token, certificate, key = issued.token, issued.certificate, issued.key
    encoding = [("Accept-Encoding", "identity")] if cluster.disable_compression else []
    return _Found(
        "the kubeconfig",
        cluster.server,
        token,
        authority,
        certificate or b"",
        key or b"",
        verify=not cluster.insecure_skip_tls_verify,
        proxy=cluster.proxy_url,
        server_name=cluster.tls_server_name,
        headers=(*_impersonation(user), *encoding),
        token_file=token_file,
        issued=issued,
    )


def _token(user: User, file: Path | None) -> str:
    """The token; that of the file takes precedence if it can be read (client-go, ``transport/round_trippers.go``)."""
    try:
        token = file.read_text().strip() if file else ""
    except (OSError, UnicodeDecodeError) as error:
        if user.token:
            return user.token
        raise ConfigurationError(f"the kubeconfig's tokenFile {file} cannot be read: {error}") from error
    if file and not (token or user.token):
        raise tls.Incomplete(f"the kubeconfig's tokenFile {file} is empty")
    return token or user.token


def _data_or_file(data: str, file: str, name: str) -> bytes | None:
    """The content of ``<name>-data``, else of the file in `name`; None if neither is set."""
    if data:
        try:
            return base64.b64decode("".join(data.split()), validate=True)
        except ValueError:
            raise ConfigurationError(f"{name}-data in the kubeconfig is not base64") from None
    return _content(file, f"{name} of the kubeconfig") if file else None


def _content(path: str | Path, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read: {error}") from error


def _cluster_of_plugin(cluster: Cluster, authority: bytes | None) -> dict[str, Any]:
    """What a plugin with ``provideClusterInfo`` gets to know (client-go, ``clientauthentication.Cluster``)."""
    config = [each.get("extension") for each in cluster.extensions if each.get("name") == _PLUGIN_SETTINGS]
    found = {
        "server": cluster.server,
        "tls-server-name": cluster.tls_server_name,
        "insecure-skip-tls-verify": cluster.insecure_skip_tls_verify,
        "certificate-authority-data": base64.b64encode(authority or b"").decode(),
        "proxy-url": cluster.proxy_url,
        "disable-compression": cluster.disable_compression,
        "config": config[0] if config else None,
    }
    return {name: value for name, value in found.items() if value}


def _impersonation(user: User) -> Iterator[tuple[str, str]]:
    """The headers of ``as``, ``as-uid``, ``as-groups`` and ``as-user-extra`` (client-go, ``round_trippers.go``)."""
    headers = [("User", user.as_), ("Uid", user.as_uid), *(("Group", group) for group in user.as_groups)]
    for key, values in user.as_user_extra.items():
        headers += [(f"Extra-{quote(key, safe=_UNESCAPED)}", value) for value in values]
    for name, value in headers:
        if not value.isprintable() or value != value.strip():
            problem = f"has a control character, or a space at the start or end, in {name!r}"
            raise ConfigurationError(f"the user that the kubeconfig impersonates {problem}")
        if value:
            yield f"Impersonate-{name}", value


def _no_cluster(why: str) -> ConfigurationError:
    advice = "Set KUBECONFIG, or run on this machine instead: TRAINJOB_BACKEND=local"
    return ConfigurationError(f"no cluster is configured: {why.rstrip('.')}. {advice}")


def _of_pod() -> _Found:
    """Settings of the pod's service account (kubernetes.io, "Accessing the Kubernetes API from a Pod")."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    file = _SERVICE_ACCOUNT / "token"
    state = _state(file)
    try:
        token, authority = file.read_text().strip(), (_SERVICE_ACCOUNT / "ca.crt").read_bytes()
    except OSError as error:
        raise _no_cluster(f"this is not a pod with a service account ({error})") from error
    if not (host and port and token and authority.strip()):
        raise _no_cluster("this is not a pod with a service account")
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return _Found("the service account of this pod", url, token, authority, token_file=(file, state))


def _access(found: _Found, verify: bool) -> Access:
    verify, secure = verify and found.verify, found.host.startswith("https:")
    authority = []
    if secure and verify and found.authority is not None:
        authority = tls.certificates(found.authority, f"the certificate authority of {found.name}")
    context = tls.context(authority, found.server_name, verify=verify)
    if secure and (found.certificate or found.key):
        end = tls.load_pair(context, found.certificate, found.key, found.name)
        if end < datetime.now(UTC) and not found.token:
            raise ConfigurationError(
                f"the client certificate of {found.name} expired on {end:%Y-%m-%d %H:%M} UTC: log in again, or renew it"
            )
    if found.token and not _TOKEN.fullmatch(found.token):
        raise ConfigurationError(
            f"the token of {found.name} contains characters that no token can have, or a space at the start or end"
        )
    proxy = _proxy(found)

    def is_current() -> bool:
        file, state = found.token_file or (None, ())
        return (found.issued is None or found.issued.is_current()) and (file is None or _state(file) in ((), state))

    identity = (found.host, verify, proxy, found.server_name, found.authority, found.certificate, found.key)
    authorization = f"Bearer {found.token}" if found.token else ""
    host = found.host.rstrip("/")
    return Access(host, context, authorization, proxy, identity, found.headers, is_current, found.issued)


def _state(file: Path) -> tuple[int, ...]:
    """Differs after the file was written or replaced; empty if there is none, such as while it is replaced."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _proxy(found: _Found) -> str | None:
    """The proxy of the kubeconfig, else of the environment.

    Raises:
        ConfigurationError: Its kind is not supported, or it would read the token.
    """
    proxy = found.proxy or proxy_for(found.host)
    if proxy is None:
        return None
    where = f"the proxy for {_shown(found.host)} ({'proxy-url' if found.proxy else 'HTTPS_PROXY or HTTP_PROXY'})"
    if why := why_unusable(proxy):
        raise ConfigurationError(f"{where} {why}")
    if found.token and found.host.startswith("http:"):
        raise ConfigurationError(f"{where} would read the token, since the server has no TLS: list it in NO_PROXY")
    return proxy


def _shown(url: str) -> str:
    """A URL without user, password, path and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
