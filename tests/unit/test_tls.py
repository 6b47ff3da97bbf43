"""Certificates and keys in PEM, against real TLS servers."""

from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.certificates import Authority
from tests.endpoints import Endpoint, ask, kubeconfig, write

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.errors import Unreachable
from trainjob.errors import ConfigurationError

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the server."""
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The certificate of another authority."""
    return Authority(tmp_path_factory.mktemp("tls") / "other").certificate.read_bytes()


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[Endpoint]:
    """A server that accepts client certificates of the authority."""
    with Endpoint(authority.issue("server", addresses=["127.0.0.1"]), authority) as running:
        yield running


def bundled(directory: Path, bundle: bytes, server: Endpoint) -> Credentials:
    (directory / "ca.crt").write_bytes(bundle)
    config = kubeconfig({"token": "t"}, {"server": server.url, "certificate-authority": "ca.crt"})
    return Credentials(kubeconfig=write(directory / "kubeconfig", config))


def trusted(certificate: bytes) -> bytes:
    """The same as ``TRUSTED CERTIFICATE``, which has OpenSSL's own data after the certificate."""
    command = ["openssl", "x509", "-trustout", "-addtrust", "serverAuth", "-setalias", "cluster"]
    return subprocess.run(command, input=certificate, capture_output=True, check=True).stdout


BUNDLES = {
    "alone": b"%(own)s",
    "comment at the end": b"%(own)s# end of bundle\n",
    "text around": b"Bag Attributes\n  friendlyName: \xc3\xa4\n%(other)s\nsubject=CN = x\n%(own)ssee https://example.com\n",
    "several": b"%(other)s%(own)s%(other)s",
    "twice": b"%(own)s%(own)s",
    "DOS line ends": b"%(dos)s",
    "no newline at the end": b"%(stripped)s",
    "trusted certificate": b"%(trusted)s%(other)s",
    "X509 label": b"%(x509)s",
    "beside a key": b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n%(own)s",
}


@pytest.mark.parametrize("bundle", BUNDLES.values(), ids=BUNDLES)
def test_a_bundle_is_valid_with_anything_around_its_certificates(
    tmp_path: Path, server: Endpoint, authority: Authority, other: bytes, bundle: bytes
) -> None:
    own = authority.certificate.read_bytes()
    forms = {b"own": own, b"other": other, b"dos": own.replace(b"\n", b"\r\n"), b"stripped": own.strip()}
    forms |= {b"trusted": trusted(own), b"x509": own.replace(b"CERTIFICATE", b"X509 CERTIFICATE")}
    asyncio.run(ask(bundled(tmp_path, bundle % forms, server)))
    asyncio.run(ask(Credentials(host=server.url, token="t", ca_file=str(tmp_path / "ca.crt"))))


NO_BUNDLES = {
    "empty": (b"\n", "contains no certificate: it is empty"),
    "a key": (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "only PRIVATE KEY: it must have"),
    "text": (b"<html>login</html>", "18 bytes without a PEM block: it must have the CA certificates as PEM"),
    "DER": (b"\x30\x82\x01\x00", "is DER: convert it to PEM, openssl x509 -inform der"),
    "torn": (b"-----BEGIN CERTIFICATE-----\nMIIC", "is incomplete: its last PEM block has no end"),
    "no base64": (b"-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n", "a certificate that is damaged"),
    "no certificate": (b"-----BEGIN CERTIFICATE-----\nMAAA\n-----END CERTIFICATE-----\n", "is invalid: "),
}


@pytest.mark.parametrize(("bundle", "message"), NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_a_file_that_is_no_bundle_is_refused_with_what_it_contains(
    tmp_path: Path, server: Endpoint, bundle: bytes, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        bundled(tmp_path, bundle, server).load()


def test_a_server_of_another_authority_is_not_trusted(tmp_path: Path, server: Endpoint, other: bytes) -> None:
    requests = len(server.headers)
    with pytest.raises(ConfigurationError, match=f"the certificate of {server.url} is not trusted"):
        asyncio.run(ask(bundled(tmp_path, other, server)))
    assert len(server.headers) == requests


def test_an_intermediate_certificate_can_be_trusted(tmp_path: Path, authority: Authority) -> None:
    pair = authority.issue("trusted itself", addresses=["127.0.0.1"])
    with Endpoint(pair) as running:
        asyncio.run(ask(bundled(tmp_path, pair.certificate.read_bytes(), running)))


def issued(authority: Authority, end: datetime, *, password: bytes = b"") -> dict[str, str]:
    """A user with a client certificate that is valid until `end`."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = serialization.load_pem_private_key((authority.directory / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        x509.load_pem_x509_certificate(authority.certificate.read_bytes()).subject,
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jane")]),
        key.public_key(),
        x509.random_serial_number(),
        datetime(1990, 1, 1, tzinfo=UTC),
        end,
    )
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pems = {
        "client-certificate-data": builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "client-key-data": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden),
    }
    return {name: base64.b64encode(pem).decode() for name, pem in pems.items()}


def of_user(directory: Path, authority: Authority, server: Endpoint, user: dict[str, str]) -> Credentials:
    cluster = {"server": server.url, "certificate-authority-data": authority.bundle}
    return Credentials(kubeconfig=write(directory / "kubeconfig", kubeconfig(user, cluster)))


@pytest.mark.parametrize("end", [NOW + timedelta(hours=1), datetime(2060, 1, 1, tzinfo=UTC)])
def test_a_client_certificate_authenticates(
    tmp_path: Path, server: Endpoint, authority: Authority, end: datetime
) -> None:
    asyncio.run(ask(of_user(tmp_path, authority, server, issued(authority, end))))
    assert server.clients[-1] == "jane"


@pytest.mark.parametrize("end", [NOW - timedelta(minutes=1), datetime(1999, 12, 31, tzinfo=UTC)])
def test_an_expired_client_certificate_is_refused_by_its_date(
    tmp_path: Path, server: Endpoint, authority: Authority, end: datetime
) -> None:
    requests = len(server.headers)
    user = issued(authority, end)
    with pytest.raises(ConfigurationError, match=f"expired on {end:%Y-%m-%d %H:%M} UTC: log in again, or renew it"):
        asyncio.run(ask(of_user(tmp_path, authority, server, user)))
    assert len(server.headers) == requests
    assert of_user(tmp_path, authority, server, user | {"token": "t"}).load().authorization == "Bearer t"


def test_certificates_and_keys_that_cannot_be_used_are_refused(
    tmp_path: Path, server: Endpoint, authority: Authority
) -> None:
    one, two = (issued(authority, NOW + timedelta(hours=1)) for _ in range(2))
    wrong = {
        "has a client certificate, but no client key": {"client-certificate-data": one["client-certificate-data"]},
        "has a client key, but no client certificate": {"client-key-data": one["client-key-data"]},
        "cannot be read: .*KEY_VALUES_MISMATCH": one | {"client-key-data": two["client-key-data"]},
        "the client key is encrypted: store it without a passphrase, as kubectl requires": issued(
            authority, NOW + timedelta(hours=1), password=b"hunter2"
        ),
    }
    for message, user in wrong.items():
        with pytest.raises(ConfigurationError, match=message):
            of_user(tmp_path, authority, server, user).load()


def test_a_server_may_refuse_tls(tmp_path: Path, authority: Authority) -> None:
    with Endpoint() as plain:
        plain.url = plain.url.replace("http:", "https:")
        with pytest.raises(Unreachable):
            asyncio.run(ask(of_user(tmp_path, authority, plain, {"token": "t"})))
