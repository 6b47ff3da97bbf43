"""The state of a study in an Optuna storage: a database that Optuna's own tools read, too.

Two studies of Optuna hold one study:

* ``trainjob-journal/<name>`` is the journal. Each of its trials is a file of the journal, as `trainjob.tuning.journal`
  lists them, and is complete from the start. Optuna numbers the trials of a study without a gap, also for several
  processes: of two files with the same name the one with the lower number stands. Only Optuna's API is needed for that.
* The study with the key as its name is for people: Optuna's dashboard and `optuna.load_study` show it as a study that
  Optuna ran itself. It is written from the journal, and nothing is read from it. What a killed launcher did not write
  there is written by the next one.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote

from trainjob._support.control_characters import one_line
from trainjob._support.masking import MASK, names_a_secret
from trainjob.data.stores.base import retry
from trainjob.errors import ConfigurationError, CorruptData, StoreUnavailable
from trainjob.tuning.sampling import distribution_of, load_optuna, quiet
from trainjob.tuning.study import Study
from trainjob.tuning.trials import parameters_of, trial_of

if TYPE_CHECKING:
    import optuna

_log = logging.getLogger(__name__)
T = TypeVar("T")
Entry = Mapping[str, Any]

_SCHEME = re.compile(r"(?:sqlite|postgresql|mysql|mariadb)(?:\+\w+)?://", re.IGNORECASE)
_PASSWORD = re.compile(r"[\w+]+://[^:/]*:(?P<password>[^@]*)@")  # as SQLAlchemy reads it
_REFERENCE = re.compile(r"\$\(([A-Za-z_]\w*)\)")
_OPENINGS = 5
_BUSY_SECONDS = 60  # SQLite: how long a writer waits for another one
_REASON = 500  # characters

_OWNER = "trainjob.journal"
"""Attribute of the study for people: the name of its journal."""


def is_storage(uri: str) -> bool:
    """Whether a location is an Optuna storage."""
    return _SCHEME.match(uri) is not None


def storage_location(url: str, name: str) -> str:
    """The location of a journal in an Optuna storage: ``<url>#<name>``.

    Raises:
        ConfigurationError: The URL contains a password.
    """
    _refuse_secrets(url)
    return f"{url}#{name}"


@contextmanager
def open_storage(uri: str) -> Iterator[StorageJournal]:
    """Open the journal at a location, see `storage_location`.

    Raises:
        ConfigurationError: The URL contains a password, or Optuna or the driver of the database is not installed.
        StoreUnavailable: The database cannot be reached, or refuses the credentials.
    """
    _refuse_secrets(uri)
    url, _, name = uri.rpartition("#")
    if not url or not name:
        raise ConfigurationError(f"{uri} has no name of a study; write {uri}#name")
    journal = StorageJournal(url, name)
    try:
        yield journal
    finally:
        journal.close()


class StorageJournal:
    """A journal in an Optuna storage. Safe for several threads.

    Args:
        url: URL of the database; ``$(NAME)`` stands for the environment variable NAME.
        name: Name of the journal.
    """

    def __init__(self, url: str, name: str) -> None:
        self._optuna = load_optuna()
        self._url, self._name = url, name
        self._location = f"{url}#{name}"
        self._lock = RLock()
        self._secrets: list[str] = []
        self._writer = uuid.uuid4().hex
        self._journal: optuna.Study | None = None
        self._taken = 0
        self._known: dict[str, dict[str, Any]] = {}
        self._own: set[str] = set()
        self._shown: _Shown | None = None
        self._thread = ThreadPoolExecutor(1, "trainjob-storage")  # each value of a trial is a transaction
        self._storage, self._rdb = self._open()

    def close(self) -> None:
        """Close the connections. What is not yet in the study for people is written by the next launch."""
        self._thread.shutdown(cancel_futures=True)
        self._rdb.remove_session()
        self._rdb.engine.dispose()

    @property
    def location(self) -> str:
        """Its location, for errors."""
        return self._location

    def create(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Store `value` if the name is not in use; returns what stands there.

        Raises:
            ConfigurationError: The storage has another study with the key of this one as its name.
        """
        with self._lock:
            if name == "study":
                self._shown = self._tried(lambda: _Shown(self._optuna, self._storage, self._name, value))
            if name not in self._known and name not in self._take():
                self._tried(lambda: self._append(name, value))
                if name not in self._take():
                    raise CorruptData(f"{self._location}: {name} was removed while the study ran")
            self._show(name)
            return self._known[name]

    def read(self, name: str) -> dict[str, Any] | None:
        """What stands under a name; None if it is not in use."""
        with self._lock:
            return self._known.get(name) or self._take().get(name)

    def all(self, folder: str) -> dict[str, dict[str, Any]]:
        """Name without the folder -> what stands there."""
        prefix = f"{folder}/"
        with self._lock:
            known = self._take().items()
            return {name.removeprefix(prefix): value for name, value in known if name.startswith(prefix)}

    # --- the journal

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        if self._journal is None:
            self._journal = self._optuna.create_study(
                study_name=f"trainjob-journal/{self._name}", storage=self._storage, load_if_exists=True
            )
            self._journal.set_user_attr(
                "trainjob", "The journal of a study of trainjob. Without it, the study is lost."
            )
        attributes = {"name": name, "value": dict(value), "writer": self._writer}
        # A reply that was lost is no problem: the first of the two entries stands.
        self._journal.add_trial(self._optuna.trial.create_trial(value=0.0, user_attrs=attributes))

    def _take(self) -> dict[str, dict[str, Any]]:
        """Read the entries that are new; returns all."""
        for trial in self._tried(self._entries)[self._taken :]:
            name, value = (trial.user_attrs.get(each) for each in ("name", "value"))
            if not isinstance(name, str) or not isinstance(value, dict):
                raise CorruptData(
                    f"{self._location}: trial {trial.number} of the Optuna study trainjob-journal/{self._name} is"
                    " damaged; use another key"
                )
            if name not in self._known:
                self._known[name] = value
                if trial.user_attrs.get("writer") == self._writer:
                    self._own.add(name)
            self._taken += 1
        return self._known

    def _entries(self) -> list[Any]:
        if self._journal is None:
            try:
                self._journal = self._optuna.load_study(
                    study_name=f"trainjob-journal/{self._name}", storage=self._storage
                )
            except KeyError:
                return []
        try:
            return self._journal.get_trials(deepcopy=False)
        except KeyError:
            raise CorruptData(f"{self._location} was removed while the study ran") from None

    # --- the study for people

    def _show(self, name: str) -> None:
        """Write the trial of an own entry to the study for people; all trials when a launch begins or ends."""
        shown, (folder, _, number) = self._shown, name.partition("/")
        if shown is None or not number:
            return
        everything = folder in ("launches", "ends")
        if not everything and name not in self._own:
            return
        prefix = "asked/" if everything else f"asked/{number}"
        numbers = [each.partition("/")[2] for each in self._known if each.startswith(prefix)]
        trials = {int(each): (self._known[f"asked/{each}"], self._known.get(f"ended/{each}")) for each in numbers}
        level = logging.WARNING if folder == "ends" else logging.DEBUG  # the end writes all trials again
        done = self._thread.submit(self._write, shown, trials, level)
        if folder == "ends":
            done.result()

    def _write(self, shown: _Shown, trials: Mapping[int, tuple[Entry, Entry | None]], level: int) -> None:
        try:
            shown.write(trials)
        except Exception as error:  # noqa: BLE001 - of Optuna, of the database: the journal is what counts
            _log.log(level, "the Optuna study of %s misses trials: %s", self._location, self._text(error))

    # --- errors

    def _open(self) -> tuple[optuna.storages.BaseStorage, optuna.storages.RDBStorage]:
        """Connect, and create Optuna's tables."""
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

        url = _REFERENCE.sub(self._referenced, self._url)
        options: dict[str, Any] = {"pool_pre_ping": True}
        try:
            parsed = make_url(url)
            if parsed.get_backend_name() == "sqlite":
                if parsed.database in (None, "", ":memory:"):
                    raise ConfigurationError(f"{self._url} is lost with its process; write sqlite:////path/studies.db")
                options["connect_args"] = {"timeout": _BUSY_SECONDS}
        except (ArgumentError, ValueError):
            raise ConfigurationError(f"{self._url} is not the URL of a database, such as {_EXAMPLE}") from None
        for number in range(_OPENINGS):
            try:
                storage = self._optuna.storages.RDBStorage(url, engine_kwargs=options)
                return self._optuna.storages.get_storage(storage), storage
            except (ImportError, NoSuchModuleError) as error:
                raise ConfigurationError(
                    f"the driver of the database {self._url} is not installed ({self._text(error.__cause__ or error)});"
                    f" for PostgreSQL: pip install psycopg2-binary, and write {_EXAMPLE}"
                ) from None
            except RuntimeError as error:  # tables of another version
                raise ConfigurationError(f"{self._url}: {self._text(error)}") from None
            except (SQLAlchemyError, self._optuna.exceptions.StorageInternalError) as error:
                # Two processes that create the tables at once are in each other's way.
                if number == _OPENINGS - 1:
                    raise StoreUnavailable(f"{self._url}: {self._text(error)}") from None
        raise AssertionError

    def _referenced(self, found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if not value:
            raise ConfigurationError(f"{self._url} uses the environment variable {found[1]}, which is not set; set it")
        self._secrets += [value, quote(value, safe="")]
        return quote(value, safe="")

    def _tried(self, action: Callable[[], T]) -> T:
        """The result of `action`, retried while the database is unavailable."""
        return retry(lambda: self._translated(action))

    def _translated(self, action: Callable[[], T]) -> T:
        # It comes with Optuna, an extra.
        from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

        try:
            return action()
        except (SQLAlchemyError, self._optuna.exceptions.StorageInternalError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
            text = f"{self._location}: {self._text(cause)}"
            if isinstance(cause, DBAPIError) and not isinstance(cause, OperationalError | InterfaceError):
                raise ConfigurationError(text) from None  # such as a missing permission
            raise StoreUnavailable(text) from None

    def _text(self, error: BaseException) -> str:
        """The message of an error, without the values of environment variables."""
        text = str(getattr(error, "orig", None) or error)
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return one_line(text, _REASON)


class _Shown:
    """The study for people: an Optuna study with the key of the study as its name.

    Trial n is n in Optuna, too. Trials are added empty, in the state ``WAITING``: where two launchers add one at once,
    one is left for the next number. Everything else may be written twice.
    """

    def __init__(self, module: Any, storage: Any, name: str, header: Mapping[str, Any]) -> None:
        self._optuna, self._storage, self._states = module, storage, module.trial.TrialState
        asked = Study.read({**header["study"], "max_trials": 1})
        self._distributions = {each: distribution_of(parameter) for each, parameter in asked.space.items()}
        key = str(header["key"])
        self._study = module.create_study(
            study_name=key, storage=storage, direction=asked.direction, load_if_exists=True
        )
        # Trials are read before the owner: another launcher names the owner, then adds trials.
        empty = not self._study.get_trials(deepcopy=False)
        owner = self._study.user_attrs.get(_OWNER)
        if owner is None and empty:
            self._study.set_user_attr(_OWNER, name)
            with quiet():  # that the method is experimental
                self._study.set_metric_names([asked.metric])
        elif owner != name:
            raise ConfigurationError(f"the Optuna storage has another study with the name {key}; use another key")

    def write(self, trials: Mapping[int, tuple[Entry, Entry | None]]) -> None:
        """Write what the journal has of these trials: number -> parameters, outcome."""
        present = self._study.get_trials(deepcopy=False)
        for number, (asked, ended) in sorted(trials.items()):
            while len(present) <= number:
                self._study.add_trial(self._optuna.trial.create_trial(state=self._states.WAITING))
                present = self._study.get_trials(deepcopy=False)
            if not present[number].state.is_finished():
                self._write(present[number], asked, ended)

    def _write(self, present: optuna.trial.FrozenTrial, asked: Entry, ended: Entry | None) -> None:
        states, storage, id_ = self._states, self._storage, present._trial_id
        parameters = parameters_of(present.number, asked)
        if present.state is states.WAITING:
            storage.set_trial_state_values(id_, states.RUNNING)
        for name in parameters.keys() - present.params.keys():
            distribution = self._distributions[name]
            storage.set_trial_param(id_, name, distribution.to_internal_repr(parameters[name]), distribution)
        if ended is None:
            return
        trial = trial_of(present.number, parameters, ended)
        for step, value in trial.values:
            if step not in present.intermediate_values:
                storage.set_trial_intermediate_value(id_, step, value)
        outcome = trial.as_dict()
        for name in ("job", "reason", "metrics", "outputs"):
            if outcome[name]:
                storage.set_trial_user_attr(id_, f"trainjob.{name}", outcome[name])
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED}.get(trial.state, states.FAIL)
        values = [trial.value] if state is not states.FAIL and trial.value is not None else None
        storage.set_trial_state_values(id_, state, values)


_EXAMPLE = "postgresql+psycopg2://user:$(DB_PASSWORD)@host/database"


def _refuse_secrets(url: str) -> None:
    """Refuse a literal password; the message does not quote the URL."""
    found = _PASSWORD.match(url)
    query = parse_qsl(url.partition("?")[2].partition("#")[0])
    if (found and found["password"] and not _REFERENCE.fullmatch(found["password"])) or any(
        names_a_secret(name, value) for name, value in query
    ):
        raise ConfigurationError(
            "the URL of the Optuna storage contains a password, which logs and commands would show; set an environment"
            f" variable, and write its name in place of the password: {_EXAMPLE}"
        )
