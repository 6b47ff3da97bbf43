"""The report of a job: as a value, as text and as an HTML page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest
from hypothesis import given, settings, strategies as st
from tests.unit.test_page import Parsed

from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._jobs.report import Report, examine
from trainjob._pages.documents.training import training_document
from trainjob._pages.page import page_html
from trainjob._support.masking import MASK
from trainjob.cli import texts
from trainjob.cli.output import as_json
from trainjob.job import JobRef
from trainjob.status import GIVEN_UP, QUEUE_LABEL, Phase
from trainjob.verdicts import Category, Evidence

NOW = datetime(2026, 11, 21, 10, 10, tzinfo=UTC)
REF = JobRef("ns", "x", "uid-1", 2)
HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "{{ report.key }} {% raw %} ${x} &lt; & \"quoted\" 'single'",
    "\x1b[2J\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "NUL \x00 and \x07 and \x9b2J",
    "lone \udc80 surrogate and \u202eturned",
    "x" * (1 << 20),
]
SECRET = "hf_" + "a" * 30


def trainjob(*conditions: dict[str, Any], **spec: Any) -> dict[str, Any]:
    trainer = {
        "numNodes": 2,
        "image": "img:1",
        "command": ["python", "train.py", "--token=" + "abcdefghijk", "--name", "a b", f"--url=redis://u:{SECRET}@h/"],
        "env": [{"name": "NAME", "value": "the-value"}, {"name": "HF_TOKEN", "value": SECRET}],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }
    return {
        "metadata": {
            "namespace": "ns",
            "name": "x",
            "uid": "uid-1",
            "creationTimestamp": "2026-11-21T10:00:00Z",
            "labels": {"trainjob.dev/attempt": "2"},
            "annotations": {"trainjob.dev/key": "dag/run/train"},
        },
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, **spec},
        "status": {"conditions": list(conditions)},
    }


FAILED = {
    "type": "Failed",
    "status": "True",
    "reason": "FailedJobs",
    "message": "jobset failed due to one or more job failures",
    "lastTransitionTime": "2026-11-21T10:06:00Z",
}


def pod(index: int, state: dict[str, Any], last: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    container = {"name": "node", "state": state, "lastState": last or {}, "restartCount": 2 if last else 0}
    return {
        "metadata": {"name": f"x-node-0-{index}-abcde", "uid": f"pod-{index}", "labels": labels},
        "spec": {"nodeName": "n1", "containers": [{"name": "node"}]},
        "status": {"phase": "Running", "containerStatuses": [container], **status},
    }


RUNNING = {"running": {"startedAt": "2026-11-21T10:01:00Z"}}
ENDED = {
    "terminated": {
        "exitCode": 3,
        "reason": "Error",
        "startedAt": "2026-11-21T10:01:01Z",
        "finishedAt": "2026-11-21T10:05:00Z",
    }
}
EVENT = {
    "type": "Warning",
    "reason": "BackOff",
    "message": "Back-off restarting failed container",
    "eventTime": "2026-11-21T10:05:30.000000Z",
    "count": 4,
    "involvedObject": {"kind": "Pod", "name": "x-node-0-1-abcde"},
}


def failed(log: list[str], **more: Any) -> Report:
    pods = [pod(0, RUNNING), pod(1, {"waiting": {"reason": "CrashLoopBackOff"}}, ENDED)]
    evidence = Evidence(trainjob(FAILED), pods, {"x-node-0-1-abcde": log}, [EVENT], **more)
    return examine(REF, evidence, NOW)


def plain(report: Report) -> str:
    return click.unstyle(texts.report_text(report))


def page(report: Report) -> str:
    return page_html(training_document(report))


def shown(report: Report) -> str:
    """All texts of the page."""
    parsed = Parsed(page(report))
    return parsed.text + json.dumps(parsed.data["document"], ensure_ascii=False)


def test_report_of_a_failed_job_has_the_root_cause() -> None:
    report = failed(["loading", "ValueError: no"])
    assert (report.observation.phase, report.diagnosis.rank) == (Phase.FAILED, "node-1")
    assert report.running_since == datetime(2026, 11, 21, 10, 1, tzinfo=UTC)
    assert [(name, (b - a).total_seconds()) for name, a, b in report.phases] == [("starting", 60), ("running", 300)]
    assert [(rank.rank, rank.state, rank.exit_code, rank.restarts, rank.bad) for rank in report.ranks] == [
        ("node-0", "Running", None, 0, False),
        ("node-1", "CrashLoopBackOff", 3, 2, True),
    ]
    for text in (plain(report), shown(report)):
        for expected in (
            *("ns/x", "Failed", "node-1 exited with code 3", "ValueError: no", "fix the training code"),
            *("torch-distributed", "nvidia.com/gpu 8", "CrashLoopBackOff", "Back-off restarting failed container"),
            *("dag/run/train", "img:1"),
        ):
            assert expected in text, expected
    assert "(4 times)" in plain(report)


def test_only_the_root_cause_is_the_culprit() -> None:
    report = failed(["ValueError: no"])
    terminated = replace(report.ranks[0], rank="node-2", state="Error", exit_code=143, pod="x-node-0-2-abcde")
    ranks = training_document(replace(report, ranks=[*report.ranks, terminated]))["ranks"]
    assert [(each["rank"], each["bad"], each["culprit"]) for each in ranks] == [
        ("node-0", False, False),
        ("node-1", True, True),
        ("node-2", True, False),
    ]


def test_status_and_diagnose_have_the_same_text() -> None:
    report = failed(["ValueError: no"])
    assert texts.report_text(report).startswith(texts.status_text(report))
    assert report.diagnosis.text() in texts.status_text(report)


@pytest.mark.parametrize("render", [plain, page, lambda report: as_json(report.as_dict())], ids=["text", "html", "json"])  # fmt: skip # noqa: E501
def test_variable_values_and_secrets_are_omitted(render: Any) -> None:
    event = {**EVENT, "message": f"cannot pull with {SECRET}"}
    pods = [pod(1, ENDED)]
    evidence = Evidence(trainjob(FAILED), pods, {"x-node-0-1-abcde": [f"login {SECRET} refused"]}, [event])
    text = render(examine(REF, evidence, NOW))
    assert SECRET not in text
    assert "the-value" not in text
    assert "abcdefghijk" not in text
    for expected in ("NAME, HF_TOKEN", f"login {MASK} refused", f"cannot pull with {MASK}", f"--token={MASK}"):
        assert expected in text


def test_hostile_text_is_escaped() -> None:
    report = failed(HOSTILE, unseen=[HOSTILE[0], HOSTILE[3]])
    html = page(report)
    html.encode()
    seen = Parsed(html)
    assert set(seen.tags) & {"img", "link", "iframe", "object"} == set()
    assert not [name for name, _ in seen.attributes if name.startswith("on") or name in ("src", "href")]
    assert HOSTILE[0] in seen.data["document"]["diagnosis"]["log"]
    assert "{{ report.key }}" in shown(report)
    assert len(json.dumps(seen.data)) < 60_000
    for text in (shown(report), plain(report)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
        assert "red" in text
        assert "x" * 2000 not in text
    json.loads(as_json(report.as_dict()))


def test_a_waiting_job_shows_its_blocker() -> None:
    labelled = trainjob(suspend=True)
    labelled["metadata"]["labels"][QUEUE_LABEL] = "gpus"
    waiting = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "4 more needed for gpu"}
    report = examine(REF, Evidence(labelled, workload={"status": {"conditions": [waiting]}}), NOW)
    assert report.observation.phase is Phase.QUEUED
    assert "4 more needed for gpu" in report.observation.message
    assert [name for name, *_ in report.phases] == ["queued"]
    for text in (plain(report), shown(report)):
        assert "4 more needed for gpu" in text
        assert "queue" in text


def test_report_of_pending_pods_has_the_blocker() -> None:
    job = trainjob()
    job["status"] = {"jobsStatus": [{"name": "node", "active": 1}]}
    why = f"no room for {SECRET}: {'0/6 nodes are available; ' * 30}"
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
    waiting = pod(0, {})
    waiting["status"] = {"phase": "Pending", "conditions": [unscheduled]}
    report = examine(REF, Evidence(job, [waiting]), NOW)
    assert [name for name, *_ in report.phases] == ["starting"]
    assert report.diagnosis.summary.endswith("…")
    assert report.besides == ""
    assert SECRET not in page(report) + plain(report) + report.observation.message
    crashed = examine(REF, Evidence(job, [waiting, pod(1, ENDED)]), NOW)
    assert crashed.diagnosis.exit_code == 3
    assert crashed.besides == crashed.observation.message, "the blocker concerns another rank"


def test_report_of_a_healthy_job_has_no_diagnosis() -> None:
    job = trainjob()
    job["status"] = {"jobsStatus": [{"name": "node", "ready": 1, "active": 1}], "trainerStatus": {"progressPercentage": 42}}  # fmt: skip # noqa: E501
    report = examine(REF, Evidence(job, [pod(0, RUNNING), pod(1, RUNNING)]), NOW)
    assert (report.observation.phase, report.troubled, report.as_dict()["diagnosis"]) == (Phase.RUNNING, False, None)
    assert "42" in shown(report)
    assert "42%" in plain(report)


def test_a_crash_of_a_running_job_is_reported() -> None:
    job = trainjob()
    job["status"] = {"jobsStatus": [{"name": "node", "ready": 1, "active": 1}]}
    report = examine(REF, Evidence(job, [pod(0, RUNNING), pod(1, RUNNING, ENDED)]), NOW)
    assert report.observation.phase is Phase.RUNNING
    assert (report.diagnosis.rank, report.diagnosis.exit_code) == ("node-1", 3)
    assert "is Running: node-1 exited with code 3" in plain(report)


def test_a_given_up_job_keeps_its_diagnosis() -> None:
    why = replace(failed(["ValueError: no"]).diagnosis, job="ns/x")
    job = trainjob(suspend=True)
    job["metadata"]["annotations"][GIVEN_UP] = json.dumps(pack_diagnosis(why))
    report = examine(REF, Evidence(job), NOW)
    assert (report.observation.phase, report.given_up) == (Phase.SUSPENDED, True)
    assert (report.diagnosis.rank, report.diagnosis.log) == ("node-1", ("ValueError: no",))
    assert "ValueError: no" in shown(report)


def test_report_of_a_deleted_job_has_its_events() -> None:
    report = examine(JobRef("ns", "x", ""), Evidence(None, [], {}, [EVENT]), NOW)
    assert (report.observation.phase, report.diagnosis.category) == (Phase.DELETED, Category.DELETED)
    assert "Back-off" in plain(report)
    assert "the TrainJob was deleted" in shown(report)


def test_ranks_and_events_are_limited_and_failed_ranks_come_first() -> None:
    pods = [*(pod(i, RUNNING) for i in range(1000)), pod(1000, ENDED)]
    events = [{**EVENT, "message": f"event {i}"} for i in range(5000)]
    began = datetime.now(UTC)
    report = examine(REF, Evidence(trainjob(FAILED), pods, {}, events), NOW)
    html, text = page(report), plain(report)
    assert datetime.now(UTC) - began < timedelta(seconds=10)
    assert len(report.events) == 100
    for each in (html, text):
        assert "node-1000" in each
        assert "event 4999" in each
    assert "and 951 more" in text
    assert [rank.rank for rank in report.ranks[:3]] == ["node-0", "node-1", "node-2"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([
                *("metadata", "spec", "status", "conditions", "containerStatuses", "state", "lastState", "terminated"),
                *("exitCode", "finishedAt", "trainer", "env", "name", "labels", "runtimeRef", "command", "jobsStatus"),
                *("trainerStatus", "initializer", "metrics", "suspend", "annotations", "message", "reason", "type"),
            ]),
            inner, max_size=5,
        )
    ),
    max_leaves=8,
)  # fmt: skip
OBJECT = st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON, max_size=3)


@settings(max_examples=60, deadline=None)
@given(OBJECT, st.lists(OBJECT, max_size=3), st.lists(OBJECT, max_size=3), OBJECT, st.lists(st.text(), max_size=3))
def test_any_evidence_can_be_reported(job: Any, pods: Any, events: Any, workload: Any, lines: Any) -> None:
    report = examine(REF, Evidence(job, pods, {"": lines}, events, workload), NOW)
    page(report).encode()
    plain(report).encode()
    json.loads(as_json(report.as_dict()))
