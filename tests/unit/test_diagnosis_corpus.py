"""Diagnoses of recorded evidence of real failed jobs. `tests.cluster.corpus` records it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.cluster import corpus
from tests.cluster.failures import FAILURES, Failure
from tests.recordings import by_line

from trainjob import Phase
from trainjob._diagnosis import blockers, diagnosis_of
from trainjob._jobs import report
from trainjob.status import observe
from trainjob.verdicts import Category

# Paths and hosts of this machine, of a person's machine, or of build services.
FOREIGN = re.compile(
    r"/work/|/root/|/home/|/tmp/trainjob|/tmp/pytest|/opt/venv|proxy\.|mirror|artifactory|\.internal\b"
)


def test_every_failure_is_recorded() -> None:
    assert corpus.recorded() == sorted(failure.name for failure in FAILURES)
    assert len(FAILURES) >= 25
    # A hang is found while the job runs, from several readings of its logs: tests/local/test_hangs.py.
    assert {failure.category for failure in FAILURES} == set(Category) - {Category.HANG}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_recorded_failures_are_diagnosed(failure: Failure) -> None:
    evidence = corpus.read(failure.name)
    found = diagnosis_of(evidence)
    assert corpus.differences(failure, found, evidence) == [], found.text()


@pytest.mark.parametrize("failure", [failure for failure in FAILURES if failure.victim], ids=lambda each: each.name)
def test_a_rank_that_lost_a_peer_is_not_the_root_cause_despite_clock_skew(failure: Failure) -> None:
    evidence = corpus.read(failure.name)
    second = '"finishedAt": "2026-11-21T10:00:00Z"'
    pods = json.loads(re.sub(r'"finishedAt": "[^"]*"', second, json.dumps(list(evidence.pods))))
    for order in (pods, pods[::-1]):
        same = replace(evidence, pods=order)
        found = diagnosis_of(same)
        assert corpus.differences(failure, found, same) == [], found.text()


@pytest.mark.parametrize("name", corpus.recorded())
def test_the_corpus_has_no_data_of_this_machine(name: str) -> None:
    text = (corpus.DIRECTORY / f"{name}.json").read_text()
    assert FOREIGN.findall(text) == []
    assert "managedFields" not in text
    assert len(text) < 200_000
    assert by_line(json.loads(text)) == text, "the format of the recorder"


def test_documentation_has_the_current_table() -> None:
    assert f"{corpus.BEGIN}{corpus.table()}{corpus.END}" in corpus.PAGE.read_text(), "run make record-diagnosis"


@pytest.mark.parametrize("name", corpus.recorded())
def test_a_waiter_and_diagnose_agree_on_what_blocks_a_job(name: str) -> None:
    """A waiter lists pending pods and warnings only. `wait --fail-fast` and `diagnose` exit with the same code."""
    evidence = corpus.read(name)
    phase = observe(evidence.trainjob).phase
    if phase.terminal or phase is Phase.RUNNING or evidence.missing:
        return
    if phase is Phase.QUEUED:
        blocker = blockers.in_workload(evidence.workload or {})
    else:
        pending = [pod for pod in evidence.pods if pod["status"].get("phase") == "Pending"]
        warnings = [event for event in evidence.events if event.get("type") == "Warning"]
        finding = blockers.first(blockers.around(pending, warnings))
        blocker = finding.blocker if finding else None
    shown = report._blocker(evidence, phase)
    assert (shown is not None and shown.permanent) is (blocker is not None and blocker.permanent)
