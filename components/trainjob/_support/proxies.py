"""Which proxy of the environment a request takes, by the rules of kubectl and every other program in Go.

They are those of ``golang.org/x/net/http/httpproxy`` (0ca694d2a5ad, ``proxy.go``). Python's
`urllib.request.proxy_bypass`, on which httpx relies, knows neither CIDRs nor loopback addresses: a request with its
credentials would reach the proxy.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from trainjob._support.urls import is_url

_PORTS = {"http": 80, "https": 443}
_CIDR = re.compile(r"[^/]+/\d+")
_WITH_PORT = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):([^:]*)")


def proxy_for(url: str) -> str | None:
    """The URL of the proxy for requests to `url`; None for a direct connection.

    ``HTTPS_PROXY`` or ``HTTP_PROXY`` applies, by the scheme of `url`, unless ``NO_PROXY`` has the host: as a name (with
    its subdomains), ``.name`` or ``*.name`` (its subdomains only), an IP address, a CIDR, each but a CIDR also with a
    port, or ``*``. ``localhost`` and loopback addresses never take a proxy. The same variables in lower case apply
    where the others are empty.

    Raises:
        ValueError: `url` is not a URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "http" and os.environ.get("REQUEST_METHOD"):
        return None  # a CGI program, whose client can set HTTP_PROXY by a header "Proxy" (CVE-2016-5385)
    proxy = _setting(f"{parts.scheme}_proxy") if parts.scheme in _PORTS else ""
    if not proxy or _is_excepted(parts):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def why_unusable(proxy: str) -> str:
    """Why httpx cannot use the URL of a proxy, as a predicate without the URL, which may have a password; or empty."""
    if not is_url(proxy, "http", "https", "socks5", "socks5h"):
        return "is not a URL with scheme http, https or socks5: write http://host:port"
    if proxy.startswith("socks5") and find_spec("socksio") is None:
        return "needs the package socksio, not installed here: pip install 'httpx[socks]'"
    return ""


def _setting(name: str) -> str:
    return os.environ.get(name.upper()) or os.environ.get(name) or ""


def _is_excepted(url: SplitResult) -> bool:
    host, port = _ascii(url.hostname or ""), str(url.port or _PORTS[url.scheme])
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    entries = [entry.strip().lower() for entry in _setting("no_proxy").split(",")]
    return "*" in entries or any(_matches(entry, host, port, address) for entry in entries if entry)


def _matches(entry: str, host: str, port: str, address: IPv4Address | IPv6Address | None) -> bool:
    if _CIDR.fullmatch(entry):
        try:
            return address is not None and address in ip_network(entry, strict=False)
        except ValueError:
            pass
    found = _WITH_PORT.fullmatch(entry)
    name, entry_port = (found[1] or found[2] or "", found[3]) if found else (entry, "")
    if not name or entry_port not in ("", port):
        return False
    if (entry_address := _address(name)) is not None or address is not None:
        return entry_address == address
    name = name[1:] if name.startswith("*.") else name
    below = f".{_ascii(name.removeprefix('.'))}"
    return host.endswith(below) or (not name.startswith(".") and host == below[1:])


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """The IP address; IPv4 also where it is written as IPv6 (``::ffff:10.0.0.1``)."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _ascii(name: str) -> str:
    """A host name in the form that is resolved (IDNA)."""
    try:
        return name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        return name
