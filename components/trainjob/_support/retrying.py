"""One retry policy for all requests: `Backoff`, its presets, and the header ``Retry-After``.

========  =======================  ===============  ===============  ==============================================
preset    gives up after           pauses, seconds  ``Retry-After``  used for
========  =======================  ===============  ===============  ==============================================
PATIENT   20 failures and 900 s    0.8 to 30        up to 60 s       watches of jobs that are waited for
REQUEST   5 failures and 60 s      0.8 to 30        up to 60 s       one request to Kubernetes, or one log
TRANSFER  7 failures or 120 s      1 to 20          up to 3600 s     stores of data, registries of images and models
========  =======================  ===============  ===============  ==============================================

Failures are counted in a row; a success sets their number back. The pauses are the upper bounds of the first and of the
longest one: the bound doubles at each failure, and the pause is random below it (full jitter).

A process that polls without giving up does not retry, and uses none of this: `trainjob.progress` posts the latest state
and is a file that may be copied alone, the supervisor of a local job waits for disk space, a Lease is renewed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TypeVar

_T = TypeVar("_T")

_LEAST = 0.05
"""Part of the upper bound that every pause has, so that no two attempts follow each other at once."""


@dataclass
class Backoff:
    """When to give up, and how long to pause before the next attempt. The caller sleeps.

    Attributes:
        failures: Failures in a row.
        seconds: Duration of the failures. With `both` it begins at the first failure, since a watch or a log may be
            silent for long; otherwise at the last success, since a transfer has to move, and without the pauses that
            the server asked for.
        both: Give up when `failures` and `seconds` are both used up; otherwise when either is.
        total: Failures in all, successes in between or not.
        first_pause: Upper bound of the first pause in seconds; doubled at each further failure in a row.
        longest_pause: Its largest value.
        longest_retry_after: Largest ``Retry-After`` in seconds that is obeyed; of a larger one, so much.
        count: Failures in a row so far.
        count_total: Failures so far.
    """

    failures: float
    seconds: float = math.inf
    both: bool = False
    total: float = math.inf
    first_pause: float = 1.0
    longest_pause: float = 20.0
    longest_retry_after: float = 60.0
    count: int = field(default=0, init=False)
    count_total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that count for `seconds`."""
        return time.monotonic() - self._since

    def failure(self) -> bool:
        """Record a failure; whether to give up."""
        if self.both and self.count == 0:
            self._since = time.monotonic()
        self.count += 1
        self.count_total += 1
        used_up = (self.count >= self.failures, self.elapsed >= self.seconds)
        return (all(used_up) if self.both else any(used_up)) or self.count_total >= self.total

    def success(self) -> None:
        """Record a success, or any progress: the next failure is the first in a row."""
        self.count = 0
        self._since = time.monotonic()

    def answered(self) -> None:
        """Begin `seconds` anew and keep the length of the pauses: the server has answered, which is no success yet."""
        self._since = time.monotonic()

    def pause(self, retry_after: float | None = None) -> float:
        """Seconds until the next attempt, random: ``Retry-After`` at least, and what spreads many clients."""
        asked = min(max(retry_after or 0.0, 0.0), self.longest_retry_after)
        if not self.both:
            self._since += asked
        bound = min(self.longest_pause, self.first_pause * 2.0 ** min(max(self.count - 1, 0), 32))
        return asked + bound * random.uniform(_LEAST, 1)


Preset = Callable[..., Backoff]
"""Makes a `Backoff`; its arguments replace fields of the preset."""

_KUBERNETES = partial(Backoff, both=True, first_pause=0.8, longest_pause=30.0)  # as client-go's reflector

PATIENT: Preset = partial(_KUBERNETES, failures=20, seconds=900.0)
"""An upgrade of a control plane takes minutes, and a job that is waited for keeps running meanwhile."""
REQUEST: Preset = partial(_KUBERNETES, failures=5, seconds=60.0)
"""Somebody waits for the answer."""
TRANSFER: Preset = partial(Backoff, failures=7, seconds=120.0, longest_retry_after=3600.0)
"""Success is any byte that arrives, so 120 s is the time for which nothing moves: a stall of 60 s is retried, a longer
outage is for the orchestrator's retry. A rate limit can last for an hour; an earlier request is refused again."""


def retry(action: Callable[[], _T], error: type[Exception], backoff: Backoff) -> _T:
    """The result of ``action``, retried while it raises ``error``, whose ``retry_after`` is obeyed if it has one."""
    while True:
        try:
            return action()
        except error as failure:
            if backoff.failure():
                raise
            time.sleep(backoff.pause(getattr(failure, "retry_after", None)))


def seconds(header: str | None) -> float | None:
    """``Retry-After`` (RFC 9110, 10.2.3) in seconds, at least 0; None if the header is missing or cannot be parsed."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
