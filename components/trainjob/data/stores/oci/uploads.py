"""Upload blobs: small ones by one request, others in parts that can be resumed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import httpx

from trainjob._support import retrying
from trainjob._support.retrying import Backoff
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.oci.client import FINISH, Interrupted, pause
from trainjob.data.stores.oci.payloads import Hashing, Once, Payload
from trainjob.data.stores.oci.repository import Repository
from trainjob.errors import CorruptData

PART = 64 * CHUNK
"""Bytes of one PATCH. A part is not held in memory: after a cut it is read again. Proxies in front of registries often
limit requests to about 100 MB."""
SINGLE = 4 * CHUNK
"""Blobs of up to so many bytes are uploaded by POST and PUT, without PATCH."""

_ACKNOWLEDGED = re.compile(r"(?:bytes=)?0-(\d+)")


class _Lost(Exception):
    """The registry has lost an upload, which must be started again."""


def push(repository: Repository, payload: Payload, digest: str, origins: tuple[str, ...] = ()) -> None:
    """Upload a blob of known digest, unless the registry has it.

    Args:
        repository: The target.
        payload: Content of the blob.
        digest: Its digest, which the registry verifies.
        origins: Repositories of the same registry that may have it.
    """
    if not present(repository, digest, origins):
        _upload(repository, payload, digest, None, None)


def present(repository: Repository, digest: str, origins: tuple[str, ...] = ()) -> bool:
    """Whether a blob exists, or could be mounted from one of ``origins``."""
    return repository.has_blob(digest) or any(repository.mount(digest, origin) for origin in origins)


def push_once(repository: Repository, payload: Payload, once: Once) -> str:
    """Upload a blob whose digest is known only at the end; returns the digest.

    Args:
        repository: The target.
        payload: Content of the blob.
        once: The part of the payload that is verified at its end.
    """
    hashing = Hashing(payload)
    _upload(repository, hashing, None, hashing, once)
    return hashing.digest


def _upload(
    repository: Repository, payload: Payload, digest: str | None, hashing: Hashing | None, once: Once | None
) -> None:
    where = repository.where(digest) if digest else f"oci://{repository.client.host}/{repository.name}"
    # Without `seconds`, since a registry is silent for minutes while it computes the digest of a large blob. With
    # `total`, since each cut can cost what was sent before it.
    backoff = retrying.TRANSFER(seconds=math.inf, total=30)
    while True:
        try:
            session = _Session(repository, where, backoff)
            if digest is not None and payload.size <= SINGLE:
                session.finish(digest, payload)
                return
            session.send(payload)
            if once is not None:
                once.finish()
            session.finish(digest or (hashing.digest if hashing is not None else ""), None)
        except (_Lost, Interrupted) as error:
            pause(backoff, where, error if isinstance(error, Interrupted) else Interrupted(str(error)))
        else:
            return


class _Session:
    """One open upload of a registry."""

    def __init__(self, repository: Repository, where: str, backoff: Backoff) -> None:
        self._repository, self._client = repository, repository.client
        self._where, self._backoff = where, backoff
        url = repository.url("blobs/uploads/")
        with self._client.open("POST", url, repository.push, content=b"") as response:
            if response.status_code != 202:
                raise self._client.refused(response, repository.url(""))
            self._moved(response)
            self._least = _number(response.headers.get("oci-chunk-min-length"))

    def send(self, payload: Payload) -> None:
        """Upload all parts."""
        at = 0
        while at < payload.size:
            end = min(payload.size, at + max(PART, self._least))
            try:
                at = self._part(payload.open(at, end - at), at, end)
                self._backoff.success()
            except Interrupted as error:
                pause(self._backoff, self._where, error)
                at = self._acknowledged(end)

    def finish(self, digest: str, payload: Payload | None) -> None:
        """Close the upload; the request contains all bytes of a small blob.

        Raises:
            _Lost: The registry has lost the upload.
        """
        url = str(httpx.URL(self._url).copy_merge_params({"digest": digest}))
        data = b"".join(payload.open(0, payload.size)) if payload is not None else b""
        headers = {"content-type": "application/octet-stream", "content-length": str(len(data))}
        # The registry verifies a small blob at once.
        read = FINISH if payload is None else None
        try:
            with self._client.open(
                "PUT", url, self._repository.push, headers=headers, content=data, read=read
            ) as response:
                if response.status_code in (201, 204):
                    return
                if response.status_code == 400 and "DIGEST_INVALID" in (reason := self._client.reason(response)):
                    raise CorruptData(
                        f"{self._repository.where(digest)}: the content changed during the upload: {reason}"
                    )
                if response.status_code not in (400, 404, 416):
                    raise self._client.refused(response, self._repository.where(digest))
                lost = f"the registry replied {self._client.reason(response)}"
        except Interrupted:
            # Perhaps only the reply was lost.
            if self._repository.has_blob(digest):
                return
            raise
        if not self._repository.has_blob(digest):
            raise _Lost(lost)

    def _part(self, content: Iterator[bytes], at: int, end: int) -> int:
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(end - at),
            "content-range": f"{at}-{end - 1}",
        }
        with self._client.open("PATCH", self._url, self._repository.push, headers=headers, content=content) as response:
            if response.status_code == 416:
                raise Interrupted("the registry expects another part of the blob")
            if response.status_code in (400, 404):
                raise _Lost(f"the registry replied {self._client.reason(response)}")
            if response.status_code not in (201, 202, 204):
                raise self._client.refused(response, self._repository.url(""))
            self._moved(response)
            return end

    def _acknowledged(self, sent: int) -> int:
        """Number of bytes that the registry has, at most ``sent``."""
        while True:
            try:
                with self._client.open("GET", self._url, self._repository.push) as response:
                    if response.status_code not in (200, 204):
                        # distribution up to 3.0 drops an upload if it has more bytes than it has acknowledged.
                        raise _Lost(
                            f"the upload cannot be resumed: the registry replied {self._client.reason(response)}"
                        )
                    self._moved(response)
                    range_ = _ACKNOWLEDGED.fullmatch(response.headers.get("range", ""))
                    # "0-0" is one byte or none. A part is never one byte long, so it is none.
                    held = int(range_[1]) + 1 if range_ is not None and int(range_[1]) else 0
                    if held > sent:
                        raise _Lost(f"the registry has {held} bytes of an upload of which {sent} were sent")
                    return held
            except Interrupted as error:
                pause(self._backoff, self._where, error)

    def _moved(self, response: httpx.Response) -> None:
        """Keep the URL of the next request, which each reply has."""
        if location := self._client.location(response):
            self._url = location


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
