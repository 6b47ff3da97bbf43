"""Read and write manifests and blobs of one repository (OCI distribution-spec 1.1), with retries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainjob._support import retrying
from trainjob._support.foreign import Unreadable, mapping_of
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.oci.client import DOCUMENT, Client, Interrupted, pause, retry
from trainjob.data.stores.oci.reference import check_digest
from trainjob.errors import ChecksumMismatch, CorruptData, SourceNotFound, StoreUnavailable

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_IMAGE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_ACCEPT = ", ".join((INDEX, IMAGE, DOCKER_INDEX, DOCKER_IMAGE))
_UNKNOWN = re.compile(r"\b(?:MANIFEST_|MANIFEST_BLOB_|BLOB_)UNKNOWN\b")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def sha256(data: bytes) -> str:
    """The digest of ``data`` in OCI's notation."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(frozen=True)
class Manifest:
    """A manifest or index, as stored.

    Attributes:
        digest: Digest of its bytes.
        value: Its content.
        size: Number of its bytes.
    """

    digest: str
    value: Mapping[str, Any]
    size: int

    @property
    def media_type(self) -> str:
        """The media type, derived from the content if the field is missing: it is optional in OCI 1.0."""
        stated = self.value.get("mediaType")
        return stated if isinstance(stated, str) else INDEX if "manifests" in self.value else IMAGE


class Repository:
    """One repository of a registry. Safe for several threads."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name
        self.pull = (f"repository:{name}:pull",)
        self.push = (f"repository:{name}:pull,push",)
        self._where = f"oci://{client.host}/{name}"

    def where(self, name: str) -> str:
        """The location of a tag or digest, for errors."""
        return f"{self._where}@{name}" if ":" in name else f"{self._where}:{name}"

    def url(self, rest: str) -> str:
        """URL of a resource in the repository."""
        return self.client.url(self.name, rest)

    # ------------------------------------------------------------ manifests

    def manifest(self, name: str) -> Manifest | None:
        """Read the manifest of a tag or digest; None if it does not exist.

        Raises:
            ChecksumMismatch: The bytes do not match the digest.
            CorruptData: The bytes are not a JSON object.
        """
        data = retry(self.where(name), lambda: self._manifest(name))
        if data is None:
            return None
        digest = sha256(data)
        if ":" in name and name != digest:
            raise ChecksumMismatch(f"{self.where(name)}: the registry sent a manifest with digest {digest} instead")
        try:
            return Manifest(digest, mapping_of(data, self.where(name), DOCUMENT), len(data))
        except Unreadable as error:
            raise CorruptData(f"{self.where(name)} is not a manifest: it {error.why}") from None

    def _manifest(self, name: str) -> bytes | None:
        with self.client.open("GET", self.url(f"manifests/{name}"), self.pull, headers={"accept": _ACCEPT}) as response:
            if response.status_code == 404:
                return None
            if response.status_code != 200:
                raise self.client.refused(response, self.where(name))
            return self.client.read(response)

    def has_manifest(self, name: str, digest: str) -> bool:
        """Whether a tag or digest is the manifest with ``digest``, as far as the registry reports it."""

        def head() -> bool:
            url, headers = self.url(f"manifests/{name}"), {"accept": _ACCEPT}
            with self.client.open("HEAD", url, self.push, headers=headers) as response:
                held = response.headers.get("docker-content-digest")
                return response.status_code == 200 and held == digest

        return retry(self.where(name), head)

    def put_manifest(self, name: str, data: bytes, media_type: str) -> bool:
        """Store a manifest under a tag or digest, unless it exists; returns whether the registry tracks its subject."""
        if self.has_manifest(name, sha256(data)):
            return False

        def put() -> bool:
            headers = {"content-type": media_type}
            url = self.url(f"manifests/{name}")
            with self.client.open("PUT", url, self.push, headers=headers, content=data) as response:
                if response.status_code in (400, 404):
                    # The blobs and manifests that it names exist. But docker-registry truncates a link before it writes
                    # it again, which it does when another client pushes the same; and other registries need time to
                    # find an upload.
                    reason = self.client.reason(response)
                    if _UNKNOWN.search(reason):
                        raise Interrupted(f"the registry replied {reason}")
                    error = SourceNotFound if response.status_code == 404 else StoreUnavailable
                    raise error(f"{self.where(name)}: the registry replied {reason}")
                if response.status_code not in (200, 201, 202):
                    raise self.client.refused(response, self.where(name))
                return "oci-subject" in response.headers

        return retry(self.where(name), put)

    # ------------------------------------------------------------ blobs

    def has_blob(self, digest: str) -> bool:
        """Whether a blob exists."""

        def head() -> bool:
            with self.client.open("HEAD", self.url(f"blobs/{digest}"), self.push) as response:
                return response.status_code == 200

        return retry(self.where(digest), head)

    def mount(self, digest: str, origin: str) -> bool:
        """Mount a blob of another repository of the registry; False if the registry does not."""
        scopes = (*self.push, f"repository:{origin}:pull")

        def post() -> bool:
            url = self.url(f"blobs/uploads/?mount={digest}&from={origin}")
            with self.client.open("POST", url, scopes, content=b"") as response:
                location = self.client.location(response)
                if response.status_code == 202 and location:
                    # The registry opened an upload instead. It is cancelled: the caller opens one when needed.
                    with self.client.open("DELETE", location, self.push):
                        pass
                return response.status_code == 201

        return retry(self.where(digest), post)

    def blob(self, digest: str, size: int, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Read bytes of a blob of ``size``, without verification; resumes if the connection is cut.

        Raises:
            SourceNotFound: The blob does not exist.
        """
        check_digest(digest, self._where)
        end = size if length is None else min(size, start + length)
        backoff = retrying.TRANSFER()
        while start < end:
            try:
                for chunk in self._blob(digest, start, end):
                    start += len(chunk)
                    backoff.success()
                    yield chunk
                    backoff.success()  # the time of who takes it does not count
                if start < end:
                    raise Interrupted(f"the registry sent {start} of {end} bytes")
            except Interrupted as error:
                pause(backoff, self.where(digest), error)

    def small(self, digest: str, size: int, limit: int = 16 * CHUNK) -> bytes:
        """Read and verify a small blob.

        Raises:
            CorruptData: Its size is larger than ``limit``.
            ChecksumMismatch: The bytes do not match the digest.
        """
        if size > limit:
            raise CorruptData(f"{self.where(digest)} has {size} bytes; a small document has at most {limit}")
        data = b"".join(self.blob(digest, size))
        if sha256(data) != digest:
            raise ChecksumMismatch(f"{self.where(digest)}: the registry sent bytes with digest {sha256(data)}")
        return data

    def _blob(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        headers = {"range": f"bytes={start}-{end - 1}"}
        with self.client.open("GET", self.url(f"blobs/{digest}"), self.pull, headers=headers) as response:
            if response.status_code == 404:
                raise SourceNotFound(f"{self.where(digest)} does not exist")
            if response.status_code not in (200, 206):
                raise self.client.refused(response, self.where(digest))
            skip = start if response.status_code == 200 else 0  # a server may ignore the range
            if response.status_code == 206:
                sent = _RANGE.fullmatch(response.headers.get("content-range", ""))
                if sent is None or int(sent[1]) != start:
                    raise StoreUnavailable(f"{self.where(digest)}: the registry sent another range than requested")
            left = end - start
            for chunk in response.iter_raw(CHUNK):
                piece, skip = chunk[skip:], max(0, skip - len(chunk))
                if piece := piece[:left]:
                    left -= len(piece)
                    yield piece
                if not left:
                    return
