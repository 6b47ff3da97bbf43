"""The documents that make layers an image (KServe's ModelCar) and a model artifact (CNCF ModelPack). Pure functions.

Both have the same layers, each an uncompressed tar with files below ``models/``:

* the image, for linux on amd64 and on arm64: its root file system has the model in ``/models``, where KServe looks for
  it (https://kserve.github.io/website, "modelcars"; ``oci://``, ``oci+native://``, ``oci+fetch://``);
* the ModelPack manifest (https://github.com/modelpack/model-spec 0.0.7), whose layers have media types that say what
  they hold.

An index names all three; a container runtime takes the image of its platform from it. All of it depends on the names
and content of the files only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainjob.data.stores.oci.repository import IMAGE, INDEX, sha256

ROOT = "models/"
"""Where a ModelCar has its files."""
WHITEOUT = ".wh."
"""Before the name of what a layer of an image removes from those below it (image-spec, "Whiteouts")."""
CONTENT = "dev.trainjob.content.digest"
"""Annotation: the root digest of the content, `ContentManifest.digest`."""
LAYOUT = "dev.trainjob.layout"
"""Annotation of what trainjob wrote; its value is `ROOT`: paths in layers have it before them, `FILEPATH` has not."""
FILEPATH = "org.cncf.model.filepath"
METADATA = "org.cncf.model.file.metadata+json"
UNTESTED = "org.cncf.model.file.mediatype.untested"
TITLE = "org.opencontainers.image.title"

IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
MODEL = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG = "application/vnd.cncf.model.config.v1+json"
MODEL_LAYER = "application/vnd.cncf.model.{kind}.v1.tar"
EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY_DATA = b"{}"

PLATFORMS = ("amd64", "arm64")
KINDS = ("weight", "weight.config", "doc", "code")
"""What ModelPack's media types tell apart."""
_EPOCH = "1970-01-01T00:00:00Z"
_SUFFIXES = {
    "weight.config": "json jsonl yaml yml toml ini cfg conf txt model tiktoken jinja vocab merges xml properties",
    "doc": "md rst pdf html htm adoc png jpg jpeg svg gif csv",
    "code": "py ipynb sh js ts c cc cpp cu h hpp go rs java jl r lua",
}
_KINDS = {f".{suffix}": kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
_DOCS = ("license", "licence", "readme", "notice", "authors", "copying", "changelog", "usage_policy")
_FORMATS = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".onnx": "onnx",
    ".pt": "pt",
    ".pth": "pt",
    ".keras": "keras",
    ".ubj": "xgboost",
}


@dataclass(frozen=True)
class Layer:
    """A blob that is a layer of both.

    Attributes:
        digest: Of the blob, an uncompressed tar.
        size: Bytes of the blob.
        kind: One of `KINDS`.
        path: Of the one file in it, relative to the model; empty where there are several.
        length: Bytes of the one file.
    """

    digest: str
    size: int
    kind: str
    path: str = ""
    length: int = 0

    def descriptor(self, media_type: str) -> dict[str, Any]:
        """As the manifests name it."""
        annotations = {UNTESTED: "true"}  # by its name, that is
        if self.path:
            # The fields of model-spec's FileMetadata; 48 is tar's '0', a regular file.
            metadata = {
                "name": PurePosixPath(self.path).name,
                "mode": 0o644,
                "uid": 0,
                "gid": 0,
                "size": self.length,
                "mtime": _EPOCH,
                "typeflag": 48,
            }
            annotations |= {FILEPATH: self.path, METADATA: canonical(metadata).decode()}
        return {"mediaType": media_type, "digest": self.digest, "size": self.size, "annotations": annotations}


@dataclass(frozen=True)
class Document:
    """Something to store by its digest.

    Attributes:
        data: Its bytes.
        media_type: What it is.
    """

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """Of its bytes."""
        return sha256(self.data)

    @property
    def descriptor(self) -> dict[str, Any]:
        """As others name it."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data)}


@dataclass(frozen=True)
class Documents:
    """All that belongs to some layers.

    Attributes:
        blobs: Configurations, to be stored as blobs.
        manifests: To be stored by their digests; the last one is the ModelPack manifest.
        index: Names the manifests.
    """

    blobs: tuple[Document, ...]
    manifests: tuple[Document, ...]
    index: Document


def kind_of(path: str) -> str:
    """What ModelPack calls a file of this name."""
    name = PurePosixPath(path.lower())
    if name.stem in _DOCS:
        return "doc"
    return _KINDS.get(name.suffix, "weight")


def documents(layers: Sequence[Layer], content: str, paths: Sequence[str]) -> Documents:
    """All documents for a model.

    Args:
        layers: In their order.
        content: Root digest of the model.
        paths: Its files.
    """
    marks = {CONTENT: content, LAYOUT: ROOT}
    digests = [layer.digest for layer in layers]
    blobs, manifests, entries = [], [], []
    for architecture in PLATFORMS:
        config = Document(canonical(_image_config(architecture, digests)), IMAGE_CONFIG)
        described = [layer.descriptor(IMAGE_LAYER) for layer in layers]
        image = Document(canonical(_manifest(config, described, marks)), IMAGE)
        blobs.append(config)
        manifests.append(image)
        entries.append({**image.descriptor, "platform": {"architecture": architecture, "os": "linux"}})
    config = Document(canonical(_model_config(digests, paths)), MODEL_CONFIG)
    described = [layer.descriptor(MODEL_LAYER.format(kind=layer.kind)) for layer in layers]
    model = Document(canonical({**_manifest(config, described, marks), "artifactType": MODEL}), IMAGE)
    blobs.append(config)
    manifests.append(model)
    unknown = {"architecture": "unknown", "os": "unknown"}  # so that no runtime takes it for an image
    entries.append({**model.descriptor, "artifactType": MODEL, "platform": unknown})
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, "annotations": marks}
    return Documents(tuple(blobs), tuple(manifests), Document(canonical(index), INDEX))


def attachment(subject: dict[str, Any], artifact_type: str, data: dict[str, Any], title: str) -> Document:
    """The manifest of an artifact that belongs to ``subject`` (image-spec 1.1, "Guidelines for Artifact Usage")."""
    layer = {**data, "annotations": {TITLE: title}}
    empty = Document(EMPTY_DATA, EMPTY)
    return Document(
        canonical({**_manifest(empty, [layer], {}), "artifactType": artifact_type, "subject": subject}), IMAGE
    )


def canonical(value: dict[str, Any]) -> bytes:
    """JSON with sorted keys and no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _manifest(config: Document, layers: list[dict[str, Any]], annotations: dict[str, str]) -> dict[str, Any]:
    value = {"schemaVersion": 2, "mediaType": IMAGE, "config": config.descriptor, "layers": layers}
    return {**value, "annotations": annotations} if annotations else value


def _image_config(architecture: str, digests: Sequence[str]) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "os": "linux",
        "created": _EPOCH,
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": list(digests)},
        "history": [{"created": _EPOCH, "created_by": "trainjob"} for _ in digests],
    }


def _model_config(digests: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    found = sorted({_FORMATS[suffix] for path in paths if (suffix := PurePosixPath(path).suffix.lower()) in _FORMATS})
    return {
        "descriptor": {},
        # Several formats beside each other: none is the model's.
        "config": {"format": found[0]} if len(found) == 1 else {},
        "modelfs": {"type": "layers", "diffIds": list(digests)},
    }
