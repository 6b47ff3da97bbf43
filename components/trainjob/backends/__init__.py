"""Where TrainJobs run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainjob.backends.base import Backend
    from trainjob.backends.kubernetes.credentials import Credentials


BACKENDS = ("kubernetes", "local")

_PROBE_SECONDS = 8.0


def connect(
    backend: str | None = None,
    *,
    shared: bool = False,
    attended: bool = False,
    credentials: Credentials | None = None,
) -> Backend:
    """The backend of that name; without one, the one that ``TRAINJOB_BACKEND`` names, else ``kubernetes``.

    The local backend is never chosen by itself: training on the machine that happens to run the workflow is something
    to be asked for. `shared` is for those who wait for many jobs at once: on a cluster they share one watch. There,
    `credentials` say which cluster; without them it is that of the kubeconfig or of this pod. `attended` is for
    terminals: an API server that does not answer is reported within ten seconds, at the cost of a small request every
    four seconds.

    Nothing is sent yet: that no cluster is configured shows at the first question.

    Raises:
        ConfigurationError: there is no such backend.
    """
    from trainjob.errors import ConfigurationError, missing  # noqa: PLC0415 - supervisors import this package too
    from trainjob.settings import Settings  # noqa: PLC0415

    name = backend or Settings().backend
    if name == "local":
        from trainjob.backends.local.backend import LocalBackend  # noqa: PLC0415

        return LocalBackend()
    if name == "kubernetes":
        try:
            from trainjob.backends.kubernetes.backend import KubernetesBackend  # noqa: PLC0415 - needs httpx, an extra
            from trainjob.backends.kubernetes.client import Timings  # noqa: PLC0415 - needs httpx, an extra
        except ImportError as error:
            needed = missing(
                "a cluster (TRAINJOB_BACKEND=kubernetes, the default)", error.name or "httpx", "kubernetes"
            )
            raise ConfigurationError(f"{needed}; to run jobs on this machine: export TRAINJOB_BACKEND=local") from error
        timings = Timings(probe=_PROBE_SECONDS) if attended else None
        return KubernetesBackend(credentials, shared=shared, timings=timings)
    where = "" if backend else "TRAINJOB_BACKEND: "
    raise ConfigurationError(f"{where}there is no backend {name!r}; there are: {', '.join(BACKENDS)}")
