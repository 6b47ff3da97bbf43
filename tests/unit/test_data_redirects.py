"""Redirects of real servers. All names and addresses lead to this machine.

Only the layer below trainjob is replaced: the system's resolver, and the connections.
"""

from __future__ import annotations

import http.server
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.serving import EndsConnections, serving

from trainjob.data import copy
from trainjob.data.locations import parse_store
from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.web import Web, WebStore
from trainjob.errors import ConfigurationError, StoreUnavailable

SECRET = b"AccessKeyId and SecretAccessKey"
METADATA = "169.254.169.254"
PUBLIC, OTHER, PRIVATE = "93.184.215.14", "23.192.228.80", "10.20.30.40"


class _Server(EndsConnections):
    """Responds for every host: with redirects, or like a metadata server."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.redirects: dict[tuple[str, str], str] = {}
        self.challenge = ""
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 30  # of an idle connection, so that no test hangs
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        host, path = self.headers["Host"].partition(":")[0], self.path
        if path.startswith("http://"):  # a request to a proxy
            host, _, path = path.removeprefix("http://").partition("/")
            path = f"/{path}"
        self.server.asked.append((host, path, dict(self.headers)))
        target = self.server.redirects.get((host, path))
        self.send_response(302 if target else 401 if self.server.challenge else 200)
        if target:
            self.send_header("Location", target)
        if self.server.challenge:
            self.send_header("WWW-Authenticate", self.server.challenge)
        body = b"" if target else SECRET
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@dataclass
class Internet:
    """Addresses and names of the server. The resolver returns a name's answers in turn, and repeats the last one."""

    server: _Server
    names: dict[str, list[list[str]]] = field(default_factory=dict)
    connected: list[str] = field(default_factory=list)
    lookups: list[str] = field(default_factory=list)

    def name(self, host: str, *answers: str | list[str]) -> None:
        self.names[host] = [[answer] if isinstance(answer, str) else answer for answer in answers]

    def redirect(self, url: str, target: str) -> None:
        host, _, path = url.partition("://")[2].partition("/")
        self.server.redirects[host, f"/{path}"] = target


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    resolve, connect = socket.getaddrinfo, socket.create_connection

    with serving(_Server()) as server:
        made = Internet(server)

        def getaddrinfo(host: Any, port: Any, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0) -> Any:
            made.lookups.append(host)
            if host not in made.names:
                # Resolve numeric addresses in all of their spellings; unknown names fail.
                return resolve(host, port, family, kind, proto, socket.AI_NUMERICHOST)
            answers = made.names[host]
            found = answers.pop(0) if len(answers) > 1 else answers[0]
            return [entry for each in found for entry in resolve(each, port, family, kind, proto, flags)]

        def create_connection(address: tuple[str, int], *args: Any, **options: Any) -> Any:
            made.connected.append(address[0])
            if address[0].startswith("198.18."):
                raise ConnectionRefusedError("no server at this address")
            return connect(("127.0.0.1", server.server_port), *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(socket, "create_connection", create_connection)
        yield made


def _read(url: str, **headers: str) -> bytes:
    web = Web(url, headers)
    try:
        return b"".join(web.read(url, url, 0, None, ""))
    finally:
        web.close()


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (f"http://{METADATA}/latest/meta-data/", "link-local"),
        ("http://169.254.170.2/v2/credentials", "link-local"),
        ("http://[fe80::1]/", "link-local"),
        ("http://[fd00:ec2::254]/latest/", "metadata server's"),
        ("http://168.63.129.16/machine", "metadata server's"),
        ("http://100.100.100.200/latest", "metadata server's"),
        ("http://192.0.0.192/opc", "metadata server's"),
        ("http://metadata.google.internal/computeMetadata/v1/", "metadata server's"),
        ("http://METADATA.google.internal./computeMetadata/v1/", "metadata server's"),
        ("http://127.0.0.1:8080/", "loopback"),
        ("http://127.1/", "loopback"),
        ("http://2130706433/", "loopback"),
        ("http://0x7f.0.0.1/", "loopback"),
        ("http://[::1]/", "loopback"),
        ("http://localhost/", "loopback"),
        ("http://a.localhost/", "loopback"),
        ("http://0.0.0.0/", "unspecified"),
        ("http://[::]/", "unspecified"),
        ("http://10.1.2.3/", "private"),
        ("http://172.31.0.1/", "private"),
        ("http://192.168.1.1/", "private"),
        ("http://[fc00::1]/", "private"),
        ("http://[fec0::1]/", "private"),
        ("http://100.64.0.1/", "private"),
        ("http://224.0.0.1/", "multicast"),
        ("http://[ff02::1]/", "multicast"),
        ("http://240.0.0.1/", "private"),
        ("http://[::ffff:169.254.169.254]/", "link-local"),
        ("http://[::ffff:a00:1]/", "private"),
        ("http://[::127.0.0.1]/", "loopback"),
        ("http://[64:ff9b::a9fe:a9fe]/", "link-local"),
        ("http://[64:ff9b:1::1]/", "private"),
        ("http://[2002:a9fe:a9fe::1]/", "link-local"),
        ("http://inside.example/", "private"),
        ("http://mapped.example/", "link-local"),
        ("//10.1.2.3/without-a-scheme", "private"),
    ],
)
def test_redirects_of_a_public_source_to_internal_addresses_are_rejected(
    internet: Internet, target: str, kind: str
) -> None:
    internet.name("files.example", PUBLIC)
    internet.name("inside.example", [PRIVATE, METADATA])
    internet.name("mapped.example", f"::ffff:{METADATA}")
    internet.redirect("http://files.example/a.csv", target)
    with pytest.raises(ConfigurationError, match=rf"^http://files\.example/a\.csv redirects to .*{kind} address"):
        _read("http://files.example/a.csv")
    assert internet.connected == [PUBLIC]
    assert [host for host, _, _ in internet.server.asked] == ["files.example"]


