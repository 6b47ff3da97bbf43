"""Act as an initializer of Kubeflow Trainer, which is configured by environment variables only.

The step image can replace ``ghcr.io/kubeflow/trainer/dataset-initializer`` and ``model-initializer`` in a runtime.
Names, paths and patterns are those of ``pkg/initializers`` of Trainer 2.3.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainjob.data.locations import Location, parse
from trainjob.errors import ConfigurationError

What = Literal["dataset", "model"]

TARGETS = {"dataset": "/workspace/dataset", "model": "/workspace/model"}
"""Directories from which training reads (``pkg/initializers/utils/utils.go``: the volume of all runtimes)."""

# pkg/initializers/model/huggingface.py
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.gguf")
_SETTINGS = {
    "ACCESS_TOKEN": "HF_TOKEN",
    "ENDPOINT": "AWS_ENDPOINT_URL",
    "ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID",
    "SECRET_ACCESS_KEY": "AWS_SECRET_ACCESS_KEY",
    "REGION": "AWS_REGION",
    "ROLE_ARN": "AWS_ROLE_ARN",
}


@dataclass(frozen=True)
class Task:
    """The task of an initializer, as arguments of `trainjob.data.initialize`."""

    source: str
    target: str
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()


def task(environment: MutableMapping[str, str], what: What | None = None) -> Task:
    """Read the task from the environment, and set the variables from which stores read credentials.

    Args:
        environment: The environment variables; changed in place.
        what: Which initializer to be. None: given by ``TRAINJOB_INITIALIZER``, or by the name of the pod, which
            contains the name of the runtime's job (``dataset-initializer``, ``model-initializer``).

    Raises:
        ConfigurationError: A variable is missing, or asks for something that trainjob does not support.
    """
    uri = environment.get("STORAGE_URI", "")
    if not uri:
        raise ConfigurationError("STORAGE_URI is not set; set it to the location to download")
    what = what or _what(environment)
    if uri.startswith("cache://"):
        raise ConfigurationError("cache:// is Trainer's data cache, which only Trainer's dataset initializer supports")
    location = parse(uri)
    exclude = [pattern.strip() for pattern in environment.get("IGNORE_PATTERNS", "").split(",") if pattern.strip()]
    _credentials(environment)
    if not isinstance(location, Location) or location.scheme != "hf":
        return Task(uri, TARGETS[what], (), exclude)
    if what == "model":
        return Task(uri, TARGETS[what], _MODEL_FILES, exclude)
    # A dataset initializer reads dataset repositories without the prefix "datasets/". Files keep their path below the
    # target: the runtimes' `dataset.data_dir` points there.
    kind = "" if location.authority.startswith(("datasets/", "spaces/")) else "datasets/"
    path = glob.escape(location.path)
    return Task(f"hf://{kind}{location.authority}/", TARGETS[what], (path, f"{path}/*") if path else (), exclude)


def is_initializer(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs as an initializer of Trainer."""
    return "STORAGE_URI" in environment


def is_idle(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the job has nothing to initialize: ``STORAGE_URI`` is empty, as the runtime sets it."""
    return environment.get("STORAGE_URI") == ""


def _what(environment: Mapping[str, str]) -> What:
    name = environment.get("TRAINJOB_INITIALIZER") or environment.get("HOSTNAME", "")
    names: tuple[What, What] = ("dataset", "model")
    for what in names:
        if name == what or f"-{what}-initializer-" in f"-{name}-":
            return what
    raise ConfigurationError(
        f"the pod's name ({name!r}) does not contain dataset-initializer or model-initializer; set"
        " TRAINJOB_INITIALIZER=dataset or =model, or run `python -m trainjob.data initialize-dataset` or -model"
    )


def _credentials(environment: MutableMapping[str, str]) -> None:
    if environment.get("ACCESS_KEY_ID"):
        environment.pop("AWS_SESSION_TOKEN", None)  # belongs to other keys, such as those of steps
    for theirs, ours in _SETTINGS.items():
        if value := environment.get(theirs):
            environment[ours] = value
    if environment.get("AWS_REGION") == "auto":  # opendal detects the region
        environment["AWS_REGION"] = "us-east-1"
    if environment.get("ENDPOINT", "").startswith("http://"):
        environment["AWS_ALLOW_HTTP"] = "true"
    if environment.get("ROLE_ARN") and not environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        raise ConfigurationError(
            "ROLE_ARN requires a service account with a web identity (AWS_WEB_IDENTITY_TOKEN_FILE is not set); use"
            " such a service account for the pod, or keys that have read permission without the role"
        )
