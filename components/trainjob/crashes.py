"""A crash while its job goes on: as text for people, and as JSON that outlives the pods it was seen in. Pure.

With the runtimes that Trainer ships a container that crashed is started again in its place, the job is `Failed` only
minutes later, and then Kubernetes deletes its pods with their logs (measured: 320 s).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from trainjob.diagnosis import CUT, TAIL_LINES, Category, Diagnosis, Evidence
from trainjob.errors import RetryVerdict
from trainjob.status import Phase, mapping, mappings

LINE_CHARACTERS = 500
"""Of a log line that is kept for later: 20 of them fit into an annotation, and into a row of Airflow's database."""

_PODS, _LINES = 3, 100  # the ranks that failed first say it, and torchrun writes 40 lines after those of its workers
_POD_PARTS = {
    "metadata": ("name", "namespace", "uid", "labels", "creationTimestamp", "deletionTimestamp"),
    "spec": ("nodeName", "restartPolicy", "terminationGracePeriodSeconds"),
    "status": ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses"),
}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def printable(text: str, characters: int = LINE_CHARACTERS) -> str:
    """One line that moves no cursor, turns no direction of writing and can be encoded: U+FFFD marks what went."""
    last = text[: 20 * characters].rstrip("\r\n").rpartition("\r")[2]  # progress bars overwrite themselves
    plain = _ESCAPES.sub("", last).replace("\t", "    ")
    shown = "".join(c if c.isprintable() else "\ufffd" for c in plain[:characters])
    left_out = max(0, len(plain) - characters) + max(0, len(text) - 20 * characters)
    return f"{shown} … ({left_out}{CUT}" if left_out else shown


def warning(diagnosis: Diagnosis) -> list[str]:
    """What a log says of a crash while the job goes on, line by line."""
    lines = [diagnosis.crash]
    if diagnosis.log:
        lines.append(f"last lines of {diagnosis.rank or 'its log'}:")
        shown = [printable(line) for line in diagnosis.log]
        lines += [f"  | {line}" for line in shown]
        if any(line.endswith(CUT) for line in shown):
            lines.append(diagnosis.whole_log)
    return lines


def pack_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON values, 15 KB at most."""
    log = tuple(printable(line) for line in diagnosis.log[-TAIL_LINES:])
    kept = replace(diagnosis, log=log, summary=printable(diagnosis.summary, 1000), unseen=diagnosis.unseen[:5])
    packed: dict[str, Any] = json.loads(json.dumps(kept.as_dict()))
    return packed


def unpack_diagnosis(packed: object) -> Diagnosis:
    """The diagnosis again; the best that can be made of it where another version wrote it, or a person changed it."""
    known = {field.name: field for field in fields(Diagnosis)}
    values = {str(name): value for name, value in packed.items()} if isinstance(packed, Mapping) else {}
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items() if name in known}
    values |= {
        "category": _member(Category, values.get("category"), Category.UNKNOWN),
        "retry": _member(RetryVerdict, values.get("retry"), RetryVerdict.CONFIGURATION),
        "phase": _member(Phase, values.get("phase"), Phase.FAILED),
        "summary": str(values.get("summary") or "it was given up, and what was written down of it cannot be read"),
    }
    return Diagnosis(**values)


def _member(kind: Any, value: object, default: Any) -> Any:
    return kind(value) if value in {each.value for each in kind} else default


def pack_evidence(evidence: Evidence | None) -> dict[str, Any] | None:
    """What a diagnosis looks at of pods that crashed, as JSON values: for whoever has to explain the end of the job."""
    if evidence is None:
        return None
    chosen = sorted(evidence.pods, key=lambda pod: _name(pod) not in evidence.logs)[:_PODS]
    pods = [
        {
            part: {name: value for name, value in mapping(pod, part).items() if name in names}
            for part, names in _POD_PARTS.items()
        }
        for pod in chosen
    ]
    for packed, pod in zip(pods, chosen, strict=True):  # what was OOMKilled without a limit has filled its node
        packed["spec"] |= {kind: _resources(pod, kind) for kind in ("containers", "initContainers")}
    names = {_name(pod) for pod in pods}
    logs = {
        name: [printable(line) for line in list(lines)[-_LINES:]]
        for name, lines in evidence.logs.items()
        if name in names
    }
    return {"pods": pods, "logs": logs}


def _resources(pod: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    wanted = ("name", "resources", "restartPolicy")
    return [{name: each[name] for name in wanted if name in each} for each in mappings(pod, "spec", kind)]


def unpack_evidence(packed: Mapping[str, Any] | None) -> Evidence | None:
    """The evidence again."""
    return Evidence(None, packed.get("pods") or [], packed.get("logs") or {}) if packed else None


def _name(pod: Mapping[str, Any]) -> str:
    return str(mapping(pod, "metadata").get("name", ""))
