"""What the integrations have in common: they run a training, and report how it ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]


@dataclass
class Ended:
    """What a user of an integration gets.

    Attributes:
        outcome: 0 after success; else the kind of failure, as `Integration.outcome` gives it.
        message: The error, empty after success.
        result: What the integration returns; empty after a failure.
        log: What it logged.
    """

    outcome: object
    message: str = ""
    result: Fields = field(default_factory=dict)
    log: str = field(default="", repr=False)


class Integration(ABC):
    """Runs trainings. All runs of one object have the same key: a later one is another try of the same work.

    Attributes:
        name: Its name in the parameters of tests.
        decides: Whether it decides about a job that it no longer waits for; otherwise its caller does.
    """

    name: str
    decides = True

    @abstractmethod
    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        """Run the training of `spec`, with so many tries; report the last one, with the logs of all."""

    @abstractmethod
    def outcome(self, code: int) -> object:
        """What stands for an exit code of the command line in this integration."""
