"""Read layers: list their files and read these, verified against a digest."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock

from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.oci import tars
from trainjob.data.stores.oci.gzips import Gunzip
from trainjob.data.stores.oci.payloads import limited
from trainjob.data.stores.oci.repository import Repository
from trainjob.data.stores.oci.tars import Member, Reader
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, SourceNotFound

# Media types of OCI images (base layers may be "nondistributable"), Docker images (base layers: "foreign") and models.
_FILES = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.|docker\.image\.rootfs\.|cncf\.model\.[a-z.]+\.v1\.(?!config))(.*)"
)
_FORM = re.compile(r"(?:(?:nondistributable\.)?v1\.|(?:foreign\.)?diff\.)?(?:(raw|tar)|tar[+.](gzip))")
_READ_COMPLETELY = 4 * CHUNK  # layers up to this size are read completely, before their content is known
_STRETCH = 4 * CHUNK  # bytes of a layer, read by one request for the small files in it
_SMALL = _STRETCH // 16  # the files that are copied at the same time are in one or two stretches
_STRETCHES = 6  # cached: at least one for each of five kinds of files, which are copied in turn


@dataclass(frozen=True)
class _Checked:
    """A file of a layer that was read completely."""

    offset: int
    size: int
    sha256: str


class Stretches:
    """A cache of the stretches of an image's layers that were read last. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def get(self, digest: str, number: int, read: Callable[[], Iterator[bytes]]) -> bytes:
        """Get a stretch of a layer. If another thread is reading it, wait for that thread's result or error."""
        key = (digest, number)
        with self._lock:
            known = self._kept.get(key)
            future: Future[bytes] = known or Future()
            self._kept[key] = future
            self._kept.move_to_end(key)
            if len(self._kept) > _STRETCHES:
                self._kept.popitem(last=False)
        if known is None:
            try:
                future.set_result(b"".join(read()))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(key, None)
                future.set_exception(error)
                raise
        return future.result()


