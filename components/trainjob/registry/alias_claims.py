"""Election of the version that holds an alias, for registries without compare-and-set: a pure function of claims.

A promoted version gets a property, its **claim**: a number higher than that of all other claims at the time, and the
metric that made it better. Readers replay the claims in the order of their numbers. A claim by a metric counts only if
the version is better than the holder at that point, whatever its writer saw. So all readers see the same winner of
simultaneous promotions, and a slow promotion cannot replace a better version.
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
    """The claim of a version to an alias.

    Attributes:
        order: Its number; 0 if a person edited the claim and it has no number.
        metric: Metric that decided, if any.
        mode: Whether a higher or lower metric is better.
    """

    order: int
    metric: str | None = None
    mode: Mode = "max"

    def __str__(self) -> str:
        return f"{self.order} {self.mode} {self.metric}" if self.metric else str(self.order)

    @classmethod
    def parse(cls, text: str) -> Claim:
        """Parse the text that ``str`` returns."""
        match = _CLAIM.fullmatch(text.strip())
        if match is None:
            return cls(0)
        return cls(int(match[1]), match[3], cast(Mode, match[2]) if match[2] else "max")

    def beats(self, version: ModelVersion, other: ModelVersion) -> bool:
        """Whether ``version``, which has this claim, takes the alias from ``other``."""
        if self.metric is None:
            return True
        mine, theirs = (each.metrics.get(self.metric, math.nan) for each in (version, other))
        return mine > theirs if self.mode == "max" else mine < theirs


def holder(claims: Iterable[tuple[ModelVersion, Claim]]) -> ModelVersion | None:
    """Elect the holder of an alias from all versions with a claim, given in registration order; None without claims."""
    held: ModelVersion | None = None
    for version, claim in sorted(claims, key=lambda item: item[1].order):
        if held is None or claim.beats(version, held):
            held = version
    return held
