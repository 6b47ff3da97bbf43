"""The store at an ``oci`` location: a model in a container registry, as an image and as a ModelPack artifact."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from trainjob.data import content
from trainjob.data.content import ContentManifest
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
"""Files up to this size share a layer with others of their kind: container runtimes take about a hundred layers."""
SUFFIX = "-modelpack"
"""Of the tag that names the ModelPack manifest itself, for tools that do not look into an index."""


class OciStore(WritableStore):
    """A tag or digest of a repository.

    What is written becomes visible as a whole, when ``MANIFEST.json`` is: then the tag is put. Until then, and if that
    never happens, the tag is what it was; blobs that nothing names are swept by the registry.
    """

    resumes_reads = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self.reference = Reference.of(location)
        self._client = Client(self.reference.host)
        # Not every store is closed; sockets that are left to the garbage collector are a warning.
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
        for path in self._told() or (image.files if image is not None else ()):
            yield self.stat(path)

    def stat(self, path: str) -> Entry:
        """Return one file; raise SourceNotFound if it does not exist."""
        if not path:
            raise SourceNotFound(f"{self._location} is no single file")
        image = self._needed()
        if (entry := self._told().get(path)) is not None:
            return entry
        placed = image.placed(path)
        # A layer that is the file itself: with its digest the rest of a file that was begun before is checked, too.
        sha256 = placed.blob.digest.removeprefix("sha256:") if placed.blob.form == "raw" else ""
        return Entry(path, placed.size, f"{placed.blob.digest}/{placed.name}", sha256)

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read a file. Complete files are verified against the digest of their layer; parts of files are not.

        Files beside a model (`content.SIDECARS`) can be read too, although they are not in the image.
        """
        if path == content.MARK:
            raise SourceNotFound(f"{self._location} holds no {path}")  # what is not finished is nowhere
        if etag and self.stat(path).etag != etag:
            raise CorruptData(f"{self._location.child(path)} changed while it was read; run the step again")
        image = self._needed()
        try:
            chunks = image.read(path, start, length)
        except SourceNotFound:
            data = next(iter(self.sidecar_versions(path)), None) if path in content.SIDECARS else None
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
            raise UnsafePath(f"{where}: names with {manifests.WHITEOUT} remove files in an image; rename or exclude it")
        if size <= SMALL:
            data = b"".join(chunks)
            if len(data) != size:
                raise CorruptData(f"{where} gave {len(data)} of {size} bytes")
            self._small.add(path, data)
            return
        before, after = tars.header(name, size), tars.padding(size) + tars.END

        def layer(file: Payload) -> Payload:
            return Joined([Data(before), file, Data(after)])

        if isinstance(chunks, Rereadable) and self._cheap(chunks, path, size):
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
        if path == content.NAME:
            self._commit(content.parse(data, self._location.child(path).uri))
        elif path != content.MARK:
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
            raise ConfigurationError(f"{self._location} is a digest, which cannot be written; name a tag")
        self._loaded = None
        yield

    def finish(self) -> None:
        """Do nothing: nothing is written below ``.trainjob``."""

    def close(self) -> None:
        """Close the store's connections."""
        self._close()

    # ------------------------------------------------------------

    def _image(self) -> Image | None:
        # Once: a tag that moves must not give files of one image and files of another.
        with self._lock:
            if self._loaded is None:
                self._loaded = (Image.load(self.repository, self.reference.name),)
            return self._loaded[0]

    def _told(self) -> Mapping[str, Entry]:
        """What the manifest of an image says that it holds, where trainjob wrote it.

        Without it, the layers of small files have to be read, to know what is in them.
        """
        image = self._image()
        if image is None or content.NAME not in image.layers:
            return {}
        with self._lock:
            if self._entries is None or self._entries[0] is not image:
                where = self._location.child(content.NAME).uri
                manifest = content.parse(b"".join(image.read(content.NAME, 0, None)), where)
                entries = {file.path: Entry(file.path, file.size, file.sha256) for file in manifest.files}
                entries[content.NAME] = Entry(content.NAME, image.layers[content.NAME].length, manifest.digest)
                self._entries = (image, entries)
            return self._entries[1]

    def _needed(self) -> Image:
        image = self._image()
        if image is None:
            raise SourceNotFound(f"{self._location} does not exist")
        return image

    def _cheap(self, chunks: Rereadable, path: str, size: int) -> bool:
        """Whether to read a file twice: it is here, or the registry has it already, or it looks as if it had."""
        if chunks.source.location.on_disk or self._origins(chunks):
            return True
        image = self._image()
        return image is not None and path in image.layers and image.layers[path].length == size

    def _origins(self, chunks: Rereadable) -> tuple[str, ...]:
        """Repositories of this registry that may have a layer."""
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
        self._put(self.reference, documents.index)  # the last: from here on it is there
        with self._lock:
            self._loaded, self._layers, self._small, self._sidecars = None, {}, Small(), {}

    def _put(self, reference: Reference, document: Document) -> None:
        self.repository.put_manifest(reference.name, document.data, document.media_type)

    def _all_layers(self, manifest: ContentManifest) -> Sequence[Layer]:
        """Large files in the order of their paths, bundles of small ones, the manifest."""
        layers = []
        for file in manifest.files:
            if file.size > SMALL:
                layers.append(self._layers.get(file.path) or self._kept(file.path, file.size))
            elif file.path not in self._small:
                self._small.add(file.path, b"".join(self._needed().read(file.path, 0, None)))
        for kind in manifests.KINDS:
            paths = [
                file.path for file in manifest.files if file.size <= SMALL and manifests.kind_of(file.path) == kind
            ]
            if paths:
                bundle = tars.archive([(manifests.ROOT + path, self._small.payload(path)) for path in paths])
                layers.append(self._pushed(bundle, kind))
        # Without its origin, which says where it was copied from: the same content is the same image.
        data = ContentManifest(manifest.files).to_json()
        own = tars.archive([(manifests.ROOT + content.NAME, Data(data))])
        return [*layers, self._pushed(own, "doc", content.NAME, len(data))]

    def _pushed(self, payload: Payload, kind: str, path: str = "", length: int = 0) -> Layer:
        digest = digest_of(payload.open(0, payload.size))
        push(self.repository, payload, digest)
        return Layer(digest, payload.size, kind, path, length)

    def _kept(self, path: str, size: int) -> Layer:
        """The layer of a file that the image had already."""
        image = self._needed()
        if path not in image.layers:
            # Packed by someone else, in another way: packed anew.
            self.write(path, image.read(path, 0, None), size)
            return self._layers[path]
        return image.layers[path]


def _around(before: bytes, chunks: Iterator[bytes], after: bytes) -> Iterator[bytes]:
    yield before
    yield from chunks
    yield after
