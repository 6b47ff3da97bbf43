"""The report of a job: as a value, as text and as an HTML page."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from time import process_time
from typing import Any

import click
import pytest
from hypothesis import given, settings, strategies as st
from tests.objects import FAILED, RUNNING, condition, counts, pod
from tests.page.parsed import Parsed
from tests.unit.odd_objects import OBJECTS
from tests.unit.reports import BACK_OFF, ENDED, NOW, REF, SECRET, failed, trainjob

from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._jobs.report import Report, examine
from trainjob._pages.documents.training import training_document
from trainjob._pages.page import page_html
from trainjob._support.masking import MASK
from trainjob.cli import texts
from trainjob.cli.output import as_json
from trainjob.errors import Category
from trainjob.job import JobRef
from trainjob.status import GIVEN_UP, Phase


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
    assert [(name, (b - a).total_seconds()) for name, a, b in report.phases] == [("starting", 60), ("running", 240)]
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
    assert texts.report_text(report).startswith(texts.status_text(report)), "status and diagnose have the same text"
    assert report.diagnosis.text() in texts.status_text(report)


def test_only_the_root_cause_is_the_culprit() -> None:
    report = failed(["ValueError: no"])
    terminated = replace(report.ranks[0], rank="node-2", state="Error", exit_code=143, pod="x-node-0-2-abcde")
    ranks = training_document(replace(report, ranks=[*report.ranks, terminated]))["ranks"]
    assert [(each["rank"], each["bad"], each["culprit"]) for each in ranks] == [
        ("node-0", False, False),
        ("node-1", True, True),
        ("node-2", True, False),
    ]


def as_text(report: Report) -> str:
    return as_json(report.as_dict())


@pytest.mark.parametrize("render", [plain, page, as_text])
def test_variable_values_and_secrets_are_omitted(render: Any) -> None:
    event = {**BACK_OFF, "message": f"cannot pull with {SECRET}"}
    pods = [pod(1, ENDED)]
    evidence = Evidence(trainjob(FAILED), pods, {"x-node-0-1-abcde": [f"login {SECRET} refused"]}, [event])
    text = render(examine(REF, evidence, NOW))
    assert SECRET not in text
    assert "the-value" not in text
    assert "abcdefghijk" not in text
    for expected in ("NAME, HF_TOKEN", f"login {MASK} refused", f"cannot pull with {MASK}", f"--token={MASK}"):
        assert expected in text


def test_report_of_pending_pods_has_the_blocker() -> None:
    job = trainjob(jobsStatus=[counts(active=1)])
    why = f"no room for {SECRET}: {'0/6 nodes are available; ' * 30}"
    unscheduled = condition("PodScheduled", "Unschedulable", value="False", message=why)
    waiting = pod(0, {}, phase="Pending", conditions=[unscheduled])
    report = examine(REF, Evidence(job, [waiting]), NOW)
    assert [name for name, *_ in report.phases] == ["starting"]
    assert report.diagnosis.summary.endswith("…")
    assert report.besides == ""
    assert SECRET not in page(report) + plain(report) + report.observation.message
    crashed = examine(REF, Evidence(job, [waiting, pod(1, ENDED)]), NOW)
    assert crashed.diagnosis.exit_code == 3
    assert crashed.besides == crashed.observation.message, "the blocker concerns another rank"


def test_report_of_a_healthy_job_has_no_diagnosis() -> None:
    job = trainjob(jobsStatus=[counts(ready=1, active=1)], trainerStatus={"progressPercentage": 42})
    report = examine(REF, Evidence(job, [pod(0, RUNNING), pod(1, RUNNING)]), NOW)
    assert (report.observation.phase, report.troubled, report.as_dict()["diagnosis"]) == (Phase.RUNNING, False, None)
    assert "42" in shown(report)
    assert "42%" in plain(report)


def test_a_crash_of_a_running_job_is_reported() -> None:
    job = trainjob(jobsStatus=[counts(ready=1, active=1)])
    report = examine(REF, Evidence(job, [pod(0, RUNNING), pod(1, RUNNING, ENDED)]), NOW)
    assert report.observation.phase is Phase.RUNNING
    assert (report.diagnosis.rank, report.diagnosis.exit_code) == ("node-1", 3)
    assert "is Running: node-1 exited with code 3" in plain(report)


def test_a_given_up_job_keeps_its_diagnosis() -> None:
    why = replace(failed(["ValueError: no"]).diagnosis, job="ns/x")
    job = trainjob(spec={"suspend": True}, annotations={GIVEN_UP: json.dumps(pack_diagnosis(why))})
    report = examine(REF, Evidence(job), NOW)
    assert (report.observation.phase, report.given_up) == (Phase.SUSPENDED, True)
    assert (report.diagnosis.rank, report.diagnosis.log) == ("node-1", ("ValueError: no",))
    assert "ValueError: no" in shown(report)


def test_report_of_a_deleted_job_has_its_events() -> None:
    report = examine(JobRef("ns", "x", ""), Evidence(None, [], {}, [BACK_OFF]), NOW)
    assert (report.observation.phase, report.diagnosis.category) == (Phase.DELETED, Category.DELETED)
    assert "Back-off" in plain(report)
    assert "the TrainJob was deleted" in shown(report)


def test_ranks_and_events_are_limited_and_failed_ranks_come_first() -> None:
    pods = [*(pod(i, RUNNING) for i in range(1000)), pod(1000, ENDED)]
    events = [{**BACK_OFF, "message": f"event {i}"} for i in range(5000)]
    before = process_time()
    report = examine(REF, Evidence(trainjob(FAILED), pods, {}, events), NOW)
    html, text = page(report), plain(report)
    assert process_time() - before < 10
    assert len(report.events) == 100
    for each in (html, text):
        assert "node-1000" in each
        assert "event 4999" in each
    assert "and 951 more" in text
    assert [rank.rank for rank in report.ranks[:3]] == ["node-0", "node-1", "node-2"]


@settings(max_examples=30)
@given(OBJECTS, st.lists(OBJECTS, max_size=3), st.lists(OBJECTS, max_size=3), OBJECTS, st.lists(st.text(), max_size=3))
def test_any_evidence_can_be_reported(job: Any, pods: Any, events: Any, workload: Any, lines: Any) -> None:
    report = examine(REF, Evidence(job, pods, {"": lines}, events, workload), NOW)
    page(report).encode()
    plain(report).encode()
    json.loads(as_json(report.as_dict()))
