"""Choose the store of a location by its scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainjob.data.locations import Location, check_writable
from trainjob.data.stores.base import ReadableStore, WritableStore
from trainjob.data.stores.files import FileStore
from trainjob.errors import missing


def open_store(location: Location) -> ReadableStore:
    """Open ``location`` to read it.

    Raises:
        ConfigurationError: The extra ``trainjob[storage]`` is required and not installed, or a setting is wrong.
    """
    if location.writable:
        return open_writable(location)
    try:
        from trainjob.data.stores.web import WebStore
    except ImportError:
        raise missing(f"{location.scheme}://", "httpx", "storage") from None
    return WebStore(location)


def open_writable(location: Location) -> WritableStore:
    """Open ``location`` to read and write it.

    Raises:
        ConfigurationError: The location is read-only, the extra ``trainjob[storage]`` is required and not installed, or
            a setting is wrong.
    """
    check_writable(location)
    if location.on_disk:
        return FileStore(location)
    if location.scheme == "hf":
        try:
            from trainjob.data.stores.huggingface import HuggingFaceStore
        except ImportError:
            raise missing("hf://", "huggingface-hub and httpx", "hf") from None
        return HuggingFaceStore(location)
    if location.scheme == "oci":
        try:
            from trainjob.data.stores.oci import OciStore
        except ImportError:
            raise missing("oci://", "httpx", "storage") from None
        return OciStore(location)
    from trainjob.data.stores.object_stores import ObjectStore

    return ObjectStore(location)


@contextmanager
def opened(location: Location) -> Iterator[ReadableStore]:
    """Open ``location`` to read it, and close its connections at the end of the block."""
    store = open_store(location)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_writable(location: Location) -> Iterator[WritableStore]:
    """Open ``location`` to write it, and close its connections at the end of the block."""
    store = open_writable(location)
    try:
        yield store
    finally:
        store.close()
