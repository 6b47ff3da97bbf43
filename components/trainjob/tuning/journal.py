"""The state of a study: small JSON files in one directory of the workspace, each created once and never changed.

::

    <directory>/study.json              number of the format, the search and the template, and when the study began
    <directory>/asked/00007.json        parameters of trial 7, before its job is created
    <directory>/ended/00007.json        outcome of trial 7, before its job is cancelled
    <directory>/launches/00002.json     limits of the third launch
    <directory>/ends/00002.json         why the third launch ended the study

In an Optuna storage the files are trials of an Optuna study, see `trainjob.tuning.storage`.

Two launchers of one study may run at once: of two files with the same name the first one stands, and both read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainjob._support.foreign import LARGE, Unreadable, mapping_of
from trainjob.data.locations import join, parse_target
from trainjob.data.stores.base import WritableStore, read_small, retry
from trainjob.data.stores.opening import opened_writable
from trainjob.errors import CorruptData, SourceNotFound
from trainjob.settings import Settings
from trainjob.tuning.storage import is_storage, open_storage, storage_location
from trainjob.tuning.trials import Journal

_LARGEST = 64 << 20  # bytes of a file


class StoreJournal:
    """A journal in a directory or an object store.

    Args:
        store: The opened directory.
    """

    def __init__(self, store: WritableStore) -> None:
        self._store = store
        self._known: dict[str, dict[str, Any]] = {}

    @property
    def location(self) -> str:
        """Its location, for errors."""
        return str(self._store.location)

    def create(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Store `value` if the name is not in use; returns what stands there."""
        # A reply that was lost is no problem: the next try finds this value.
        if retry(lambda: self._store.create(f"{name}.json", _encoded(value))):
            self._known[name] = dict(value)
            return dict(value)
        found = self.read(name)
        if found is None:
            raise CorruptData(f"{self._store.location}: {name}.json was removed while the study ran")
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        """What stands under a name; None if it is not in use."""
        if name not in self._known:
            try:
                data = retry(lambda: read_small(self._store, f"{name}.json", _LARGEST))
            except SourceNotFound:
                return None
            self._known[name] = self._decoded(name, data)
        return self._known[name]

    def all(self, folder: str) -> dict[str, dict[str, Any]]:
        """Name without the folder -> what stands there; each file is read once."""
        found = {}
        for entry in retry(lambda: list(self._store.list())):
            head, _, name = entry.path.rpartition("/")
            if head == folder and name.endswith(".json"):
                value = self.read(entry.path.removesuffix(".json"))
                if value is not None:
                    found[name.removesuffix(".json")] = value
        return found

    def _decoded(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            return mapping_of(data, name, LARGE)
        except Unreadable as error:
            raise CorruptData(
                f"{self._store.location}: {name}.json is damaged (it {error.why}); remove the file to repeat what it"
                " records, or use another key"
            ) from None


@contextmanager
def open_journal(uri: str) -> Iterator[Journal]:
    """Open the journal in a directory, an object store, or an Optuna storage (``sqlite:////path/studies.db#name``).

    Raises:
        ConfigurationError: The location cannot hold a journal.
        StoreUnavailable: The database of an Optuna storage cannot be reached.
    """
    if is_storage(uri):
        with open_storage(uri) as journal:
            yield journal
        return
    with opened_writable(parse_target(uri)) as store:
        yield StoreJournal(store)


def journal_location(key_hash: str, workspace: str | None = None) -> str:
    """The directory of the journal of a study.

    Args:
        key_hash: Hash of the study's key.
        workspace: Directory, object store or Optuna storage of all studies. If left out, ``TRAINJOB_WORKSPACE``, else
            ``TRAINJOB_HOME`` of this machine.

    Raises:
        ConfigurationError: The URL of an Optuna storage contains a password.
    """
    settings = Settings()
    where = workspace or settings.workspace or settings.home.as_uri()
    return storage_location(where, key_hash) if is_storage(where) else join(where, "studies", key_hash)


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
