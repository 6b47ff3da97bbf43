"""Backends: a Kubernetes cluster, or this machine.

May import `_manifest`, and the layers below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainjob.errors import ConfigurationError, missing
from trainjob.settings import Settings

if TYPE_CHECKING:
    from trainjob._backends.base import Backend
    from trainjob._backends.credentials import Credentials


BACKENDS = ("kubernetes", "local")


def connect(
    backend: str | None = None,
    *,
    shared: bool = False,
    credentials: Credentials | None = None,
) -> Backend:
    """Return a backend. Makes no request: a missing cluster configuration is reported by the first call.

    Args:
        backend: Name of the backend; if None, ``TRAINJOB_BACKEND``, else ``kubernetes``. The local backend is never a
            default: training on the machine that runs the workflow has to be requested.
        shared: Watch all jobs of a namespace, for many waiting calls, in place of one job (cluster only).
        credentials: Credentials of the cluster; those of the kubeconfig or of this pod if None.

    Raises:
        ConfigurationError: The backend is unknown, or a package that it needs is not installed.
    """
    name = backend or Settings().backend
    if name == "local":
        from trainjob._backends.local.backend import LocalBackend  # noqa: PLC0415 - needed on this machine only, not for a cluster

        return LocalBackend()
    if name == "kubernetes":
        try:
            from trainjob._backends.kubernetes import backend as cluster  # noqa: PLC0415 - needs httpx, an extra
        except ImportError as error:
            needed = missing(
                "a cluster (TRAINJOB_BACKEND=kubernetes, the default)", error.name or "httpx", "kubernetes"
            )
            raise ConfigurationError(f"{needed}; to run jobs on this machine: export TRAINJOB_BACKEND=local") from error
        return cluster.KubernetesBackend(credentials, shared=shared)
    where = "" if backend else "TRAINJOB_BACKEND: "
    raise ConfigurationError(f"{where}unknown backend {name!r}; use one of: {', '.join(BACKENDS)}")
