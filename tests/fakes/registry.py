"""A repository in memory with images from other tools; tests/oci uses a real registry."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.oci.images import Image
from trainjob.data.stores.oci.manifests import IMAGE_CONFIG, IMAGE_LAYER
from trainjob.data.stores.oci.repository import IMAGE, Manifest, Repository, sha256

Entry = tuple[tarfile.TarInfo, bytes]


class MemoryRepository(Repository):
    """Serves dictionaries, and records the requested bytes of blobs."""

    def __init__(self) -> None:
        super().__init__(Client("registry.example"), "team/model")
        self.client.close()
        self.blobs: dict[str, bytes] = {}
        self.documents: dict[str, bytes] = {}
        self.asked: list[tuple[int, int]] = []
        self.opened = 0

    def add(self, data: bytes) -> str:
        digest = sha256(data)
        self.blobs[digest] = data
        return digest

    def put(self, value: Mapping[str, Any], *names: str) -> str:
        data = json.dumps(value).encode()
        for name in (sha256(data), *names):
            self.documents[name] = data
        return sha256(data)

    def manifest(self, name: str) -> Manifest | None:
        data = self.documents.get(name)
        return None if data is None else Manifest(sha256(data), json.loads(data), len(data))

    def blob(self, digest: str, size: int, *, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        self.opened += 1
        data = self.blobs[digest]
        end = len(data) if length is None else start + length
        while start < min(end, len(data)):
            piece = data[start : min(end, start + 50_000)]
            self.asked.append((start, len(piece)))
            start += len(piece)
            yield piece


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = "") -> Entry:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, target
    return info, data


def packed(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def files(**content: bytes) -> bytes:
    return packed(*(entry(f"models/{name}", data) for name, data in content.items()))


def image(
    repository: MemoryRepository,
    layers: Sequence[bytes | tuple[bytes, str, Mapping[str, str]]],
    *names: str,
    **fields: Any,
) -> str:
    """Push a manifest of layers (tars, or blobs with media type and annotations); return its digest."""
    described = []
    for layer in layers:
        data, kind, annotations = layer if isinstance(layer, tuple) else (layer, IMAGE_LAYER, {})
        digest = repository.add(data)
        described.append({"mediaType": kind, "digest": digest, "size": len(data), "annotations": dict(annotations)})
    config = {"mediaType": IMAGE_CONFIG, "digest": repository.add(b"{}"), "size": 2}
    value = {"schemaVersion": 2, "mediaType": IMAGE, "config": config, "layers": described, **fields}
    return repository.put(value, *names)


def load(repository: MemoryRepository, name: str) -> Image:
    """The image, with all of its layers scanned."""
    loaded = Image.load(repository, name)
    assert loaded is not None
    assert loaded.files is not None
    return loaded


def read_all(repository: MemoryRepository, name: str) -> dict[str, bytes]:
    loaded = load(repository, name)
    return {path: b"".join(loaded.read(path, 0, None)) for path in loaded.files}


def zipped(data: bytes) -> tuple[bytes, str, dict[str, str]]:
    return gzip.compress(data, mtime=0), f"{IMAGE_LAYER}+gzip", {}
