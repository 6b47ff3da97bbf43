"""Shorter scripts that still violate a property."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fewer(actions: Sequence[str], violates: Callable[[list[str]], bool]) -> list[str]:
    """Remove as many actions as possible: first halves, then smaller parts (delta debugging)."""
    left, parts = list(actions), 2
    while len(left) >= 2:
        size = max(1, len(left) // parts)
        for start in range(0, len(left), size):
            shorter = left[:start] + left[start + size :]
            if violates(shorter):
                left, parts = shorter, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), parts * 2)
    return left
