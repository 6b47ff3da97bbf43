"""Small artifacts that refer to an image: provenance, signatures (OCI distribution-spec 1.1, "Referrers")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainjob._support.foreign import Unreadable, mapping_of
from trainjob.data import file_manifest
from trainjob.data.locations import Location
from trainjob.data.stores.oci import manifests
from trainjob.data.stores.oci.client import DOCUMENT, Client, retry
from trainjob.data.stores.oci.manifests import EMPTY_DATA, Document, attachment
from trainjob.data.stores.oci.payloads import Data
from trainjob.data.stores.oci.reference import Reference, check_digest
from trainjob.data.stores.oci.repository import IMAGE, INDEX, Manifest, Repository, sha256
from trainjob.data.stores.oci.uploads import push
from trainjob.errors import CorruptData, SourceNotFound

IN_TOTO = "application/vnd.in-toto+json"
"""Artifact type of an in-toto statement, such as SLSA provenance."""
_TYPES = {file_manifest.PROVENANCE: IN_TOTO, file_manifest.CARD: "text/markdown"}
_LIMIT = 4 * 1024 * 1024


def attach(location: Location, name: str, data: bytes, artifact_type: str = IN_TOTO) -> str:
    """Attach a small artifact to an image or artifact. Idempotent.

    Args:
        location: Tag or digest of an image or artifact.
        name: File name of the artifact.
        data: Its content.
        artifact_type: Its media type.

    Returns:
        Digest of the artifact's manifest.

    Raises:
        SourceNotFound: ``location`` does not exist.
    """
    with _subject(location) as (repository, subject):
        descriptor = {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size}
        return attach_to(repository, descriptor, name, data, artifact_type)


def attached(location: Location, artifact_type: str = IN_TOTO) -> dict[str, bytes]:
    """Read the artifacts of a type that are attached to an image or artifact; contents by file name.

    Raises:
        SourceNotFound: ``location`` does not exist.
    """
    with _subject(location) as (repository, subject):
        found: dict[str, bytes] = {}
        for entry in listed(repository, subject.digest):
            if entry.get("artifactType") == artifact_type:
                found |= _contents(repository, check_digest(entry.get("digest"), str(location)))
        return found


@contextmanager
def _subject(location: Location) -> Iterator[tuple[Repository, Manifest]]:
    """The manifest at ``location`` and its repository."""
    reference = Reference.of(location)
    client = Client(reference.host)
    try:
        repository = Repository(client, reference.repository)
        subject = repository.manifest(reference.name)
        if subject is None:
            raise SourceNotFound(f"{location} does not exist")
        yield repository, subject
    finally:
        client.close()


def type_of(name: str) -> str:
    """Artifact type of a file beside a model."""
    return _TYPES.get(name, "application/octet-stream")


def beside(repository: Repository, digest: str, name: str) -> Iterator[bytes]:
    """The files ``name`` that `attach_to` has attached to a manifest, the latest first.

    There are several if the model was exported more than once, or a retry attached another one.
    """
    for entry in reversed(listed(repository, digest)):
        if entry.get("artifactType") == type_of(name):
            found = _contents(repository, check_digest(entry.get("digest"), repository.where(digest)))
            if name in found:
                yield found[name]


def attach_to(repository: Repository, subject: dict[str, Any], name: str, data: bytes, artifact_type: str) -> str:
    """Attach ``data`` to the manifest that ``subject`` describes; returns the digest of the attachment."""
    digest = sha256(data)
    described = {"mediaType": artifact_type, "digest": digest, "size": len(data)}
    document = attachment(subject, artifact_type, described, name)
    push(repository, Data(data), digest)
    push(repository, Data(EMPTY_DATA), sha256(EMPTY_DATA))
    repository.put_manifest(document.digest, document.data, IMAGE)
    if not any(entry.get("digest") == document.digest for entry in listed(repository, subject["digest"])):
        # The registry has no referrers API: clients maintain the list, under a tag.
        _add_to_list(repository, subject["digest"], document, artifact_type)
    return document.digest


def listed(repository: Repository, digest: str) -> list[Mapping[str, Any]]:
    """Descriptors of the artifacts that refer to a manifest."""
    found = retry(repository.where(digest), lambda: _request(repository, digest))
    if found is None:
        tagged = repository.manifest(_tag(digest))
        found = tagged.value if tagged is not None else {}
    entries = found.get("manifests")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _request(repository: Repository, digest: str) -> Mapping[str, Any] | None:
    """The reply of the referrers API; None if the registry does not have it."""
    with repository.client.open("GET", repository.url(f"referrers/{digest}"), repository.pull) as response:
        kind = response.headers.get("content-type", "").partition(";")[0]
        if response.status_code != 200 or kind != INDEX:
            return None
        try:
            return mapping_of(repository.client.read(response), "the list of referrers", DOCUMENT)
        except Unreadable as error:
            raise CorruptData(
                f"{repository.where(digest)}: the registry's list of referrers is not an index: it {error.why}"
            ) from None


def _add_to_list(repository: Repository, subject: str, document: Document, artifact_type: str) -> None:
    held = repository.manifest(_tag(subject))
    entries = list(held.value.get("manifests") or []) if held is not None else []
    entries.append({**document.descriptor, "artifactType": artifact_type})
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    repository.put_manifest(_tag(subject), manifests.canonical(index), INDEX)


def _tag(digest: str) -> str:
    """The tag of the list of referrers (distribution-spec, "Referrers Tag Schema")."""
    return digest.replace(":", "-")


def _contents(repository: Repository, digest: str) -> dict[str, bytes]:
    manifest = repository.manifest(digest)
    layers = manifest.value.get("layers") if manifest is not None else None
    found = {}
    for layer in layers if isinstance(layers, list) else ():
        name = (layer.get("annotations") or {}).get(manifests.TITLE)
        if isinstance(name, str) and isinstance(layer.get("size"), int):
            found[name] = repository.small(
                check_digest(layer.get("digest"), repository.where(digest)), layer["size"], _LIMIT
            )
    return found
