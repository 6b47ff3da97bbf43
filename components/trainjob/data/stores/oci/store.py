"""The store of ``oci`` locations: a model in a container registry, as an image and as a ModelPack artifact."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from trainjob.data import file_manifest
from trainjob.data.file_manifest import ContentManifest
from trainjob.data.locations import Location, safe_path
from trainjob.data.stores.base import CHUNK, Entry, Rereadable, WritableStore
from trainjob.data.stores.oci import manifests, referrers, tars
from trainjob.data.stores.oci.bundles import Small
from trainjob.data.stores.oci.client import Client
from trainjob.data.stores.oci.images import Image
from trainjob.data.stores.oci.manifests import Document, Layer
from trainjob.data.stores.oci.payloads import Again, Data, Joined, Once, Payload, digest_of
from trainjob.data.stores.oci.reference import Reference
from trainjob.data.stores.oci.repository import Repository
from trainjob.data.stores.oci.uploads import push, push_once
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, UnsafePath

SMALL = CHUNK
"""Files up to this size share a layer with others of their kind: container runtimes support about a hundred layers."""
SUFFIX = "-modelpack"
"""Suffix of the tag of the ModelPack manifest itself, for tools that do not read an index."""


class OciStore(WritableStore):
    """A tag or digest of a repository.

    Files become visible together, when ``MANIFEST.json`` is written and the tag is set. Until then the tag is
    unchanged. The registry's garbage collection removes blobs of a write that never finished.
    """

    resumes_reads = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self.reference = Reference.of(location)
        self._client = Client(self.reference.host)
        # Not every caller closes the store; Python warns about sockets that the garbage collector closes.
        self._close = weakref.finalize(self, self._client.close)
        self.repository = Repository(self._client, self.reference.repository)
        self._lock = Lock()
        self._loaded: tuple[Image | None] | None = None
        self._entries: tuple[Image, Mapping[str, Entry]] | None = None
        self._layers: dict[str, Layer] = {}
        self._small = Small()
        self._sidecars: dict[str, bytes] = {}

    def resolved(self) -> Location:
        """The location by digest, which no push can change.

        Raises:
            SourceNotFound: The tag does not exist.
        """
        return self.reference.at(self._needed().top.digest).location

    def list(self) -> Iterator[Entry]:
        """List all files; of an image those below ``/models``."""
        image = self._image()
        for path in self._listed() or (image.files if image is not None else ()):
            yield self.stat(path)

    def stat(self, path: str) -> Entry:
        """Return one file; raise SourceNotFound if it does not exist."""
        if not path:
            raise SourceNotFound(f"{self._location} is not a single file")
        image = self._needed()
        if (entry := self._listed().get(path)) is not None:
            return entry
        placed = image.placed(path)
        # If the layer is the file itself, its digest also verifies a file that is resumed.
        sha256 = placed.blob.digest.removeprefix("sha256:") if placed.blob.form == "raw" else ""
        return Entry(path, placed.size, f"{placed.blob.digest}/{placed.name}", sha256)

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read a file. Complete files are verified against the digest of their layer; parts of files are not.

        Files beside a model (`content.SIDECARS`) can be read too, although they are not in the image.
        """
        if path == file_manifest.MARK:
            raise SourceNotFound(f"{self._location} has no {path}")  # an unfinished write is not visible
        if etag and self.stat(path).etag != etag:
            raise CorruptData(f"{self._location.child(path)} changed while it was read; run the step again")
        image = self._needed()
        try:
            chunks = image.read(path, start, length)
        except SourceNotFound:
            data = next(iter(self.sidecar_versions(path)), None) if path in file_manifest.SIDECARS else None
            if data is None:
                raise
            chunks = iter((data[start:] if length is None else data[start : start + length],))
        yield from chunks

    def sidecar_versions(self, path: str) -> Iterator[bytes]:
        """All versions of a file beside the model, which are referrers of the image; the latest first."""
        yield from referrers.beside(self.repository, self._needed().top.digest, path)

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Write a file; here ``size`` is exact.

        A file that is cheap to read twice is: its digest is computed first, and it is not sent if the registry has it.
        Any other file is sent while it is hashed; the upload is closed with its digest.

        Raises:
            UnsafePath: The name would remove files of an image instead of adding one.
        """
        name, where = manifests.ROOT + safe_path(path), self._location.child(path).uri
        if any(part.startswith(manifests.WHITEOUT) for part in path.split("/")):
            raise UnsafePath(
                f"{where}: names that begin with {manifests.WHITEOUT} remove files of an image; rename or exclude the"
                " file"
            )
        if size <= SMALL:
            data = b"".join(chunks)
            if len(data) != size:
                raise CorruptData(f"{where} has {len(data)} bytes instead of {size}")
            self._small.add(path, data)
            return
        before, after = tars.header(name, size), tars.padding(size) + tars.END

        def layer(file: Payload) -> Payload:
            return Joined([Data(before), file, Data(after)])

        if isinstance(chunks, Rereadable) and self._is_cheap_to_read_twice(chunks, path, size):
            digest = digest_of(_around(before, chunks.preview(), after))
            push(self.repository, layer(Again(chunks, size)), digest, self._origins(chunks))
        else:
            once = Once(chunks, size, where)
            digest = push_once(self.repository, layer(once), once)
        blob = len(before) + size + len(after)
        with self._lock:
            self._layers[path] = Layer(digest, blob, manifests.kind_of(path), path, size)

    def write_small(self, path: str, data: bytes) -> None:
        """Write a small file. ``MANIFEST.json`` makes all files visible; others become referrers of the image."""
        if path == file_manifest.NAME:
            self._commit(file_manifest.parse(data, self._location.child(path).uri))
        elif path != file_manifest.MARK:
            self._sidecars[path] = data

    def delete(self, path: str) -> None:
        """Remove a file that is written and not visible yet. The content of a tag is replaced as a whole."""
        with self._lock:
            self._layers.pop(path, None)
        self._small.remove(path)

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Check that the location has a tag. Registries have no locks: of two writers, the last one sets the tag."""
        del notify
        if self.reference.digest:
            raise ConfigurationError(f"{self._location} is a digest, which cannot be written; use a tag")
        self._loaded = None
        yield

    def finish(self) -> None:
        """Do nothing: nothing is written below ``.trainjob``."""

    def close(self) -> None:
        """Close the store's connections."""
        self._close()

    # ------------------------------------------------------------

    def _image(self) -> Image | None:
        # Load once: files must come from one image, also if the tag moves.
        with self._lock:
            if self._loaded is None:
                self._loaded = (Image.load(self.repository, self.reference.name),)
            return self._loaded[0]

    def _listed(self) -> Mapping[str, Entry]:
        """The files of an image by its ``MANIFEST.json``; empty if trainjob did not write the image.

        Without that file, the layers of small files must be read to list their content.
        """
        image = self._image()
        if image is None or file_manifest.NAME not in image.layers:
            return {}
        with self._lock:
            if self._entries is None or self._entries[0] is not image:
                where = self._location.child(file_manifest.NAME).uri
                manifest = file_manifest.parse(b"".join(image.read(file_manifest.NAME, 0, None)), where)
                entries = {file.path: Entry(file.path, file.size, file.sha256) for file in manifest.files}
                entries[file_manifest.NAME] = Entry(
                    file_manifest.NAME, image.layers[file_manifest.NAME].length, manifest.digest
                )
                self._entries = (image, entries)
            return self._entries[1]

    def _needed(self) -> Image:
        image = self._image()
        if image is None:
            raise SourceNotFound(f"{self._location} does not exist")
        return image

    def _is_cheap_to_read_twice(self, chunks: Rereadable, path: str, size: int) -> bool:
        """Whether the file is on this machine, or the registry has it or probably has it."""
        if chunks.source.location.on_disk or self._origins(chunks):
            return True
        image = self._image()
        return image is not None and path in image.layers and image.layers[path].length == size

    def _origins(self, chunks: Rereadable) -> tuple[str, ...]:
        """Repositories of this registry that may have the layer."""
        source = chunks.source.location
        if source.scheme != "oci" or (reference := Reference.of(source)).host != self.reference.host:
            return ()
        return (reference.repository,)

    def _commit(self, manifest: ContentManifest) -> None:
        layers = self._all_layers(manifest)
        documents = manifests.documents(layers, manifest.digest, [file.path for file in manifest.files])
        for blob in documents.blobs:
            push(self.repository, Data(blob.data), blob.digest)
        for document in (*documents.manifests, documents.index):
            self.repository.put_manifest(document.digest, document.data, document.media_type)
        for path, data in self._sidecars.items():
            referrers.attach_to(self.repository, documents.index.descriptor, path, data, referrers.type_of(path))
        if (beside := self.reference.beside(SUFFIX)) is not None:
            self._put(beside, documents.manifests[-1])
        self._put(self.reference, documents.index)  # last: this makes the model visible
        with self._lock:
            self._loaded, self._layers, self._small, self._sidecars = None, {}, Small(), {}

    def _put(self, reference: Reference, document: Document) -> None:
        self.repository.put_manifest(reference.name, document.data, document.media_type)

    def _all_layers(self, manifest: ContentManifest) -> Sequence[Layer]:
        """Layers of the large files in path order, of bundles of small files, and of the manifest."""
        layers = []
        for file in manifest.files:
            if file.size > SMALL:
                layers.append(self._layers.get(file.path) or self._existing_layer(file.path, file.size))
            elif file.path not in self._small:
                self._small.add(file.path, b"".join(self._needed().read(file.path, 0, None)))
        for kind in manifests.KINDS:
            paths = [
                file.path for file in manifest.files if file.size <= SMALL and manifests.kind_of(file.path) == kind
            ]
            if paths:
                bundle = tars.archive([(manifests.ROOT + path, self._small.payload(path)) for path in paths])
                layers.append(self._pushed(bundle, kind))
        # Without the origin, where it was copied from: the same content becomes the same image.
        data = ContentManifest(manifest.files).to_json()
        own = tars.archive([(manifests.ROOT + file_manifest.NAME, Data(data))])
        return [*layers, self._pushed(own, "doc", file_manifest.NAME, len(data))]

    def _pushed(self, payload: Payload, kind: str, path: str = "", length: int = 0) -> Layer:
        digest = digest_of(payload.open(0, payload.size))
        push(self.repository, payload, digest)
        return Layer(digest, payload.size, kind, path, length)

    def _existing_layer(self, path: str, size: int) -> Layer:
        """The layer of a file that the image already has."""
        image = self._needed()
        if path not in image.layers:
            # Written by another tool, in another layout: written again.
            self.write(path, image.read(path, 0, None), size)
            return self._layers[path]
        return image.layers[path]


def _around(before: bytes, chunks: Iterator[bytes], after: bytes) -> Iterator[bytes]:
    yield before
    yield from chunks
    yield after
