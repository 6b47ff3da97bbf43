"""Registries with Basic or token authentication, and certificates."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.fakes.faults import Fault, Kind, Proxy, Seen
from tests.oci.conftest import MEBI
from tests.oci.registry import Server, TokenServer, hashed, needs_registry, registry
from tests.trees import files, tree

from trainjob._support import retrying
from trainjob.data import copy
from trainjob.data.stores.oci import client, uploads
from trainjob.data.transfer import scan
from trainjob.errors import ConfigurationError, StoreUnavailable

pytestmark = needs_registry
PASSWORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("basic")
    (folder / "htpasswd").write_text(f"somebody:{hashed(PASSWORD)}\n")
    with registry(folder, htpasswd={"realm": "tests", "path": str(folder / "htpasswd")}) as server:
        yield server


@pytest.fixture
def tokens(authority: Authority) -> Iterator[TokenServer]:
    server = TokenServer(authority.issue("tokens"), {"somebody": PASSWORD})
    with server.running():
        yield server


def by_tokens(tokens: TokenServer, authority: Authority) -> dict[str, str]:
    """Settings of a registry that accepts the tokens of a server."""
    settings = {"realm": tokens.url, "service": "registry", "issuer": "tests"}
    return {**settings, "rootcertbundle": str(authority.certificate)}


@pytest.fixture
def guarded(tokens: TokenServer, authority: Authority, tmp_path: Path) -> Iterator[Server]:
    with registry(tmp_path / "guarded", token=by_tokens(tokens, authority)) as server:
        yield server


Authenticate = Callable[..., None]


@pytest.fixture
def authenticate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authenticate:
    """Write a credential for a host to Docker's configuration: of a user, or with the fields given."""

    def write(host: str, password: str = PASSWORD, **fields: str) -> None:
        auth = {"auth": base64.b64encode(f"somebody:{password}".encode()).decode()}
        tree(tmp_path / "docker", {"config.json": json.dumps({"auths": {host: fields or auth}}).encode()})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))

    return write


def test_basic_authentication_is_refused_without_the_right_password(
    basic: Server, name: str, source: Path, authenticate: Authenticate
) -> None:
    """`tests/stores` has the copies with it."""
    uri = basic.uri(f"{name}:1")
    with pytest.raises(ConfigurationError, match="no credential for it was found"):
        copy(str(source), uri)
    authenticate(basic.host, "wrong-password")
    with pytest.raises(ConfigurationError, match="check the permissions") as caught:
        copy(str(source), uri)
    assert "wrong-password" not in str(caught.value)
    authenticate(basic.host)
    assert copy(str(source), uri).digest == scan(uri).digest


def test_token_authentication(
    guarded: Server,
    tokens: TokenServer,
    name: str,
    source: Path,
    content: dict[str, bytes],
    tmp_path: Path,
    authenticate: Authenticate,
) -> None:
    uri = guarded.uri(f"{name}:1")
    with pytest.raises(ConfigurationError, match="no credential"):
        copy(str(source), uri)
    authenticate(guarded.host)
    tokens.failures += [503, 429]
    copy(str(source), uri)
    copy(uri, str(tmp_path / "back"))
    assert files(tmp_path / "back") == content
    copy(uri, guarded.uri(f"{name}/b:1"))
    scopes = {tuple(each["scopes"]) for each in tokens.requests}
    assert (f"repository:{name}/b:pull,push", f"repository:{name}:pull") in scopes
    tokens.granted = frozenset({"pull"})
    with pytest.raises(ConfigurationError, match=f"denied access .*{name}:pull,push.* check the permissions"):
        copy(str(source), guarded.uri(f"{name}:2"))


def test_an_identity_token(
    guarded: Server, tokens: TokenServer, name: str, source: Path, authenticate: Authenticate
) -> None:
    authenticate(guarded.host, identitytoken=PASSWORD)
    copy(str(source), guarded.uri(f"{name}:1"))
    assert {each["method"] for each in tokens.requests} == {"POST"}


def test_tokens_that_the_server_considers_expired(
    guarded: Server,
    tokens: TokenServer,
    name: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: dict[str, bytes],
    authenticate: Authenticate,
) -> None:
    """With different clocks the server considers tokens expired that the client considers valid."""
    authenticate(guarded.host)
    real = tokens.token
    given = 0

    def token(user: str, scopes: list[str]) -> str:
        nonlocal given
        given += 1
        # Not the first: if a request is refused with the token issued for it, it is not repeated.
        tokens.seconds = -70 if given % 3 == 2 else 60
        try:
            return real(user, scopes)
        finally:
            tokens.seconds = 60

    monkeypatch.setattr(tokens, "token", token)
    copy(str(source), guarded.uri(f"{name}:1"))
    copy(guarded.uri(f"{name}:1"), str(tmp_path / "back"))
    assert files(tmp_path / "back") == content
    assert given > 3


