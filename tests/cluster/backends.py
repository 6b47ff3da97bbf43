"""Backends of users of the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend


def backend_of(kubeconfig: Path, **options: Any) -> KubernetesBackend:
    """A backend with the permissions of a kubeconfig."""
    return KubernetesBackend(Credentials(kubeconfig=str(kubeconfig)), **options)


@asynccontextmanager
async def opened(kubeconfig: Path, **options: Any) -> AsyncIterator[KubernetesBackend]:
    """The same, closed at the end."""
    backend = backend_of(kubeconfig, **options)
    yield backend
    await backend.aclose()


both_watches = pytest.mark.parametrize("backend", [False, True], indirect=True, ids=["alone", "shared"])
"""Runs a test with a watch of one job, and with one that all jobs of a namespace share."""
