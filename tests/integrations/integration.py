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
    """

    name: str

    @abstractmethod
    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        """Run the training of `spec`, with so many tries; report the last one, with the logs of all."""

    @abstractmethod
    def wait(self, job: str) -> Ended:
        """Wait for the end of a job that was launched elsewhere."""

    @abstractmethod
    def export(self, trained: Fields, target: str, **options: Any) -> Ended:
        """Export the model of a training by the result that the integration returned, and register it."""

    @abstractmethod
    def tune(self, study: Fields, template: Fields) -> Ended:
        """Run a study whose trials are jobs of the template."""

    @abstractmethod
    def outcome(self, code: int, *, certain: bool = False) -> object:
        """What stands for an exit code of the command line in this integration.

        Args:
            code: The exit code.
            certain: Whether a failure is certain to repeat, so that no retry follows.
        """
