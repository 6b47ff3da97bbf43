"""A certificate authority for one cluster, by the `openssl` program."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"  # no test cluster runs longer


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into `directory`, which may exist: then it is the same authority.

    Keys are P-256: one takes 10 ms, an RSA key up to a second.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if self.certificate.exists():
            return
        directory.mkdir(mode=0o700)
        subject = ["-subj", "/CN=trainjob-test-cluster", "-days", _DAYS]
        extensions = ["-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        self._openssl("req", "-x509", *key, *subject, *extensions, "-keyout", "ca.key", "-out", "ca.crt")

    @property
    def certificate(self) -> Path:
        """The certificate of the authority."""
        return self.pair("ca").certificate

    @property
    def bundle(self) -> str:
        """The authority's certificate as base64 of PEM, for objects of the API."""
        return base64.b64encode(self.certificate.read_bytes()).decode()

    def issue(self, name: str, organization: str = "", addresses: Sequence[str] = ()) -> Pair:
        """A certificate for a client (`name` is the user, `organization` the group) or a server of `addresses`."""
        pair = self.pair(name)
        file = pair.certificate.stem
        subject = f"/O={organization}/CN={name}" if organization else f"/CN={name}"
        # authorityKeyIdentifier: Python 3.13 refuses a certificate without it.
        lines = ["authorityKeyIdentifier=keyid", "extendedKeyUsage=clientAuth,serverAuth"]
        if addresses:
            kinds = ("IP" if each.replace(".", "").isdigit() else "DNS" for each in addresses)
            alternatives = (f"{kind}:{each}" for kind, each in zip(kinds, addresses, strict=True))
            lines.append(f"subjectAltName={','.join(alternatives)}")
        extensions = self.directory / f"{file}.ext"
        extensions.write_text("\n".join(lines) + "\n")
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        self._openssl("req", *key, "-subj", subject, "-keyout", str(pair.key), "-out", f"{file}.csr")
        sign = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", _DAYS, "-extfile", str(extensions)]
        self._openssl("x509", "-req", "-in", f"{file}.csr", *sign, "-out", str(pair.certificate))
        return pair

    def pair(self, name: str) -> Pair:
        """The files of the certificate `name`, also of one that was issued before."""
        file = name.replace(":", "-").replace("/", "-")
        return Pair(self.directory / f"{file}.crt", self.directory / f"{file}.key")

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"openssl {' '.join(arguments)}: {done.stderr.strip()}")
