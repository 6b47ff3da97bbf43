"""One call of the Kubeflow SDK, the equivalent `TrainJobSpec`, and the differences with their reasons.

Both are Python text, evaluated here and shown in docs/how-to/kubeflow-sdk.md. This module imports only the standard
library: it also runs in the SDK's environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.functions import train_model

EMBEDDED = (
    "The SDK puts the function's text into a shell script, where `$` and back-ticks in it mean something to the shell; "
    "here it is an argument of a program that writes it to a file, and arrives as it is. That program installs the "
    "packages, too."
)
BY_REFERENCE = (
    "The SDK writes the secret into the TrainJob, where everyone who can read jobs reads it; here it is named."
)
ALWAYS_A_TRAINER = (
    "Without `spec.trainer`, which the SDK leaves out here, Trainer sets none of the variables of torchrun; here it is "
    "always sent."
)
WHERE_THE_DATA_IS = (
    "The SDK does not tell torchtune where the S3 dataset is "
    "([kubeflow/sdk#768](https://github.com/kubeflow/sdk/issues/768)), which then trains on its recipe's own."
)
AS_WRITTEN = (
    "torchtune reads the argument as YAML, and the pod expands `$(NAME)`: what means something to either is quoted."
)


@dataclass(frozen=True)
class Row:
    """One call.

    Attributes:
        name: Name of the row.
        sdk: Arguments of the SDK's ``TrainerClient.train``.
        ours: Fields of a TrainJobSpec.
        differs: Differences of the JobSets: ``replicated job: path in its pod`` -> reason.
        refused: Why both are rejected: a part of the SDK's or Trainer's message.
        sooner: The same as a part of trainjob's message, if trainjob rejects the spec before it sends a request.
    """

    name: str
    sdk: str
    ours: str
    differs: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    sooner: str = ""

    def fields(self) -> dict[str, Any]:
        """`ours`, evaluated."""
        fields: dict[str, Any] = eval(f"dict({self.ours})", {"train_model": train_model})
        return fields
