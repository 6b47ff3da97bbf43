"""Diagnosis and evidence of a crash as text, and as JSON that outlives the pods. Pure.

With the runtimes that Trainer ships, a crashed container is restarted in place, the job becomes `Failed` minutes later,
and Kubernetes then deletes its pods with their logs (measured: 320 s).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trainjob._diagnosis import TAIL_LINES, output
from trainjob._diagnosis.evidence import Evidence
from trainjob._support.control_characters import one_line
from trainjob._support.kube_objects import mapping, mappings, name_of
from trainjob._support.masking import masked_lines, public
from trainjob.errors import CUT, Category, Diagnosis, RetryVerdict
from trainjob.status import Phase

LINE_CHARACTERS = 500
"""Characters of a stored log line: 20 lines fit into an annotation, and into a row of Airflow's database."""

_PODS, _LINES = 3, 100  # the ranks that failed first suffice; torchrun adds a report of 40 lines
_POD_PARTS = {
    "metadata": ("name", "namespace", "uid", "labels", "creationTimestamp", "deletionTimestamp"),
    "spec": ("nodeName", "restartPolicy", "terminationGracePeriodSeconds"),
    "status": ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses"),
}


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


def pack_evidence(evidence: Evidence | None) -> dict[str, Any] | None:
    """The parts of crashed pods that a diagnosis reads, as JSON values, to explain the failure of the job later."""
    if evidence is None:
        return None
    chosen = sorted(evidence.pods, key=lambda pod: name_of(pod) not in evidence.logs)[:_PODS]
    pods = [
        {
            part: {name: value for name, value in mapping(pod, part).items() if name in names}
            for part, names in _POD_PARTS.items()
        }
        for pod in chosen
    ]
    for packed, pod in zip(pods, chosen, strict=True):  # an OOMKilled container without a limit filled its node
        packed["status"] = _public(packed["status"])
        packed["spec"] |= {kind: _resources(pod, kind) for kind in ("containers", "initContainers")}
    names = {name_of(pod) for pod in pods}
    logs = {
        name: [
            one_line(line, LINE_CHARACTERS)
            for line in masked_lines(output.shown(line)[: 2 * LINE_CHARACTERS] for line in list(lines)[-_LINES:])
        ]
        for name, lines in evidence.logs.items()
        if name in names
    }
    return {"pods": pods, "logs": logs}


def _public(value: Any) -> Any:
    """A part of a pod's status without control sequences and secrets."""
    if isinstance(value, Mapping):
        return {name: _public(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_public(part) for part in value]
    return public(value) if isinstance(value, str) else value


def _resources(pod: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    wanted = ("name", "resources", "restartPolicy")
    return [{name: each[name] for name in wanted if name in each} for each in mappings(pod, "spec", kind)]


def unpack_evidence(packed: Mapping[str, Any] | None) -> Evidence | None:
    """The inverse of `pack_evidence`."""
    return Evidence(None, packed.get("pods") or [], packed.get("logs") or {}) if packed else None
