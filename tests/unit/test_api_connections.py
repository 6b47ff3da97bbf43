"""How requests reach an API server: proxies, the name in its certificate, whose requests they are."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from tests.certificates import Authority
from tests.endpoints import Endpoint, ask, kubeconfig, proxy, write

from trainjob import JobRef
from trainjob._backends.credentials import _TOKEN, Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.errors import Unreachable
from trainjob.errors import ConfigurationError

UNUSABLE = [
    "ftp://h:1",
    "socks4://h:1",
    " http://h:1",
    "http://h:1\n",
    "http://[::1",
    "http://u:hunter2#x@h:1",
    "http://a..b",
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the server."""
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture
def server(authority: Authority) -> Iterator[Endpoint]:
    """A server whose certificate has another name than its address."""
    pair = authority.pair("internal")
    if not pair.certificate.exists():
        authority.issue("internal", addresses=["api.internal"])
    with Endpoint(pair) as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy in the environment."""
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def named(directory: Path, server: Endpoint, user: dict[str, Any] | None = None, **cluster: Any) -> Credentials:
    """Credentials that expect the server's name, unless `cluster` has other settings (``_`` for ``-``)."""
    settings = {"server": server.url} | {name.replace("_", "-"): value for name, value in cluster.items()}
    return Credentials(kubeconfig=write(directory / "kubeconfig", kubeconfig(user or {"token": "t"}, settings)))


def test_the_certificate_has_the_expected_name(tmp_path: Path, server: Endpoint, authority: Authority) -> None:
    bundle: dict[str, Any] = {"certificate_authority_data": authority.bundle}
    with pytest.raises(ConfigurationError, match="IP address mismatch"):
        asyncio.run(ask(named(tmp_path, server, **bundle)))
    with pytest.raises(ConfigurationError, match="Hostname mismatch"):
        asyncio.run(ask(named(tmp_path, server, tls_server_name="another.internal", **bundle)))
    assert server.headers == []
    asyncio.run(ask(named(tmp_path, server, tls_server_name="api.internal", **bundle)))
    asyncio.run(ask(named(tmp_path, server, insecure_skip_tls_verify=True)))
    assert server.sent("Authorization") == [["Bearer t"]] * 2


def test_a_prepared_request_expects_the_same_name(tmp_path: Path, server: Endpoint, authority: Authority) -> None:
    settings: dict[str, Any] = {"certificate_authority_data": authority.bundle}

    async def warm(name: str) -> None:
        backend = KubernetesBackend(named(tmp_path, server, tls_server_name=name, **settings))
        request = await backend.prepared_pod_request("n", "pod")
        assert request is not None
        await request.warm()
        request.close()
        await backend.aclose()

    asyncio.run(warm("api.internal"))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        asyncio.run(warm("another.internal"))
    assert server.sent("Authorization") == [["Bearer t"]]


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_a_proxy_of_the_kubeconfig(tmp_path: Path, server: Endpoint, authority: Authority, scheme: str) -> None:
    settings: dict[str, Any] = {"tls_server_name": "api.internal", "certificate_authority_data": authority.bundle}
    with proxy(scheme) as (url, asked):
        asyncio.run(ask(named(tmp_path, server, proxy_url=url, **settings)))
        with pytest.raises(ConfigurationError, match="is not trusted"):
            asyncio.run(ask(named(tmp_path, server, proxy_url=url, **settings | {"tls_server_name": "another"})))
    assert asked == [server.url.removeprefix("https://")] * 2
    assert server.sent("Authorization") == [["Bearer t"]]


def test_socks_needs_a_package(tmp_path: Path, server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._support.proxies.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"needs the package socksio, .*: pip install 'httpx\[socks\]'"):
        named(tmp_path, server, proxy_url="socks5://127.0.0.1:1080").load()


@pytest.mark.parametrize("excepted", ["", "127.0.0.0/8", "127.0.0.1", "*"])
def test_a_loopback_server_is_reached_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excepted: str
) -> None:
    monkeypatch.setenv("NO_PROXY", excepted)
    with proxy() as (url, asked), Endpoint() as server:
        monkeypatch.setenv("HTTP_PROXY", url)
        asyncio.run(ask(named(tmp_path, server)))
    assert asked == []
    assert server.sent("Authorization") == [["Bearer t"]]


@pytest.mark.parametrize("proxy", [*UNUSABLE, "http://u:hunter2@proxy:port", "://"])
def test_a_proxy_of_the_environment_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ConfigurationError, match=r"HTTP_PROXY\) is not a URL with scheme http") as caught:
        Credentials(host="https://api.example").load()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "host", [*UNUSABLE, "api.example:6443", "https://", "https://u:hunter2@h:x", "https://bü..cher:1"]
)
def test_a_host_that_is_no_url_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a URL: write https://host:6443") as caught:
        Credentials(host=host).load()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("login", ["hunter2@", "hunter2:@", "u:hunter2@", ":hunter2@"])
