"""Counts the steps of this process, for the watchdog."""

from __future__ import annotations

import threading


class Counter:
    """The steps of this process. `step` runs in each step of a training, so it only adds to these."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # as in `Reporter`
        self.unwatched = True  # no watchdog was started, and `watch` has not found that there must be none
        self.count = 0  # calls of `step` and `report`
        self.steps = 0  # calls of `step` without a number
        self.step: int | None = None  # latest number given to `step`
        self.reported: int | None = None  # latest number given to `report`

    def number(self) -> dict[str, int]:
        """``step`` or ``steps``, which can be compared between ranks that have the same of both; empty if unknown."""
        if self.step is not None:
            return {"step": self.step}
        if self.steps:
            return {"steps": self.steps}
        return {} if self.reported is None else {"step": self.reported}
