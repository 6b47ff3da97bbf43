"""``trainjob wait`` for several jobs: on one watch, a line as soon as one has ended."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from trainjob import names
from trainjob._jobs.following import follow
from trainjob._jobs.successors import JobReplaced
from trainjob.cli.exits import NOT_FOUND, TIMEOUT, USAGE, USER
from trainjob.cli.output import OutputClosed
from trainjob.cli.session import Interrupts, Session, now
from trainjob.errors import (
    BackendUnavailable,
    InvalidSpec,
    JobHung,
    NotFound,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.job import KEY, JobRef, labels_of
from trainjob.status import Observation, Phase
from trainjob.wait_options import WaitOptions

_SLICE = 100  # waits started in one turn of the event loop, which has to serve a connection meanwhile


async def wait_for_many(session: Session, given: Sequence[tuple[str, str]], options: WaitOptions) -> int:
    """Wait for jobs; the exit code is the first that applies to any of them: failed, timeout, not found.

    Args:
        session: Backend and namespace.
        given: Namespaces (empty: the default one) and names of the jobs, or their keys.
        options: When to stop waiting for each; `fail_on_first_crash` is not used.
    """
    session.shared = True
    waits = _Waits(session, options)
    with Interrupts() as interrupts, interrupts.stage():
        # All objects that are created here stay until the end: each garbage collection over 10,000 waits would
        # block the event loop for 0.1 s.
        gc.disable()
        refs = await waits.find(given)
        try:
            async with asyncio.TaskGroup() as tasks:
                for i, (name, ref) in enumerate(refs.items(), 1):
                    tasks.create_task(waits.wait(ref, name))
                    if i % _SLICE == 0:
                        await asyncio.sleep(0)
                gc.freeze()
                gc.enable()
        except ExceptionGroup as group:  # a task group wraps every exception
            raise group.exceptions[0] from None
    return interrupts.exit_code or min(waits.codes, default=0)


class _Waits:
    """The waits of one command.

    Attributes:
        codes: Exit codes of the jobs that did not complete.
    """

    def __init__(self, session: Session, options: WaitOptions) -> None:
        self._session, self._options = session, options
        self.codes: set[int] = set()
        self._notice = ""

    async def find(self, given: Sequence[tuple[str, str]]) -> dict[str, JobRef]:
        """Name as the caller wrote it -> job, each job once. What is no name, or also a key, is looked up by itself.

        One list for each namespace, and for the default one, where a key may look like a job of another namespace.
        """
        default = self._session.namespace
        wanted: dict[str, set[str]] = {default: set()}
        for namespace, name in given:
            wanted.setdefault(namespace or default, set()).add(name)
        listed = {namespace: await self._listed(namespace, each) for namespace, each in wanted.items()}
        refs: dict[str, JobRef] = {}
        for namespace, name in given:
            written = f"{namespace}/{name}" if namespace else name
            ref = listed[namespace or default][0].get(name)
            try:
                if ref is None or labels_of(written)[KEY] in listed[default][1]:
                    ref = JobRef.of(await self._session.find((namespace, name)))
            except (NotFound, InvalidSpec) as error:
                self._bad(NOT_FOUND if isinstance(error, NotFound) else USAGE, str(error))
                continue
            if ref not in refs.values():
                refs[written] = ref
        return refs

    async def _listed(self, namespace: str, wanted: set[str]) -> tuple[dict[str, JobRef], set[str]]:
        """As `Backend.refs`; nothing where this account may not list jobs: the text may mean a job elsewhere."""
        named = {name for name in wanted if names.JOB.fullmatch(name)}
        try:
            return await self._session.backend.refs(namespace, named)
        except BackendUnavailable:
            raise
        except TrainJobError:
            if named and namespace == self._session.namespace:
                raise
            return {}, set()

    async def wait(self, ref: JobRef, name: str) -> None:
        """Wait for a job, or for the attempt that replaces it; `name` is the name that the caller wrote."""
        while True:
            try:
                return await self._wait_for(ref, name)
            except JobReplaced as replaced:
                self._say(f"TrainJob {ref} was replaced by {replaced.by}, which is waited for from now on")
                ref = replaced.by
            except TimedOut as error:
                return self._bad(TIMEOUT, str(error))
            except TrainJobFailed as error:  # it hangs, or its step gave it up
                kind = "hung" if isinstance(error, JobHung) else "failed"
                diagnosis = error.diagnosis.as_dict()
                self._session.event(kind, name=name, uid=ref.uid, time=time.time(), diagnosis=diagnosis)
                return self._bad(USER, str(error))

    async def _wait_for(self, ref: JobRef, name: str) -> None:
        async with aclosing(follow(self._session.backend, ref, self._options)) as changes:
            async for observed, notice in changes:
                self._take(ref, name, observed, notice)

    def _take(self, ref: JobRef, name: str, observed: Observation, notice: str) -> None:
        if observed.phase.terminal:
            self._ended(ref, name, observed, time.time())
        elif notice and notice != self._notice:  # an outage affects all jobs alike
            self._notice = notice
            self._say(notice)

    def _ended(self, ref: JobRef, name: str, final: Observation, seen: float) -> None:
        reached: dict[str, Any] = {"phase": str(final.phase), "reason": final.reason, "message": final.message}
        self._session.event("ended", f"{name}\t{seen:.6f}", name=name, uid=ref.uid, time=seen, **reached)
        if self._session.closed:
            raise OutputClosed
        if final.phase is not Phase.COMPLETE:
            code = USER if final.phase is Phase.FAILED else NOT_FOUND
            self._bad(code, f"TrainJob {ref} is {final.phase}: {final.message}")

    def _bad(self, code: int, text: str) -> None:
        self.codes.add(code)
        self._say(text)

    def _say(self, text: str) -> None:
        time = now()
        self._session.event("notice", f"{time} {text}", err=True, time=time, message=text)
