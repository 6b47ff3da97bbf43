"""The store at an ``oci`` location: a model in a container registry, as an image and as a ModelPack artifact."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Literal

from trainjob.data import content
from trainjob.data.content import ContentManifest
from trainjob.data.locations import Location, safe_path
from trainjob.data.stores.base import CHUNK, Entry, Reread
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


class OciStore:
    """A tag or digest of a repository.

    What is written becomes visible as a whole, when ``MANIFEST.json`` is: then the tag is put. Until then, and if that
    never happens, the tag is what it was; blobs that nothing names are swept by the registry.
    """

    bridging: Literal[True] = True
    """See `Bridging`."""

    def __init__(self, location: Location) -> None:
        self._location = location
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

    @property
    def location(self) -> Location:
        """Where it was opened."""
        return self._location

    @property
    def pinned(self) -> Location:
        """The same by its digest, which no push can change.

        Raises:
            SourceNotFound: There is nothing.
        """
        return self.reference.at(self._needed().top.digest).location

    def list(self) -> Iterator[Entry]:
        """See `Store.list`. Of an image these are the files below ``/models``."""
        image = self._image()
        for path in self._told() or (image.files if image is not None else ()):
            yield self.stat(path)

    def stat(self, path: str) -> Entry:
        """See `Store.stat`."""
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
        """See `Store.read`. Whole files are checked against the digest of their layer; parts of files are not.

        What is told of a model (`content.SIDECARS`) can be read, too, though it is no part of the image.
        """
        if path == content.MARK:
            raise SourceNotFound(f"{self._location} holds no {path}")  # what is not finished is nowhere
        if etag and self.stat(path).etag != etag:
            raise CorruptData(f"{self._location.child(path)} changed while it was read; run the step again")
        image = self._needed()
        try:
            chunks = image.read(path, start, length)
        except SourceNotFound:
            data = next(iter(self.beside(path)), None) if path in content.SIDECARS else None
            if data is None:
                raise
            chunks = iter((data[start:] if length is None else data[start : start + length],))
        yield from chunks

    def beside(self, path: str) -> Iterator[bytes]:
        """See `Referring.beside`."""
        yield from referrers.beside(self.repository, self._needed().top.digest, path)

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """See `Store.write`; here ``size`` is exact.

        What can be read twice at little cost is: its digest is computed first, and nothing is sent that the registry
        has. Everything else is sent while it is hashed, and named by its digest at the end.

        Raises:
            UnsafePath: In an image, the name would remove files instead of adding one.
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

        if isinstance(chunks, Reread) and self._cheap(chunks, path, size):
            digest = digest_of(_around(before, chunks.preview(), after))
            push(self.repository, layer(Again(chunks, size)), digest, self._origins(chunks))
        else:
            once = Once(chunks, size, where)
            digest = push_once(self.repository, layer(once), once)
        blob = len(before) + size + len(after)
        with self._lock:
            self._layers[path] = Layer(digest, blob, manifests.kind_of(path), path, size)

    def write_small(self, path: str, data: bytes) -> None:
        """See `Store.write_small`. ``MANIFEST.json`` makes all visible; others become referrers of the image."""
        if path == content.NAME:
            self._commit(content.parse(data, self._location.child(path).uri))
        elif path != content.MARK:
            self._sidecars[path] = data

    def delete(self, path: str) -> None:
        """See `Store.delete`: of what was written and is not visible yet. What a tag names is replaced as a whole."""
        with self._lock:
            self._layers.pop(path, None)
        self._small.remove(path)

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """See `Store.begin`. There are no locks: of two writers, the tag is that of the last one."""
        del notify
        if self.reference.digest:
            raise ConfigurationError(f"{self._location} is a digest, which cannot be written; name a tag")
        self._loaded = None
        yield

    def finish(self) -> None:
        """See `Store.finish`."""

    def close(self) -> None:
        """See `Closing.close`."""
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

    def _cheap(self, chunks: Reread, path: str, size: int) -> bool:
        """Whether to read a file twice: it is here, or the registry has it already, or it looks as if it had."""
        if chunks.source.location.on_disk or self._origins(chunks):
            return True
        image = self._image()
        return image is not None and path in image.layers and image.layers[path].length == size

    def _origins(self, chunks: Reread) -> tuple[str, ...]:
        """Repositories of this registry that may have a layer."""
        source = chunks.source
        if not isinstance(source, OciStore) or source.reference.host != self.reference.host:
            return ()
        return (source.reference.repository,)

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