def test_a_login_in_a_url_that_would_replace_the_token_is_refused(tmp_path: Path, login: str) -> None:
    url, by_name = (
        f"https://{login}h:1",
        r"^(.*: )?the (host|server of cluster 'c').* has a user or password in its URL",
    )
    file = write(tmp_path / "kubeconfig", kubeconfig({"token": "t"}, {"server": url}))
    for given in (Credentials(host=url, token="t"), Credentials(kubeconfig=file)):
        with pytest.raises(ConfigurationError, match=by_name) as caught:
            given.load()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("server", UNUSABLE)
def test_a_server_that_no_client_can_use_is_refused(tmp_path: Path, server: str) -> None:
    with pytest.raises(ConfigurationError, match="cluster 'c' has no server, the URL of an API server"):
        Credentials(kubeconfig=write(tmp_path / "kubeconfig", kubeconfig({}, {"server": server}))).load()


def test_a_proxy_that_would_read_the_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url.replace("//", "//user:hunter2@"))
        credentials = Credentials(host="http://api.example", token="t")
        with pytest.raises(
            ConfigurationError, match=r"HTTP_PROXY\) would read the token, .*: list it in NO_PROXY"
        ) as caught:
            asyncio.run(ask(credentials))
    assert asked == []
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("excepted", "direct"), [("10.0.0.0/8", True), ("10.96.0.1:443", True), ("11.0.0.0/8", False)])
def test_a_pod_reaches_the_api_server_by_no_proxy(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, excepted: str, direct: bool
) -> None:
    monkeypatch.setattr("trainjob._backends.credentials._SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_bytes(authority.certificate.read_bytes())
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "NO_PROXY": excepted}
    for name, value in {**environment, "HTTPS_PROXY": "http://proxy.example:3128"}.items():
        monkeypatch.setenv(name, value)
    assert Credentials(in_cluster=True).load().proxy == (None if direct else "http://proxy.example:3128")


def test_requests_are_those_of_the_impersonated_user(tmp_path: Path) -> None:
    user: dict[str, Any] = {"token": "t", "as": "jäne", "as-uid": "7", "as-groups": ["a", "b c"]}
    user["as-user-extra"] = {"scopes": ["x", "y"], "acme.com/Größe%": ["1"]}
    with Endpoint() as server:
        credentials = named(tmp_path, server, user, disable_compression=True)
        asyncio.run(ask(credentials))
        prepared = asyncio.run(KubernetesBackend(credentials).prepared_request(JobRef("n", "j", "uid"), {}))
    assert prepared is None, "it would be sent without these headers"
    sent = [(name, value) for name, value in server.headers[0] if name.startswith(("impersonate", "Impersonate"))]
    assert sent == [
        ("Impersonate-User", "jäne".encode().decode("latin-1")),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b c"),
        ("Impersonate-Extra-scopes", "x"),
        ("Impersonate-Extra-scopes", "y"),
        ("Impersonate-Extra-acme.com%2FGr%C3%B6%C3%9Fe%25", "1"),
    ]
    assert server.sent("Accept-Encoding") == [["identity"]]


@pytest.mark.parametrize(
    "token", ["s3cret ", " s3cret", " ", "s3cret\t", "s3\ncret", "s3cret\x7f", "s3crét", "s3cret\0"]
)
def test_a_token_that_no_header_can_have_is_refused_without_it(token: str) -> None:
    for given in (
        Credentials(host="http://127.0.0.1:1", token=token),
        Credentials(kubeconfig_text=json.dumps(kubeconfig({"token": token}, {}))),
    ):
        with pytest.raises(
            ConfigurationError, match=r"the token of the .* contains characters that no token"
        ) as caught:
            asyncio.run(ask(given))
        assert "s3" not in str(caught.value)


def test_h11_sends_every_token_that_is_accepted() -> None:
    edges = [f"{before}{chr(place)}{after}" for place in range(256) for before in ("", "a") for after in ("", "b")]
    sent = [token for token in edges if _TOKEN.fullmatch(token)]
    assert "a b" in sent
    for token in sent:
        h11.Request(method="GET", target="/", headers=[("Host", "h"), ("Authorization", f"Bearer {token}")])


def test_no_error_of_a_client_quotes_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._backends.credentials._TOKEN", re.compile(".*"))
    token = "".join(("s3", "cret "))  # the traceback shows this line
    with Endpoint() as server, pytest.raises(Unreachable, match=r"no reply .* \(LocalProtocolError\)") as caught:
        asyncio.run(ask(Credentials(host=server.url, token=token)))
    assert token not in "".join(traceback.format_exception(caught.value))


def test_a_token_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    with Endpoint() as server:
        client_of = named(tmp_path, server, {"tokenFile": "token"})
        access = client_of.load()
        (tmp_path / "token").unlink()
        assert access.is_current(), "the file is being replaced"
        (tmp_path / "new").write_text("second")
        (tmp_path / "new").rename(tmp_path / "token")
        assert not access.is_current()
        assert client_of.load(access).authorization == "Bearer second"
