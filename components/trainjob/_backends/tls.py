"""TLS settings of a connection to an API server, from certificates and keys in PEM."""

from __future__ import annotations

import base64
import re
import ssl
import tempfile
from datetime import UTC, datetime
from typing import Any

from trainjob.errors import ConfigurationError

_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_CERTIFICATES = (b"CERTIFICATE", b"X509 CERTIFICATE", b"TRUSTED CERTIFICATE")  # as OpenSSL reads bundles


class Incomplete(ConfigurationError):
    """A certificate, key or token is incomplete: another thread or program may be writing it."""


def certificates(content: bytes, name: str) -> list[bytes]:
    """The certificates of a PEM file as DER. Text before, between and after them is allowed (RFC 7468, section 2).

    Args:
        content: The file.
        name: What it is, for errors.

    Raises:
        ConfigurationError: It contains no certificate, or one that cannot be read.
    """
    blocks = [*_BLOCK.finditer(content)]
    if b"-----BEGIN" in content[blocks[-1].end() if blocks else 0 :]:
        raise Incomplete(f"{name} is incomplete: its last PEM block has no end")
    found = [block[2] for block in blocks if block[1] in _CERTIFICATES]
    if not found:
        raise _without_certificate(content, [block[1].decode() for block in blocks], name)
    try:
        ders = [base64.b64decode(b"".join(body.split()), validate=True) for body in found]
        return [der[: _element(der, 0)[1]] for der in ders]  # a trusted certificate has OpenSSL's own data after it
    except (ValueError, IndexError):
        raise ConfigurationError(f"{name} contains a certificate that is damaged: write the file again") from None


def _without_certificate(content: bytes, labels: list[str], name: str) -> ConfigurationError:
    if not content.strip():
        return Incomplete(f"{name} contains no certificate: it is empty")
    if content.startswith(b"\x30"):
        return ConfigurationError(f"{name} is DER: convert it to PEM, openssl x509 -inform der -in FILE")
    what = f"only {', '.join(dict.fromkeys(labels))}" if labels else f"{len(content)} bytes without a PEM block"
    return ConfigurationError(f"{name} contains no certificate, {what}: it must have the CA certificates as PEM")


class _Context(ssl.SSLContext):
    """Expects another name in the server's certificate than the host of the URL. httpcore 1.0 cannot behind a proxy."""

    server_name = ""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name or server_hostname, session)

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        name = self.server_name or options.get("server_hostname")
        return super().wrap_socket(*args, **{**options, "server_hostname": name})


def context(authority: list[bytes], server_name: str, *, verify: bool) -> ssl.SSLContext:
    """Settings without a client certificate.

    Args:
        authority: Trusted certificates, also intermediate ones, as in Go; those of the system if empty.
        server_name: Expected name in the server's certificate; the host name if empty.
        verify: False accepts every certificate.

    Raises:
        ConfigurationError: A certificate is invalid.
    """
    made = _Context(ssl.PROTOCOL_TLS_CLIENT)
    made.server_name = server_name
    if not verify:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    elif authority:
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            made.load_verify_locations(cadata=b"".join(authority))
        except ssl.SSLError as error:
            raise ConfigurationError(f"a certificate of the certificate authority is invalid: {error}") from error
    else:
        made.load_default_certs()
    return made


def load_pair(made: ssl.SSLContext, certificate: bytes, key: bytes, name: str) -> datetime:
    """Authenticate by a client certificate, and return until when it is valid.

    Raises:
        ConfigurationError: Certificate or key are missing or invalid, or the key has a password.
    """
    if not (certificate and key):
        present, absent = ("certificate", "key") if certificate else ("key", "certificate")
        raise ConfigurationError(f"{name} has a client {present}, but no client {absent}")
    leaf = certificates(certificate, f"the client certificate of {name}")[0]
    with tempfile.NamedTemporaryFile("wb", prefix="trainjob-") as file:  # ssl reads them from files only
        file.write(certificate + b"\n" + key)
        file.flush()
        try:
            made.load_cert_chain(file.name, password=_refuse_password)
        except ssl.SSLError as error:
            raise Incomplete(f"client certificate or key of {name} cannot be read: {error}") from error
    return _not_after(leaf)


def _refuse_password() -> str:
    """Prevents OpenSSL from asking for the password on the terminal."""
    raise ConfigurationError("the client key is encrypted: store it without a passphrase, as kubectl requires, too")


def _not_after(certificate: bytes) -> datetime:
    """The end of the validity of a certificate that OpenSSL has accepted (RFC 5280, section 4.1)."""
    fields = _inside(certificate, _inside(certificate, 0)[0])
    validity = fields[4 if certificate[fields[0]] == 0xA0 else 3]  # the version is optional
    end = _inside(certificate, validity)[1]
    start, stop = _element(certificate, end)
    text = certificate[start:stop].decode("ascii")
    if certificate[end] == 0x17:  # UTCTime has two digits of the year, from 1950
        text = f"{'20' if text < '50' else '19'}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int]:
    """Where the content of a DER element begins and ends."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return start, start + length


def _inside(der: bytes, at: int) -> list[int]:
    """Where the elements inside an element begin."""
    position, end = _element(der, at)
    found = []
    while position < end:
        found.append(position)
        position = _element(der, position)[1]
    return found
