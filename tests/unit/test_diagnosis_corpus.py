"""What was seen of jobs that failed for real, diagnosed. How it is recorded: `tests.cluster.corpus`."""

from __future__ import annotations

import re

import pytest
from tests.cluster import corpus
from tests.cluster.failures import FAILURES, Failure

from trainjob.diagnosis import Category, diagnose

# Of this machine, of a person's, or of what is built on.
FOREIGN = re.compile(
    r"/work/|/root/|/home/|/tmp/trainjob|/tmp/pytest|/opt/venv|proxy\.|mirror|artifactory|\.internal\b"
)


def test_every_failure_is_recorded() -> None:
    assert corpus.recorded() == sorted(failure.name for failure in FAILURES)
    assert len(FAILURES) >= 25
    assert {failure.category for failure in FAILURES} == set(Category)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_it_is_diagnosed(failure: Failure) -> None:
    found = diagnose(corpus.read(failure.name))
    assert corpus.differences(failure, found) == [], found.text()


@pytest.mark.parametrize("name", corpus.recorded())
def test_nothing_of_this_machine_is_recorded(name: str) -> None:
    text = (corpus.DIRECTORY / f"{name}.json").read_text()
    assert FOREIGN.findall(text) == []
    assert "managedFields" not in text
    assert len(text) < 200_000


def test_the_page_says_what_is_said() -> None:
    assert f"{corpus.BEGIN}{corpus.table()}{corpus.END}" in corpus.PAGE.read_text(), "make record-diagnosis writes it"
