"""Examples of the rules of the diagnosis, and what a rank's log means alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.objects import ended, pod, trainjob

from trainjob._diagnosis import diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.rules.row import LineRule, ObjectRule, RaisedRule
from trainjob.errors import Diagnosis
from trainjob.status import Observation, Phase

EXAMPLES = Path(__file__).parent / "rules"
WORDINGS = [json.loads(line) for line in EXAMPLES.with_name("wordings.jsonl").read_text().splitlines()]
SIGNALS = {"SIGINT": 130, "SIGABRT": 134, "SIGKILL": 137, "SIGTERM": 143, "SIGBUS": 135, "SIGILL": 132, "SIGSEGV": 139}


def example_of(rule: ObjectRule) -> tuple[str, str]:
    found = json.loads((EXAMPLES / f"{rule.id}.json").read_text())
    return found["reason"], found["message"]


def log_of(rule: RaisedRule | LineRule) -> list[str]:
    return (EXAMPLES / f"{rule.id}.log").read_text().splitlines()


def code_of(rule: RaisedRule | LineRule) -> int:
    code = rule.codes.split()[0] if isinstance(rule, LineRule) and rule.codes else "1"
    return SIGNALS.get(code) or int(code)


def diagnosed(code: int, log: list[str]) -> Diagnosis:
    logs = {"x-node-0-0-abcde": log}
    return diagnosis_of(Evidence(trainjob(), [pod(0, ended(code))], logs), Observation(Phase.FAILED))
