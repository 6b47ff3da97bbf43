"""Each rule has a verbatim example, which it judges, and which is judged otherwise without it.

An example of `objects` is a JSON object with reason and message; one of `raised` and `lines` is the end of a log, after
which the process exits with the code of the rule, else with 1.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.rule_examples import EXAMPLES, WORDINGS, code_of, diagnosed, example_of, log_of

from trainjob._diagnosis import output
from trainjob._diagnosis.rules import lines, objects, raised
from trainjob._diagnosis.rules.lines import LINES
from trainjob._diagnosis.rules.objects import OBJECTS
from trainjob._diagnosis.rules.raised import RAISED
from trainjob._diagnosis.rules.row import LineRule, ObjectRule, RaisedRule

EVERY: list[ObjectRule | RaisedRule | LineRule] = [*OBJECTS, *RAISED, *LINES]

each_object = pytest.mark.parametrize("rule", OBJECTS, ids=lambda rule: rule.id)
each_log = pytest.mark.parametrize("rule", [*RAISED, *LINES], ids=lambda rule: rule.id)


def test_each_rule_has_its_own_name_a_source_and_an_example_and_no_example_is_left_over() -> None:
    names = [rule.id for rule in EVERY]
    assert len(names) == len(set(names))
    assert all(rule.source for rule in EVERY)
    assert {file.stem for file in EXAMPLES.iterdir()} == set(names)


@each_object
def test_an_object_is_judged_by_its_rule(rule: ObjectRule) -> None:
    assert objects.rule_of(*example_of(rule)) == rule


@each_object
def test_without_the_rule_an_object_is_judged_otherwise(rule: ObjectRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "BY_REASON", objects.indexed(each for each in OBJECTS if each is not rule))
    assert objects.meaning_of(*example_of(rule)) != rule.means


@each_log
def test_a_log_is_judged_by_its_rule(rule: RaisedRule | LineRule) -> None:
    found = output.read(log_of(rule))
    if isinstance(rule, RaisedRule):
        assert found.rule is not None, found
        assert found.rule.id == rule.id
    verdict = diagnosed(code_of(rule), log_of(rule))
    assert (verdict.category, verdict.retry) == (rule.means.category, rule.means.retry), verdict.text()


@each_log
def test_without_the_rule_a_log_is_judged_otherwise(
    rule: RaisedRule | LineRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = diagnosed(code_of(rule), log_of(rule))
    monkeypatch.setattr(raised, "RAISED", tuple(each for each in RAISED if each is not rule))
    monkeypatch.setattr(lines, "LINES", tuple(each for each in LINES if each is not rule))
    after = diagnosed(code_of(rule), log_of(rule))
    assert (before.category, before.retry, before.advice) != (after.category, after.retry, after.advice)


@pytest.mark.parametrize("wording", WORDINGS, ids=lambda wording: wording["log"][-1][:40])
def test_other_wordings_of_a_rule_mean_the_same(wording: dict[str, Any]) -> None:
    """Of other versions, other libraries, other shells than that of the example."""
    found = diagnosed(wording["code"], wording["log"])
    assert (found.category, found.retry) == (wording["category"], wording["retry"]), found.text()
    assert found.advice.startswith(wording["advice"])
