"""What an attempt changes by `on_retry`, as text: for waiters, which read no spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._support.control_characters import one_line
from trainjob._support.kube_objects import annotated, mapping
from trainjob._support.masking import public
from trainjob.job import RESERVED_PREFIX

RETRY_CHANGE = RESERVED_PREFIX + "retry-change"
"""Annotation of a changed attempt, as JSON: ``reason``, ``diff`` to the author's spec, ``hash`` of the changed spec and
``changes``, from which the next attempt continues."""

_NOTICE = 1000  # characters


def text_of(diff: Mapping[str, Any]) -> str:
    """A difference as text: ``memory 16Gi -> 24Gi, queue main -> backfill``."""
    return ", ".join(f"{name} {_words(old)} -> {_words(new)}" for name, (old, new) in diff.items())


def _words(value: object) -> str:
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value or "")) or "(none)"


def notice(trainjob: Mapping[str, Any]) -> str:
    """What this attempt changes and why, for a log; empty if it changes nothing."""
    found = annotated(trainjob, RETRY_CHANGE)
    try:
        diff, reason = text_of(mapping(found, "diff")), str(mapping(found).get("reason") or "")
    except (TypeError, ValueError):
        return ""
    return public(one_line(f"on_retry changed this attempt: {diff}; because of {reason}", _NOTICE)) if diff else ""
