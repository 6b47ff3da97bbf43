"""Tests in virtual time: an hour of waiting takes no time, and the same moments follow each other in each run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.simulation.virtual import VirtualLoop

P = ParamSpec("P")
LONGEST = 5000.0
"""Seconds of virtual time that a test may take."""


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on an event loop whose clock moves when all tasks wait. For code without threads and sockets."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        loop = VirtualLoop(lambda _: None)
        with loop.running():
            task = loop.create_task(test(*arguments, **named))
            loop.settle()
            while not task.done():
                due = loop.due()
                assert due is not None, "all tasks wait for ever"
                assert due < LONGEST, "the test does not end"
                loop.now = max(loop.now, due)
                loop.settle()
            for each in asyncio.all_tasks(loop):
                each.cancel()
            loop.settle()
        loop.close()
        task.result()

    return run
