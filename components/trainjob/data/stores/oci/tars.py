"""Tar archives: written reproducibly (same files, same bytes), and read as untrusted input."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainjob.data.locations import safe_path
from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.oci.payloads import Data, Joined, Payload
from trainjob.errors import CorruptData, UnsafePath

BLOCK = 512
END = bytes(2 * BLOCK)
_HEADER_LIMIT = 1024 * 1024  # bytes of one extended header; a path has at most 4096
_MEMBERS_LIMIT = 1_000_000
_JUMP = CHUNK  # longer gaps are skipped by a new request instead of reading and discarding
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)


def header(path: str, size: int) -> bytes:
    """The header of a file: mode 0644, owner and times 0, so that it depends on path and size only."""
    info = tarfile.TarInfo(path)
    info.size, info.mode, info.mtime = size, 0o644, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size: int) -> bytes:
    """The zeros that pad the last block of a file."""
    return bytes(-size % BLOCK)


def archive(files: Sequence[tuple[str, Payload]]) -> Payload:
    """Make a tar of these files, in this order."""
    parts: list[Payload] = []
    for path, file in files:
        parts += [Data(header(path, file.size)), file, Data(padding(file.size))]
    return Joined([*parts, Data(END)])


@dataclass(frozen=True)
class Member:
    """One entry of an archive.

    Attributes:
        path: As in the archive, without leading ``./`` and trailing slashes; ``""`` is the root.
        kind: ``file``, ``directory``, ``symlink``, ``link`` or ``special`` (a device, a pipe, a sparse file).
        size: Bytes of content.
        offset: Offset of its content in the archive.
        target: Target of a link.
    """

    path: str
    kind: str
    size: int
    offset: int
    target: str = ""


class Reader:
    """Reads bytes in order, and skips forward where that is cheap.

    Args:
        chunks: The bytes from the beginning on.
        where: Name for errors.
        reopen: Returns the bytes from a position on, if possible.
    """

    def __init__(
        self, chunks: Iterator[bytes], where: str, reopen: Callable[[int], Iterator[bytes]] | None = None
    ) -> None:
        self._chunks, self._reopen = chunks, reopen
        self.where = where
        self._rest = b""
        self.at = 0

    def read(self, count: int) -> bytes:
        """Read exactly ``count`` bytes."""
        return b"".join(self.take(count))

    def take(self, count: int) -> Iterator[bytes]:
        """Read exactly ``count`` bytes, in pieces.

        Raises:
            CorruptData: The archive ends earlier.
        """
        while count > 0:
            chunk = self._rest or next(self._chunks, None)
            if chunk is None:
                raise CorruptData(f"{self.where} is a truncated archive")
            piece, self._rest = chunk[:count], chunk[count:]
            count -= len(piece)
            self.at += len(piece)
            if piece:
                yield piece

    def seek(self, position: int) -> None:
        """Skip forward to ``position``."""
        if self._reopen is not None and position - self.at > len(self._rest) + _JUMP:
            self._chunks, self._rest, self.at = self._reopen(position), b"", position
            return
        for _ in self.take(position - self.at):
            pass

    def ended(self) -> bool:
        """Whether all bytes are read."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            self._rest = chunk
        return False

    def drain(self) -> None:
        """Read to the end."""
        self._rest = b""
        for _ in self._chunks:
            pass


def members(reader: Reader) -> Iterator[Member]:
    """List the entries of an archive. Content that the caller does not take from ``reader`` is skipped.

    Raises:
        CorruptData: The archive is invalid.
        UnsafePath: An entry has an absolute path, or one with ``..``.
    """
    extended: dict[str, str] = {}
    for _ in range(_MEMBERS_LIMIT):
        info = _header(reader)
        if info is None:
            return
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise CorruptData(
                f"{reader.where} contains a sparse file, which is not supported; build it again without sparse files"
            )
        if info.type in _LONG or info.type in _EXTENDED:
            if info.size > _HEADER_LIMIT:
                raise CorruptData(f"{reader.where} has an extended header of {info.size} bytes")
            data = reader.read(info.size)
            reader.seek(reader.at + -info.size % BLOCK)
            if info.type in _LONG:
                extended[_LONG[info.type]] = _text(data.partition(b"\0")[0], reader)
            elif info.type != tarfile.XGLTYPE:
                extended |= _records(data, reader)
            continue
        member = _member(info, extended, reader)
        extended = {}
        yield member
        end = member.offset + member.size
        reader.seek(end + -end % BLOCK)
    raise CorruptData(f"{reader.where} has more than {_MEMBERS_LIMIT} entries")


def _header(reader: Reader) -> tarfile.TarInfo | None:
    if reader.ended():
        return None  # some tools omit the two empty blocks at the end
    block = reader.read(BLOCK)
    if not any(block):
        return None
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        raise CorruptData(f"{reader.where} has an invalid header in its archive") from None
    if info.size < 0:
        raise CorruptData(f"{reader.where} has a file of negative size in its archive")
    return info


def _member(info: tarfile.TarInfo, extended: dict[str, str], reader: Reader) -> Member:
    written = extended.get("path", info.name)
    if written.startswith("/"):
        raise UnsafePath(f"{reader.where} contains {written!a}, an absolute path")
    path = written.rstrip("/")
    while path.startswith("./"):
        path = path[2:].lstrip("/")
    path = "" if path == "." else path
    if path:
        try:
            safe_path(path)
        except UnsafePath as error:
            raise UnsafePath(f"{reader.where} contains an {error}") from None
    size = info.size
    if "size" in extended:
        if not extended["size"].isdecimal() or len(extended["size"]) > 18:
            raise CorruptData(f"{reader.where} has an invalid size in its archive")
        size = int(extended["size"])
    kind = _kind(info, extended)
    # Links and directories have no content, whatever their size says (tarfile and Go's archive/tar agree).
    content = size if info.type in _REGULAR or info.type not in tarfile.SUPPORTED_TYPES else 0
    return Member(path, kind, content, reader.at, extended.get("linkpath", info.linkname))


def _kind(info: tarfile.TarInfo, extended: dict[str, str]) -> str:
    if any(key.startswith("GNU.sparse.") for key in extended):
        return "special"
    if info.type in _REGULAR:
        # In archives from before POSIX a directory is a file with a trailing slash; frombuf converts it.
        return "file"
    return {tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "link"}.get(info.type, "special")


def _records(data: bytes, reader: Reader) -> dict[str, str]:
    """The records of a pax header, each a length, a space, ``keyword=value`` and a line feed."""
    found = {}
    while data:
        digits, space, _ = data[:20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record, data = data[:length], data[length:]
        key, equals, value = record[len(digits) + 1 :].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise CorruptData(f"{reader.where} has an invalid extended header in its archive")
        found[_text(key, reader)] = _text(value[:-1], reader)
    return found


def _text(data: bytes, reader: Reader) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UnsafePath(f"{reader.where} contains a name that is not valid UTF-8") from None
