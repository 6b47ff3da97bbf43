"""A row of the table of reasons."""

from __future__ import annotations

import re

from trainjob._diagnosis.meaning import Meaning
from trainjob.verdicts import Category, RetryVerdict

Rule = tuple[list[str], re.Pattern[str], Meaning]
"""Reasons, a regular expression to find in the message, and their meaning."""


def rule(
    reasons: str,
    message: str,
    category: Category,
    retry: RetryVerdict,
    advice: str,
    *,
    termination: str = "",
    permanent: bool = False,
    resource: str = "",
) -> Rule:
    """A rule of the table.

    Args:
        reasons: Reasons, separated by spaces.
        message: Regular expression to find in the message.
        category: See `Meaning`, as for the arguments below.
        retry: Who has to act.
        advice: What to do.
        termination: How a container terminated.
        permanent: It cannot resolve itself.
        resource: The resource of which the node needs more.
    """
    meaning = Meaning(category, retry, advice, termination, permanent, resource=resource)
    return reasons.split(), re.compile(message, re.DOTALL), meaning
