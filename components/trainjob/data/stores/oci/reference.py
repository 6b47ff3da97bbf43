"""Parse ``oci`` locations: a registry, a repository in it, and a tag or digest."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from trainjob.data.locations import Location
from trainjob.errors import ConfigurationError, CorruptData

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG_LENGTH = 128  # distribution-spec, "Pulling manifests"


@dataclass(frozen=True)
class Reference:
    """The reference of an image or artifact.

    Attributes:
        host: Registry, with its port if it has one.
        repository: Name in the registry, such as ``team/digits``.
        tag: Empty if there is a digest.
        digest: ``sha256:<hex>``, or empty.
    """

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def of(cls, location: Location) -> Reference:
        """Parse a location.

        Raises:
            ConfigurationError: The location has neither a tag nor a digest.
        """
        name, _, digest = location.path.partition("@")
        folder, slash, last = name.rpartition("/")
        last, _, tag = last.partition(":")
        if not tag and not digest:
            raise ConfigurationError(f"{location} has no tag; write {location.uri.rstrip('/')}:TAG or …@sha256:DIGEST")
        return cls(location.authority, f"{folder}{slash}{last}", "" if digest else tag, digest)

    @property
    def name(self) -> str:
        """The tag or digest, as in the URL of a manifest."""
        return self.digest or self.tag

    @property
    def location(self) -> Location:
        """The reference as a location."""
        mark = f"@{self.digest}" if self.digest else f":{self.tag}"
        return Location("oci", self.host, f"{self.repository}{mark}")

    def at(self, digest: str) -> Reference:
        """The same repository at ``digest``."""
        return replace(self, tag="", digest=digest)

    def beside(self, suffix: str) -> Reference | None:
        """The reference whose tag has ``suffix`` appended; None without a tag, or if the tag would be too long."""
        tag = f"{self.tag}{suffix}"
        return replace(self, tag=tag) if self.tag and len(tag) <= _TAG_LENGTH else None


def check_digest(digest: object, where: str) -> str:
    """Return ``digest`` if it is a SHA-256 digest in OCI's notation.

    Raises:
        CorruptData: It is not. Digests from a registry become parts of URLs and are compared with the bytes read.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CorruptData(f"{where} contains {str(digest)[:80]!a}, which is not a sha256 digest")
    return digest
