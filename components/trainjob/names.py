"""Names of namespaces and jobs by Kubernetes' rules, for all backends: names become parts of URLs and paths."""

from __future__ import annotations

import hashlib
import re

from trainjob.errors import ConfigurationError

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
NAMESPACE = re.compile(_LABEL)
"""An RFC 1123 label, as in Kubernetes (``IsDNS1123Label``)."""
JOB = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
"""An RFC 1123 subdomain, as in Kubernetes (``IsDNS1123Subdomain``). Trainer's webhook allows less."""


_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def digest(text: str, characters: int) -> str:
    """A hash of `text` for labels, names and paths: so many lower-case letters and digits."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest())
    return "".join(_ALPHABET[number // 36**i % 36] for i in range(characters))


def namespace(text: str) -> str:
    """Return `text` if it is a valid name of a namespace.

    Raises:
        ConfigurationError: It is not.
    """
    if NAMESPACE.fullmatch(text):
        return text
    raise ConfigurationError(
        f"{_short(text)} is not a namespace: write 1 to 63 lower-case letters, digits and '-', such as training-1, "
        "with a letter or digit at both ends"
    )


def job(text: str) -> str:
    """Return `text` if it is a valid name of a job.

    Raises:
        ConfigurationError: It is not.
    """
    if JOB.fullmatch(text):
        return text
    raise ConfigurationError(
        f"{_short(text)} is not the name of a TrainJob: write 1 to 253 lower-case letters, digits, '-' and '.', such "
        "as train-6rm04nbcle-1, with a letter or digit at both ends"
    )


def _short(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")
