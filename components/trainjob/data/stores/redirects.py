"""Check redirects: to the public internet or within the server's network only, and never from https to http.

An author chooses the server of a location, but not the servers to which it redirects. A redirect can lead to a server
that only this machine reaches: a cloud's metadata server with credentials, a service on loopback. The address that is
connected to is checked, so a name that later resolves to another address (DNS rebinding) does not evade the check.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpcore
import httpx

LIMIT = 10
"""Redirects of one request. Browsers follow 20 (Fetch standard); file servers and registries need three."""

Address = IPv4Address | IPv6Address

_PUBLIC = ""
_LINK_LOCAL, _SERVER = "link-local", "metadata server's"
# Metadata servers outside of the link-local networks: AWS and Google by IPv6, Alibaba, Oracle, Azure's WireServer.
_METADATA = frozenset(
    map(
        ip_address, ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
    )
)
_NAMES = {
    "localhost": "loopback",
    **dict.fromkeys(("instance-data", "instance-data.ec2.internal"), _SERVER),
    **dict.fromkeys(("metadata", "metadata.goog", "metadata.google.internal"), _SERVER),
}
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))  # with an IPv4 address in the last 32 bits
_PRIVATE = (
    ip_network("100.64.0.0/10"),  # RFC 6598: pods of many clusters, VPNs
    ip_network("64:ff9b:1::/48"),  # RFC 8215: local NAT64
    ip_network("fec0::/10"),  # RFC 3879: deprecated, and never public
)


class Refused(Exception):
    """A connection or redirect is not allowed.

    Args:
        reason: Completes a sentence whose subject is the source.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Guard(httpcore.NetworkBackend):
    """Make the connections of one client, and check their addresses. Safe for several threads.

    Args:
        home: The server that the author chose. Its network is that of the first address connected to.
    """

    def __init__(self, home: httpx.URL) -> None:
        self._home = _host(home)
        self._network = _known(self._home)
        self._inner = httpcore.SyncBackend()

    def check(self, before: httpx.URL, after: httpx.URL) -> None:
        """Check a redirect without a connection. With a proxy, which makes the connections, this is the only check.

        Raises:
            Refused: The redirect is not allowed.
        """
        if after.scheme not in ("http", "https") or not after.host:
            raise Refused(f"redirects to scheme {after.scheme[:20]!a}; only http and https are followed")
        if (before.scheme, after.scheme) == ("https", "http"):
            raise Refused(
                f"redirects from https to http ({after.host}); the redirect is not followed, use a server that stays"
                " on https"
            )
        host = after.host.lower().rstrip(".")
        network = _known(host)
        if host != self._home and network not in (None, _PUBLIC, self._network):
            raise self._refused(host, f"a {network} address")

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to a checked address. TLS and the request still use the host name.

        Raises:
            Refused: No address of the host is in an allowed network.
        """
        host = host.lower().rstrip(".")
        found = _addresses(host, port)
        allowed = {text: network for text, network in found.items() if self._allowed(host, network)}
        if not allowed:
            address, network = next(iter(found.items()))
            raise self._refused(host, f"{address}, a {network} address")
        for number, (address, network) in enumerate(allowed.items(), 1):
            try:
                stream = self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if number == len(allowed):
                    raise
            else:
                if self._network is None and host == self._home:
                    self._network = network
                return stream
        raise AssertionError("the host has an allowed address")

    def _allowed(self, host: str, network: str) -> bool:
        if network in (_PUBLIC, self._network):
            return True
        # Link-local and metadata addresses only if the location has the address itself: others could point a name
        # that they control at the metadata server.
        first = self._network is None and host == self._home
        return first and network not in (_LINK_LOCAL, _SERVER)

    def _refused(self, host: str, where: str) -> Refused:
        if host == self._home:
            return Refused(
                f"resolves to {host} ({where}); no connection is made, write the address itself if it is intended"
            )
        return Refused(
            f"redirects to {host} ({where}), which is outside the network of {self._home}; the redirect is not"
            " followed, use that server as the source if it is intended"
        )


def client(guard: Guard, **options: Any) -> httpx.Client:
    """Make a client that connects through ``guard`` and does not follow redirects.

    If the environment sets a proxy (``HTTPS_PROXY``), the proxy resolves names and connects.

    Args:
        guard: Checks the connections.
        options: Options of `httpx.Client`.
    """
    made = httpx.Client(follow_redirects=False, **options)
    # httpx 0.28 has no parameter for the network backend of httpcore. Proxies have separate pools.
    transport: Any = made._transport
    pool = transport._pool
    if not isinstance(pool._network_backend, httpcore.NetworkBackend):
        raise TypeError(
            "trainjob does not support this version of httpx: its transport has no httpcore network backend"
        )
    pool._network_backend = guard
    return made


def network_of(address: Address) -> str:
    """The kind of network of an address; empty for the public internet."""
    if isinstance(address, IPv6Address) and (inner := _embedded(address)) is not None:
        return network_of(inner)
    kinds = {
        _SERVER: address in _METADATA,
        _LINK_LOCAL: address.is_link_local,
        "loopback": address.is_loopback,
        "unspecified": address.is_unspecified,
        "multicast": address.is_multicast,
        "private": address.is_private or any(address in network for network in _PRIVATE),
        "reserved": address.is_reserved or not address.is_global,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), _PUBLIC)


def _host(url: httpx.URL) -> str:
    """The host as it is resolved: lower case, ASCII (IDNA), without a trailing dot."""
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to this IPv6 address may reach."""
    if address.ipv4_mapped or address.sixtofour or address.teredo:
        return address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1]) or None
    if any(address in network for network in _NAT64) and not (address.is_loopback or address.is_unspecified):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _known(host: str) -> str | None:
    """The kind of network of a host that is an address or a well-known name; None for any other name."""
    if host.endswith(".localhost"):
        return "loopback"
    try:
        return network_of(ip_address(host))
    except ValueError:
        pass
    try:
        return network_of(IPv4Address(socket.inet_aton(host)))  # 127.1, 0x7f000001: resolvers accept these as addresses
    except OSError:
        return _NAMES.get(host)


def _addresses(host: str, port: int) -> dict[str, str]:
    """Addresses of a host in the resolver's order, with the kinds of their networks."""
    try:
        found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(str(error)) from error
    return {str(entry[4][0]): network_of(ip_address(str(entry[4][0]))) for entry in found}
