"""``MANIFEST.json``: the files of a dataset or model, and the mark that it is complete.

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

from trainjob._support.foreign import LARGE, json_of
from trainjob._support.formats import wrong_format
from trainjob.data.locations import safe_path
from trainjob.errors import ConfigurationError, CorruptData, UnsafePath

NAME = "MANIFEST.json"
"""The commit marker, at the root of a dataset or model."""
PROVENANCE = "provenance.json"
"""Provenance of a model, for programs."""
CARD = "MODEL_CARD.md"
"""Provenance of a model, for people."""
SIGNATURE = "model.sig"
"""Signature, see `trainjob.data.signing`."""
EVALUATION = "evaluation.json"
"""Evaluation report of a model, and the decision of its gate."""
TEST_RESULT = "evaluation.intoto.json"
"""The decision as an in-toto statement."""
SIDECARS = (PROVENANCE, CARD, EVALUATION, TEST_RESULT, SIGNATURE)
"""Files beside a manifest that does not list them: they describe the content and are not part of it."""
WORK = ".trainjob"
"""Working directory of a transfer that is running or was killed. A finished target does not have it."""
MARK = f"{WORK}/writing.json"
"""Lists the files that this transfer and earlier ones that were killed have written or will write."""

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
        origin: Fingerprint of the source's listing (names, sizes, entity tags); empty if the source has no entity tags.
            It reveals whether the source has changed, without reading it. Not part of the digest.
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
        # `default` converts one file after the other: dictionaries of all files would take more memory than their text.
        text = json.dumps(value, default=_value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode() + b"\n"


def build(files: Iterable[File], origin: str = "") -> ContentManifest:
    """Make a manifest of ``files``, sorted and checked.

    Raises:
        UnsafePath: A path is not allowed, see `check_paths`.
    """
    ordered = tuple(sorted(files, key=lambda file: in_order(file.path)))
    check_paths(file.path for file in ordered)
    return ContentManifest(ordered, origin)


def in_order(path: str) -> str:
    """Sort key of paths: segment by segment, since no character of a path sorts before this one."""
    return path.replace("/", "\0")


def matches(manifest: ContentManifest, digest: str) -> bool:
    """Whether ``digest`` is the root digest of the content or, for a single file, the digest of the file."""
    hexadecimal = digest.removeprefix("sha256:")
    single = manifest.files[0].sha256 if len(manifest.files) == 1 else ""
    return hexadecimal in (manifest.digest.removeprefix("sha256:"), single)


def check_digest(digest: str | None) -> str | None:
    """Return ``digest`` in lower case; None if it is empty.

    Raises:
        ConfigurationError: It is neither 64 hexadecimal digits nor ``sha256:`` and 64 digits.
    """
    if not digest:
        return None
    text = digest.strip().lower()
    hexadecimal = text.removeprefix("sha256:")
    if len(hexadecimal) != 64 or set(hexadecimal) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{digest!a} is not a digest: write the SHA-256 of the only file as 64 hexadecimal digits,"
            " or sha256:<root digest> of a directory"
        )
    return text


def check_paths(paths: Iterable[str]) -> None:
    """Check that files with these relative paths can be written together, and only below their root.

    Raises:
        UnsafePath: A path leaves its root, is reserved by trainjob, or is both a file and a directory.
    """
    seen = set(paths)
    for path in seen:
        safe_path(path)
        if path.split("/")[0] in (NAME, WORK):
            raise UnsafePath(f"{path!r} is a name that trainjob reserves; rename the file or exclude it")
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in seen:
                raise UnsafePath(f"{parent!r} is both a file and a directory (of {path!r}); exclude one of them")


def longest(paths: Iterable[str]) -> int:
    """Upper limit of a manifest's size for these files, with a margin for a manifest that a person indented."""
    return 2**20 + sum(500 + 12 * len(path) for path in paths)


def parse(data: bytes, where: str) -> ContentManifest:
    """Read a ``MANIFEST.json``; ``where`` is its location for the error message.

    Raises:
        CorruptData: The data is not a manifest of trainjob, or is inconsistent.
        UnsafePath: It lists a path that leaves its root.
    """
    try:
        value = json_of(data, where, LARGE)
        form = value["format"]
        if form != _FORMAT:
            name, _, number = str(form).rpartition("/v")
            known = int(_FORMAT.rpartition("/v")[2])
            if name == _FORMAT.rpartition("/v")[0] and re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII):
                raise CorruptData(wrong_format(where, int(number), known))
            raise CorruptData(f"{where} has format {form!a}; this version of trainjob supports {_FORMAT}")
        files = [_file(item) for item in value["files"]]
        manifest = build(files, origin=str(value.get("origin", "")))
        consistent = (
            len({file.path for file in files}) == len(files)
            and manifest.digest == value["digest"]
            and manifest.size == value["size"]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptData(
            f"{where} is not a manifest that trainjob wrote; if it belongs to the data, exclude {NAME!r}"
        ) from None
    if not consistent:
        raise CorruptData(f"{where} was modified: its digest or size does not match its list of files")
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
