"""Layers as they are read: what files they hold, and the bytes of these, each checked against a digest."""

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

# Of images (of OCI, whose base layers may be "nondistributable", and of Docker, where these are "foreign") and models.
_FILES = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.|docker\.image\.rootfs\.|cncf\.model\.[a-z.]+\.v1\.(?!config))(.*)"
)
_FORM = re.compile(r"(?:(?:nondistributable\.)?v1\.|(?:foreign\.)?diff\.)?(?:(raw|tar)|tar[+.](gzip))")
_AT_ONCE = 4 * CHUNK  # layers up to this size are read whole, before it is known what they hold
_STRETCH = 4 * CHUNK  # of a layer, read by one request for the small files that lie beside each other in it
_SMALL = _STRETCH // 16  # as many files as are copied at once lie in one or two stretches
_STRETCHES = 6  # that are kept: of each of five kinds of files, as they are copied in turns, one


@dataclass(frozen=True)
class _Checked:
    """A file of a layer of which all bytes were seen."""

    offset: int
    size: int
    sha256: str


class Stretches:
    """What was read last of the layers of an image. Safe to be used by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def get(self, digest: str, number: int, read: Callable[[], Iterator[bytes]]) -> bytes:
        """A stretch of a layer. Who asks while another thread reads it waits, and gets its error if there is one."""
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
    """One layer of an image or artifact. Safe to be used by several threads.

    Args:
        repository: Where it is.
        digest: Of the blob.
        size: Of the blob.
        form: ``raw`` (the blob is a file), ``tar`` or ``gzip`` (a compressed tar).
        stretches: Those of all layers of the image.
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
        """What it holds. Of a plain tar only the headers are read, of a compressed one everything.

        Args:
            small: All its files are known to be small, so that nothing can be left out between the headers: they are
                checked in the same pass.

        Raises:
            CorruptData: It is no sound archive.
            UnsafePath: A path in it could lead out of where it is unpacked.
        """
        with self._lock:
            if self._members is None:
                if self.form == "tar" and self.size > _AT_ONCE and not small:
                    self._members = list(tars.members(Reader(self._packed(0), self.where, self._packed)))
                else:
                    self._check()
            return self._members or []

    def raw(self, start: int, length: int) -> Iterator[bytes]:
        """Bytes of a layer that is a file itself; checked where all are asked for."""
        chunks = self._repository.blob(self.digest, self.size, start=start, length=length)
        whole = start == 0 and length == self.size
        return self._verified(chunks, self.digest.removeprefix("sha256:")) if whole else chunks

    def only(self, name: str, size: int) -> Iterator[bytes]:
        """All of the one file of a plain tar, in one pass that checks the whole layer.

        Raises:
            ChecksumMismatch: The layer is not what its digest says.
            CorruptData: It holds something else than that file.
        """
        chunks = self._verified(self._repository.blob(self.digest, self.size), self.digest.removeprefix("sha256:"))
        reader = Reader(chunks, self.where)
        found = False
        for member in tars.members(reader):
            if member.kind == "directory":
                continue
            if found or (member.path, member.kind, member.size) != (name, "file", size):
                raise CorruptData(f"{self.where} holds {member.path!a}, where its manifest says {name!a} only")
            found = True
            yield from reader.take(size)
        reader.drain()
        if not found:
            raise CorruptData(f"{self.where} does not hold {name!a}, which its manifest names")

    def file(self, name: str, start: int, length: int) -> Iterator[bytes]:
        """Bytes of a file of an archive of several; the whole layer is checked before the first is given."""
        with self._lock:
            if self._checked is None:
                self._check()
            checked = (self._checked or {}).get(name)
        if checked is None:
            raise SourceNotFound(f"{self.where} holds no {name!a}")
        read = self._content if checked.size > _SMALL else self._beside
        chunks = read(checked.offset + start, length)
        return self._verified(chunks, checked.sha256) if start == 0 and length == checked.size else chunks

    def offset(self, name: str) -> int:
        """Where the content of a file begins in the archive."""
        for member in self.members():
            if member.path == name and member.kind == "file":
                return member.offset
        raise SourceNotFound(f"{self.where} holds no {name!a}")

    def part(self, offset: int, length: int) -> Iterator[bytes]:
        """Bytes of a plain tar, not checked."""
        return self._repository.blob(self.digest, self.size, start=offset, length=length)

    def _content(self, start: int, length: int) -> Iterator[bytes]:
        """Bytes of the archive, unpacked."""
        return limited(self._gunzip.read(start) if self.form == "gzip" else self._packed(start, length), length)

    def _beside(self, start: int, length: int) -> Iterator[bytes]:
        """The same of a small file, by stretches that hold its neighbors too: a request for each takes far longer."""
        end = start + length
        while start < end:
            number, at = divmod(start, _STRETCH)
            read = partial(self._content, number * _STRETCH, _STRETCH)
            piece = self._stretches.get(self.digest, number, read)[at : at + end - start]
            if not piece:
                raise CorruptData(f"{self.where} ends in the middle of a file")
            start += len(piece)
            yield piece

    def _packed(self, start: int, length: int | None = None) -> Iterator[bytes]:
        """Bytes of the blob."""
        return self._repository.blob(self.digest, self.size, start=start, length=length)

    def _check(self) -> None:
        """Read everything once: the digest of the layer, and that of each file in it."""
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
    """``raw``, ``tar`` or ``gzip``; None for what is no layer of files.

    Raises:
        ConfigurationError: It is one, but compressed or encrypted in a way that cannot be read here.
    """
    files = _FILES.fullmatch(media_type)
    if files is None:
        return None
    form = _FORM.fullmatch(files[1])
    if form is None:
        raise ConfigurationError(f"{where} has layers of type {media_type}; pack it again with gzip or uncompressed")
    return form[1] or form[2]
