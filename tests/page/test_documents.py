"""The documents of these tests have the keys of real ones."""

from __future__ import annotations

from tests.page import documents
from tests.unit import test_document, test_report

from trainjob._pages.documents.jobs import list_document, workflow_document

FREE = (*test_document.FREE, "attempts.history.")


def test_a_training_has_the_keys_of_a_real_one() -> None:
    real, made = test_document.complete(), documents.complete()
    made |= {name: documents.failed()[name] for name in ("diagnosis", "events", "attempts", "goodput")}
    made |= {"blocker": documents.queued()["blocker"], "resources": documents.running()["resources"]}
    real["blocker"] = real["blocker"] or made["blocker"]
    for part in ("evaluation", "registered"):
        real["lineage"][part] = made["lineage"][part]
    found = [{path for path in test_document.keys(each) if not path.startswith(FREE)} for each in (made, real)]
    assert found[0] == found[1]


def test_lists_and_workflows_have_the_keys_of_real_ones() -> None:
    jobs = list_document([test_report.trainjob()], "ns")
    assert jobs.keys() == documents.listed().keys()
    assert jobs["jobs"][0].keys() == documents.job(0, "Running").keys()
    assert workflow_document("x", [test_document.complete()]).keys() == documents.workflow().keys()
