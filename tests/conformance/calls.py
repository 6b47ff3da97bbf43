"""Makes the calls of the page; runs in the SDK's environment: ``python -m tests.conformance.calls URL NAMESPACE``.

Each call goes to ``URL/<number>``, so that the server can assign the request to its call. Prints one JSON object: why
the SDK rejects calls, by their number, and its arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from typing import Any

import kubeflow.trainer
import kubeflow.trainer.options
from kubeflow.trainer import KubernetesBackendConfig, TrainerClient
from kubernetes.client import ApiException, Configuration
from tests.conformance.functions import train_model
from tests.conformance.page import sdk_calls

NAMES = {**vars(kubeflow.trainer), **vars(kubeflow.trainer.options), "train_model": train_model}
NO_ARGUMENTS = {"Event", "Runtime", "RuntimeTrainer", "TrainJobTemplate", "TrainingRuntimeSource"}
"""Dataclasses that describe a cluster, or that are built from other arguments."""


def main() -> None:
    url, namespace = sys.argv[1:]
    refused = {}
    for number, call in enumerate(sdk_calls()):
        backend = KubernetesBackendConfig(
            namespace=namespace, client_configuration=Configuration(host=f"{url}/{number}")
        )
        try:
            eval(f"client.train({call})", {**NAMES, "client": TrainerClient(backend)})
        except (ValueError, RuntimeError) as error:
            refused[number] = _reason(error)
    json.dump({"refused": refused, "arguments": arguments()}, sys.stdout)


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    return str(json.loads(cause.body)["message"]) if isinstance(cause, ApiException) else str(error)


def arguments() -> dict[str, list[str]]:
    """All arguments of the SDK that describe a TrainJob: class -> names."""
    train = inspect.signature(TrainerClient.train)
    found: dict[str, list[str]] = {"TrainerClient.train": [name for name in train.parameters if name != "self"]}
    for name, value in sorted(NAMES.items()):
        if _is_argument_class(name, value):
            found[name] = [field.name for field in dataclasses.fields(value) if field.init]
    return found


def _is_argument_class(name: str, value: Any) -> bool:
    public = name in {*kubeflow.trainer.__all__, *kubeflow.trainer.options.__all__}
    is_class = isinstance(value, type) and dataclasses.is_dataclass(value)
    return public and is_class and name not in NO_ARGUMENTS and not name.endswith("BackendConfig")


if __name__ == "__main__":
    main()