def test_rejected_redirects_store_nothing(internet: Internet, tmp_path: Path) -> None:
    internet.name("files.example", PUBLIC)
    internet.redirect("http://files.example/a.csv", f"http://{METADATA}/latest/meta-data/iam/security-credentials/role")
    with pytest.raises(ConfigurationError, match=METADATA):
        copy("http://files.example/a.csv", str(tmp_path / "t"))
    assert not list((tmp_path / "t").rglob("a.csv"))


@pytest.mark.parametrize(
    ("home", "target", "allowed"),
    [
        (PUBLIC, OTHER, True),
        (PUBLIC, "2606:4700::1", True),
        (PUBLIC, "::ffff:23.192.228.80", True),
        (PUBLIC, "64:ff9b::17c0:e450", True),
        (PRIVATE, "192.168.1.1", True),
        (PRIVATE, "fc00::1", True),
        (PRIVATE, OTHER, True),
        (PRIVATE, "127.0.0.1", False),
        (PRIVATE, METADATA, False),
        (PRIVATE, "fd00:ec2::254", False),
        (PRIVATE, "100.64.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", PRIVATE, False),
        ("127.0.0.1", METADATA, False),
        ("100.64.0.1", "192.168.1.1", True),
        ("100.64.0.1", "100.100.100.200", False),
        (METADATA, "169.254.170.2", True),
        (METADATA, PRIVATE, False),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_redirects_may_stay_in_a_network_or_leave_it(
    internet: Internet, home: str, target: str, allowed: bool, named: bool
) -> None:
    internet.name("source.example", home)
    internet.name("target.example", target)
    # A link-local source must be given by its address.
    source = home if home == METADATA else "source.example"
    address = f"[{target}]" if ":" in target else target
    internet.redirect(f"http://{source}/a", f"http://{'target.example' if named else address}/b")
    if allowed:
        assert _read(f"http://{source}/a") == SECRET
        assert len(internet.connected) == 2
    else:
        with pytest.raises(ConfigurationError, match="outside the network of"):
            _read(f"http://{source}/a")
        assert internet.connected == [home]


def test_a_name_that_resolves_to_a_metadata_server_is_rejected(internet: Internet) -> None:
    internet.name("files.example", METADATA)
    with pytest.raises(
        ConfigurationError, match=r"files\.example/a resolves to files\.example \(169\.254.*write the address"
    ):
        _read("http://files.example/a")
    assert internet.connected == []
    assert _read(f"http://{METADATA}/a") == SECRET  # an explicit address is allowed


def test_every_redirect_is_checked_against_the_first_source(internet: Internet) -> None:
    internet.name("files.example", PUBLIC)
    internet.name("cdn.example", OTHER)
    internet.redirect("http://files.example/a", "http://cdn.example/b")
    internet.redirect("http://cdn.example/b", "http://cdn.example/c")
    assert _read("http://files.example/a") == SECRET
    internet.redirect("http://cdn.example/c", f"http://{PRIVATE}/d")
    with pytest.raises(ConfigurationError, match=PRIVATE):
        _read("http://files.example/a")


def test_number_of_redirects_is_limited(internet: Internet) -> None:
    internet.name("files.example", PUBLIC)
    for number in range(10):
        internet.redirect(f"http://files.example/{number}", f"/{number + 1}")
    assert _read("http://files.example/0") == SECRET
    internet.redirect("http://files.example/10", "/11")
    with pytest.raises(ConfigurationError, match="more than 10 times"):
        _read("http://files.example/0")


@pytest.mark.parametrize(
    "target", ["ftp://files.example/a", "file:///etc/passwd", "gopher://files.example/", "http://0251.0376.0251.0376/"]
)
def test_redirects_to_other_schemes_and_invalid_addresses_are_rejected(internet: Internet, target: str) -> None:
    internet.name("files.example", PUBLIC)
    internet.redirect("http://files.example/a", target)
    with pytest.raises(ConfigurationError, match=r"only http and https|an invalid URL"):
        _read("http://files.example/a")


def test_connections_use_the_checked_address(internet: Internet) -> None:
    """DNS rebinding: the name is resolved only once for each connection."""
    internet.name("files.example", PUBLIC)
    internet.name("moving.example", OTHER, METADATA)
    internet.redirect("http://files.example/a", "http://moving.example/b")
    assert _read("http://files.example/a") == SECRET
    assert internet.connected == [PUBLIC, OTHER]
    assert internet.lookups.count("moving.example") == 1
    with pytest.raises(ConfigurationError, match=METADATA):
        _read("http://files.example/a")


def test_a_source_that_later_resolves_to_loopback_is_rejected(internet: Internet) -> None:
    internet.name("files.example", PUBLIC, "127.0.0.1")
    internet.redirect("http://files.example/a", "http://files.example:9000/b")
    with pytest.raises(ConfigurationError, match=r"resolves to files\.example \(127\.0\.0\.1, a loopback address"):
        _read("http://files.example/a")
    assert internet.connected == [PUBLIC]


def test_only_allowed_addresses_of_a_name_are_tried(internet: Internet) -> None:
    internet.name("files.example", PUBLIC)
    internet.name("many.example", [METADATA, "198.18.0.1", OTHER, PRIVATE])
    internet.redirect("http://files.example/a", "http://many.example/b")
    assert _read("http://files.example/a") == SECRET
    assert internet.connected == [PUBLIC, OTHER]


def test_unreachable_servers_are_reported(internet: Internet) -> None:
    internet.name("files.example", ["198.18.0.1", "198.18.0.2"])
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        _read("http://files.example/a")
    assert internet.connected == ["198.18.0.1", "198.18.0.2"]
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        _read("http://nosuch.example/a")


def test_credentials_are_not_sent_to_another_host(internet: Internet) -> None:
    internet.name("files.example", PUBLIC)
    internet.name("cdn.example", OTHER)
    internet.redirect("http://files.example/a", "http://files.example/b")
    internet.redirect("http://files.example/b", "http://cdn.example/c")
    assert _read("http://files.example/a", Authorization="Bearer hunter2", Cookie="hunter2") == SECRET
    sent = {path: headers for _, path, headers in internet.server.asked}
    assert sent["/a"]["Authorization"] == sent["/b"]["Authorization"] == "Bearer hunter2"
    assert "hunter2" not in str(sent["/c"])


def test_https_checks_the_name_and_is_not_downgraded(
    internet: Internet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is checked for the name, not for the address."""
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("files", addresses=["files.example"])
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    internet.name("files.example", PUBLIC)
    internet.name("other.example", PUBLIC)
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(pair.certificate, pair.key)
    internet.server.socket = secure.wrap_socket(internet.server.socket, server_side=True)
    assert _read("https://files.example/a") == SECRET
    with pytest.raises(ConfigurationError, match="not trusted"):
        _read("https://other.example/a")
    internet.redirect("https://files.example/a", "http://files.example/b?signature=hunter2")
    with pytest.raises(ConfigurationError, match=r"from https to http \(files\.example\)") as raised:
        _read("https://files.example/a")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("target", [METADATA, "metadata.google.internal", "10.1.2.3", "127.1", "localhost"])
def test_behind_a_proxy_addresses_and_known_names_are_checked(
    internet: Internet, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """The proxy resolves all other names."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:3128")
    internet.redirect("http://files.example/a", "http://cdn.example/b")
    assert _read("http://files.example/a") == SECRET
    assert set(internet.connected) == {"127.0.0.1"}
    internet.redirect("http://cdn.example/b", f"http://{target}/c")
    with pytest.raises(ConfigurationError, match="outside the network"):
        _read("http://files.example/a")
    assert [path for _, path, _ in internet.server.asked] == ["/a", "/b"] * 2


def test_a_store_names_the_source(internet: Internet) -> None:
    internet.name("files.example", PUBLIC)
    internet.redirect("http://files.example/a?version=1", "http://10.1.2.3/b?token=hunter2")
    store = WebStore(parse_store("http://files.example/a?version=1"))
    with pytest.raises(ConfigurationError) as raised:
        store.stat("")
    store.close()
    assert str(raised.value) == (
        "http://files.example/a redirects to 10.1.2.3 (a private address), which is outside the network of"
        " files.example; the redirect is not followed, use that server as the source if it is intended"
    )


@pytest.fixture
def registry(internet: Internet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("TRAINJOB_OCI_PLAIN_HTTP", "registry.example")
    internet.name("registry.example", PUBLIC)
    internet.name("cdn.example", OTHER)
    client = Client("registry.example")
    yield client
    client.close()


def _blob(registry: Client) -> bytes:
    with registry.open("GET", registry.url("team/model", "blobs/sha256:1"), ()) as response:
        return registry.read(response)


def test_redirects_of_a_public_registry_to_internal_addresses_are_rejected(
    internet: Internet, registry: Client
) -> None:
    blob = "http://registry.example/v2/team/model/blobs/sha256:1"
    internet.redirect(blob, "http://cdn.example/blob")
    assert _blob(registry) == SECRET
    for target in (METADATA, "10.1.2.3", "[fd00:ec2::254]", "inside.example"):
        internet.name("inside.example", PRIVATE)
        internet.redirect(blob, f"http://{target}/latest")
        with pytest.raises(ConfigurationError, match=r"^registry\.example redirects to .* address"):
            _blob(registry)
    assert set(internet.connected) == {PUBLIC, OTHER}


def test_internal_token_servers_of_a_public_registry_are_rejected(internet: Internet, registry: Client) -> None:
    for realm in (f"http://{METADATA}/token", "http://inside.example/token", "ftp://cdn.example/token"):
        internet.name("inside.example", PRIVATE)
        internet.server.challenge = f'Bearer realm="{realm}",service="registry.example"'
        with pytest.raises(ConfigurationError, match=r"address\)|has no https URL"):
            _blob(registry)
    assert set(internet.connected) == {PUBLIC}
