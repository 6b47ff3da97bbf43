"""Trainer's initializers: what they download, and the environment variables that configure their images.

The images (``pkg/initializers`` of Trainer) read one variable for each setting, with its name in upper case. Names of
fields are those of the Kubeflow SDK's ``HuggingFaceDatasetInitializer``, ``S3DatasetInitializer``,
``DataCacheInitializer``, ``HuggingFaceModelInitializer`` and ``S3ModelInitializer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainjob._spec.base import Part
from trainjob._spec.checks import env_problems
from trainjob._spec.parts import Env, SecretRef, TextOrSource, env_api
from trainjob._support.masking import holds_secret, names_a_secret
from trainjob.errors import Problem

_STORAGE_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
_CACHE_URI = re.compile(r"cache://[^/]+/[^/]+")

# In the order of the SDK's fields and of the variables.
_SETTINGS = {
    "hf": ("ignore_patterns", "access_token"),
    "s3": ("ignore_patterns", "endpoint", "access_key_id", "secret_access_key", "region", "role_arn"),
    "cache": ("num_data_nodes", "metadata_loc", "head_cpu", "head_mem", "worker_cpu", "worker_mem", "iam_role"),
}
_ALL_SETTINGS = sorted({setting for settings in _SETTINGS.values() for setting in settings})

_NO_MODEL_WEIGHTS = ("*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth")
"""The SDK's default for models: weights of other frameworks, and pickles, which may run code when they are loaded."""

Kind = Literal["dataset", "model"]


class InitializerSource(Part):
    """The source of one of Trainer's initializers: ``hf://``, ``s3://`` or (datasets) ``cache://``.

    ``secret_ref`` is a Secret whose keys are the image's variables: ``ACCESS_TOKEN``, ``ACCESS_KEY_ID``, …; for a
    Secret with other keys, set each field: ``access_token={"secretKeyRef": {"name": …, "key": …}}``.
    """

    storage_uri: Annotated[str, Field(max_length=2048)]
    env: Env = Field(default_factory=dict)
    secret_ref: SecretRef | None = None

    ignore_patterns: list[str] | None = None
    """hf, s3: files not to download. Of a model, by default, ``*.msgpack *.h5 *.bin *.pt *.pth``; ``[]`` for none."""

    access_token: TextOrSource | None = None
    """hf: reference to the token."""

    endpoint: str | None = None
    access_key_id: TextOrSource | None = None
    secret_access_key: TextOrSource | None = None
    region: str | None = None
    role_arn: str | None = None

    metadata_loc: str | None = None
    """cache: the metadata file of the Iceberg table."""

    num_data_nodes: Annotated[int, Field(ge=2)] | None = None
    """cache: number of data nodes, without the head node."""

    head_cpu: str | None = None
    head_mem: str | None = None
    worker_cpu: str | None = None
    worker_mem: str | None = None
    iam_role: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _uri_alone(cls, value: object) -> object:
        return {"storage_uri": value} if isinstance(value, str) else value

    @field_validator("storage_uri")
    @classmethod
    def _uri(cls, value: str) -> str:
        if not _STORAGE_URI.fullmatch(value):
            raise ValueError("must be a URI such as hf://org/name or s3://bucket/prefix")
        return value

    @property
    def scheme(self) -> str:
        """Scheme of the URI, in lower case."""
        return self.storage_uri.partition("://")[0].lower()

    def environment(self, kind: Kind) -> dict[str, str | dict[str, Any]]:
        """The settings as environment variables of the image, then `env`."""
        environment: dict[str, str | dict[str, Any]] = {}
        for setting in _SETTINGS.get(self.scheme, ()):
            value = getattr(self, setting)
            if setting == "ignore_patterns":
                ignored = _NO_MODEL_WEIGHTS if value is None and kind == "model" else value
                value = ",".join(ignored or ()) or None
            elif setting == "num_data_nodes" and value is not None:
                environment["CLUSTER_SIZE"] = str(value + 1)
                continue
            if value is not None:
                environment[setting.upper()] = value
        return environment | self.env

    def api_of(self, kind: Kind) -> dict[str, Any]:
        """The part as in the API."""
        environment = self.environment(kind)
        env = {"env": env_api(environment)} if environment else {}
        secret = {"secretRef": self.secret_ref.api()} if self.secret_ref else {}
        return {"storageUri": self.storage_uri, **env, **secret}

    def problems(self, kind: Kind, where: str) -> Iterator[Problem]:
        """Problems of the source."""
        if holds_secret(self.storage_uri):
            yield Problem(f"{where}.storage_uri", "contains a credential", "use secret_ref")
        settings = _SETTINGS.get(self.scheme, ())
        for setting in _ALL_SETTINGS:
            value = getattr(self, setting)
            if value is None:
                continue
            if setting not in settings:
                instead = f"settings: {', '.join(settings)}" if settings else "set it in env"
                yield Problem(f"{where}.{setting}", f"is not a setting of {self.scheme}://", instead)
            elif isinstance(value, str) and (names_a_secret(setting, value) or holds_secret(value)):
                by_key = f"{{'secretKeyRef': {{'name': …, 'key': …}}}}, or secret_ref: a Secret with {setting.upper()}"
                yield Problem(f"{where}.{setting}", "is a literal secret", f"write {setting}: {by_key}")
            if setting.upper() in self.env:
                yield Problem(f"{where}.env.{setting.upper()}", f"is set by {setting}, too", "remove one of them")
        yield from self._uri_problems(kind, where)
        yield from env_problems(env_api(self.env), f"{where}.env")

    def _uri_problems(self, kind: Kind, where: str) -> Iterator[Problem]:
        path = f"{where}.storage_uri"
        if kind == "dataset" and self.scheme == "hf" and "/" not in self.storage_uri[5:].rstrip("/"):
            yield Problem(path, "has no owner of the dataset, which Trainer's image needs", "write hf://org/name")
        if self.scheme != "cache":
            return
        if kind == "model":
            yield Problem(
                path, "is a data cache, which does not support models", "write hf://org/name or s3://bucket/prefix"
            )
        elif not _CACHE_URI.fullmatch(self.storage_uri):
            yield Problem(path, f"{self.storage_uri!r} is not the URI of a table", "write cache://schema/table")
        for setting in ("metadata_loc", "num_data_nodes"):
            variable = {"num_data_nodes": "CLUSTER_SIZE"}.get(setting, setting.upper())
            if kind == "dataset" and getattr(self, setting) is None and variable not in self.env:
                yield Problem(f"{where}.{setting}", "is missing; a data cache needs it")


class Initializer(Part):
    """Trainer's initializers. The runtime must have a job for each one that is used (``spec.initializer``)."""

    dataset: InitializerSource | None = None
    model: InitializerSource | None = None

    def _sources(self) -> Iterator[tuple[Kind, InitializerSource]]:
        if self.dataset is not None:
            yield "dataset", self.dataset
        if self.model is not None:
            yield "model", self.model

    def api(self) -> dict[str, Any]:
        """The part as in the API."""
        return {kind: source.api_of(kind) for kind, source in self._sources()}

    def problems(self) -> Iterator[Problem]:
        """Problems of both sources."""
        for kind, source in self._sources():
            yield from source.problems(kind, f"initializer.{kind}")
