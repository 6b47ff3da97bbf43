"""Checks URLs of servers and proxies before a client uses them: the errors of clients quote parts of passwords."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")  # urlsplit drops some of them, and httpx refuses others
_NUMBERS = re.compile(r"[\d.]+|.*:.*")  # an IP address; no name of the DNS has the form of one


def is_url(text: str, *schemes: str) -> bool:
    """Whether `text` is a URL with a host that can exist, one of the schemes, and a port from 1 if any."""
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and not _UNSAFE.search(text) and parts.port != 0 and _is_host(parts)
    except ValueError:  # no number as port, half an IPv6 address
        return False


def _is_host(parts: SplitResult) -> bool:
    """Whether the host can be looked up. Raises ValueError for some that cannot."""
    host = parts.hostname or ""
    if _NUMBERS.fullmatch(host):
        ip_address(host)
    elif not host.isascii():
        from idna import encode  # noqa: PLC0415 - by httpx; few hosts need it

        encode(host)
    else:
        host.encode("idna")  # no empty label, and none of more than 63 characters
    return bool(host)
