from __future__ import annotations

import pytest

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import pods
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._diagnosis.evidence import Evidence
from trainjob.job import JobRef


@pytest.mark.anyio
@pytest.mark.parametrize("allowed", [True, False])
async def test_evidence_has_a_field_for_invisible_pods(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """A diagnosis distinguishes "no pods" from "pods cannot be listed" by this field, not by the text of `unseen`."""
    backend = KubernetesBackend(Credentials(host="http://localhost:1"))

    async def list_pods(*_: object) -> list[object]:
        if allowed:
            return []
        raise Forbidden(403, "Forbidden", "pods is forbidden")

    async def nothing(*_: object, **__: object) -> object:
        raise ObjectNotFound(404, "NotFound", "not found")

    async def no_items(*_: object, **__: object) -> list[object]:
        return []

    monkeypatch.setattr(pods, "list_pods", list_pods)
    monkeypatch.setattr(backend._client, "send", nothing)
    monkeypatch.setattr(backend._client, "items", no_items)
    evidence = await backend.evidence(JobRef("ns", "x", "uid"))
    expected = [] if allowed else ["pods: pods is forbidden"]
    assert evidence == Evidence(None, [], {}, [], None, expected, [], pods_visible=allowed)
    await backend.aclose()
