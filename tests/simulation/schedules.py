"""Run schedules: random ones by their seed, scripts as text; check the properties; shrink what violates one."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from tests.simulation.choices import Chooser
from tests.simulation.facts import Facts, Moment
from tests.simulation.processes import load
from tests.simulation.properties import violations
from tests.simulation.settings import LAUNCHERS, Settings
from tests.simulation.shrinking import fewer
from tests.simulation.variations import Variation, parsed
from tests.simulation.virtual import Unsettled
from tests.simulation.world import World

STEPS = 60
"""Random actions of a schedule, before everything is answered and judged."""

_RETRIES_SECONDS = 150.0  # longest that requests are repeated after the last fault, and launches wait for ranks
_REAPER_SECONDS = 300.0
_ROUNDS = 4  # of ended jobs until everything must have ended: each end may start another attempt
_ROUND_SECONDS = 400.0


@dataclass
class Outcome:
    """What became of a schedule.

    Attributes:
        world: The world at its end.
        found: Kind of each violated property -> what was seen first.
        steps: How many actions were possible.
    """

    world: World
    found: dict[str, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def script(self) -> str:
        """The schedule as a script for `replay`."""
        return script_of(self.world.settings, self.world.mix, self.world.trace)


def script_of(settings: Settings, mix: str, actions: list[str]) -> str:
    """A schedule as text."""
    return "\n".join([f"world mix={mix} {settings}".strip(), *actions]) + "\n"


def run(seed: int, mix: str, steps: int = STEPS) -> Outcome:
    """Run a random schedule."""
    numbers = random.Random(f"{mix} {seed}")
    if mix == "variations":
        variation = Variation(seed, numbers)
        return _run(variation.settings, mix, variation.act)
    settings = Settings.draw(seed, mix, numbers)

    def actions(world: World) -> None:
        chooser = Chooser(world, numbers)
        for _ in range(steps):
            world.act(chooser.draw())

    return _run(settings, mix, actions)


def replay(script: str, only: str = "", *, finish: bool = True) -> Outcome:
    """Run a script: actions, one a line, after an optional line ``world SETTING=VALUE …``; ``#`` starts a comment.

    Args:
        script: The script.
        only: Stop at the first violation of this kind.
        finish: Let everything end after the last action, as at the end of a random schedule.
    """
    settings, lines = parsed(script)
    mix = found[1] if (found := re.search(r"^world .*\bmix=(\w+)", script, re.MULTILINE)) else "all"

    def actions(world: World) -> None:
        for line in lines:
            world.act(line)

    return _run(settings, mix, actions, only, finish=finish)


class _Found(Exception):
    """The violation that a shrink looks for was found."""


def _run(
    settings: Settings, mix: str, actions: Callable[[World], None], only: str = "", *, finish: bool = True
) -> Outcome:
    for kind in LAUNCHERS[mix]:
        load(kind)  # before the clocks are replaced
    logging.disable(logging.CRITICAL)
    world = World(settings, mix)
    outcome = Outcome(world)
    facts = Facts(world.server, world.processes)

    def check(moment: Moment) -> None:
        for kind, text in violations(facts, moment):
            outcome.found.setdefault(kind, f"after step {len(world.trace)}: {text}")
        if only in outcome.found:
            raise _Found

    world.checked = lambda: check("step")
    try:
        with world.loop.running():
            try:
                actions(world)
                outcome.steps = len(world.trace)
                if finish:
                    _finish(world, check)
            except _Found:
                pass
            except Unsettled as error:
                outcome.found["unsettled"] = str(error)
            finally:
                world.checked = lambda: None
                world.close()
    finally:
        logging.disable(logging.NOTSET)
    outcome.steps = outcome.steps or len(world.trace)
    return outcome


def _finish(world: World, check: Callable[[Moment], None]) -> None:
    """Let everything end, and judge: when requests are answered, after a run of the reaper, and at the end."""
    trace = list(world.trace)
    world.recover()
    world.rest(_RETRIES_SECONDS)
    check("quiet")
    world.spawn("reap", world.settings.keys[0])
    reaper = world.processes[-1]
    world.rest(_REAPER_SECONDS, lambda: not reaper.is_living)
    check("reaped")
    for _ in range(_ROUNDS):
        world.end_jobs()
        world.rest(_ROUND_SECONDS, lambda: not any(each.is_living for each in world.processes))
        if not any(each.is_living for each in world.processes):
            break
    check("end")
    world.trace[:] = trace


def shrink(outcome: Outcome, kind: str) -> str | None:
    """The shortest script that was found which still violates that property; None if the script does not violate it."""
    settings, mix, actions = outcome.world.settings, outcome.world.mix, list(outcome.world.trace)

    def violates(settings: Settings, actions: list[str]) -> bool:
        return kind in replay(script_of(settings, mix, actions), kind).found

    if not violates(settings, actions):
        return None
    actions = fewer(actions, lambda some: violates(settings, some))
    for each in fields(Settings):
        simpler = settings.with_default(each.name)
        if simpler != settings and violates(simpler, actions):
            settings = simpler
    actions = fewer(actions, lambda some: violates(settings, some))
    return script_of(settings, mix, actions)
