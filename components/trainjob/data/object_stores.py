"""Object stores and web servers, through obstore (the Rust crate ``object_store``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from trainjob.data.content import MARK
from trainjob.data.locations import Location, safe_path
from trainjob.data.stores import CHUNK, Entry
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, StoreUnavailable, TrainJobError, UnsafePath

if TYPE_CHECKING:
    from obstore.store import ClientConfig, HTTPStore, RetryConfig, S3Store

# Part of an upload: S3 allows 10 000 of them, and none but the last below 5 MiB. Four files at a time, four parts each.
_PART, _PARTS, _UPLOADS = 5 * CHUNK, 9_000, 4
# An outage of up to a minute is bridged here; longer ones are for the orchestrator's retry.
_RETRY: RetryConfig = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_ACCESS_KEY_ID")


def open_object_store(location: Location) -> ObjectStore:
    """The store at an ``s3`` or ``http(s)`` location.

    S3 takes bucket-independent settings from the usual environment: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``, ``AWS_SKIP_SIGNATURE``, web
    identity, container and instance credentials (`obstore.store.S3Config`).

    Raises:
        ConfigurationError: obstore is not installed, or a setting is wrong.
    """
    try:
        from obstore.store import HTTPStore, S3Store  # noqa: PLC0415 - an extra, for those who need it
    except ImportError:
        raise ConfigurationError(
            f"{location.scheme}:// needs obstore: install trainjob[storage], or use an image that has it"
        ) from None
    # obstore's own default ends every request, with its whole body, after 30 s.
    client: ClientConfig = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "7days"}
    inner: S3Store | HTTPStore
    with _errors(location, ""):
        if location.scheme == "s3":
            # Client options given here replace those of the environment, so this one is read here.
            client["allow_http"] = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
            inner = S3Store(location.authority, client_options=client, retry_config=_RETRY)
        else:
            client["allow_http"] = location.scheme == "http"
            inner = HTTPStore(location.uri, client_options=client, retry_config=_RETRY)
    return ObjectStore(location, inner)


class ObjectStore:
    """A prefix of a bucket, or one file of a web server."""

    def __init__(self, location: Location, inner: S3Store | HTTPStore) -> None:
        self._location = location
        self._inner: Any = inner  # obstore's functions take a union that names all its classes
        self._prefix = location.path if location.scheme == "s3" else ""

    @property
    def location(self) -> Location:
        """Where it was opened."""
        return self._location

    def list(self) -> Iterator[Entry]:
        """See `Store.list`. A prefix ends at a slash: ``models/a`` does not list ``models/abc``."""
        import obstore  # noqa: PLC0415 - an extra

        self._only_s3("list")
        folders: set[str] = set()
        empty: list[Entry] = []
        with _errors(self._location, ""):
            for batch in obstore.list(self._inner, prefix=self._prefix or None):
                for meta in batch:
                    path = meta["path"].removeprefix(self._prefix).lstrip("/")
                    if not path:  # the marker object "prefix/" that consoles create, or a file of the prefix's name
                        continue
                    folders.add(path.rpartition("/")[0])
                    entry = Entry(path, meta["size"], meta["e_tag"] or "")
                    if entry.size:
                        yield entry
                    else:
                        empty.append(entry)
        for folder in tuple(folders):
            folders.update(folder[: match.start()] for match in re.finditer("/", folder))
        # An empty object "a/" beside "a/b" is a console's folder; its slash is lost in the listing.
        yield from (entry for entry in empty if entry.path not in folders)

    def stat(self, path: str) -> Entry:
        """See `Store.stat`."""
        import obstore  # noqa: PLC0415 - an extra

        with _errors(self._location, path):
            if self._location.scheme == "s3":
                meta = obstore.head(self._inner, self._key(path))
            else:
                # Many web applications answer GET only; the body is not read.
                meta = obstore.get(self._inner, self._key(path)).meta
        return Entry(path, meta["size"], _tag(meta))

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """See `Store.read`."""
        import obstore  # noqa: PLC0415 - an extra

        if length == 0:
            return
        options: dict[str, Any] = {}
        if length is not None:
            options["range"] = (start, start + length)
        elif start:
            options["range"] = {"offset": start}
        with _errors(self._location, path):
            result = obstore.get(self._inner, self._key(path), options=options or None)  # type: ignore[arg-type]
            # Compared here and not by If-Match: web servers often ignore it, and the answer is the same.
            if etag and _tag(result.meta) != etag:
                raise CorruptData(f"{self._uri(path)} changed while it was read; run the step again")
            for chunk in result.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    def write(self, path: str, chunks: Iterable[bytes], size: int) -> None:
        """See `Store.write`: one PUT for what fits into a part, else a multipart upload, aborted on an error."""
        import obstore  # noqa: PLC0415 - an extra

        self._only_s3("write to")
        with _errors(self._location, path):
            if size <= _PART:
                obstore.put(self._inner, self._key(path), b"".join(chunks), use_multipart=False)
            else:
                part = max(_PART, -(-size // _PARTS))
                with _fed(chunks) as fed:
                    obstore.put(self._inner, self._key(path), fed, chunk_size=part, max_concurrency=_UPLOADS)

    def write_small(self, path: str, data: bytes) -> None:
        """See `Store.write_small`."""
        self.write(path, [data], len(data))

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        import obstore  # noqa: PLC0415 - an extra

        with _errors(self._location, path):
            obstore.delete(self._inner, self._key(path))

    @contextmanager
    def begin(self, notify: Callable[[str], None]) -> Iterator[None]:
        """See `Store.begin`. There are no locks: of two writers, each object is that of one of them."""
        del notify
        self._only_s3("write to")
        yield

    def finish(self) -> None:
        """See `Store.finish`."""
        self.delete(MARK)

    def _key(self, path: str) -> str:
        if path:
            safe_path(path)
        return f"{self._prefix}/{path}".strip("/")

    def _uri(self, path: str) -> str:
        return _public(self._location.child(path) if path else self._location)

    def _only_s3(self, what: str) -> None:
        if self._location.scheme != "s3":
            raise ConfigurationError(
                f"cannot {what} {_public(self._location)}: a web server holds single files to read;"
                " name one file, or use s3:// or file://"
            )


@contextmanager
def _fed(chunks: Iterable[bytes]) -> Iterator[Iterator[bytes]]:
    """Iterate over ``chunks`` in a thread of its own.

    obstore panics when the iterator of an upload calls obstore itself, as that of a download from S3 does. An error of
    ``chunks`` comes out of the iterator, and makes obstore abort the upload.
    """
    queue: Queue[bytes | BaseException | None] = Queue(maxsize=4)
    ended = Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not ended.is_set():
            with suppress(Full):
                queue.put(item, timeout=0.2)
                return True
        return False

    def feed() -> None:
        try:
            for chunk in chunks:
                if not put(chunk):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised again on the other side
            put(error)

    def take() -> Iterator[bytes]:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = Thread(target=feed, name="trainjob-feed")
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        thread.join()


def _tag(meta: Any) -> str:
    # Without an entity tag, the date of a web server; obstore gives the epoch where there is none.
    tag: str | None = meta["e_tag"]
    modified = meta["last_modified"].timestamp()
    return tag or (f"{modified:.0f}-{meta['size']}" if modified > 0 else "")


def _public(location: Location) -> str:
    """The location without its query, which may say more than it should."""
    return location.uri.partition("?")[0] if location.query else location.uri


@contextmanager
def _errors(location: Location, path: str) -> Iterator[None]:
    """Turn what obstore raises into our errors."""
    from obstore import exceptions  # noqa: PLC0415 - an extra

    try:
        where = _public(location.child(path) if path else location)
        yield
    except TrainJobError:
        raise
    except FileNotFoundError:
        raise SourceNotFound(f"{where} does not exist") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        hint = "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy" * (location.scheme == "s3")
        raise ConfigurationError(f"access to {where} was denied{hint}") from None
    except exceptions.PreconditionError:
        raise CorruptData(f"{where} changed while it was read; run the step again") from None
    except exceptions.InvalidPathError as error:
        raise UnsafePath(f"{where} holds a file with an unsafe name: {_brief(error)}") from None
    except (exceptions.BaseError, OSError, ValueError) as error:
        text = _brief(error)
        if "NoSuchBucket" in str(error):
            raise SourceNotFound(f"there is no bucket {location.authority!r} ({where})") from None
        if "Range request not supported" in text:
            # object_store had to resume after a cut, and could not.
            text = "the connection was cut, and the server cannot resume"
        if "No CA certificates" in str(error):  # also for plain http: the client is made for both
            raise ConfigurationError(
                f"{where} cannot be opened: there are no CA certificates here; install ca-certificates in the image, "
                "or set SSL_CERT_FILE"
            ) from None
        if "builder error" in text and location.scheme == "s3":
            raise ConfigurationError(
                "the S3 endpoint is plain http: set AWS_ALLOW_HTTP=true if that is meant, or use https"
            ) from None
        raise StoreUnavailable(f"{where}: {text}") from None


def _brief(error: Exception) -> str:
    """The first line, without secrets and without the query of URLs."""
    text = str(error).partition("\n")[0]
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return re.sub(r"\?[^\s]*", "?...", text)[:300]
