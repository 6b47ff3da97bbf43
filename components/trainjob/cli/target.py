"""Which backend and namespace a command works with, and how its answer is printed: the values of the global options."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainjob.cli.commands import Commands


@dataclass
class Target:
    """The values of the global options."""

    backend: str | None = None
    namespace: str | None = None
    as_json: bool = False

    def do(self, action: Callable[[Commands], Awaitable[int]]) -> int:
        """Run `action` and return the exit code."""
        from trainjob.cli.commands import Commands, perform

        return perform(Commands(self.backend, self.namespace, as_json=self.as_json), action)
