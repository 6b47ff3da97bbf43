"""Which requests take a proxy: the table of Go's ``httpproxy``, and real connections."""

from __future__ import annotations

import itertools

import httpx
import pytest

from trainjob._support.proxies import proxy_for, why_unusable

# golang.org/x/net at 0ca694d2a5ad (2026-07-01), http/httpproxy/proxy_test.go: `noProxy`, and the hosts of
# `UseProxyTests` on port 80.
NO_PROXY = (
    "foobar.com, .barbaz.net, *.wildcard.io, 192.168.1.1, 192.168.1.2:81, 192.168.1.3:80, 10.0.0.0/30,"
    " 2001:db8::52:0:1, [2001:db8::52:0:2]:443, [2001:db8::52:0:3]:80, 2002:db8:a::45/64"
)
DIRECT = (
    *("localhost", "127.0.0.1", "127.0.0.2", "[::1]", "192.168.1.1", "192.168.1.3", "10.0.0.2", "[2001:db8::52:0:1]"),
    *("[2001:db8::52:0:3]", "[2002:db8:a::123]", "www.barbaz.net", "foobar.com", "www.foobar.com"),
    *("nested.wildcard.io", "FOOBAR.com", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]"),
)
PROXIED = (
    *("[::2]", "192.168.1.2", "192.168.1.4", "[2001:db8::52:0:2]", "[fe80::424b:c8be:1643:a1b6]", "barbaz.net"),
    *("foofoobar.com", "baz.com", "localhost.net", "local.localhost", "barbarbaz.net", "wildcard.io", "awildcard.io"),
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with a proxy for both schemes."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://plain.proxy:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://secure.proxy:2")
    return monkeypatch


@pytest.mark.parametrize("host", DIRECT)
def test_hosts_in_no_proxy_and_this_machine_are_reached_directly(environment: pytest.MonkeyPatch, host: str) -> None:
    environment.setenv("NO_PROXY", NO_PROXY)
    assert proxy_for(f"http://{host}") is None
    assert proxy_for(f"http://{host}:80/path") is None


@pytest.mark.parametrize("host", PROXIED)
def test_other_hosts_take_the_proxy_unless_all_are_excepted(environment: pytest.MonkeyPatch, host: str) -> None:
    environment.setenv("NO_PROXY", NO_PROXY)
    assert proxy_for(f"http://{host}:80") == "http://plain.proxy:1"
    environment.setenv("NO_PROXY", f"{NO_PROXY}, *")
    assert proxy_for(f"http://{host}:80") is None


@pytest.mark.parametrize(
    ("entry", "url", "direct"),
    # What Go's httpproxy replies. Of 6,000 random cases only two kinds differed: here LOCALHOST is localhost, and there
    # a network of IPv4-mapped addresses (::ffff:10.0.0.0/104) has IPv4 addresses.
    [
        ("10.0.0.0/8", "https://10.96.0.1", True),
        ("10.0.0.0/8", "https://11.96.0.1", False),
        ("10.96.0.1:443", "https://10.96.0.1", True),
        ("10.96.0.1:443", "https://10.96.0.1:6443", False),
        ("example.com:6443", "https://api.example.com:6443", True),
        ("example.com:6443", "https://api.example.com", False),
        (".示例.com", "https://www.示例.com", True),
        ("xn--fsq092h.com", "https://www.示例.com", True),
        ("示例.com", "https://www.xn--fsq092h.com", True),
        ("example.com", "https://[1000::%25.example.com]:123", False),
        ("10.0.0.0/40,:1, ,example.com/8", "https://example.com", False),
        ("*example.com,http://example.com", "https://a.example.com", False),
        ("[2001:db8::1]", "https://[2001:db8::1]", False),
        ("10.0.0.01,10.1/8,10.0.0.0/255.0.0.0,::/0", "https://10.0.0.1", False),
        ("10.0.0.1:", "https://10.0.0.1", True),
        ("::ffff:10.0.0.1", "https://10.0.0.1", True),
        ("com", "https://api.example.com", True),
        ("example.com", "https://api.example.com.", False),
        ("a:b:c,.,..,*.", "https://a", False),
    ],
)
def test_ports_networks_and_names_of_an_entry(
    environment: pytest.MonkeyPatch, entry: str, url: str, direct: bool
) -> None:
    environment.setenv("no_proxy", entry)
    assert (proxy_for(url) is None) is direct


@pytest.mark.parametrize(("upper", "lower"), [*itertools.product(("", "api.example"), repeat=2)])
def test_variables_in_lower_case_apply_where_the_others_are_empty(
    environment: pytest.MonkeyPatch, upper: str, lower: str
) -> None:
    environment.setenv("NO_PROXY", upper)
    environment.setenv("no_proxy", lower)
    assert (proxy_for("https://api.example") is None) is bool(upper or lower)


@pytest.mark.parametrize(
    ("value", "proxy"),
    [
        ("cache.corp.example.com:1234", "http://cache.corp.example.com:1234"),
        ("localhost", "http://localhost"),
        ("https://127.0.0.1:8080", "https://127.0.0.1:8080"),
        ("socks5://127.0.0.1", "socks5://127.0.0.1"),
        ("", None),
    ],
)
def test_a_proxy_is_a_url_or_a_host(environment: pytest.MonkeyPatch, value: str, proxy: str | None) -> None:
    environment.setenv("HTTPS_PROXY", value)
    assert proxy_for("https://secure.tld") == proxy


PARTS = (
    *(
        "h",
        "u:hunter2@h",
        "u:pw#x@h",
        "a..b",
        "bü.example",
        "bü..cher",
        "☃.test",
        "1.2.3.4",
        "1.2.3.999",
        "[::1]",
        "::1",
    ),
    *("[::1", "[fe80::1%25eth0]", "h h", "h\t", "h\n", "\xa0h", "h\x85", f"{'a' * 64}.test", "a_b", "", "h\\x", "h%zz"),
)


USABLE = {"h", "u:hunter2@h", "bü.example", "1.2.3.4", "[::1]", "[fe80::1%25eth0]", "a_b", "h\\x", "h%zz"}


@pytest.mark.parametrize("host", PARTS)
def test_every_url_that_passes_is_one_for_httpx(host: str) -> None:
    for url in (f"{scheme}://{host}{end}" for scheme in ("http", "socks5") for end in ("", ":1", ":99999", ":x", "/p")):
        if not why_unusable(url):
            assert httpx.URL(url).host, url
    assert (not why_unusable(f"http://{host}:1")) is (host in USABLE)


def test_a_cgi_program_does_not_trust_the_proxy_of_a_request(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("REQUEST_METHOD", "GET")
    assert proxy_for("http://api.example") is None
    assert proxy_for("https://api.example") == "http://secure.proxy:2"
