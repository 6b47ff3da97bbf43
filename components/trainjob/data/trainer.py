"""What Kubeflow Trainer tells its initializers: settings in the environment and nothing else.

The step image can take the place of ``ghcr.io/kubeflow/trainer/dataset-initializer`` and ``model-initializer`` in a
runtime. Names, places and patterns are those of ``pkg/initializers`` of Trainer 2.3.
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
"""Where training finds it (``pkg/initializers/utils/utils.go``: the volume of all runtimes)."""

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
    """What an initializer has to do, as arguments of `trainjob.data.initialize`."""

    source: str
    target: str
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()


def task(environment: MutableMapping[str, str], what: What | None = None) -> Task:
    """Read the environment; credentials are put where the stores look for them.

    Args:
        environment: Its variables.
        what: Which initializer it is; None: told by ``TRAINJOB_INITIALIZER``, or by the name of the pod, which has that
            of the runtime's job in it (``dataset-initializer``, ``model-initializer``).

    Raises:
        ConfigurationError: It says not enough, or something that trainjob cannot do.
    """
    uri = environment.get("STORAGE_URI", "")
    if not uri:
        raise ConfigurationError("STORAGE_URI is not set; it names what the initializer is to bring")
    what = what or _what(environment)
    if uri.startswith("cache://"):
        raise ConfigurationError("cache:// is Trainer's data cache, which only its own dataset initializer can start")
    location = parse(uri)
    exclude = [pattern.strip() for pattern in environment.get("IGNORE_PATTERNS", "").split(",") if pattern.strip()]
    _credentials(environment)
    if not isinstance(location, Location) or location.scheme != "hf":
        return Task(uri, TARGETS[what], (), exclude)
    if what == "model":
        return Task(uri, TARGETS[what], _MODEL_FILES, exclude)
    # A dataset initializer's repositories are datasets, without saying so. A path keeps its place below the target,
    # where the runtimes' `dataset.data_dir` points to.
    kind = "" if location.authority.startswith(("datasets/", "spaces/")) else "datasets/"
    path = glob.escape(location.path)
    return Task(f"hf://{kind}{location.authority}/", TARGETS[what], (path, f"{path}/*") if path else (), exclude)


def asked(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as Trainer starts an initializer."""
    return "STORAGE_URI" in environment


def idle(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether it is the initializer of a job that asks for none: the runtime's own ``STORAGE_URI`` is empty."""
    return environment.get("STORAGE_URI") == ""


def _what(environment: Mapping[str, str]) -> What:
    said = environment.get("TRAINJOB_INITIALIZER") or environment.get("HOSTNAME", "")
    names: tuple[What, What] = ("dataset", "model")
    for what in names:
        if said == what or f"-{what}-initializer-" in f"-{said}-":
            return what
    raise ConfigurationError(
        f"is this the initializer of the dataset or of the model? The pod's name ({said!r}) does not say; set"
        " TRAINJOB_INITIALIZER=dataset or =model, or run `python -m trainjob.data initialize-dataset` or -model"
    )


def _credentials(environment: MutableMapping[str, str]) -> None:
    if environment.get("ACCESS_KEY_ID"):
        environment.pop("AWS_SESSION_TOKEN", None)  # of other keys, such as those that steps have
    for theirs, ours in _SETTINGS.items():
        if value := environment.get(theirs):
            environment[ours] = value
    if environment.get("AWS_REGION") == "auto":  # opendal's word for "find out"
        environment["AWS_REGION"] = "us-east-1"
    if environment.get("ENDPOINT", "").startswith("http://"):
        environment["AWS_ALLOW_HTTP"] = "true"
    if environment.get("ROLE_ARN") and not environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        raise ConfigurationError(
            "ROLE_ARN needs a service account with a web identity (AWS_WEB_IDENTITY_TOKEN_FILE is not set); give the"
            " pod one, or keys that may read without the role"
        )
