"""What must hold in every schedule, judged from the server's state and log, and from which processes live.

Each property is a function of `Facts` and of the moment, and yields a text for each violation. Moments: ``step`` after
each action; ``quiet`` when all requests have been answered after the last action; ``reaped`` after a run of the reaper
that follows; ``end`` when all jobs have ended. The docstrings state the bounds, which docs/development/simulation.md
explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.simulation.attempt_properties import again, foreign, lost, overlap, reused, revived, stale, twice
from tests.simulation.end_properties import deserted, error, orphan, waits
from tests.simulation.facts import Facts, Moment
from tests.simulation.stop_properties import reaped, running, unstopped

Property = Callable[[Facts, Moment], Iterator[str]]

PROPERTIES: tuple[Property, ...] = (
    twice,
    again,
    lost,
    overlap,
    foreign,
    running,
    unstopped,
    reaped,
    deserted,
    stale,
    reused,
    revived,
    waits,
    orphan,
    error,
)

KINDS = (*(check.__name__ for check in PROPERTIES), "unsettled")
"""Names of the properties; ``unsettled`` is that of a schedule that does not settle."""


def violations(facts: Facts, moment: Moment) -> Iterator[tuple[str, str]]:
    """Kind and text of each property that does not hold at a moment."""
    ended = sum(each.done + sum(launch.end is not None for launch in each.launches) for each in facts.processes)
    if moment == "step" and (facts.server.version, ended) == facts.seen:
        return  # requests that read change nothing that a property is about
    facts.seen = (facts.server.version, ended)
    for check in PROPERTIES:
        for text in check(facts, moment):
            yield check.__name__, text
    facts.judged = len(facts.server.log)
    facts.ended |= {each.name for each in facts.processes if each.done}
