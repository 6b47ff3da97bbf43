"""Handlers of Ctrl-C and SIGTERM, for the main thread of programs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` on SIGINT and SIGTERM; the earlier handlers return at the end."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def exiting(number: int, frame: object = None) -> NoReturn:
    """A handler that raises SystemExit, so that a transfer removes its temporary files and partial uploads."""
    del frame
    sys.exit(128 + number)
