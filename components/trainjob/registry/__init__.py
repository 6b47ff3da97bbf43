"""Model registries.

::

    registry = trainjob.registry.connect("mlflow+sqlite:////data/registry.db")
    registry.resolve("digits", "champion").uri
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from trainjob.errors import ConfigurationError, missing
from trainjob.registry.base import Mode, ModelVersion, Promotion, Registry

__all__ = ["Mode", "ModelVersion", "Promotion", "Registry", "connect"]

_HOW = (
    "set TRAINJOB_REGISTRY, or pass one: mlflow+sqlite:////absolute/path.db, mlflow+https://host or"
    " kubeflow+https://host"
)


def connect(uri: str | None = None) -> Registry:
    """The registry at ``uri``, or without one that of the settings (``TRAINJOB_REGISTRY``).

    Args:
        uri: ``mlflow+sqlite:////abs.db``, ``mlflow+http(s)://host``; without ``mlflow+`` they are MLflow's too.
            ``kubeflow+http(s)://host[:port]`` for a Kubeflow Model Registry.

    Raises:
        ConfigurationError: No registry is set, its scheme is unknown, or the extra that it needs is not installed.
        RegistryUnavailable: It cannot be reached.
    """
    if uri is None:
        from trainjob.settings import Settings  # noqa: PLC0415 - pydantic, which the caller may not need

        uri = Settings().registry
    kind, url = parse(uri or "")
    if kind == "kubeflow":
        try:
            from trainjob.registry.kubeflow import KubeflowRegistry  # noqa: PLC0415 - an extra
        except ImportError:
            raise missing("a Kubeflow Model Registry", "httpx", "model-registry") from None
        return KubeflowRegistry(url)
    from trainjob.registry.mlflow import MlflowRegistry  # noqa: PLC0415 - an extra

    return MlflowRegistry(url)


def parse(uri: str) -> tuple[Literal["mlflow", "kubeflow"], str]:
    """Kind and address of the registry at ``uri``; connects to nothing.

    Raises:
        ConfigurationError: It is empty, its scheme is unknown, or it has credentials in it.
    """
    if not uri:
        raise ConfigurationError(f"no model registry is configured; {_HOW}")
    scheme, colon, rest = uri.partition(":")
    if scheme in ("kubeflow+http", "kubeflow+https"):
        return "kubeflow", uri.removeprefix("kubeflow+")
    scheme = scheme.removeprefix("mlflow+")
    if scheme not in ("http", "https", "sqlite") or not rest.startswith("//"):
        # A URI of another kind, a database server's say, may hold a password: only its scheme is shown.
        raise ConfigurationError(f"no registry of scheme {scheme + colon!a} is known; {_HOW}")
    if scheme != "sqlite" and "@" in urlsplit(f"{scheme}:{rest}").netloc:
        raise ConfigurationError(
            "the registry's URL has credentials in it; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,"
            " or MLFLOW_TRACKING_TOKEN"
        )
    return "mlflow", f"{scheme}:{rest}"
