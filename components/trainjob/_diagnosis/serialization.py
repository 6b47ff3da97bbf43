"""The diagnosis of a crash as text, and as JSON that outlives the pods. Pure.

With the runtimes that Trainer ships, a crashed container is restarted in place, the job becomes `Failed` minutes later,
and Kubernetes then deletes its pods with their logs (measured: 320 s).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainjob._diagnosis import TAIL_LINES
from trainjob._support.control_characters import one_line
from trainjob._support.kube_objects import mapping
from trainjob.errors import CUT, Category, Diagnosis, RetryVerdict
from trainjob.status import Phase

LINE_CHARACTERS = 500
"""Characters of a stored log line: 20 lines fit into an annotation, and into a row of Airflow's database."""


def warning(diagnosis: Diagnosis) -> list[str]:
    """Log lines about a crashed rank of a job that has not ended, or about one whose pod does not end."""
    if diagnosis.exit_code is None and diagnosis.category is Category.CONFIGURATION:
        lines = [f"{diagnosis.summary}; {diagnosis.advice}"]
    else:
        lines = [f"{diagnosis.summary}; the job keeps running if its runtime restarts the rank"]
    if diagnosis.log:
        lines.append(diagnosis.log_heading)
        shown = [one_line(line, LINE_CHARACTERS) for line in diagnosis.log]
        lines += [f"  | {line}" for line in shown]
        if any(line.endswith(CUT) for line in shown):
            lines.append(diagnosis.whole_log)
    return lines


def pack_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON values, at most 15 KB."""
    log = tuple(one_line(line, LINE_CHARACTERS) for line in diagnosis.log[-TAIL_LINES:])
    kept = replace(diagnosis, log=log, summary=one_line(diagnosis.summary, 1000), unseen=diagnosis.unseen[:5])
    packed: dict[str, Any] = json.loads(json.dumps(kept.as_dict()))
    return packed


def unpack_diagnosis(packed: object) -> Diagnosis:
    """The inverse of `pack_diagnosis`; tolerates values of another version or of a person."""
    values = mapping(packed)
    fitting = {name: fits(values[name]) for name, fits in _FIELDS.items() if name in values}
    known: dict[str, Any] = {name: value for name, value in fitting.items() if value is not None}
    known |= {
        "category": _member(Category, values.get("category"), Category.UNKNOWN),
        "retry": _member(RetryVerdict, values.get("retry"), RetryVerdict.CONFIGURATION),
        "phase": _member(Phase, values.get("phase"), Phase.FAILED),
        "summary": str(
            values.get("summary") or "the job was suspended at its first crash; the recorded diagnosis cannot be read"
        ),
    }
    return Diagnosis(**known)


_FIELDS: dict[str, Callable[[object], object]] = {
    **dict.fromkeys(
        ("rank", "advice", "job", "pod", "node", "change"), lambda value: value if isinstance(value, str) else None
    ),
    **dict.fromkeys(("log", "unseen"), lambda value: tuple(map(str, value)) if isinstance(value, list) else None),
    "exit_code": lambda value: value if isinstance(value, int) else None,
    "node_memory": lambda value: value is True,
}
"""Field of a diagnosis -> its value in JSON, or None if it has another type."""


def _member(kind: Any, value: object, default: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return default
