"""Make the documents of an image (KServe's ModelCar) and a model artifact (CNCF ModelPack). Pure functions.

Both have the same layers, each an uncompressed tar with files below ``models/``:

* the image, for linux on amd64 and on arm64: its root file system has the model in ``/models``, where KServe expects
  it (https://kserve.github.io/website, "modelcars"; ``oci://``, ``oci+native://``, ``oci+fetch://``);
* the ModelPack manifest (https://github.com/modelpack/model-spec 0.0.7), whose layers have media types for the kind
  of their files.

An index lists all three; a container runtime chooses the image of its platform. All documents depend on the names and
contents of the files only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainjob.data.stores.oci.repository import IMAGE, INDEX, sha256

ROOT = "models/"
"""Directory of the files in a ModelCar."""
WHITEOUT = ".wh."
"""Prefix of names that a layer of an image removes from the layers below (image-spec, "Whiteouts")."""
CONTENT = "dev.trainjob.content.digest"
"""Annotation: the root digest of the content, `ContentManifest.digest`."""
LAYOUT = "dev.trainjob.layout"
"""Annotation of images that trainjob wrote. Its value is `ROOT`, which paths in layers begin with and `FILEPATH` does
not."""
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
"""Kinds of files that ModelPack's media types distinguish."""
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
    """A blob that is a layer of both image and artifact.

    Attributes:
        digest: Digest of the blob, an uncompressed tar.
        size: Bytes of the blob.
        kind: One of `KINDS`.
        path: Path of its only file, relative to the model; empty if it has several files.
        length: Bytes of the only file.
    """

    digest: str
    size: int
    kind: str
    path: str = ""
    length: int = 0

    def descriptor(self, media_type: str) -> dict[str, Any]:
        """The descriptor of the layer in manifests."""
        annotations = {UNTESTED: "true"}  # the kind is derived from the file name only
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
    """A document that is stored by its digest.

    Attributes:
        data: Its bytes.
        media_type: Its media type.
    """

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        """Digest of the bytes."""
        return sha256(self.data)

    @property
    def descriptor(self) -> dict[str, Any]:
        """Descriptor of the document in other documents."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data)}


@dataclass(frozen=True)
class Documents:
    """All documents for some layers.

    Attributes:
        blobs: Configurations, stored as blobs.
        manifests: Manifests, stored by their digests; the last one is the ModelPack manifest.
        index: Lists the manifests.
    """

    blobs: tuple[Document, ...]
    manifests: tuple[Document, ...]
    index: Document


def kind_of(path: str) -> str:
    """ModelPack's kind of a file with this name."""
    name = PurePosixPath(path.lower())
    if name.stem in _DOCS:
        return "doc"
    return _KINDS.get(name.suffix, "weight")


def documents(layers: Sequence[Layer], content: str, paths: Sequence[str]) -> Documents:
    """Make all documents for a model.

    Args:
        layers: Its layers, in order.
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
    unknown = {"architecture": "unknown", "os": "unknown"}  # so that no runtime runs it as an image
    entries.append({**model.descriptor, "artifactType": MODEL, "platform": unknown})
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries, "annotations": marks}
    return Documents(tuple(blobs), tuple(manifests), Document(canonical(index), INDEX))


def attachment(subject: dict[str, Any], artifact_type: str, data: dict[str, Any], title: str) -> Document:
    """Make the manifest of an artifact that refers to ``subject`` (image-spec 1.1, "Guidelines for Artifact Usage")."""
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
        # With several formats, none is the format of the model.
        "config": {"format": found[0]} if len(found) == 1 else {},
        "modelfs": {"type": "layers", "diffIds": list(digests)},
    }
