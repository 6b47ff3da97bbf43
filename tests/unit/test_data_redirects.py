"""Redirects of real servers. All names and addresses lead to this machine.

Only the layer below trainjob is replaced: the system's resolver, and the connections.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Authority
from tests.fakes.scripted import Answer, Asked, ScriptedServer
from tests.serving import serving

from trainjob.data import copy
from trainjob.data.locations import parse_store
from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.web import Web, WebStore
from trainjob.errors import ConfigurationError, StoreUnavailable

SECRET = b"AccessKeyId and SecretAccessKey"
METADATA = "169.254.169.254"
RESOLVE, CONNECT = socket.getaddrinfo, socket.create_connection
PUBLIC, OTHER, PRIVATE = "93.184.215.14", "23.192.228.80", "10.20.30.40"


class Internet(ScriptedServer):
    """Responds for every host: with redirects, or like a metadata server.

    Attributes:
        names: Host -> its addresses. The resolver returns a name's answers in turn, and repeats the last one.
    """

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.redirects: dict[str, str] = {}
        self.challenge = ""
        self.names: dict[str, list[list[str]]] = {}
        self.connected: list[str] = []
        self.lookups: list[str] = []

    @staticmethod
    def address(asked: Asked) -> str:
        """Host and path; a request to a proxy has a complete URL."""
        return asked.path.removeprefix("http://") if "//" in asked.path else asked.headers["Host"] + asked.path

    def reply(self, asked: Asked) -> Answer:
        host, _, path = self.address(asked).partition("/")
        if target := self.redirects.get(f"{host.partition(':')[0]}/{path}"):
            return Answer(302, headers={"Location": target})
        if self.challenge:
            return Answer(401, SECRET, {"WWW-Authenticate": self.challenge})
        return Answer(200, SECRET)

    def name(self, host: str, *answers: str | list[str]) -> None:
        self.names[host] = [[answer] if isinstance(answer, str) else answer for answer in answers]

    def redirect(self, url: str, target: str) -> None:
        self.redirects[url.partition("://")[2]] = target

    def resolve(self, host: Any, port: Any, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0) -> Any:
        """As `socket.getaddrinfo`."""
        self.lookups.append(host)
        if host not in self.names:  # numeric addresses in all of their spellings; unknown names fail
            return RESOLVE(host, port, family, kind, proto, socket.AI_NUMERICHOST)
        answers = self.names[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [entry for each in found for entry in RESOLVE(each, port, family, kind, proto, flags)]

    def connect(self, address: tuple[str, int], *args: Any, **options: Any) -> Any:
        """As `socket.create_connection`."""
        self.connected.append(address[0])
        if address[0].startswith("198.18."):
            raise ConnectionRefusedError("no server at this address")
        return CONNECT(("127.0.0.1", self.server_port), *args, **options)


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving(Internet()) as server:
        server.name("files.example", PUBLIC)
        server.name("cdn.example", OTHER)
        monkeypatch.setattr(socket, "getaddrinfo", server.resolve)
        monkeypatch.setattr(socket, "create_connection", server.connect)
        yield server


def _read(url: str, **headers: str) -> bytes:
    web = Web(url, headers)
    try:
        return b"".join(web.read(url, url, 0, None, ""))
    finally:
        web.close()


INTERNAL = {
    "link-local": (
        f"http://{METADATA}/latest/meta-data/ http://169.254.170.2/v2/credentials http://[fe80::1]/"
        " http://[::ffff:169.254.169.254]/ http://[64:ff9b::a9fe:a9fe]/ http://[2002:a9fe:a9fe::1]/"
        " http://mapped.example/"
    ),
    "metadata server's": (
        "http://[fd00:ec2::254]/latest/ http://168.63.129.16/machine http://100.100.100.200/latest"
        " http://192.0.0.192/opc http://metadata.google.internal/computeMetadata/v1/"
        " http://METADATA.google.internal./computeMetadata/v1/"
    ),
    "loopback": (
        "http://127.0.0.1:8080/ http://127.1/ http://2130706433/ http://0x7f.0.0.1/ http://[::1]/ http://localhost/"
        " http://a.localhost/ http://[::127.0.0.1]/"
    ),
    "unspecified": "http://0.0.0.0/ http://[::]/",
    "private": (
        "http://10.1.2.3/ http://172.31.0.1/ http://192.168.1.1/ http://[fc00::1]/ http://[fec0::1]/"
        " http://100.64.0.1/ http://240.0.0.1/ http://[::ffff:a00:1]/ http://[64:ff9b:1::1]/ http://inside.example/"
        " //10.1.2.3/without-a-scheme"
    ),
    "multicast": "http://224.0.0.1/ http://[ff02::1]/",
}


@pytest.mark.parametrize(
    ("target", "kind"), [(target, kind) for kind, targets in INTERNAL.items() for target in targets.split()]
)
def test_redirects_of_a_public_source_to_internal_addresses_are_rejected(
    internet: Internet, target: str, kind: str
) -> None:
    internet.name("inside.example", [PRIVATE, METADATA])
    internet.name("mapped.example", f"::ffff:{METADATA}")
    internet.redirect("http://files.example/a.csv", target)
    with pytest.raises(ConfigurationError, match=rf"^http://files\.example/a\.csv redirects to .*{kind} address"):
        _read("http://files.example/a.csv")
    assert internet.connected == [PUBLIC]
    assert [Internet.address(asked) for asked in internet.asked] == ["files.example/a.csv"]


@pytest.mark.parametrize(
    ("home", "target", "allowed"),
    [
        *((PUBLIC, target, True) for target in (OTHER, "2606:4700::1", "::ffff:23.192.228.80", "64:ff9b::17c0:e450")),
        *((PRIVATE, target, True) for target in ("192.168.1.1", "fc00::1", OTHER, "100.64.0.1")),
        *((PRIVATE, target, False) for target in ("127.0.0.1", METADATA, "fd00:ec2::254")),
        *(("127.0.0.1", target, True) for target in ("127.0.0.2", "::1")),
        *(("127.0.0.1", target, False) for target in (PRIVATE, METADATA)),
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


A, B, CDN = "http://files.example/a", "http://files.example:9000/b", "http://cdn.example/b"
TEN = {A: "/0"} | {f"http://files.example/{number}": f"/{number + 1}" for number in range(9)}
OTHER_SCHEMES = (
    "ftp://files.example/a",
    "file:///etc/passwd",
    "gopher://files.example/",
    "http://0251.0376.0251.0376/",
)


@pytest.mark.parametrize(
    ("names", "redirects", "words", "connected"),
    [
        ([METADATA], {}, r"files\.example/a resolves to files\.example \(169\.254.*write the address", set()),
        ([PUBLIC], {A: CDN, CDN: f"http://{PRIVATE}/d"}, PRIVATE, {PUBLIC, OTHER}),
        ([PUBLIC], TEN | {"http://files.example/9": "/10"}, "more than 10 times, perhaps in a loop", {PUBLIC}),
        ([PUBLIC, "127.0.0.1"], {A: B}, r"to files\.example \(127\.0\.0\.1, a loopback address", {PUBLIC}),
        *(([PUBLIC], {A: target}, r"only http and https|an invalid URL", {PUBLIC}) for target in OTHER_SCHEMES),
    ],
    ids=["metadata server", "second redirect", "11 redirects", "source moves to loopback", *OTHER_SCHEMES],
)
def test_every_redirect_is_checked_against_the_first_source(
    internet: Internet, names: list[str], redirects: dict[str, str], words: str, connected: set[str]
) -> None:
    internet.name("files.example", *names)
    for url, target in redirects.items():
        internet.redirect(url, target)
    with pytest.raises(ConfigurationError, match=words):
        _read(A)
    assert set(internet.connected) == connected


def test_ten_redirects_and_the_address_of_a_metadata_server_are_allowed(internet: Internet, tmp_path: Path) -> None:
    for url, target in TEN.items():
        internet.redirect(url, target)
    assert _read(A) == _read(f"http://{METADATA}/a") == SECRET
    internet.redirect("http://files.example/9", f"http://{PRIVATE}/d")
    with pytest.raises(ConfigurationError, match=PRIVATE):
        copy(A, str(tmp_path / "t"))
    assert not list((tmp_path / "t").rglob("a*"))


def test_connections_use_the_checked_address(internet: Internet) -> None:
    """DNS rebinding: the name is resolved only once for each connection."""
    internet.name("moving.example", OTHER, METADATA)
    internet.redirect("http://files.example/a", "http://moving.example/b")
    assert _read("http://files.example/a") == SECRET
    assert internet.connected == [PUBLIC, OTHER]
    assert internet.lookups.count("moving.example") == 1
    with pytest.raises(ConfigurationError, match=METADATA):
        _read("http://files.example/a")


def test_only_allowed_addresses_of_a_name_are_tried(internet: Internet) -> None:
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
    internet.redirect("http://files.example/a", "http://files.example/b")
    internet.redirect("http://files.example/b", "http://cdn.example/c")
    assert _read("http://files.example/a", Authorization="Bearer hunter2", Cookie="hunter2") == SECRET
    sent = {asked.path: dict(asked.headers) for asked in internet.asked}
    assert sent["/a"]["Authorization"] == sent["/b"]["Authorization"] == "Bearer hunter2"
    assert "hunter2" not in str(sent["/c"])


def test_https_checks_the_name_and_is_not_downgraded(
    internet: Internet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is checked for the name, not for the address."""
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("files", addresses=["files.example"])
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    internet.name("other.example", PUBLIC)
    internet.secure(pair)
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
    asked = [Internet.address(each) for each in internet.asked]
    assert asked == ["files.example/a", "cdn.example/b"] * 2


def test_a_store_names_the_source(internet: Internet) -> None:
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
    internet.name("inside.example", PRIVATE)
    for target in (METADATA, "inside.example"):
        internet.redirect(blob, f"http://{target}/latest")
        with pytest.raises(ConfigurationError, match=r"^registry\.example redirects to .* address"):
            _blob(registry)
    assert set(internet.connected) == {PUBLIC, OTHER}


def test_internal_token_servers_of_a_public_registry_are_rejected(internet: Internet, registry: Client) -> None:
    for realm in (f"http://{METADATA}/token", "http://inside.example/token", "ftp://cdn.example/token"):
        internet.name("inside.example", PRIVATE)
        internet.challenge = f'Bearer realm="{realm}",service="registry.example"'
        with pytest.raises(ConfigurationError, match=r"address\)|has no https URL"):
            _blob(registry)
    assert set(internet.connected) == {PUBLIC}
