"""Settings from the environment (``TRAINJOB_*``), read in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trainjob import names
from trainjob.errors import ConfigurationError


class Settings(BaseModel):
    """Settings from environment variables. An explicit argument or an Airflow connection has precedence.

    Each call of ``Settings()`` reads the environment again, so that tests and notebooks see their changes. An empty
    variable counts as unset.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, validate_default=True)

    backend: str = "kubernetes"
    """``kubernetes`` or ``local`` (``TRAINJOB_BACKEND``)."""

    namespace: str | None = None
    """Default namespace of jobs; if unset, that of the kubeconfig or of the pod (``TRAINJOB_NAMESPACE``)."""

    home: Path = Field(default_factory=lambda: Path.home() / ".trainjob")
    """Directory of the local backend, with its jobs, logs and models (``TRAINJOB_HOME``)."""

    registry: str | None = None
    """Model registry: ``mlflow+sqlite:////abs/path.db``, ``mlflow+https://host``, ``kubeflow+https://host``
    (``TRAINJOB_REGISTRY``)."""

    sign_key: str | None = None
    """Path of the private key that signs exported models (``TRAINJOB_SIGN_KEY``)."""

    verify_key: str | None = None
    """Path of the public key that verifies the signatures of initialized models and data (``TRAINJOB_VERIFY_KEY``)."""

    workspace: str | None = None
    """Location of the artifacts of jobs that kfp.local launches on a cluster, such as ``s3://bucket/prefix``
    (``TRAINJOB_WORKSPACE``). If unset or a ``file://`` location, they are below the pipeline root of kfp.local.
    Also the location of the journals of studies, which may be an Optuna storage; not together with kfp.local then."""

    job_url: str = ""
    """URL of a TrainJob in a dashboard, with ``{namespace}``, ``{name}`` and ``{uid}``, which KFP's steps log as a link
    (``TRAINJOB_JOB_URL``). In Airflow it is a field of the connection."""

    local_environments: dict[str, Path] = Field(default_factory=dict)
    """Runtime name -> virtual environment whose ``bin`` comes first on the PATH of that runtime's ranks, in place of
    the image of a cluster. JSON, e.g. ``{"torch-distributed": "/venvs/torch"}`` (``TRAINJOB_LOCAL_ENVIRONMENTS``)."""

    oci_plain_http: str = ""
    """Registries that ``oci://`` reaches without TLS, as ``host:port`` separated by commas
    (``TRAINJOB_OCI_PLAIN_HTTP``). A registry on this machine needs no entry."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{**_environment(), **values})
        except ValidationError as error:
            raise ConfigurationError(_wrong(error)) from None

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

    @field_validator("local_environments", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            raise ValueError(f"is {'a list' if isinstance(value, list) else 'a single value'}")
        for runtime, environment in value.items():
            if not runtime.strip() or not str(environment).strip():
                raise ValueError(f"{runtime!r}: {environment!r} is blank")
        return value


def _environment() -> dict[str, Any]:
    """The settings in the environment. Without pydantic-settings, which takes 8 MB in each process that waits for jobs.

    Raises:
        ConfigurationError: A value that has to be JSON is not.
    """
    # In any case, as pydantic-settings read them.
    present = {name.lower(): value for name, value in os.environ.items() if value}
    found: dict[str, Any] = {}
    for name in Settings.model_fields:
        if (value := present.get(f"trainjob_{name}")) is None:
            continue
        try:
            found[name] = json.loads(value) if name == "local_environments" else value
        except ValueError as error:
            raise ConfigurationError(f"TRAINJOB_LOCAL_ENVIRONMENTS: {error}; {_ENVIRONMENTS}") from None
    return found


def _wrong(error: ValidationError) -> str:
    problems = []
    for each in error.errors(include_url=False):
        setting, *path = map(str, each["loc"])
        form = f"; {_ENVIRONMENTS}" if setting == "local_environments" else ""
        message = each["msg"].removeprefix("Value error, ")
        problems.append(": ".join([f"TRAINJOB_{setting.upper()}", *path, message]) + form)
    return "\n".join(problems)


_ENVIRONMENTS = 'write a JSON object: {"torch-distributed": "/path/of/a/virtual/environment"}'
