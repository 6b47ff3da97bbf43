"""Model registries.

May import `_goodput`, and the layers below.

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

_ADVICE = (
    "set TRAINJOB_REGISTRY, or pass a URI: mlflow+sqlite:////absolute/path.db, mlflow+https://host or"
    " kubeflow+https://host"
)


def connect(uri: str | None = None) -> Registry:
    """Connect to the registry at ``uri``, by default that of the settings (``TRAINJOB_REGISTRY``).

    Args:
        uri: ``mlflow+sqlite:////abs.db`` or ``mlflow+http(s)://host`` (``mlflow+`` may be omitted);
            ``kubeflow+http(s)://host[:port]`` for a Kubeflow Model Registry.

    Raises:
        ConfigurationError: No registry is set, its scheme is unknown, or the required extra is not installed.
        RegistryUnavailable: The registry cannot be reached.
    """
    if uri is None:
        from trainjob.settings import Settings

        uri = Settings().registry
    kind, url = parse(uri or "")
    if kind == "kubeflow":
        try:
            from trainjob.registry.kubeflow import KubeflowRegistry
        except ImportError:
            raise missing("a Kubeflow Model Registry", "httpx", "model-registry") from None
        return KubeflowRegistry(url)
    from trainjob.registry.mlflow import MlflowRegistry

    return MlflowRegistry(url)


def parse(uri: str) -> tuple[Literal["mlflow", "kubeflow"], str]:
    """Parse the URI of a registry into its kind and address. Makes no request.

    Raises:
        ConfigurationError: The URI is empty, its scheme is unknown, or it contains credentials.
    """
    if not uri:
        raise ConfigurationError(f"no model registry is configured; {_ADVICE}")
    scheme, colon, rest = uri.partition(":")
    if scheme in ("kubeflow+http", "kubeflow+https"):
        return "kubeflow", uri.removeprefix("kubeflow+")
    scheme = scheme.removeprefix("mlflow+")
    if scheme not in ("http", "https", "sqlite") or not rest.startswith("//"):
        # Only the scheme is shown: other URIs, such as those of database servers, may contain a password.
        raise ConfigurationError(f"{scheme + colon!a} is not a supported scheme of a registry; {_ADVICE}")
    if scheme != "sqlite" and "@" in urlsplit(f"{scheme}:{rest}").netloc:
        raise ConfigurationError(
            "the registry's URL contains credentials; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,"
            " or MLFLOW_TRACKING_TOKEN"
        )
    return "mlflow", f"{scheme}:{rest}"
