"""Settings from the environment (``TRAINJOB_*``), read in one place. Standard library only: each waiter reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainjob import names
from trainjob._support.foreign import Unreadable, json_of
from trainjob.errors import ConfigurationError

_FORM = 'write a JSON object: {"torch-distributed": "/path/of/a/virtual/environment"}'


def _value(name: str) -> str | None:
    """The value of ``TRAINJOB_<name>``, in any case; None if it is unset or empty."""
    wanted = f"trainjob_{name}"
    return next((text for key, text in os.environ.items() if text and key.lower() == wanted), None)


def schema_file() -> str:
    """Path of a TrainJob CustomResourceDefinition to check specs against (``TRAINJOB_CRD``); empty if unset."""
    return _value("crd") or ""


def _environments() -> dict[str, Path]:
    """Runtime -> virtual environment, from JSON."""
    variable = "TRAINJOB_LOCAL_ENVIRONMENTS"
    try:
        found = json_of(_value("local_environments") or "{}", variable)
    except Unreadable as error:
        raise ConfigurationError(f"{variable}: {error}; {_FORM}") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"{variable}: is {'a list' if isinstance(found, list) else 'a single value'}; {_FORM}")
    for runtime, environment in found.items():
        if not isinstance(environment, str) or not runtime.strip() or not environment.strip():
            wrong = "is blank" if isinstance(environment, str) else "is no path"
            raise ConfigurationError(f"{variable}: {runtime!r}: {environment!r} {wrong}; {_FORM}")
    return {runtime: Path(environment) for runtime, environment in found.items()}


def _count(name: str) -> int | None:
    text = _value(name)
    if text is not None and not re.fullmatch("[0-9]{1,4}", text):
        raise ConfigurationError(f"TRAINJOB_{name.upper()}: {text!r} is not a count; write a number such as 2")
    return None if text is None else int(text)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from environment variables. An explicit argument or an Airflow connection has precedence.

    Each call of ``Settings()`` reads the environment again, so that tests and notebooks see their changes. An empty
    variable counts as unset.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """

    backend: str = field(default_factory=lambda: _value("backend") or "kubernetes")
    """``kubernetes`` or ``local`` (``TRAINJOB_BACKEND``)."""

    namespace: str | None = field(default_factory=lambda: _value("namespace"))
    """Default namespace of jobs; if unset, that of the kubeconfig or of the pod (``TRAINJOB_NAMESPACE``)."""

    home: Path = field(default_factory=lambda: Path(_value("home") or "~/.trainjob"))
    """Directory of the local backend, with its jobs, logs and models (``TRAINJOB_HOME``)."""

    registry: str | None = field(default_factory=lambda: _value("registry"))
    """Model registry: ``mlflow+sqlite:////abs/path.db``, ``mlflow+https://host``, ``kubeflow+https://host``
    (``TRAINJOB_REGISTRY``)."""

    sign_key: str | None = field(default_factory=lambda: _value("sign_key"))
    """Path of the private key that signs exported models (``TRAINJOB_SIGN_KEY``)."""

    verify_key: str | None = field(default_factory=lambda: _value("verify_key"))
    """Path of the public key that verifies the signatures of initialized models and data (``TRAINJOB_VERIFY_KEY``)."""

    workspace: str | None = field(default_factory=lambda: _value("workspace"))
    """Location of the artifacts of jobs that kfp.local launches on a cluster, such as ``s3://bucket/prefix``
    (``TRAINJOB_WORKSPACE``). If unset or a ``file://`` location, they are below the pipeline root of kfp.local.
    Also the location of the journals of studies, which may be an Optuna storage; not together with kfp.local then."""

    job_url: str = field(default_factory=lambda: _value("job_url") or "")
    """URL of a TrainJob in a dashboard, with ``{namespace}``, ``{name}`` and ``{uid}``, which KFP's steps log as a link
    (``TRAINJOB_JOB_URL``). In Airflow it is a field of the connection."""

    local_environments: Mapping[str, Path] = field(default_factory=_environments)
    """Runtime name -> virtual environment whose ``bin`` comes first on the PATH of that runtime's ranks, in place of
    the image of a cluster. JSON, e.g. ``{"torch-distributed": "/venvs/torch"}`` (``TRAINJOB_LOCAL_ENVIRONMENTS``)."""

    local_gpus: int | None = field(default_factory=lambda: _count("local_gpus"))
    """How many GPUs the jobs of this machine share (``TRAINJOB_LOCAL_GPUS``), whatever else uses them; more than there
    are lets several jobs use one. If unset, each GPU that no other process uses is for one job."""

    oci_plain_http: str = field(default_factory=lambda: _value("oci_plain_http") or "")
    """Registries that ``oci://`` reaches without TLS, as ``host:port`` separated by commas
    (``TRAINJOB_OCI_PLAIN_HTTP``). A registry on this machine needs no entry."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.expanduser().absolute())
        if self.namespace is not None:
            try:
                names.namespace(self.namespace)
            except ConfigurationError as error:
                raise ConfigurationError(f"TRAINJOB_NAMESPACE: {error}") from None
