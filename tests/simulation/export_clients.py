"""How the registries of a world of exports are reached: calls of MLflow's client, and HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
from mlflow.exceptions import MlflowException

if TYPE_CHECKING:
    from tests.simulation.export_world import Exports


class Losing:
    """MLflow's client; its replies can be lost."""

    def __init__(self, world: Exports, client: Any) -> None:
        self._world, self._client = world, client

    def __getattr__(self, method: str) -> Any:
        send = getattr(self._client, method)

        def call(*arguments: Any, **options: Any) -> Any:
            done = send(*arguments, **options)
            lost, self._world.lost = self._world.lost, False
            if lost:
                raise MlflowException("the connection was cut")
            return done

        return call


class Wire:
    """An HTTP client that is connected to the registry of a world."""

    def __init__(self, world: Exports) -> None:
        self._world = world

    def request(
        self, method: str, url: str, *, params: Mapping[str, str], json: Any, headers: Mapping[str, str]
    ) -> httpx.Response:
        del headers
        path = url.partition("/api/model_registry/v1/")[2]
        return self._world.handle(method, path, params, json)
