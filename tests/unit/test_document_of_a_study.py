"""The JSON document of a study: complete, masked and bounded."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tests.unit.reports import HOSTILE, SECRET

from trainjob._pages.documents import MAX_POINTS
from trainjob._pages.documents.study import study_document
from trainjob.tuning import Trial

STUDY = {"metric": "loss", "direction": "minimize", "max_trials": 50, "parallel": 4}


def study_trial(number: int, **changes: Any) -> dict[str, Any]:
    return Trial(number, {"lr": 0.1}, "complete", float(number), values=[(1, 2.0)], job="j").as_dict() | changes


def test_the_best_trial_is_the_best_complete_one() -> None:
    trials = [
        study_trial(3, value=0.5),
        study_trial(0, value=0.1, state="pruned"),
        study_trial(1, value=0.5),
        study_trial(2, value=math.nan),
        study_trial(4, value=None, state="running"),
    ]
    document = study_document("digits", "ns", "k", STUDY, trials)
    assert document["best"] == 1
    assert [each["number"] for each in document["trials"]] == [0, 1, 2, 3, 4]
    assert document["trials"][2]["value"] is None
    assert document["counts"] == {"pruned": 1, "complete": 3, "running": 1}
    assert (document["state"], document["limits"]) == ("running", {"max_trials": 50, "parallel": 4})
    maximized = study_document(
        "digits", "ns", "k", STUDY | {"direction": "maximize"}, [*trials, study_trial(9)], ended=True
    )
    assert (maximized["best"], maximized["state"]) == (9, "ended")
    assert study_document("digits", "ns", "k", STUDY, [])["best"] is None
    json.dumps(document, allow_nan=False)


def test_the_fields_of_a_trial_are_complete() -> None:
    space = {"lr": {"type": "float", "low": 1e-5, "high": 1, "log": True}, "n": {"type": "int", "low": 1, "high": 2}}
    document = study_document("t", "ns", "k", STUDY | {"space": space}, [study_trial(0)], importances={"lr": 1.0})
    assert document["trials"][0] == study_trial(0) | {"href": "", "value": 0, "values": [[1, 2]], "seconds": 0}
    assert document["space"] == {"lr": {"type": "float", "log": True}, "n": {"type": "int", "log": False}}


def test_trials_of_a_study_are_masked_and_bounded() -> None:
    def trial(number: int, text: str, size: int) -> dict[str, Any]:
        return study_trial(
            number,
            parameters={f"p{index}": text for index in range(size // 2)},
            reason=f"token {SECRET} {text}",
            metrics={f"m{index}": number * 1.23456789 for index in range(size)},
            outputs={"model": text},
            values=[[step, math.sin(step)] for step in range(size)],
            href=f"trainings/{number}",
        )

    for count, text, size, notes in ((2, "x", 60, 1), (300, "x" * 500, 60, 3), (2100, "x", 6, 1)):
        trials = [trial(number, text, size) for number in range(count)]
        document = study_document("t", "ns", "k", STUDY | {"max_trials": count}, trials)
        assert SECRET not in json.dumps(document)
        assert sum(len(each["values"]) for each in document["trials"]) <= MAX_POINTS
        assert document["counts"] == {"complete": count}
        if count == 300:
            assert len(json.dumps(document, separators=(",", ":"))) < 1_000_000
        assert len(document["notes"]) == notes, document["notes"]
        for note in document["notes"][count > 2000 :][:1]:
            assert note.endswith(("are shown", "characters", "min-max decimation"))
    assert len(document["trials"]) == 2000
    assert document["notes"][0] == "2000 of 2100 trials are shown: the 1000 best and the latest"


def test_hostile_texts_of_a_study_are_plain() -> None:
    trials = [study_trial(n, parameters={text: text}, reason=text, state=text) for n, text in enumerate(HOSTILE[:-1])]
    text = json.dumps(study_document(HOSTILE[0], HOSTILE[1], HOSTILE[0], STUDY, trials))
    assert not re.search(r"\\u00[01][0-9a-f]|\\u202e|\\ud[89a-f]", text)