class LayerBlob:
    """One layer of an image or artifact. Safe for several threads.

    Args:
        repository: The repository of the layer.
        digest: Digest of the blob.
        size: Size of the blob.
        form: ``raw`` (the blob is a file), ``tar`` or ``gzip`` (a compressed tar).
        stretches: Cache for all layers of the image.
    """

    def __init__(self, repository: Repository, digest: str, size: int, form: str, stretches: Stretches) -> None:
        self._repository, self._stretches = repository, stretches
        self.digest, self.size, self.form = digest, size, form
        self.where = repository.where(digest)
        self._gunzip = Gunzip(self._packed, self.where)
        self._lock = Lock()
        self._checked: dict[str, _Checked] | None = None
        self._members: list[Member] | None = None

    def members(self, *, small: bool = False) -> list[Member]:
        """List the entries of the layer. Of a plain tar only the headers are read, of a compressed one everything.

        Args:
            small: All files are known to be small, so that skipping between headers saves nothing: the files are
                verified in the same pass.

        Raises:
            CorruptData: The layer is not a valid archive.
            UnsafePath: A path could be written outside the target.
        """
        with self._lock:
            if self._members is None:
                if self.form == "tar" and self.size > _READ_COMPLETELY and not small:
                    self._members = list(tars.members(Reader(self._packed(0), self.where, self._packed)))
                else:
                    self._check()
            return self._members or []

    def raw(self, start: int, length: int) -> Iterator[bytes]:
        """Read bytes of a layer that is a file itself; verified if all are requested."""
        chunks = self._repository.blob(self.digest, self.size, start=start, length=length)
        complete = start == 0 and length == self.size
        return self._verified(chunks, self.digest.removeprefix("sha256:")) if complete else chunks

    def only(self, name: str, size: int) -> Iterator[bytes]:
        """Read the only file of a plain tar, in one pass that verifies the complete layer.

        Raises:
            ChecksumMismatch: The layer does not match its digest.
            CorruptData: The layer contains something other than that file.
        """
        chunks = self._verified(self._repository.blob(self.digest, self.size), self.digest.removeprefix("sha256:"))
        reader = Reader(chunks, self.where)
        found = False
        for member in tars.members(reader):
            if member.kind == "directory":
                continue
            if found or (member.path, member.kind, member.size) != (name, "file", size):
                raise CorruptData(f"{self.where} contains {member.path!a}, but its manifest lists {name!a} only")
            found = True
            yield from reader.take(size)
        reader.drain()
        if not found:
            raise CorruptData(f"{self.where} does not contain {name!a}, which its manifest lists")

    def file(self, name: str, start: int, length: int) -> Iterator[bytes]:
        """Read bytes of a file in an archive of several; the complete layer is verified before the first byte."""
        with self._lock:
            if self._checked is None:
                self._check()
            checked = (self._checked or {}).get(name)
        if checked is None:
            raise SourceNotFound(f"{self.where} does not contain {name!a}")
        read = self._content if checked.size > _SMALL else self._cached
        chunks = read(checked.offset + start, length)
        return self._verified(chunks, checked.sha256) if start == 0 and length == checked.size else chunks

    def offset(self, name: str) -> int:
        """The offset of a file's content in the archive."""
        for member in self.members():
            if member.path == name and member.kind == "file":
                return member.offset
        raise SourceNotFound(f"{self.where} does not contain {name!a}")

    def part(self, offset: int, length: int) -> Iterator[bytes]:
        """Read bytes of a plain tar, without verification."""
        return self._repository.blob(self.digest, self.size, start=offset, length=length)

    def _content(self, start: int, length: int) -> Iterator[bytes]:
        """Read bytes of the decompressed archive."""
        return limited(self._gunzip.read(start) if self.form == "gzip" else self._packed(start, length), length)

    def _cached(self, start: int, length: int) -> Iterator[bytes]:
        """Like `_content` for a small file, by cached stretches: one request per small file takes far longer."""
        end = start + length
        while start < end:
            number, at = divmod(start, _STRETCH)
            read = partial(self._content, number * _STRETCH, _STRETCH)
            piece = self._stretches.get(self.digest, number, read)[at : at + end - start]
            if not piece:
                raise CorruptData(f"{self.where} is truncated inside a file")
            start += len(piece)
            yield piece

    def _packed(self, start: int, length: int | None = None) -> Iterator[bytes]:
        """Read bytes of the blob."""
        return self._repository.blob(self.digest, self.size, start=start, length=length)

    def _check(self) -> None:
        """Read everything once: verify the digest of the layer, and compute that of each file."""
        packed = self._packed(0)
        data = b""
        if self.form == "tar" and self.size <= _STRETCH:
            data = b"".join(packed)
            packed = iter((data,))
        stream = self._verified(packed, self.digest.removeprefix("sha256:"))
        reader = Reader(self._gunzip.read(0, stream) if self.form == "gzip" else stream, self.where)
        found, files = [], {}
        for member in tars.members(reader):
            found.append(member)
            if member.kind == "file":
                total = hashlib.sha256()
                for chunk in reader.take(member.size):
                    total.update(chunk)
                files[member.path] = _Checked(member.offset, member.size, total.hexdigest())
        reader.drain()
        self._members, self._checked = found, files
        if data:
            self._stretches.get(self.digest, 0, partial(iter, (data,)))

    def _verified(self, chunks: Iterator[bytes], sha256: str) -> Iterator[bytes]:
        total = hashlib.sha256()
        for chunk in chunks:
            total.update(chunk)
            yield chunk
        if total.hexdigest() != sha256:
            raise ChecksumMismatch(
                f"{self.where}: the registry sent bytes with SHA-256 {total.hexdigest()}, not {sha256}"
            )


def form_of(media_type: str, where: str) -> str | None:
    """The form of a layer: ``raw``, ``tar`` or ``gzip``; None if it has no files.

    Raises:
        ConfigurationError: The layer is compressed or encrypted in an unsupported way.
    """
    files = _FILES.fullmatch(media_type)
    if files is None:
        return None
    form = _FORM.fullmatch(files[1])
    if form is None:
        raise ConfigurationError(
            f"{where} has layers of the unsupported type {media_type}; build it again with gzip or uncompressed layers"
        )
    return form[1] or form[2]
