"""Read images and model artifacts, of any tool, as directories of files."""

from __future__ import annotations

import platform
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from trainjob._support.foreign import Unreadable, mapping_of
from trainjob.data.locations import safe_path
from trainjob.data.stores.oci import manifests
from trainjob.data.stores.oci.layers import LayerBlob, Stretches, form_of
from trainjob.data.stores.oci.manifests import Layer
from trainjob.data.stores.oci.reference import check_digest
from trainjob.data.stores.oci.repository import DOCKER_INDEX, INDEX, Manifest, Repository
from trainjob.data.stores.oci.tars import Member
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, UnsafePath

_OPAQUE = ".wh..wh..opq"  # image-spec, "Whiteouts"
_LINKS = 8  # links in a row
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Placed:
    """The place of a file in an image.

    Attributes:
        blob: Its layer.
        name: Path in the layer.
        size: Bytes.
        alone: The layer contains nothing else.
        target: If the file is a link: the file of the image to which it points.
    """

    blob: LayerBlob
    name: str
    size: int
    alone: bool = False
    target: str | None = None


class Image:
    """The files of one manifest.

    Args:
        repository: The repository of the image.
        top: The manifest or index of the tag or digest.
        manifest: The manifest to read.
    """

    def __init__(self, repository: Repository, top: Manifest, manifest: Manifest) -> None:
        self._repository, self.top, self._manifest = repository, top, manifest
        self._where = repository.where(manifest.digest)
        self._annotations = _strings(manifest.value.get("annotations"))
        self._ours = self._annotations.get(manifests.LAYOUT) == manifests.ROOT
        config = _media_type(manifest.value.get("config"))
        model = manifest.value.get("artifactType") == manifests.MODEL or config == manifests.MODEL_CONFIG
        self._is_image = not model
        self._prefix = "" if model and not self._ours else manifests.ROOT
        self._layers = list(self._described())
        self._annotated = {
            path: Placed(blob, manifests.ROOT + path, size, alone=True)
            for blob, notes in self._layers
            if self._ours and blob.form == "tar" and (path := notes.get(manifests.FILEPATH))
            if (size := _size(notes)) is not None
        }
        self._lock = Lock()
        self._files: Mapping[str, Placed] | None = None

    @classmethod
    def load(cls, repository: Repository, name: str) -> Image | None:
        """Load the image of a tag or digest; None if it does not exist.

        Raises:
            CorruptData: The tag or digest is not an image, or its index names a manifest that does not exist.
        """
        top = repository.manifest(name)
        if top is None:
            return None
        if top.media_type not in (INDEX, DOCKER_INDEX):
            return cls(repository, top, top)
        digest = _chosen(top, repository.where(name))
        found = repository.manifest(digest)
        if found is None:
            raise CorruptData(f"{repository.where(name)} names {digest}, which does not exist in the registry")
        return cls(repository, top, found)

    @property
    def layers(self) -> Mapping[str, Layer]:
        """Layers that contain one file each, as trainjob writes them, by the path of the file."""
        return {
            path: Layer(placed.blob.digest, placed.blob.size, manifests.kind_of(path), path, placed.size)
            for path, placed in self._annotated.items()
        }

    @property
    def files(self) -> Mapping[str, Placed]:
        """All files, by their paths.

        Raises:
            CorruptData: A layer is not a valid archive.
            UnsafePath: A layer contains an entry that could be written outside the target.
        """
        with self._lock:
            if self._files is None:
                self._files = self._find()
            return self._files

    def read(self, path: str, start: int, length: int | None) -> Iterator[bytes]:
        """Read bytes of a file. If all are requested, they are verified before the iterator ends.

        Raises:
            SourceNotFound: The file does not exist.
            ChecksumMismatch: The bytes do not match the digest.
        """
        placed = self.placed(path)
        count = max(0, placed.size - start) if length is None else min(length, max(0, placed.size - start))
        if placed.blob.form == "raw":
            return placed.blob.raw(start, count)
        if not placed.alone:
            return placed.blob.file(placed.name, start, count)
        if start == 0 and count == placed.size:
            return placed.blob.only(placed.name, placed.size)
        return placed.blob.part(placed.blob.offset(placed.name) + start, count)

    def placed(self, path: str) -> Placed:
        """Find a file, following links."""
        if path in self._annotated:  # known without reading a layer
            return self._annotated[path]
        try:
            placed = self.files[path]
        except KeyError:
            raise SourceNotFound(f"{self._where} does not contain {path!r}") from None
        return placed if placed.target is None else self.placed(placed.target)

    def _described(self) -> Iterator[tuple[LayerBlob, dict[str, str]]]:
        """The layers with files, and their annotations."""
        layers = self._manifest.value.get("layers")
        if not isinstance(layers, list):
            raise CorruptData(f"{self._where} is neither an image nor a model artifact: its manifest has no layers")
        stretches = Stretches()
        for descriptor in layers:
            if not isinstance(descriptor, dict) or not isinstance(size := descriptor.get("size"), int) or size < 0:
                raise CorruptData(f"{self._where} has a layer without digest or size")
            digest = check_digest(descriptor.get("digest"), self._where)
            annotations = _strings(descriptor.get("annotations"))
            form = form_of(_media_type(descriptor), self._where)
            if form is None and annotations.get(manifests.TITLE):
                form = "raw"  # a file as `oras push` stores it
            if form is not None:
                yield LayerBlob(self._repository, digest, size, form, stretches), annotations

    def _find(self) -> dict[str, Placed]:
        files: dict[str, Placed] = {}
        for blob, notes in self._layers:
            path = notes.get(manifests.FILEPATH) or notes.get(manifests.TITLE, "")
            if blob.form == "raw":
                if not path:
                    raise CorruptData(
                        f"{blob.where} is a file without a name: the annotation {manifests.FILEPATH} is missing"
                    )
                placed = Placed(blob, path, blob.size, alone=True)
                self._add(files, set(), safe_path(path.removeprefix("./")), placed)
            elif (known := self._annotated.get(path)) is not None and known.blob is blob:
                self._add(files, set(), safe_path(path), known)
            else:
                self._unpack(files, blob)
        return {path: self._resolved(path, files) for path in files}

    def _unpack(self, files: dict[str, Placed], blob: LayerBlob) -> None:
        found = blob.members(small=self._ours)
        relevant = [member for member in found if member.kind != "directory"]
        alone = len(relevant) == 1 and blob.form == "tar" and relevant[0].kind == "file"
        own: set[str] = set()
        for member in found:
            if self._is_image and posixpath.basename(member.path).startswith(manifests.WHITEOUT):
                _remove(files, own, *posixpath.split(member.path))
                continue
            path = self._below(member, blob)
            if path is None or member.kind == "directory":
                continue
            if member.kind == "file":
                self._add(files, own, path, Placed(blob, member.path, member.size, alone=alone))
            elif member.kind in ("symlink", "link"):
                self._add(files, own, path, Placed(blob, "", 0, target=self._target(member, path, blob)))
            else:
                raise UnsafePath(f"{blob.where} contains {path!r}, a device or pipe; remove it from the image")

    def _below(self, member: Member, blob: LayerBlob) -> str | None:
        """The path in the model; None for other files of a root file system."""
        if not self._prefix:
            return member.path or None
        if member.path == self._prefix.rstrip("/") and member.kind != "directory":
            raise UnsafePath(f"{blob.where}: /{member.path} is not a directory")
        return member.path.removeprefix(self._prefix) if member.path.startswith(self._prefix) else None

    def _target(self, member: Member, path: str, blob: LayerBlob) -> str:
        """The file of the image to which a link points."""
        if member.target.startswith("/") and self._is_image and member.kind == "symlink":
            target = posixpath.normpath(member.target).lstrip("/")
        elif member.kind == "symlink":
            target = posixpath.normpath(posixpath.join(self._prefix, posixpath.dirname(path), member.target))
        else:  # a hard link: from the root of the archive
            target = posixpath.normpath(member.target)
        if target.startswith(("/", "../")) or target in (".", "..") or not target.startswith(self._prefix):
            raise UnsafePath(f"{blob.where} contains {path!r}, a link that leads out of the model")
        return target.removeprefix(self._prefix)

    def _add(self, files: dict[str, Placed], own: set[str], path: str, placed: Placed) -> None:
        if path in own or (path in files and not self._is_image):
            raise UnsafePath(f"{placed.blob.where} contains {path!r} a second time")
        own.add(path)
        files[path] = placed

    def _resolved(self, path: str, files: Mapping[str, Placed]) -> Placed:
        placed, at = files[path], path
        for _ in range(_LINKS):
            if placed.target is None:
                return placed if at == path else replace(placed, target=at)
            at = placed.target
            if at not in files:
                raise UnsafePath(
                    f"{self._where} contains {path!r}, a link to {at!r}, which does not exist in the model"
                )
            placed = files[at]
        raise UnsafePath(
            f"{self._where} contains {path!r}, which resolves through more than {_LINKS} links or a loop of links"
        )


