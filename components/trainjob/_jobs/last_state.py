"""The state of a job that is kept when it is deleted: its phase, progress, metrics and last lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.report_parts import rank_from
from trainjob._support.display import public_values, shown_lines
from trainjob._support.kube_objects import name_of, rank_of
from trainjob.status import observe

LAST_LINES = 20
"""Lines of a rank in `last_state`."""

_LAST_RANKS = 8  # in `last_state`


def last_state(evidence: Evidence, logs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The state of a job before it is deleted, as JSON values.

    ``phase``, ``progress``, ``metrics`` and, in ``logs``, the last lines of each failed rank, else of rank 0.

    Args:
        evidence: Evidence of the job, which still exists.
        logs: Rank -> last lines, for ranks whose lines the evidence lacks.
    """
    observation = observe(evidence.trainjob)
    shown = {rank: log_of(evidence, rank) or logs.get(rank, ()) for rank in last_ranks(evidence)}
    return {
        "phase": str(observation.phase),
        "progress": observation.progress,
        "metrics": public_values(observation.metrics),
        "logs": {rank: shown_lines(list(lines)[-LAST_LINES:]) for rank, lines in shown.items() if lines},
    }


def last_ranks(evidence: Evidence) -> list[str]:
    """The ranks whose last lines `last_state` has: the failed ones, else rank 0."""
    ranks = {rank_of(pod): pod for pod in evidence.pods}
    failed = sorted(rank for rank, pod in ranks.items() if rank_from(pod).exit_code)[:_LAST_RANKS]
    return failed or sorted(ranks.keys() & {"launcher-0", "node-0"})[:1]


def log_of(evidence: Evidence, rank: str) -> Sequence[str]:
    """The last lines of a rank; empty if the evidence lacks them."""
    return next((evidence.logs.get(name_of(pod), ()) for pod in evidence.pods if rank_of(pod) == rank), ())
