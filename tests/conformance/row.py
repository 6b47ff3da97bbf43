"""One call of the Kubeflow SDK, the same asked for with `TrainJobSpec`, what differs then, and why.

Both are Python text, which is evaluated and shown in docs/how-to/kubeflow-sdk.md. Imports nothing but the standard
library, since the SDK's environment has nothing else.
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
        name: Of the row.
        sdk: Arguments of the SDK's ``TrainerClient.train``.
        ours: Fields of a TrainJobSpec.
        differs: Where the JobSets differ, as ``replicated job: path in its pod``, and why.
        refused: What both are refused for, in words of the SDK's or Trainer's refusal.
        sooner: The same in words of ours, where it comes before anything is sent.
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
