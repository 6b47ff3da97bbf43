"""``MANIFEST.json``: what a dataset or model consists of, and the mark that it is whole.

It is written last, so a directory or prefix that has one is complete. Its root digest is that of OpenSSF Model Signing
(SHA-256 over the SHA-256 digests of the files, concatenated in path order, where paths are compared segment by
segment), so a signature made by ``model-signing`` over the same files carries the same digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from trainjob.data import strict
from trainjob.data.locations import safe_path
from trainjob.errors import ConfigurationError, CorruptData, UnsafePath

NAME = "MANIFEST.json"
"""The commit marker, at the root of a dataset or model."""
PROVENANCE = "provenance.json"
"""Who made a model, of what, for programs."""
CARD = "MODEL_CARD.md"
"""The same for people."""
SIGNATURE = "model.sig"
"""Who vouches for it, see `trainjob.data.signing`."""
SIDECARS = (PROVENANCE, CARD, SIGNATURE)
"""Files beside a manifest that does not name them: they tell about the content and are no part of it."""
WORK = ".trainjob"
"""Directory of a transfer that is under way or was killed; there is none in a finished target."""
MARK = f"{WORK}/writing.json"
"""Lists the files that the transfer, and those before it that were killed, have written or are about to."""

_FORMAT = "trainjob.content/v1"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True, slots=True)
class File:
    """One file: path relative to the root with ``/``, size in bytes, lower-case hexadecimal SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ContentManifest:
    """The files of a dataset or model.

    Attributes:
        files: In path order.
        origin: Fingerprint of the listing (names, sizes, entity tags) that the content was copied from, empty where
            the source gave no entity tags. Tells an unchanged source from a changed one without reading it; no part
            of the digest.
    """

    files: tuple[File, ...]
    origin: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @cached_property
    def digest(self) -> str:
        """``sha256:<hex>``, the root digest of OpenSSF Model Signing."""
        return "sha256:" + hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in self.files)).hexdigest()

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no white space, UTF-8, one line."""
        value = {
            "digest": self.digest,
            "files": self.files,
            "format": _FORMAT,
            "origin": self.origin,
            "size": self.size,
        }
        # By `default`, one file after the other: as dictionaries, all of them would take more memory than their text.
        text = json.dumps(value, default=_value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode() + b"\n"


def build(files: Iterable[File], origin: str = "") -> ContentManifest:
    """A manifest of ``files``, put in order and checked.

    Raises:
        UnsafePath: See `check_paths`.
    """
    ordered = tuple(sorted(files, key=lambda file: in_order(file.path)))
    check_paths(file.path for file in ordered)
    return ContentManifest(ordered, origin)


def in_order(path: str) -> str:
    """What paths are sorted by: segment by segment, since no path has a character that comes before this one."""
    return path.replace("/", "\0")


def matches(manifest: ContentManifest, digest: str) -> bool:
    """Whether the content has this digest: its root digest or, for a single file, that of the file."""
    hexadecimal = digest.removeprefix("sha256:")
    single = manifest.files[0].sha256 if len(manifest.files) == 1 else ""
    return hexadecimal in (manifest.digest.removeprefix("sha256:"), single)


def check_digest(digest: str | None) -> str | None:
    """``digest`` in lower case; None for none.

    Raises:
        ConfigurationError: It is neither 64 hexadecimal digits nor ``sha256:`` and 64 of them.
    """
    if not digest:
        return None
    text = digest.strip().lower()
    hexadecimal = text.removeprefix("sha256:")
    if len(hexadecimal) != 64 or set(hexadecimal) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{digest!a} is not a digest: give the SHA-256 of the one file as 64 hexadecimal digits,"
            " or sha256:<root digest> of a directory"
        )
    return text


def check_paths(paths: Iterable[str]) -> None:
    """Check that files of these relative paths can be written beside each other, and nowhere else.

    Raises:
        UnsafePath: A path would leave its root, takes the place of our own files, or is both a file and a directory.
    """
    seen = set(paths)
    for path in seen:
        safe_path(path)
        if path.split("/")[0] in (NAME, WORK):
            raise UnsafePath(f"{path!r} is a name that trainjob keeps for itself; rename the file or exclude it")
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in seen:
                raise UnsafePath(f"{parent!r} is both a file and a directory (of {path!r}); exclude one of them")


def longest(paths: Iterable[str]) -> int:
    """Bytes that a manifest of these files has at most, with some to spare for one that a person has indented."""
    return 2**20 + sum(500 + 12 * len(path) for path in paths)


def parse(data: bytes, where: str) -> ContentManifest:
    """Read a ``MANIFEST.json``; ``where`` is its location for the error message.

    Raises:
        CorruptData: Not a manifest of this program, or not consistent in itself.
        UnsafePath: It names a path that would leave its root.
    """
    try:
        value = strict.loads(data)
        form = value["format"]
        if form != _FORMAT:
            raise CorruptData(f"{where} has format {form!a}; this version of trainjob reads {_FORMAT}")
        files = [_file(item) for item in value["files"]]
        manifest = build(files, origin=str(value.get("origin", "")))
        consistent = (
            len({file.path for file in files}) == len(files)
            and manifest.digest == value["digest"]
            and manifest.size == value["size"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptData(
            f"{where} is not a manifest that trainjob wrote; if it belongs to the data, exclude {NAME!r}"
        ) from None
    if not consistent:
        raise CorruptData(f"{where} was altered: its digest or size does not fit its list of files")
    return manifest


def _value(file: File) -> dict[str, object]:
    return {"path": file.path, "sha256": file.sha256, "size": file.size}


def _file(item: dict[str, object]) -> File:
    path, size, sha256 = item["path"], item["size"], item["sha256"]
    if not isinstance(path, str) or not isinstance(sha256, str) or not _HEX.fullmatch(sha256):
        raise ValueError("path or sha256")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError("size")
    return File(path, size, sha256)
