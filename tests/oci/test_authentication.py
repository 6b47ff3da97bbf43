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
from tests.oci.conftest import MEBI, Repository
from tests.oci.registry import Server, TokenServer, registry, registry_with_password
from tests.trees import tree

from trainjob._support import retrying
from trainjob.data import copy
from trainjob.data.stores.oci import client, uploads
from trainjob.data.transfer import scan
from trainjob.errors import ConfigurationError, StoreUnavailable

PASSWORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with registry_with_password(tmp_path_factory.mktemp("basic"), "somebody", PASSWORD) as server:
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
At = Callable[[str], Repository]


@pytest.fixture
def authenticate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authenticate:
    """Write a credential for a host to Docker's configuration: of a user, or with the fields given."""

    def write(host: str, password: str = PASSWORD, **fields: str) -> None:
        auth = {"auth": base64.b64encode(f"somebody:{password}".encode()).decode()}
        tree(tmp_path / "docker", {"config.json": json.dumps({"auths": {host: fields or auth}}).encode()})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))

    return write


def test_basic_authentication_is_refused_without_the_right_password(
    basic: Server, at: At, authenticate: Authenticate
) -> None:
    """`tests/stores` has the copies with it."""
    repository = at(basic.host)
    with pytest.raises(ConfigurationError, match="no credential for it was found"):
        repository.push()
    authenticate(basic.host, "wrong-password")
    with pytest.raises(ConfigurationError, match="check the permissions") as caught:
        repository.push()
    assert "wrong-password" not in str(caught.value)
    authenticate(basic.host)
    assert repository.push().digest == scan(repository.uri).digest


def test_token_authentication(guarded: Server, tokens: TokenServer, at: At, authenticate: Authenticate) -> None:
    repository = at(guarded.host)
    name = repository.at.rpartition("/")[2]
    with pytest.raises(ConfigurationError, match="no credential"):
        repository.push()
    authenticate(guarded.host)
    tokens.failures += [503, 429]
    repository.push()
    assert repository.pulled() == repository.content
    copy(repository.uri, f"{repository.at}/b:1")
    scopes = {tuple(each["scopes"]) for each in tokens.requests}
    assert (f"repository:{name}/b:pull,push", f"repository:{name}:pull") in scopes
    tokens.granted = frozenset({"pull"})
    with pytest.raises(ConfigurationError, match=f"denied access .*{name}:pull,push.* check the permissions"):
        repository.push(":2")


def test_requests_refused_once_are_sent_again_with_a_new_token(
    guarded: Server, tokens: TokenServer, at: At, authenticate: Authenticate, monkeypatch: pytest.MonkeyPatch
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
        repository = at(proxy.host)
        repository.push()
        assert repository.pulled() == repository.content
    refused = [each.method for each in proxy.injected]
    assert set(refused) == {"GET", "HEAD", "POST", "PATCH", "PUT"}
    # Of 5 and 3 parts; fewer if a part of one file is the first request with a token renewed for the other.
    assert refused.count("PATCH") >= 4


def test_no_log_or_url_contains_a_secret(
    guarded: Server, at: At, caplog: pytest.LogCaptureFixture, authenticate: Authenticate
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy = Proxy(guarded.host)
    with proxy.running():
        authenticate(proxy.host)
        at(proxy.host).push()
    logged = caplog.text + "".join(each.target for each in proxy.requests)
    assert PASSWORD not in logged
    assert base64.b64encode(f"somebody:{PASSWORD}".encode()).decode() not in logged
    assert "eyJ" not in logged  # how every token begins
    assert "_state" not in caplog.text  # of an upload's URL, which permits writing to the upload


def test_certificates(authority: Authority, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = authority.issue("registry", addresses=["127.0.0.1"])
    with registry(tmp_path / "tls", tls=pair) as server:
        repository = at(server.host)
        with pytest.raises(ConfigurationError, match="SSL_CERT_FILE"):
            repository.push()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        repository.push()
        assert repository.pulled() == repository.content


def test_plain_http_requires_this_machine_or_a_setting(server: Server, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if this machine's name were the name of another host.
    monkeypatch.setattr(client, "_loopback", lambda _: False)
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=1))
    with pytest.raises(StoreUnavailable, match=r"SSL|TLS|ssl"):
        at(server.host).push()
    monkeypatch.setenv("TRAINJOB_OCI_PLAIN_HTTP", f"other:5000, {server.host}")
    at(server.host).push()


def test_an_unreachable_registry(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, failures=2))
    with pytest.raises(StoreUnavailable, match="ConnectError"):
        at("127.0.0.1:1").push()
