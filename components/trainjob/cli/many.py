"""``trainjob wait --stdin``: waits for many jobs in one process, and prints a line as soon as one has ended."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from contextlib import aclosing

from trainjob._jobs.following import follow
from trainjob._jobs.successors import JobReplaced
from trainjob._jobs.waiting import until_hung
from trainjob.cli.commands import Commands, Interrupts
from trainjob.cli.texts import as_json
from trainjob.cli.views import JsonView, PlainView
from trainjob.errors import JobHung, TimedOut, TrainJobFailed
from trainjob.job import JobRef
from trainjob.status import Observation, Phase
from trainjob.wait_options import WaitOptions

FAILED, TIMEOUT, NOT_FOUND = 1, 4, 5
_SLICE = 100  # waits started in one turn of the event loop, which has to serve a connection meanwhile


class ManyWaits:
    """Waits for many jobs. The exit code is the first that applies to any of them: failed, timeout, not found.

    Args:
        commands: Backend and namespace.
        names: Namespaces (empty: the default one) and names of the jobs.
        options: When to stop waiting for each; `fail_on_first_crash` is not used.
    """

    def __init__(self, commands: Commands, names: Iterable[tuple[str, str]], options: WaitOptions) -> None:
        commands.many = True
        self._commands = commands
        self._options = options
        # The names as the caller wrote them, for the output.
        self._given = {
            (where or commands.namespace, name): f"{where}/{name}" if where else name for where, name in names
        }
        self._show = JsonView() if commands.as_json else PlainView()
        self._codes: set[int] = set()
        self._notice = ""

    async def run(self) -> int:
        """Wait for all of them and return the exit code."""
        with Interrupts() as interrupts, interrupts.stage():
            # All objects that are created here stay until the end: each garbage collection over 10,000 waits would
            # block the event loop for 0.1 s.
            gc.disable()
            refs = await self._find()
            try:
                async with asyncio.TaskGroup() as tasks:
                    for i, ref in enumerate(refs, 1):
                        tasks.create_task(self._wait(ref, self._given[ref.namespace, ref.name]))
                        if i % _SLICE == 0:
                            await asyncio.sleep(0)
                    gc.freeze()
                    gc.enable()
            except ExceptionGroup as group:  # a task group wraps every exception
                raise group.exceptions[0] from None
        return interrupts.exit_code or min(self._codes, default=0)

    async def _find(self) -> list[JobRef]:
        wanted: dict[str, set[str]] = {}
        for namespace, name in self._given:
            wanted.setdefault(namespace, set()).add(name)
        refs: list[JobRef] = []
        for namespace, names in wanted.items():
            found = await self._commands.backend.refs(namespace, names)
            refs += found.values()
            for name in sorted(names - found.keys()):
                self._bad(NOT_FOUND, f"there is no TrainJob {namespace}/{name}")
        return refs

    async def _wait(self, ref: JobRef, name: str) -> None:
        """Wait for a job, or for the attempt that replaces it; `name` is the name that the caller wrote."""
        while True:
            try:
                return await self._wait_for(ref, name)
            except JobReplaced as replaced:
                self._show.notice(f"TrainJob {ref} was replaced by {replaced.by}, which is waited for from now on")
                ref = replaced.by
            except TimedOut as error:
                return self._bad(TIMEOUT, str(error))
            except TrainJobFailed as error:  # it hangs, or its step gave it up
                if isinstance(self._show, JsonView):
                    event = "hung" if isinstance(error, JobHung) else "failed"
                    failed = {"event": event, "name": name, "uid": ref.uid}
                    self._show.write(as_json({**failed, "time": time.time(), "diagnosis": error.diagnosis.as_dict()}))
                return self._bad(FAILED, str(error))

    async def _wait_for(self, ref: JobRef, name: str) -> None:
        backend = self._commands.backend
        async with aclosing(follow(backend, ref, self._options)) as changes:
            async for each in changes:
                if each[0].stall_timeout is not None:  # a check takes 1 KB, which the other jobs do not have
                    async with aclosing(until_hung(backend, ref, changes, _ignore, first=each)) as checked:
                        async for now, notice in checked:
                            self._take(ref, name, now, notice)
                    return
                self._take(ref, name, *each)

    def _take(self, ref: JobRef, name: str, now: Observation, notice: str) -> None:
        if now.phase.terminal:
            self._ended(ref, name, now, time.time())
        elif notice and notice != self._notice:  # an outage affects all jobs alike
            self._notice = notice
            self._show.notice(notice)

    def _ended(self, ref: JobRef, name: str, final: Observation, seen: float) -> None:
        if isinstance(self._show, JsonView):
            reached = {"phase": str(final.phase), "reason": final.reason, "message": final.message}
            self._show.write(as_json({"event": "ended", "name": name, "uid": ref.uid, "time": seen, **reached}))
        else:
            self._show.write(f"{name}\t{seen:.6f}")
        if self._show.closed:
            raise BrokenPipeError  # the reader of stdout has closed it
        if final.phase is not Phase.COMPLETE:
            code = FAILED if final.phase is Phase.FAILED else NOT_FOUND
            self._bad(code, f"TrainJob {ref} is {final.phase}: {final.message}")

    def _bad(self, code: int, text: str) -> None:
        self._codes.add(code)
        self._show.notice(text)


def _ignore(observation: Observation, notice: str) -> None:
    """What measures the progress of each of many jobs is not shown."""
    del observation, notice
