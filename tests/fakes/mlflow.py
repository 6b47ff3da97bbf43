"""MLflow's registry in memory: a client for `trainjob.registry.mlflow.MlflowRegistry` and what its server stores.

It has the methods that `MlflowRegistry` calls, except those of runs, and behaves like a server: an alias moves to the
version that was requested last, each request for a version makes one, and search results contain no aliases.
`tests.registry.test_contract` holds it to the contract of all registries.
"""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST

_QUERY = re.compile(r"name='([^']*)'(?: AND tags\.`([^`]*)`='([^']*)')?")


class _Page(list[Any]):
    token = ""


@dataclass
class _Model:
    aliases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, SimpleNamespace] = field(default_factory=dict)
    count: int = 0


class MemoryMlflow:
    """A server and its clients; safe for several threads.

    Attributes:
        request: Called before each request with the method and its arguments.
        changes: Number of changes so far.
    """

    def __init__(self) -> None:
        self.request: Callable[[str, tuple[Any, ...]], None] = lambda _method, _arguments: None
        self.clock: Callable[[], float] = time.time
        self.changes = 0
        self._models: dict[str, _Model] = {}
        self._lock = threading.RLock()

    def client(self, uri: str = "") -> _Client:
        """A client, in place of ``mlflow.MlflowClient``."""
        del uri
        return _Client(self)

    # --- what the server does; each method is one request

    def create_registered_model(self, name: str) -> None:
        if name in self._models:
            raise MlflowException(f"Registered Model (name={name}) already exists.", RESOURCE_ALREADY_EXISTS)
        self._models[name] = _Model()

    def create_model_version(
        self, name: str, source: str, *, run_id: str | None, tags: Mapping[str, str], await_creation_for: int
    ) -> Any:
        del await_creation_for
        model = self._model(name)
        model.count += 1
        version = SimpleNamespace(
            name=name,
            version=str(model.count),
            source=source,
            tags=dict(tags),
            aliases=[],
            creation_timestamp=int(self.clock() * 1000),
            run_id=run_id or "",
        )
        model.versions[version.version] = version
        return copy.deepcopy(version)

    def delete_model_version(self, name: str, version: str) -> None:
        self._version(name, version)
        model = self._models[name]
        del model.versions[version]
        model.aliases = {alias: each for alias, each in model.aliases.items() if each != version}

    def set_model_version_tag(self, name: str, version: str, key: str, value: str) -> None:
        self._version(name, version).tags[key] = value

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self._version(name, version)
        self._models[name].aliases[alias] = str(version)

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        self._model(name).aliases.pop(alias, None)

    def get_registered_model(self, name: str) -> Any:
        return SimpleNamespace(name=name, aliases=dict(self._model(name).aliases))

    def get_model_version(self, name: str, version: str) -> Any:
        found = copy.deepcopy(self._version(name, version))
        found.aliases = [alias for alias, each in self._models[name].aliases.items() if each == found.version]
        return found

    def get_model_version_by_alias(self, name: str, alias: str) -> Any:
        version = self._model(name).aliases.get(alias)
        if version is None:
            raise MlflowException(f"Registered model alias {alias} not found.", INVALID_PARAMETER_VALUE)
        return self.get_model_version(name, version)

    def search_model_versions(self, query: str, page_token: str | None = None) -> _Page:
        del page_token
        match = _QUERY.fullmatch(query)
        assert match is not None, query
        name, tag, value = match.groups()
        versions = self._models[name].versions.values() if name in self._models else ()
        return _Page(copy.deepcopy(each) for each in versions if tag is None or each.tags.get(tag) == value)

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            raise MlflowException(f"Registered Model with name={name} not found", RESOURCE_DOES_NOT_EXIST)
        return self._models[name]

    def _version(self, name: str, version: str) -> Any:
        found = self._model(name).versions.get(str(version))
        if found is None:
            raise MlflowException(f"Model Version (name={name}, version={version}) not found", RESOURCE_DOES_NOT_EXIST)
        return found


class _Client:
    """Sends each call as one request."""

    def __init__(self, server: MemoryMlflow) -> None:
        self._server = server

    def __getattr__(self, method: str) -> Callable[..., Any]:
        handle = getattr(self._server, method)

        def call(*arguments: Any, **options: Any) -> Any:
            self._server.request(method, arguments)
            with self._server._lock:
                try:
                    return handle(*arguments, **options)
                finally:
                    self._server.changes += not method.startswith(("get_", "search_"))

        return call