def _remove(files: dict[str, Placed], own: set[str], folder: str, name: str) -> None:
    """Apply a whiteout, anywhere in the root file system, to the files of the layers below."""
    gone = folder if name == _OPAQUE else posixpath.join(folder, name.removeprefix(manifests.WHITEOUT))
    for path in [path for path in files if path not in own]:
        if not gone or f"{manifests.ROOT}{path}/".startswith(f"{gone}/"):
            del files[path]


def _chosen(index: Manifest, where: str) -> str:
    """Choose the manifest to read: the image of this machine's platform, another image, or a model artifact."""
    entries = index.value.get("manifests")
    found: list[tuple[int, str]] = []
    machine = _MACHINES.get(platform.machine(), platform.machine())
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or "vnd.docker.reference.type" in _strings(entry.get("annotations")):
            continue  # BuildKit's attestations
        wanted = _strings(entry.get("platform"))
        system, architecture = wanted.get("os"), wanted.get("architecture")
        rank = 0 if (system, architecture) == ("linux", machine) else 1 if system == "linux" else 3
        rank = 2 if entry.get("artifactType") == manifests.MODEL else rank
        found.append((rank, check_digest(entry.get("digest"), where)))
    if not found:
        raise ConfigurationError(f"{where} is an index without an image")
    return min(found, key=lambda each: each[0])[1]


def _strings(value: Any) -> dict[str, str]:
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


def _media_type(descriptor: Any) -> str:
    value = descriptor.get("mediaType") if isinstance(descriptor, dict) else None
    return value if isinstance(value, str) else ""


def _size(annotations: Mapping[str, str]) -> int | None:
    """The size of the only file of a layer, from ModelPack's annotation."""
    try:
        size = mapping_of(annotations.get(manifests.METADATA), "an annotation of a layer").get("size")
    except Unreadable:
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else None
