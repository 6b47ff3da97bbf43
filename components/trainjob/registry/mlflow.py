"""MLflow as the registry: on a SQLite file, which needs no server, or behind a tracking server.

One version is one ``create_model_version`` call that carries everything in its tags, so there is never half a version.
MLflow itself numbers a version at every such call, whatever was registered before; the ``export_id`` makes it one.

Tags: ``trainjob.export_id``, ``trainjob.export_key`` (a hash of it, safe in a search filter), ``trainjob.digest``,
``trainjob.metric.<name>``, on a server ``trainjob.claim.<alias>``, and those of the caller.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trainjob import retrying
from trainjob.errors import (
    ConfigurationError,
    ModelNotFound,
    RegistryConflict,
    RegistryError,
    RegistryUnavailable,
)
from trainjob.registry import runs, sqlite
from trainjob.registry.alias_claims import Claim, holder
from trainjob.registry.base import (
    History,
    Mode,
    ModelVersion,
    Promotion,
    check_alias,
    check_export_id,
    check_metrics,
    check_name,
    check_rule,
    check_tags,
    compare,
)
from trainjob.registry.quiet import open_client, without_warnings

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_PREFIX = "trainjob."
_EXPORT_ID, _EXPORT_KEY = f"{_PREFIX}export_id", f"{_PREFIX}export_key"
_DIGEST, _METRIC = f"{_PREFIX}digest", f"{_PREFIX}metric."
_RESERVED = (_EXPORT_ID, _EXPORT_KEY, _DIGEST)
_CLAIM = f"{_PREFIX}claim."
_LONGEST_SOURCE = 500  # characters; `SqlModelVersion.source`, which SQLite does not hold to
_INSTANT = 30  # seconds within which promotions are at the same instant; clocks of launchers differ by less
_ROUNDS = 5


class MlflowRegistry:
    """See `trainjob.registry.base.Registry`.

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
        """See `Registry.check`. MLflow is asked for this version of a model that does not exist.

        It checks location, names and values before it looks for the model (3.17, ``_create_model_version`` of
        server/handlers.py and of the SQLAlchemy store), and so by its own rules and settings.
        """
        key, every = _tags(export_id, "", metrics, tags)
        if found := self._call(f"find {check_name(name)!r}", lambda: self._find(name, key)):
            return found[0]
        if self._database is None and len(uri) > _LONGEST_SOURCE:
            raise ConfigurationError(
                f"the location of the model has {len(uri)} characters, and the MLflow server {self._uri} keeps"
                f" {_LONGEST_SOURCE}; export to a shorter one: {uri}"
            )
        self._call(f"register {name!r}", lambda: self._refused(f"{name} {secrets.token_hex(16)}", uri, every))
        return None

    def _refused(self, absent: str, uri: str, tags: Mapping[str, str]) -> None:
        """Raise what MLflow has against a version, but for the absence of its model."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra

        try:
            self._create_version(absent, uri, tags)
        except MlflowException as error:
            # A right can be one to a model of this name only, which this one is not.
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
        """See `Registry.register`. Of versions that a race or a lost reply doubled, the lowest stays."""
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
                raise RegistryUnavailable(f"{self._uri} took a version of {name!r} but does not list it")
            version, *doubles = found
            for double in doubles:
                self._call(f"remove a double of {name!r}", partial(self._remove, double))
            if run and version.run_id:
                self._call(f"remove doubles of run {run.name!r}", lambda: runs.tidy(self._client, run, version.run_id))
        if (version.digest, version.uri) != (digest, uri):
            raise RegistryConflict(
                f"version {version.version} of {name!r} was registered by this same export with other content:"
                f" {version.uri} {version.digest}, now {uri} {digest}; use a new export_id for a new model"
            )
        return version

    def resolve(self, name: str, version: str) -> ModelVersion:
        """See `Registry.resolve`. All digits are a number, ``latest`` is the highest one, all else is an alias."""
        check_name(name)
        if version == "latest":
            if not (versions := self.list(name)):
                raise ModelNotFound(f"there is no version of {name!r} in {self._uri}")
            return versions[-1]
        if version.isascii() and version.isdigit():
            return self._call(
                f"find version {version} of {name!r}", lambda: _version(self._client.get_model_version(name, version))
            )
        found = self._holder(name, check_alias(version))
        if found is None:
            raise ModelNotFound(f"no version of {name!r} has the alias {version!r} in {self._uri}")
        return found

    def promote(
        self,
        name: str,
        version: str,
        *,
        alias: str,
        metric: str | None = None,
        mode: Mode = "max",
        min_improvement: float = 0.0,
        dry_run: bool = False,
    ) -> Promotion:
        """See `Registry.promote`. Of promotions at the same instant the best by ``metric`` wins, and the others tell.

        A server moves an alias to whoever asks last. So a version first **claims** it by a tag, and looks again when it
        has it: of all that claim, everyone sees the same winner.
        """
        check_alias(alias)
        check_rule(metric, mode, min_improvement)
        with self._exclusive():
            candidate = self.resolve(name, version)
            verdict = compare(
                candidate,
                self._holder(name, alias),
                alias=alias,
                metric=metric,
                mode=mode,
                min_improvement=min_improvement,
            )
            if not verdict.promoted or dry_run:
                return verdict
            has_it = verdict.previous == candidate.version
            if self._database is not None:  # nobody else writes now
                if not has_it:
                    self._set_alias(candidate, alias)
                return verdict
            tag = f"{_CLAIM}{alias}"
            if has_it and tag not in candidate.tags:
                return verdict
            # Whoever has it by a claim may be a try again, of one that was killed before it looked.
            claim = Claim.parse(candidate.tags[tag]) if has_it else Claim(int(time.time()), metric, mode)
            if not has_it:
                self._call(
                    f"tag version {candidate.version} of {name!r}",
                    lambda: self._client.set_model_version_tag(name, candidate.version, tag, str(claim)),
                )
                self._set_alias(candidate, alias)
            return self._settled(candidate, alias, claim, verdict)

    def list(self, name: str) -> Sequence[ModelVersion]:
        """See `Registry.list`."""
        return self._call(f"list {name!r}", lambda: self._search(f"name='{check_name(name)}'"))

    def _settled(self, candidate: ModelVersion, alias: str, mine: Claim, verdict: Promotion) -> Promotion:
        """What came of a promotion on a server, after the alias is where it belongs."""
        now = None
        for _ in range(_ROUNDS):
            every = self.list(candidate.name)
            now = next((version for version in every if alias in version.aliases), None)
            rivals = [
                (version, claim)
                for version in every
                if abs((claim := Claim.parse(version.tags.get(f"{_CLAIM}{alias}", ""))).order - mine.order) <= _INSTANT
                and (claim.metric, claim.mode) == (mine.metric, mine.mode)
            ]
            winner = holder(rivals) if mine.metric else now
            if now is None or winner is None or now.version == winner.version:
                break
            # Else it was moved by hand, or by one whose claim is too new for this look: that shows in the next one.
            if any(version.version == now.version for version, _ in rivals):
                self._set_alias(winner, alias)
        if now is not None and now.version == candidate.version:
            return verdict
        who = f"version {now.version}" if now else "nobody"
        return Promotion(False, f"{alias!r} went to {who} at the same moment, and stays there", verdict.previous)

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
        # A search leaves the aliases out.
        aliases = self._client.get_registered_model(found[0].name).aliases if found else {}
        named = [
            replace(each, aliases=tuple(sorted(alias for alias in aliases if str(aliases[alias]) == each.version)))
            for each in found
        ]
        return sorted(named, key=lambda version: int(version.version))

    def _record(self, run: runs.Run) -> str | None:
        """Id of the run; None where this user may register models and not create runs."""
        try:
            return self._call(f"create the run {run.name!r}", lambda: runs.record(self._client, run, self._database))
        except ConfigurationError as error:
            _log.warning("the model is registered without an MLflow run of its TrainJob: %s", error)
            return None

    def _create(self, name: str, uri: str, key: str, tags: Mapping[str, str], run_id: str | None) -> None:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # Once more, since this may be a second try whose first one arrived.
        if self._find(name, key):
            return
        self._create_version(name, uri, tags, run_id)

    def _create_version(self, name: str, uri: str, tags: Mapping[str, str], run_id: str | None = None) -> None:
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra

        try:
            self._client.create_model_version(name, uri, run_id=run_id, tags=dict(tags), await_creation_for=0)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE" and "source" in str(error):
                raise ConfigurationError(
                    f"the MLflow server {self._uri} does not register models at {uri}: it takes places that it can"
                    " reach itself, such as s3://, and no local files; export to one of those, or use the registry"
                    " mlflow+sqlite:////absolute/path.db"
                ) from None
            raise

    def _remove(self, version: ModelVersion) -> None:
        try:
            self._client.delete_model_version(version.name, version.version)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":  # its own maker was faster
                raise

    def _holder(self, name: str, alias: str) -> ModelVersion | None:
        try:
            return self._call(
                f"find {name}@{alias}", lambda: _version(self._client.get_model_version_by_alias(name, alias))
            )
        except ModelNotFound:
            return None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One writer of a SQLite registry at a time: a search and what follows from it are then one step."""
        with sqlite.locked(self._database, self._lock_timeout) if self._database else nullcontext():
            yield

    def _call(self, what: str, action: Callable[[], _T]) -> _T:
        """The result of ``action``, retried for ``lock_timeout`` while the database is locked."""
        backoff = retrying.SQLITE_LOCK(seconds=self._lock_timeout)
        while True:
            try:
                with without_warnings(), self._errors(what):
                    if self._database is not None:
                        sqlite.probe(self._database, backoff.seconds - backoff.elapsed)
                    return action()
            except _Locked:
                if backoff.failure():
                    raise RegistryUnavailable(
                        f"cannot {what}: {self._database} stayed locked for {self._lock_timeout:g} s"
                    ) from None
                time.sleep(backoff.pause())

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn MLflow's errors into ours."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra

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
                f"the MLflow server {self._uri} refused to {what}; set MLFLOW_TRACKING_TOKEN, or"
                " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or "out-of-date database schema" in text:
            return ConfigurationError(f"cannot {what} in {self._uri}: {text}")
        return RegistryUnavailable(f"cannot {what}: {self._uri} failed: {text}")


class _Locked(RegistryUnavailable):
    """SQLite answered that another connection holds the database."""


def _tags(
    export_id: str, digest: str, metrics: Mapping[str, float] | None, tags: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """What a version is found by, and all its tags."""
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
