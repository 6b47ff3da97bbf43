"""Who holds an alias where a registry has no compare-and-set: a pure function of what versions claim.

A version that is promoted says so in a property of its own, its **claim**: a number that is higher than all others
then, and what made it better. Whoever reads the claims replays them in the order of their numbers. A claim by a metric
only counts if the version is better than who holds the alias by then, whatever its writer had seen: of promotions at
the same instant all readers see the same one win, and one that is slow takes nothing from a better one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from trainjob.registry.base import Mode, ModelVersion

_CLAIM = re.compile(r"(\d{1,18})(?: (max|min) (.+))?")


@dataclass(frozen=True)
class Claim:
    """What a version claims.

    Attributes:
        order: Its number. 0 for a claim that a person wrote in words.
        metric: Metric that decided, if one did.
        mode: Whether more of it is better.
    """

    order: int
    metric: str | None = None
    mode: Mode = "max"

    def __str__(self) -> str:
        return f"{self.order} {self.mode} {self.metric}" if self.metric else str(self.order)

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Read what ``str`` wrote."""
        match = _CLAIM.fullmatch(text.strip())
        if match is None:
            return cls(0)
        return cls(int(match[1]), match[3], cast(Mode, match[2]) if match[2] else "max")

    def beats(self, version: ModelVersion, other: ModelVersion) -> bool:
        """Whether ``version``, which claims this, takes the alias from ``other``."""
        if self.metric is None:
            return True
        mine, theirs = (each.metrics.get(self.metric, math.nan) for each in (version, other))
        return mine > theirs if self.mode == "max" else mine < theirs


def holder(claims: Iterable[tuple[ModelVersion, Claim]]) -> ModelVersion | None:
    """The version that holds an alias, of all that claim it, given in the order of registration; None if none does."""
    held: ModelVersion | None = None
    for version, claim in sorted(claims, key=lambda item: item[1].order):
        if held is None or claim.beats(version, held):
            held = version
    return held
