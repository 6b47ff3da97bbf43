"""The direct backend with prepared requests, which a step sends at SIGTERM; real ones need sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tests.fakes.kube.direct import DirectBackend

from trainjob import JobRef
from trainjob._backends.kubernetes.prepared import PreparedRequest


class Prepared:
    """A prepared request, which the API server serves at once."""

    forbidden = False

    def __init__(self, backend: StepBackend, ref: JobRef, patch: Mapping[str, Any] | None) -> None:
        self.backend, self.ref, self.patch = backend, ref, patch

    async def warm(self) -> None: ...

    def close(self) -> None:
        self.backend.prepared.remove(self)

    def send(self) -> bool:
        method, body = ("PATCH", dict(self.patch)) if self.patch is not None else ("DELETE", {})
        self.backend.sent.append((method, self.ref.name))
        path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{self.ref.namespace}/trainjobs/{self.ref.name}"
        self.backend.store.handle("a signal handler", method, path, {}, body)
        return True

    def send_or(self, other: Prepared, seconds: float) -> Prepared | None:
        del seconds
        return self if self.send() else other if other.send() else None


class StepBackend(DirectBackend):
    """`DirectBackend` for a step that is terminated.

    Attributes:
        prepared: Its prepared requests.
        sent: Method and name of those that were sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Prepared] = []
        self.sent: list[tuple[str, str]] = []

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest:
        self.prepared.append(Prepared(self, ref, patch))
        return cast("PreparedRequest", self.prepared[-1])

    async def prepared_pod_request(self, namespace: str, name: str) -> None:
        del namespace, name
