"""The meaning of the reasons that Kubernetes, JobSet, Trainer and Kueue report.

One table for failures and for blockers, since the same objects report both. Each part of it is named after what reports
the reasons, or what they are reported of: `containers`, `pods`, `controllers`, `kueue`. This module joins and searches
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.reasons import containers, controllers, kueue, pods
from trainjob._diagnosis.reasons.rule import Rule
from trainjob.verdicts import Category, RetryVerdict

UNKNOWN = Meaning(Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "check the job's events and its nodes")
"""The meaning of a reason that the table does not have."""

RULES = (*containers.RULES, *pods.RULES, *controllers.RULES, *kueue.RULES)
"""The table. The first rule that matches counts."""

_LONGEST = 4096  # characters of a message that are searched; that of an Event has at most 1,024


def find(reason: str, message: str) -> Meaning | None:
    """The meaning of `reason` with `message`; None if it is unknown."""
    searched = message[:_LONGEST]
    return next((meaning for pattern, meaning in _BY_REASON.get(reason, ()) if pattern.search(searched)), None)


def _by_reason(rules: Iterable[Rule]) -> Mapping[str, list[tuple[re.Pattern[str], Meaning]]]:
    found: dict[str, list[tuple[re.Pattern[str], Meaning]]] = defaultdict(list)
    for reasons, message, meaning in rules:
        for reason in reasons:
            found[reason].append((message, meaning))
    return found


_BY_REASON = _by_reason(RULES)
