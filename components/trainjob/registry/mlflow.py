"""MLflow as the registry: in a SQLite file, which needs no server, or behind a tracking server.

One ``create_model_version`` call creates a version with all of its tags, so that no incomplete version exists. MLflow
creates a new version at each such call; the ``export_id`` prevents duplicates.

Tags: ``trainjob.export_id``, ``trainjob.export_key`` (a hash of it, safe in a search filter), ``trainjob.digest``,
``trainjob.metric.<name>``, those of `trainjob.registry.mlflow_promotions`, and those of the caller.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trainjob._support import retrying
from trainjob.errors import (
    ConfigurationError,
    ModelNotFound,
    RegistryConflict,
    RegistryError,
    RegistryUnavailable,
)
from trainjob.registry import runs, sqlite
from trainjob.registry.base import (
    History,
    ModelVersion,
    check_alias,
    check_export_id,
    check_metrics,
    check_name,
    check_tags,
)
from trainjob.registry.mlflow_environment import open_client, without_warnings
from trainjob.registry.mlflow_promotions import MlflowPromotions

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PREFIX = "trainjob."
_EXPORT_ID, _EXPORT_KEY = f"{_PREFIX}export_id", f"{_PREFIX}export_key"
_DIGEST, _METRIC = f"{_PREFIX}digest", f"{_PREFIX}metric."
_RESERVED = (_EXPORT_ID, _EXPORT_KEY, _DIGEST)
_LONGEST_SOURCE = 500  # characters; `SqlModelVersion.source`; SQLite does not enforce it


class MlflowRegistry(MlflowPromotions):
    """A `trainjob.registry.base.Registry` in MLflow.

    Args:
        uri: ``sqlite:////abs.db`` or ``http(s)://host``.
        lock_timeout: Seconds to wait for a database that others have locked.
    """

    def __init__(self, uri: str, *, lock_timeout: float = 30.0) -> None:
        self._lock_timeout = lock_timeout
        self._database = sqlite.path_of(uri) if uri.startswith("sqlite:") else None
        self._uri = f"sqlite:///{self._database}" if self._database else uri
        with without_warnings(), self._errors("connect"):
            if self._database is not None:
                sqlite.create(self._database, open_client)
                sqlite.probe(self._database, lock_timeout)
            self._client = open_client(self._uri)

    def check(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ModelVersion | None:
        """Find problems before an upload, by requesting this version for a model that does not exist.

        MLflow checks location, names and values by its own rules and settings before it looks for the model (3.17,
        ``_create_model_version`` of server/handlers.py and of the SQLAlchemy store).
        """
        key, every = _tags(export_id, "", metrics, tags)
        if found := self._call(f"find {check_name(name)!r}", lambda: self._find(name, key)):
            return found[0]
        if self._database is None and len(uri) > _LONGEST_SOURCE:
            raise ConfigurationError(
                f"the location of the model has {len(uri)} characters, but the MLflow server {self._uri} stores at most"
                f" {_LONGEST_SOURCE}; export to a shorter location than {uri}"
            )
        self._call(f"register {name!r}", lambda: self._raise_refusal(f"{name} {secrets.token_hex(16)}", uri, every))
        return None

    def _raise_refusal(self, absent: str, uri: str, tags: Mapping[str, str]) -> None:
        """Raise the reason why MLflow would refuse a version, except that its model does not exist."""
        from mlflow.exceptions import MlflowException

        try:
            self._create_version(absent, uri, tags)
        except MlflowException as error:
            # Permissions may be limited to the real model's name, which differs from this one.
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED") and " 403" not in str(error):
                raise

    def register(
        self,
        name: str,
        uri: str,
        *,
        export_id: str,
        digest: str,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
        history: History | None = None,
    ) -> ModelVersion:
        """Register a version, once per ``export_id``. Of duplicates (race, lost reply) the lowest number remains."""
        check_name(name)
        key, every = _tags(export_id, digest, metrics, tags)
        run = runs.run_of(every, metrics or {}, history or {})
        with self._exclusive():
            found = self._call(f"find {name!r}", lambda: self._find(name, key))
            if not found:
                run_id = self._record(run) if run else None
                self._call(f"register {name!r}", lambda: self._create(name, uri, key, every, run_id))
                found = self._call(f"find {name!r}", lambda: self._find(name, key))
            if not found:
                raise RegistryUnavailable(f"{self._uri} accepted a version of {name!r} but does not list it")
            version, *duplicates = found
            for duplicate in duplicates:
                self._call(f"remove a duplicate of {name!r}", partial(self._remove, duplicate))
            if run and version.run_id:
                self._call(
                    f"remove duplicates of run {run.name!r}", lambda: runs.tidy(self._client, run, version.run_id)
                )
        if (version.digest, version.uri) != (digest, uri):
            raise RegistryConflict(
                f"export_id {export_id!r} has already registered version {version.version} of {name!r} with other"
                f" content: {version.uri} {version.digest}, now {uri} {digest}; use a new export_id for a new model"
            )
        return version

    def resolve(self, name: str, version: str) -> ModelVersion:
        """Find a version by its number, by ``latest`` for the highest number, or by an alias."""
        check_name(name)
        if version == "latest":
            if not (versions := self.list(name)):
                raise ModelNotFound(f"{name!r} has no versions in {self._uri}")
            return versions[-1]
        if version.isascii() and version.isdigit():
            return self._call(
                f"find version {version} of {name!r}", lambda: _version(self._client.get_model_version(name, version))
            )
        found = self._holder(name, check_alias(version))
        if found is None:
            raise ModelNotFound(f"no version of {name!r} has the alias {version!r} in {self._uri}")
        return found

    def list(self, name: str) -> Sequence[ModelVersion]:
        """List all versions, oldest first."""
        return self._call(f"list {name!r}", lambda: self._search(f"name='{check_name(name)}'"))

    def _tag(self, version: ModelVersion, tag: str, value: str) -> None:
        self._call(
            f"tag version {version.version} of {version.name!r}",
            lambda: self._client.set_model_version_tag(version.name, version.version, tag, value),
        )

    def _set_alias(self, version: ModelVersion, alias: str) -> None:
        self._call(
            f"set alias {alias!r} of {version.name!r}",
            lambda: self._client.set_registered_model_alias(version.name, alias, version.version),
        )

    def _find(self, name: str, key: str) -> Sequence[ModelVersion]:
        return self._search(f"name='{name}' AND tags.`{_EXPORT_KEY}`='{key}'")

    def _search(self, query: str) -> Sequence[ModelVersion]:
        found = []
        token = None
        while True:
            page = self._client.search_model_versions(query, page_token=token)
            found += [_version(each) for each in page]
            token = page.token
            if not token:
                break
        # Search results do not contain aliases.
        aliases = self._client.get_registered_model(found[0].name).aliases if found else {}
        named = [
            replace(each, aliases=tuple(sorted(alias for alias in aliases if str(aliases[alias]) == each.version)))
            for each in found
        ]
        return sorted(named, key=lambda version: int(version.version))

    def _record(self, run: runs.Run) -> str | None:
        """Record the run; returns its ID, or None if this user may register models but not create runs."""
        try:
            return self._call(f"create the run {run.name!r}", lambda: runs.record(self._client, run, self._database))
        except ConfigurationError as error:
            _log.warning("the model is registered without an MLflow run of its TrainJob: %s", error)
            return None

    def _create(self, name: str, uri: str, key: str, tags: Mapping[str, str], run_id: str | None) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # Search again: this may be a retry of a request that succeeded.
        if self._find(name, key):
            return
        self._create_version(name, uri, tags, run_id)

    def _create_version(self, name: str, uri: str, tags: Mapping[str, str], run_id: str | None = None) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_model_version(name, uri, run_id=run_id, tags=dict(tags), await_creation_for=0)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE" and "source" in str(error):
                raise ConfigurationError(
                    f"the MLflow server {self._uri} does not register models at {uri}: it accepts locations that the"
                    " server can reach, such as s3://, but no local files; export to such a location, or use the"
                    " registry mlflow+sqlite:////absolute/path.db"
                ) from None
            raise

    def _remove(self, version: ModelVersion) -> None:
        try:
            self._client.delete_model_version(version.name, version.version)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":  # its creator was faster
                raise

    def _holder(self, name: str, alias: str) -> ModelVersion | None:
        try:
            return self._call(
                f"find {name}@{alias}", lambda: _version(self._client.get_model_version_by_alias(name, alias))
            )
        except ModelNotFound:
            return None

    @property
    def _is_server(self) -> bool:
        return self._database is None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Allow one writer of a SQLite registry at a time, so that a search and the following write are atomic."""
        with sqlite.locked(self._database, self._lock_timeout) if self._database else nullcontext():
            yield

    def _call(self, what: str, action: Callable[[], _T]) -> _T:
        """Do ``action``; retries for ``lock_timeout`` seconds while the database is locked."""
        # Without a limit of the failures: each is one look whether the lock is free.
        backoff = retrying.TRANSFER(failures=math.inf, seconds=self._lock_timeout, first_pause=0.05, longest_pause=2.0)

        def attempt() -> _T:
            with without_warnings(), self._errors(what):
                if self._database is not None:
                    sqlite.probe(self._database, backoff.seconds - backoff.elapsed)
                return action()

        try:
            return retrying.retry(attempt, _Locked, backoff)
        except _Locked:
            problem = f"cannot {what}: {self._database} was locked for {self._lock_timeout:g} s"
            raise RegistryUnavailable(problem) from None

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Translate MLflow's errors into those of `trainjob.errors`."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise self._translated(error, what) from None

    def _translated(self, error: Any, what: str) -> RegistryError | ConfigurationError:
        text = str(error).partition("\n")[0][:400]
        code = error.error_code
        if self._database is not None and ("database is locked" in text or "database table is locked" in text):
            return _Locked(text)
        if code == "RESOURCE_DOES_NOT_EXIST" or (code == "INVALID_PARAMETER_VALUE" and "alias" in text):
            return ModelNotFound(f"cannot {what}: {text} ({self._uri})")
        if (
            code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED")
            or " 401" in text
            or " 403" in text
        ):
            return ConfigurationError(
                f"the MLflow server {self._uri} denied access: cannot {what}; set MLFLOW_TRACKING_TOKEN, or"
                " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or "out-of-date database schema" in text:
            return ConfigurationError(f"cannot {what} in {self._uri}: {text}")
        return RegistryUnavailable(f"cannot {what}: {self._uri} failed: {text}")


class _Locked(RegistryUnavailable):
    """SQLite reported that another connection has locked the database."""


def _tags(
    export_id: str, digest: str, metrics: Mapping[str, float] | None, tags: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """The key by which a version is found, and all its tags."""
    key = hashlib.sha256(check_export_id(export_id).encode()).hexdigest()[:32]
    every = {name: value for name, value in (tags or {}).items() if name not in _RESERVED}
    check_tags(every)
    every |= {f"{_METRIC}{metric}": repr(value) for metric, value in check_metrics(metrics or {}).items()}
    return key, every | {_EXPORT_ID: export_id, _EXPORT_KEY: key, _DIGEST: digest}


def _version(found: Any) -> ModelVersion:
    tags = dict(found.tags)
    metrics = {}
    for name, value in tags.items():
        if name.startswith(_METRIC):
            try:
                metrics[name.removeprefix(_METRIC)] = float(value)
            except ValueError:
                continue  # edited by hand
    return ModelVersion(
        name=found.name,
        version=str(found.version),
        uri=found.source or "",
        digest=tags.get(_DIGEST, ""),
        metrics=metrics,
        aliases=tuple(sorted(found.aliases or ())),
        tags={name: value for name, value in tags.items() if not name.startswith(_METRIC)},
        created=found.creation_timestamp / 1000,
        run_id=found.run_id or "",
    )
