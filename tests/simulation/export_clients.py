"""How the registries of a world of exports are reached: calls of MLflow's client, and HTTP requests."""

from __future__ import annotations

import json
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


def connected(world: Exports) -> httpx.Client:
    """An HTTP client that is connected to the registry of a world."""

    def reply(request: httpx.Request) -> httpx.Response:
        path = request.url.path.partition("/api/model_registry/v1/")[2]
        body = json.loads(request.content) if request.content else None
        return world.handle(request.method, path, dict(request.url.params), body)

    return httpx.Client(transport=httpx.MockTransport(reply), trust_env=False)
