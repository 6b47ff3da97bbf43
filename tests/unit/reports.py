"""A job whose report has everything: a failed rank, secrets, a command, labels of trainjob."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests import objects
from tests.objects import FAILED, RUNNING, Object, ended, event, pod, waiting

from trainjob._diagnosis.evidence import Evidence
from trainjob._jobs.report import Report, examine
from trainjob.job import ATTEMPT, KEY, JobRef

NOW = datetime(2026, 11, 21, 10, 10, tzinfo=UTC)
REF = JobRef("ns", "x", "uid-x", 2)
SECRET = "hf_" + "a" * 30
HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "{{ report.key }} {% raw %} ${x} &lt; & \"quoted\" 'single'",
    "\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "NUL \x00 and \x07 and \x9b2J",
    "lone \udc80 surrogate and \u202eturned",
    "x" * (1 << 20),
]
ENDED = ended(3, startedAt="2026-11-21T10:01:01Z")
BACK_OFF = event(
    "BackOff", "Back-off restarting failed container", time="2026-11-21T10:05:30Z", about="x-node-0-1-abcde", count=4
)


def trainjob(*conditions: Object, spec: Object | None = None, **fields: Any) -> Object:
    """The second attempt of a job of two nodes; fields as of `tests.objects.trainjob`."""
    words = ["python", "train.py", "--token=" + "abcdefghijk", "--name", "a b", f"--url=redis://u:{SECRET}@h/"]
    trainer = {
        "numNodes": 2,
        "image": "img:1",
        "command": words,
        "env": [{"name": "NAME", "value": "the-value"}, {"name": "HF_TOKEN", "value": SECRET}],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }
    about = {"labels": {ATTEMPT: "2"}, "annotations": {KEY: "dag/run/train"}}
    return objects.trainjob(*conditions, spec={"trainer": trainer, **(spec or {})}, **{**about, **fields})


def failed(log: list[str], **more: Any) -> Report:
    """The report of a job whose second rank failed."""
    pods = [pod(0, RUNNING, node="n1"), pod(1, waiting("CrashLoopBackOff"), ENDED)]
    pods[1]["status"]["containerStatuses"][0]["restartCount"] = 2
    evidence = Evidence(trainjob(FAILED), pods, {"x-node-0-1-abcde": log}, [BACK_OFF], **more)
    return examine(REF, evidence, NOW)
