"""Random variations of scripts: all lines or the first ones, some left out, with random actions between and after.

They reach the states for which the scripts were written, each beside what else can happen then. Purely random schedules
reach most of them in one of thousands, and some of them never.
"""

from __future__ import annotations

import random
import zlib

from tests.simulation.choices import Chooser
from tests.simulation.scripts import EXAMPLES
from tests.simulation.settings import Settings
from tests.simulation.virtual import Unsettled
from tests.simulation.world import World

_LEFT_OUT, _BETWEEN = 0.05, 0.1  # probability for each line
_AFTER = 25  # most random actions at the end


class Variation:
    """A variation of a random script.

    Attributes:
        settings: The settings of the script.
    """

    def __init__(self, seed: int, numbers: random.Random) -> None:
        self._numbers = numbers
        # Not by its place, so that a new script changes few seeds.
        script = max(EXAMPLES, key=lambda each: zlib.crc32(f"{seed} {each}".encode()))
        self.settings, lines = parsed(script, seed)
        self._lines = lines[: numbers.choice((len(lines), numbers.randint(1, len(lines))))]

    def act(self, world: World) -> None:
        """Do it."""
        chooser, numbers = Chooser(world, self._numbers), self._numbers
        for line in self._lines:
            if numbers.random() < _LEFT_OUT:
                continue
            try:
                world.act(line)
            except Unsettled:
                if not line.startswith("until"):  # what it waits for may not come any more
                    raise
            if numbers.random() < _BETWEEN:
                world.act(chooser.draw())
        for _ in range(numbers.randint(0, _AFTER)):
            world.act(chooser.draw())


def parsed(script: str, seed: int = 0) -> tuple[Settings, list[str]]:
    """The settings and the actions of a script; `seed` is that of the settings if they have none."""
    lines = [line.split(" #")[0].strip() for line in script.strip().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    words = lines.pop(0).split()[1:] if lines and lines[0].startswith("world") else []
    return Settings.parse([f"seed={seed}", *(word for word in words if not word.startswith("mix="))]), lines