def test_requests_refused_once_are_sent_again_with_a_new_token(
    guarded: Server,
    tokens: TokenServer,
    name: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: dict[str, bytes],
    authenticate: Authenticate,
) -> None:
    """Nearly each request is refused once after its body was sent, with a token that another request had used."""
    monkeypatch.setattr(uploads, "PART", 2 * MEBI)
    lock, used, had = threading.Lock(), set[str](), set[tuple[str, ...]]()
    refusal = Fault(Kind.ANSWER, status=401, challenge=f'Bearer realm="{tokens.url}",service="registry"')

    def plan(seen: Seen) -> Fault | None:
        given = seen.headers.get("authorization", "")
        request = seen.method, seen.target.partition("?")[0], seen.headers.get("content-range", "")
        with lock:
            old = given in used
            if given:
                used.add(given)
            if request in had or (given and not old):
                return None
            had.add(request)  # also if the registry itself requires a token
            return refusal if given else None

    proxy = Proxy(guarded.host, plan)
    with proxy.running():
        authenticate(proxy.host)
        uri = f"oci://{proxy.host}/{name}:1"
        copy(str(source), uri)
        copy(uri, str(tmp_path / "back"))
    assert files(tmp_path / "back") == content
    refused = [each.method for each in proxy.injected]
    assert set(refused) == {"GET", "HEAD", "POST", "PATCH", "PUT"}
    # Of 5 and 3 parts; fewer if a part of one file is the first request with a token renewed for the other.
    assert refused.count("PATCH") >= 4


def test_no_log_or_url_contains_a_secret(
    guarded: Server,
    tokens: TokenServer,
    name: str,
    source: Path,
    caplog: pytest.LogCaptureFixture,
    authenticate: Authenticate,
) -> None:
    authenticate(guarded.host)
    caplog.set_level(logging.DEBUG)
    proxy = Proxy(guarded.host)
    with proxy.running():
        authenticate(proxy.host)
        copy(str(source), f"oci://{proxy.host}/{name}:1")
    logged = caplog.text + "".join(each.target for each in proxy.requests)
    assert PASSWORD not in logged
    assert base64.b64encode(f"somebody:{PASSWORD}".encode()).decode() not in logged
    assert "eyJ" not in logged  # how every token begins
    assert "_state" not in caplog.text  # of an upload's URL, which permits writing to the upload


def test_certificates(
    authority: Authority,
    name: str,
    source: Path,
    content: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = authority.issue("registry", addresses=["127.0.0.1"])
    with registry(tmp_path / "tls", tls=pair, authority=authority) as server:
        uri = server.uri(f"{name}:1")
        with pytest.raises(ConfigurationError, match="SSL_CERT_FILE"):
            copy(str(source), uri)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        copy(str(source), uri)
        copy(uri, str(tmp_path / "back"))
        assert files(tmp_path / "back") == content


def test_plain_http_requires_this_machine_or_a_setting(
    server: Server, name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if this machine's name were the name of another host.
    monkeypatch.setattr(client, "_loopback", lambda _: False)
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))
    with pytest.raises(StoreUnavailable, match=r"SSL|TLS|ssl"):
        copy(str(source), server.uri(f"{name}:1"))
    monkeypatch.setenv("TRAINJOB_OCI_PLAIN_HTTP", f"other:5000, {server.host}")
    copy(str(source), server.uri(f"{name}:1"))


def test_no_password_is_sent_to_a_token_server_without_tls(
    authority: Authority,
    tokens: TokenServer,
    name: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    authenticate: Authenticate,
) -> None:
    pair = authority.issue("registry", addresses=["127.0.0.1"])
    settings = by_tokens(tokens, authority)
    with registry(tmp_path / "tls", tls=pair, authority=authority, token=settings) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        authenticate(server.host)
        with pytest.raises(ConfigurationError, match="has no https URL"):
            copy(str(source), server.uri(f"{name}:1"))
    assert tokens.requests == []


def test_an_unreachable_registry(name: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=2))
    with pytest.raises(StoreUnavailable, match="ConnectError"):
        copy(str(source), f"oci://127.0.0.1:1/{name}:1")
