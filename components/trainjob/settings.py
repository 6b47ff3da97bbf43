"""Settings from the environment (``TRAINJOB_*``), read in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from trainjob import names
from trainjob.errors import ConfigurationError


class Settings(BaseSettings):
    """What can be set in the environment; an explicit argument or an Airflow connection wins over each of these.

    ``Settings()`` reads the environment afresh at every call, so tests and notebooks see their changes.

    Raises:
        ConfigurationError: a variable has a value that it cannot have.
    """

    model_config = SettingsConfigDict(env_prefix="TRAINJOB_", extra="ignore", frozen=True)

    backend: str = "kubernetes"
    """``kubernetes`` or ``local`` (``TRAINJOB_BACKEND``)."""

    namespace: str | None = None
    """Namespace of jobs that name none; the kubeconfig's or the pod's own if unset (``TRAINJOB_NAMESPACE``)."""

    home: Path = Field(default_factory=lambda: Path.home() / ".trainjob")
    """Where the local backend keeps its objects, and what belongs to them (``TRAINJOB_HOME``)."""

    registry: str | None = None
    """Model registry: ``mlflow+sqlite:////abs/path.db``, ``mlflow+https://host``, ``kubeflow+https://host``
    (``TRAINJOB_REGISTRY``)."""

    sign_key: str | None = None
    """Path of the private key with which models that are exported are signed (``TRAINJOB_SIGN_KEY``)."""

    verify_key: str | None = None
    """Path of the public key with which all that is initialized has to be signed (``TRAINJOB_VERIFY_KEY``)."""

    workspace: str | None = None
    """Where jobs that kfp.local launches on a cluster write their artifacts, such as ``s3://bucket/prefix``
    (``TRAINJOB_WORKSPACE``); without it, or with a ``file://`` one, below kfp.local's own pipeline root."""

    job_url: str = ""
    """Address of a TrainJob in a dashboard, with ``{namespace}``, ``{name}`` and ``{uid}`` in it: a link in the logs of
    KFP's steps (``TRAINJOB_JOB_URL``). In Airflow it is a field of the connection."""

    local_environments: dict[str, Path] = Field(default_factory=dict)
    """Runtime name -> virtual environment whose ``bin`` comes first on the PATH of that runtime's ranks, as the image
    decides on a cluster. JSON, e.g. ``{"torch-distributed": "/venvs/torch"}`` (``TRAINJOB_LOCAL_ENVIRONMENTS``)."""

    oci_plain_http: str = ""
    """Registries that ``oci://`` reaches without TLS, ``host:port`` with commas between (``TRAINJOB_OCI_PLAIN_HTTP``);
    one on this machine need not be named."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = "; ".join(f"TRAINJOB_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
            raise ConfigurationError(f"settings from the environment cannot be used: {wrong}") from None
        except SettingsError as error:  # no JSON where JSON is needed
            raise ConfigurationError(f"settings from the environment cannot be used: {error}") from None

    @field_validator("namespace")
    @classmethod
    def _is_namespace(cls, value: str | None) -> str | None:
        try:
            return names.namespace(value) if value else None
        except ConfigurationError as error:
            raise ValueError(str(error)) from None

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()
