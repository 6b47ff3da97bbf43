"""Which store a location is of: the choice by scheme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainjob.data.locations import Location
from trainjob.data.stores.base import Closing, Store
from trainjob.data.stores.files import FileStore
from trainjob.errors import missing


def open_store(location: Location) -> Store:
    """The store at ``location``.

    Raises:
        ConfigurationError: The extra ``trainjob[storage]`` is needed and not installed, or its settings are wrong.
    """
    if location.on_disk:
        return FileStore(location)
    if location.scheme in ("http", "https"):
        try:
            from trainjob.data.stores.web import WebStore  # noqa: PLC0415 - an extra, for those who need it
        except ImportError:
            raise missing(f"{location.scheme}://", "httpx", "storage") from None
        return WebStore(location)
    if location.scheme == "hf":
        try:
            from trainjob.data.stores.huggingface import HubStore  # noqa: PLC0415 - likewise
        except ImportError:
            raise missing("hf://", "huggingface-hub and httpx", "hf") from None
        return HubStore(location)
    if location.scheme == "oci":
        try:
            from trainjob.data.stores.oci import OciStore  # noqa: PLC0415 - likewise
        except ImportError:
            raise missing("oci://", "httpx", "storage") from None
        return OciStore(location)
    from trainjob.data.stores.object_stores import ObjectStore  # noqa: PLC0415 - likewise

    return ObjectStore(location)


@contextmanager
def opened(location: Location) -> Iterator[Store]:
    """`open_store`, for the length of a block: then its connections are closed."""
    store = open_store(location)
    try:
        yield store
    finally:
        if isinstance(store, Closing):
            store.close()
