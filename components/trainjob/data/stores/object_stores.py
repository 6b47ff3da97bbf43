"""Object stores, through obstore (the Rust crate ``object_store``): S3, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from trainjob.data.feeding import fed
from trainjob.data.file_manifest import MARK
from trainjob.data.locations import Location, safe_path
from trainjob.data.stores.base import CHUNK, Entry, WritableStore
from trainjob.data.stores.clouds import errors, open_bucket
from trainjob.errors import CorruptData, SourceNotFound

if TYPE_CHECKING:
    from obstore import GetOptions

# Bytes per read of a download: about what a connection delivers at once; joining more costs time.
_READ = CHUNK // 4
# Parts of an upload: S3 allows 10 000, and only the last below 5 MiB. Four files at a time, four parts each.
_PART, _PARTS, _UPLOADS = 5 * CHUNK, 9_000, 4


class ObjectStore(WritableStore):
    """A prefix of a bucket or container.

    Raises:
        ConfigurationError: obstore is not installed, or a setting is wrong.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._inner: Any = open_bucket(location)  # obstore's functions take a union of all its classes
        self._prefix = location.path
        self._huge = Lock()

    def supports_ranges(self, path: str, entry: Entry) -> bool:
        """Whether several ranges of a file can be read at once."""
        del path
        return bool(entry.etag)

    def list(self) -> Iterator[Entry]:
        """List all objects below the prefix, which ends at a slash: ``models/a`` does not list ``models/abc``."""
        import obstore

        folders: set[str] = set()
        empty: list[Entry] = []
        with errors(self._location, ""):
            for batch in obstore.list(self._inner, prefix=self._prefix or None):
                for meta in batch:
                    path = meta["path"].removeprefix(self._prefix).lstrip("/")
                    if not path:  # the marker object "prefix/" that consoles create, or an object named like the prefix
                        continue
                    folders.add(path.rpartition("/")[0])
                    entry = Entry(path, meta["size"], _tag(meta["e_tag"]))
                    if entry.size:
                        yield entry
                    else:
                        empty.append(entry)
        for folder in tuple(folders):
            folders.update(folder[: match.start()] for match in re.finditer("/", folder))
        # An empty object "a/" beside "a/b" is a folder made by a console; obstore's listing drops its slash.
        yield from (entry for entry in empty if entry.path not in folders)

    def stat(self, path: str) -> Entry:
        """Return one object; raise SourceNotFound if it does not exist."""
        import obstore

        with errors(self._location, path):
            meta = obstore.head(self._inner, self._key(path))
        return Entry(path, meta["size"], _tag(meta["e_tag"]))

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read the bytes from ``start`` on: ``length`` of them, or to the end."""
        import obstore

        if length == 0:
            return
        options: GetOptions = {}
        if length is not None:
            options["range"] = (start, start + length)
        elif start:
            options["range"] = {"offset": start}
        with errors(self._location, path):
            result = obstore.get(self._inner, self._key(path), options=options or None)
            if etag and _tag(result.meta["e_tag"]) != etag:
                raise CorruptData(f"{self._uri(path)} changed while it was read; run the step again")
            begin, end = result.range
            if end - begin <= CHUNK:
                yield bytes(result.bytes())  # one call instead of three
                return
            for chunk in result.stream(min_chunk_size=_READ):
                yield bytes(chunk)

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """Write by one PUT if the content fits into a part, else by a multipart upload, aborted on an error."""
        import obstore

        with errors(self._location, path):
            if size <= _PART:
                obstore.put(self._inner, self._key(path), b"".join(chunks), use_multipart=False)
            else:
                part = max(_PART, -(-size // _PARTS))
                at_once = max(2, _UPLOADS * _PART // part)
                # Parts of files above 45 GB are larger, and all parts in flight are in memory. obstore panics if the
                # iterator of an upload calls obstore itself, as that of a download from S3 does. An error from the
                # iterator makes obstore abort the upload.
                with self._huge if part > _PART else nullcontext(), fed(chunks) as ahead:
                    obstore.put(self._inner, self._key(path), ahead, chunk_size=part, max_concurrency=at_once)

    def write_small(self, path: str, data: bytes) -> None:
        """Create or replace a small object."""
        self.write(path, [data], len(data))

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object by a conditional PUT."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with errors(self._location, path):
            try:
                obstore.put(self._inner, self._key(path), data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def delete(self, path: str) -> None:
        """Remove an object; no error if it does not exist."""
        import obstore

        # Azure reports a missing object as an error, the others do not.
        with suppress(SourceNotFound), errors(self._location, path):
            obstore.delete(self._inner, self._key(path))

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Do nothing: object stores have no locks. With two writers, each object is from one of them."""
        del notify
        yield

    def finish(self) -> None:
        """Remove the mark below ``.trainjob``."""
        self.delete(MARK)

    def _key(self, path: str) -> str:
        if path:
            safe_path(path)
        return f"{self._prefix}/{path}".strip("/")

    def _uri(self, path: str) -> str:
        return self._location.child(path).uri if path else self._location.uri


def _tag(given: str | None) -> str:
    """An entity tag with its quotes. Azure lists tags without them; in headers they have them."""
    return f'"{given}"' if given and not given.endswith('"') else given or ""
