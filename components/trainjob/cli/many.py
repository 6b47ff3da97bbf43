"""``trainjob wait --stdin``: any number of jobs in one process, a line for each as soon as it has ended."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing

from trainjob.cli.commands import PIPE_CLOSED, Commands, Interrupts, Patience
from trainjob.cli.texts import as_json
from trainjob.cli.views import JsonView, PlainView
from trainjob.errors import TimedOut
from trainjob.launch import Budgets, follow
from trainjob.manifest import JobRef
from trainjob.status import Observation, Phase

FAILED, BUDGET, NOT_FOUND = 1, 4, 5
_SLICE = 100  # waits begun in one turn of the event loop, which has others to look after


class ManyWaits:
    """Waits for many jobs.

    Args:
        commands: Backend and namespace.
        names: Namespaces (empty: the usual one) and names of the jobs.
        patience: Budgets for queue, start and run of each.
    """

    def __init__(self, commands: Commands, names: Iterable[tuple[str, str]], patience: Patience) -> None:
        self._commands = commands
        self._budgets = Budgets(*patience)
        # As they were written: that is how whoever asked knows them.
        self._given = {
            (space or commands.namespace, name): f"{space}/{name}" if space else name for space, name in names
        }
        self._show = JsonView() if commands.as_json else PlainView()
        self._codes: set[int] = set()
        self._noticed = ""

    async def run(self) -> int:
        """Wait for all of them and return the exit code."""
        with Interrupts() as interrupts, interrupts.stage() as stage:
            refs = await self._refs()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for i, (key, ref) in enumerate(refs.items(), 1):
                        tasks.create_task(self._wait(ref, self._given[key], stage.cancel))
                        if i % _SLICE == 0:
                            await asyncio.sleep(0)
                    await asyncio.sleep(0)
            except ExceptionGroup as group:  # so a task group wraps whatever happens inside it
                raise group.exceptions[0] from None
        if self._show.closed:
            return PIPE_CLOSED
        return interrupts.exit_code or min(self._codes, default=0)
