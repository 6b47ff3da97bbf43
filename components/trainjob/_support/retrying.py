"""One retry policy for all requests: `Backoff`, its presets, and the header ``Retry-After``.

==================  ========================  ===============  ===============  =====================================
preset              gives up after            pauses, seconds  ``Retry-After``  used for
==================  ========================  ===============  ===============  =====================================
KUBERNETES_WATCH    20 failures and 900 s     0.8 to 30        up to 60 s       watches of jobs that are waited for
KUBERNETES_REQUEST  5 failures and 60 s       0.8 to 30        up to 60 s       one request, or one log to follow
KUBERNETES_LOG      3 failures                0.8 to 1.6       up to 60 s       one log, as far as it is written
KUBERNETES_TAIL     at a limit of the caller  0.8 to 2         up to 1 s        the log of a crash that is diagnosed
STORE               6 failures or 60 s        1 to 16          up to 3600 s     reads of a web server or object store
OCI                 7 failures, 30 in total   1 to 20          up to 3600 s     requests to a container registry
MODEL_REGISTRY      4 failures                1 to 4           up to 60 s       requests to a Kubeflow Model Registry
SQLITE_LOCK         30 s                      0.05 to 2        never sent       a locked SQLite database of MLflow
==================  ========================  ===============  ===============  =====================================

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

# --- Kubernetes: a proxy between API server and client may ask for a day, the API server itself asks for 1 s.

KUBERNETES: Preset = partial(Backoff, both=True, first_pause=0.8, longest_pause=30.0)  # as client-go's reflector
KUBERNETES_WATCH: Preset = partial(KUBERNETES, failures=20, seconds=900.0)
"""An upgrade of a control plane takes minutes, and a job that is waited for keeps running meanwhile."""
KUBERNETES_REQUEST: Preset = partial(KUBERNETES, failures=5, seconds=60.0)
"""Somebody waits for the answer."""
KUBERNETES_TAIL: Preset = partial(KUBERNETES, failures=math.inf, longest_pause=2.0, longest_retry_after=1.0)
"""The caller sets the time limit of the diagnosis, which is a few seconds."""
KUBERNETES_LOG: Preset = partial(KUBERNETES, both=False, failures=3)
"""The log of one of many pods: those of the others are read meanwhile."""

# --- Data: an outage of up to a minute is bridged, longer ones are for the orchestrator's retry. A rate limit can last
# for an hour; a transfer that asks earlier is refused again.

_TRANSFER = partial(Backoff, longest_retry_after=3600.0)

STORE: Preset = partial(_TRANSFER, failures=6, seconds=60.0)
"""Success is any byte that arrives, so 60 s is the time for which nothing moves."""
OCI: Preset = partial(_TRANSFER, failures=7, total=30)
"""Without `seconds`, since a registry is silent for minutes while it computes the digest of a large blob. With `total`,
since each cut of an upload can cost what was sent before it."""

# --- Registries

MODEL_REGISTRY: Preset = partial(Backoff, failures=4)
"""KEP-12020: three retries."""
SQLITE_LOCK: Preset = partial(Backoff, failures=math.inf, seconds=30.0, first_pause=0.05, longest_pause=2.0)
"""The number of failures says nothing: each is one look whether the lock is free."""


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
