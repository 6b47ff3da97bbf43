"""The JSON document of a page: complete, masked, bounded, and documented."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.objects import COMPLETE, FAILED, SUSPENDED, Object, pod
from tests.page import documents, studies
from tests.unit.reports import HOSTILE, NOW, REF, SECRET, failed, trainjob

from trainjob._backends.base import Usage
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import CHECKPOINT, MetricHistory
from trainjob._jobs.report import examine
from trainjob._manifest.render import render
from trainjob._pages.documents import MAX_POINTS
from trainjob._pages.documents.additions import with_comparison, with_lineage
from trainjob._pages.documents.attempts import with_segments
from trainjob._pages.documents.evaluation import with_evaluation
from trainjob._pages.documents.jobs import list_document, workflow_document
from trainjob._pages.documents.merging import merge_documents
from trainjob._pages.documents.training import observed_document, training_document
from trainjob._spec import TrainJobSpec
from trainjob._support.masking import MASK
from trainjob.evaluation.comparison import compare
from trainjob.evaluation.gate import Gate
from trainjob.evaluation.scores import Scores
from trainjob.job import ATTEMPT, JobRef
from trainjob.status import QUEUE_LABEL, Observation, Phase

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "page-document.md"


def of(job: Object | None = None, *pods: Object, **known: Any) -> dict[str, Any]:
    """The document of a job, with what else is known, see `training_document`."""
    return training_document(examine(REF, Evidence(job or trainjob(), pods), NOW), **known)


def history(*values: float, start: float = 1000.0) -> MetricHistory:
    made = MetricHistory()
    for step, value in enumerate(values, 1):
        made.add(start + step, {"loss": value}, step)
    return made


def keys(value: Any, path: str = "") -> set[str]:
    """The paths of all keys; those of maps with free names and of lists' entries as ``name`` and ``[]``."""
    if isinstance(value, dict):
        return set().union(*({f"{path}{name}"} | keys(each, f"{path}{name}.") for name, each in value.items()))
    return set().union(*(keys(each, path) for each in value)) if isinstance(value, list) else set()


FREE = (
    *(
        "metrics.",
        "outputs.",
        "seconds.",
        "spec.",
        "history.",
        "diagnosis.",
        "resources.requested.",
        "attempts.history.",
    ),
    *("compare.history.", "compare.metrics.", "trials.parameters.", "trials.metrics.", "trials.outputs.", "space."),
    *("importances.", "counts.", "evaluation.report.metrics.", "evaluation.report.slices.", "stragglers."),
)
"""Prefixes of the paths of keys that a person has named, or that are documented with the JSON output."""
QUEUED = trainjob(SUSPENDED, spec={"suspend": True})


def test_every_key_is_documented() -> None:
    found = {
        *list_document([], "ns", NOW),
        *workflow_document("t", []),
        *list_document([trainjob()], "ns", NOW)["jobs"][0],
    }
    for name, make in documents.ALL.items():
        if name not in ("list", "workflow") and "hostile" not in name:
            found |= {path for path in keys(make()) if not path.startswith(FREE)}
    study, report = studies.study_ended(), documents.evaluated()["evaluation"]["report"]
    found |= {*study["space"]["lr"], *report["metrics"]["accuracy"], *report["slices"]["digit=3"]}
    documented = set(re.findall(r"`([a-z_.]+)`", REFERENCE.read_text()))
    missing = {path for path in found if path not in documented and path.rpartition(".")[2] not in documented}
    assert missing == set()


def test_every_document_has_the_same_keys() -> None:
    made = [
        of(),
        of(trainjob(FAILED)),
        of(QUEUED),
        training_document(examine(REF, Evidence(None), NOW)),
        observed_document(REF, Observation(Phase.RUNNING), NOW),
        merge_documents(of(), observed_document(REF, Observation(Phase.RUNNING), NOW)),
        documents.complete(),
    ]
    assert len({frozenset(document) for document in made}) == 1
    for document in made:
        json.dumps(document, allow_nan=False)


def test_since_and_blocker_of_a_queued_job() -> None:
    since = {"lastTransitionTime": "2026-11-21T10:05:00Z"}
    job = trainjob(SUSPENDED | since, spec={"suspend": True}, labels={QUEUE_LABEL: "research"})
    document = of(job, position=3)
    assert (document["phase"], document["since"]) == ("Queued", "2026-11-21T10:05:00Z")
    assert document["blocker"]["queue"] == "research"
    assert document["blocker"]["position"] == 3
    assert not document["blocker"]["permanent"]
    assert of(trainjob(FAILED))["blocker"] is None


@pytest.mark.parametrize(
    ("details", "estimate"),
    [({"estimate": "speed"}, "the speed of the latest half of the progress"), ({}, "the training script")],
)
def test_the_estimate_names_its_source(details: dict[str, Any], estimate: str) -> None:
    observation = Observation(Phase.RUNNING, progress=50, remaining_seconds=10, details=details)
    assert observed_document(REF, observation, NOW)["estimate"] == estimate
    assert not observed_document(REF, Observation(Phase.RUNNING, progress=50), NOW)["estimate"]


def test_texts_are_masked_and_plain() -> None:
    report = failed([*HOSTILE, f"token {SECRET}"])
    lines = [{"rank": "node-0", "time": "", "text": text} for text in (*HOSTILE, f"password={SECRET}")]
    document = training_document(report, logs=lines, notes=["a note"])
    text = json.dumps(document)
    assert SECRET not in text
    assert MASK in document["logs"][-1]["text"]
    assert "the-value" not in text
    assert "NAME" in document["spec"]["env"]
    assert not re.search(r"\\u00[01][0-9a-f]|\\u202e|\\ud[89a-f]", text)
    assert max(len(line["text"]) for line in document["logs"]) <= 2000 + len(" … (1046576 more characters)")


def test_attempts_of_a_key_are_in_order_and_with_their_causes() -> None:
    earlier = trainjob(FAILED, name="x-1", labels={ATTEMPT: "1"})
    document = of(attempts=[Evidence(trainjob()), Evidence(earlier)])
    assert [(each["attempt"], each["phase"]) for each in document["attempts"]] == [(1, "Failed"), (2, "NotStarted")]
    assert document["attempts"][0]["summary"]
    assert not document["attempts"][1]["summary"]
    (running,) = observed_document(REF, Observation(Phase.RUNNING), NOW)["attempts"]
    assert not running["summary"], "a waiter knows nothing to explain"


def test_restarts_and_checkpoints_of_an_attempt() -> None:
    """Checkpoints are named as an author writes them."""
    restarted = pod(0, {"running": {}}, {"terminated": {}})
    restarted["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] = "2"
    collected = history(1, 2)
    collected.add(1005.0, {CHECKPOINT: 40}, 41)
    spec = {"runtime": "trainjob-step", "command": ["train"], "checkpoints": "pvc://claim/digits"}
    job = {**trainjob(), "spec": render(TrainJobSpec.parse(spec), "nightly/train", 1, "default")["spec"]}
    document = of(job, restarted, history=collected)
    (attempt,) = document["attempts"]
    assert attempt["restarts"] == 2 + 1
    (found,) = attempt["checkpoints"]
    assert (found["time"], found["step"]) == ("1970-01-01T00:16:45Z", 40)
    assert re.fullmatch(r"pvc://claim/digits/default/train-[0-9a-z]{10}-[0-9a-z]{8}", found["uri"])
    assert document["history"].keys() == {"loss"}
    (without,) = of(history=collected)["attempts"][0]["checkpoints"]
    assert without["uri"] == ""


def test_the_kept_document_of_an_attempt_completes_a_newer_one() -> None:
    kept = with_evaluation(training_document(failed(["boom"]), history=history(5, 4), source="kept"), evaluation())
    newer = observed_document(REF, Observation(Phase.RUNNING), NOW, history=history(4, 3, start=1001.0))
    merged = merge_documents(kept, newer)
    assert merged["phase"] == "Running"
    assert merged["spec"] == kept["spec"]
    assert merged["evaluation"] == kept["evaluation"]
    assert merged["lineage"]["evaluation"] == kept["lineage"]["evaluation"]
    assert [value for _, _, value in merged["history"]["loss"]] == [5.0, 4.0, 4.0, 3.0]


def test_the_kept_document_of_an_earlier_attempt_becomes_an_attempt() -> None:
    kept = with_evaluation(training_document(failed(["boom"]), history=history(5, 4), source="kept"), evaluation())
    newer = observed_document(replace(REF, name="x-3", uid="uid-3", attempt=3), Observation(Phase.RUNNING), NOW)
    merged = merge_documents(kept, newer)
    assert [each["attempt"] for each in merged["attempts"]] == [2, 3]
    assert [value for _, _, value in merged["attempts"][0]["history"]["loss"]] == [5.0, 4.0]
    assert (merged["history"], merged["spec"]) == ({}, {})
    assert merged["evaluation"] is merged["lineage"]["evaluation"] is None


def test_points_of_a_document_are_bounded() -> None:
    many = MetricHistory(limit=100_000)
    for step in range(400):
        many.add(float(step), {f"m{name}": (step * name * 7919) % 9973 for name in range(50)}, step)
    document = of(history=many)
    for label in ("previous run", "champion"):
        document = with_comparison(document, label, document)
    points = [document["history"], *(each["history"] for each in document["compare"])]
    assert sum(len(each) for series in points for each in series.values()) <= MAX_POINTS
    workflow = workflow_document("run", [document] * 10)
    shown = [each["history"] for each in workflow["trainings"]]
    assert sum(len(each) for series in shown for each in series.values()) <= MAX_POINTS
    assert all(not each["compare"] for each in workflow["trainings"])


def test_lineage_from_the_other_jobs_of_a_workflow() -> None:
    initializer = {"dataset": {"storageUri": "s3://b/digits"}, "model": {"storageUri": "hf://org/base"}}
    job = trainjob(spec={"initializer": initializer})
    job["spec"]["trainer"]["env"] = [{"name": "TRAINJOB_INPUT_EXTRA", "value": f"s3://b/extra?sig={SECRET}"}]
    document = of(job)
    document["lineage"]["outputs"] = [{"name": "model", "uri": "s3://b/m", "digest": ""}]
    siblings: list[dict[str, Any]] = [
        {"uri": "s3://b/digits", "digest": "sha256:d"},
        {"uri": "hf://org/base", "digest": "sha256:b"},
        {"uri": "s3://b/m", "digest": "sha256:m", "name": "digits", "version": 7, "promoted": True},
        {"uri": "s3://b/evaluation", "digest": "sha256:e", "passed": False, "rule": "min_examples", "reason": "3; 10"},
        {"uri": None},
        {},
    ]
    lineage = with_lineage(document, siblings)["lineage"]
    assert [(each["name"], each["digest"]) for each in lineage["datasets"]] == [("dataset", "sha256:d"), ("extra", "")]
    assert lineage["base_model"] == {"name": "model", "uri": "hf://org/base", "digest": "sha256:b"}
    assert lineage["outputs"][0]["digest"] == "sha256:m"
    assert (lineage["registered"]["model"], lineage["registered"]["version"]) == ("digits", "7")
    assert lineage["evaluation"] == {"passed": False, "summary": "min_examples: 3; 10"}
    assert SECRET not in json.dumps(lineage)


def test_used_and_requested_resources() -> None:
    document = of(used=[Usage("node-0", 0.25, 2**30)])
    assert document["resources"] == {
        "requested": {"nvidia.com/gpu": "8"},
        "nodes": 2,
        "used": [{"rank": "node-0", "cpu": 0.25, "memory": 2**30}],
    }


def test_a_list_has_the_newest_job_first() -> None:
    created = [{"creationTimestamp": f"2026-11-21T0{number}:00:00Z"} for number in range(3)]
    jobs = [trainjob(name=f"x-{number}", metadata=each) for number, each in enumerate(created)]
    assert [each["name"] for each in list_document(jobs, "ns", NOW)["jobs"]] == ["x-2", "x-1", "x-0"]


def test_a_diagnosis_has_its_outlook() -> None:
    document = training_document(failed(["ValueError: no"]))
    assert document["diagnosis"]["outlook"] == "can be retried: the failure may not repeat"
    assert of()["diagnosis"] is None


def test_the_time_of_a_step_is_that_of_the_latest_reports() -> None:
    collected = MetricHistory()
    for step in range(1, 31):  # 10 s for each of the first steps, then 2 s
        seconds = 10.0 * step if step <= 15 else 150 + 2.0 * (step - 15)
        collected.add(1000 + seconds, {"loss": 1 / step}, step)
    (rank,) = of(None, pod(), history=collected)["ranks"]
    assert rank["step_seconds"] == 2.0
    restarted = MetricHistory.of({"loss": [[50, 1000.0, 0.5], [10, 1010.0, 0.6]]})
    assert of(None, pod(), history=restarted)["ranks"][0]["step_seconds"] is None
    assert of(None, pod())["ranks"][0]["step_seconds"] is None


def evaluation(**changes: Any) -> dict[str, Any]:
    """An evaluation with secrets in its addresses."""
    secret = {"uri": f"https://user:{SECRET}@h/d", "digest": "sha256:3"}
    report = documents.evaluation_report() | {"dataset": secret, **changes}
    return {"report": report, "decision": documents.decision(passed=True), "uri": f"s3://b/e?token={SECRET}"}


def ended(number: int, begin: int, end: int, over: Object = FAILED) -> Object:
    """An attempt without pods, from minute `begin` to minute `end`."""
    condition = over | {"lastTransitionTime": f"2026-11-21T10:{end:02}:00Z"}
    created = {"creationTimestamp": f"2026-11-21T10:{begin:02}:00Z"}
    return trainjob(condition, name=f"x-{number}", labels={ATTEMPT: str(number)}, metadata=created)


def seen(job: dict[str, Any], *phases: tuple[int, Phase]) -> MetricHistory:
    """The phases that a waiter has observed, by minute."""
    made = MetricHistory()
    begin = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()
    made.merge_phases([(begin + 60 * minute, str(phase)) for minute, phase in phases])
    return made


def document_of(job: dict[str, Any], collected: MetricHistory | None = None, *others: dict[str, Any]) -> dict[str, Any]:
    return training_document(
        examine(JobRef.of(job), Evidence(job), NOW), history=collected, attempts=[Evidence(each) for each in others]
    )


def spent(goodput: dict[str, Any]) -> dict[str, float]:
    return {name: seconds for name, seconds in goodput["seconds"].items() if seconds}


def test_the_goodput_is_that_of_all_attempts_and_the_time_between_them() -> None:
    first, second = ended(1, 0, 10), ended(2, 15, 25, COMPLETE)
    document = document_of(second, seen(second, (15, Phase.STARTING), (17, Phase.RUNNING)), first)
    assert spent(document["goodput"]) == {"training": 600 + 480, "starting": 120, "restarting": 300}
    assert document["goodput"]["ratio"] == pytest.approx(1080 / 1500, abs=1e-6)
    assert document["goodput"]["assumed"] == 600
    assert document["goodput"]["gpu_hours"]["training"] == pytest.approx(16 * 1080 / 3600)
    own = document["attempts"][1]["goodput"]
    assert [(each["activity"], each["start"]) for each in own["segments"]] == [
        ("starting", "2026-11-21T10:15:00Z"),
        ("training", "2026-11-21T10:17:00Z"),
    ]
    assert (own["start"], own["end"]) == ("2026-11-21T10:15:00Z", "2026-11-21T10:25:00Z")


def test_the_goodput_of_an_ended_attempt_is_kept_if_more_was_known() -> None:
    job = ended(1, 0, 10)
    kept = document_of(job, seen(job, (0, Phase.STARTING), (4, Phase.RUNNING)))
    newer = document_of(ended(2, 12, 20), None, job)
    for merged in (merge_documents(kept, newer), merge_documents(kept, document_of(job))):
        assert spent(merged["attempts"][0]["goodput"]) == {"starting": 240, "training": 360}
    assert spent(merge_documents(kept, newer)["goodput"]) == {"starting": 240, "training": 360 + 480, "restarting": 120}
    begun = document_of(ended(1, 0, 10))
    begun["attempts"][0]["phase"] = "Running"
    begun["attempts"][0]["goodput"]["assumed"] = 0.0
    assert spent(merge_documents(begun, kept)["goodput"]) == {"starting": 240, "training": 360}


def test_what_a_waiter_observes_is_enough_for_the_goodput() -> None:
    observation = Observation(Phase.RUNNING, created=NOW - timedelta(minutes=10))
    collected = MetricHistory()
    collected.merge_phases([(NOW.timestamp() - 600, "Starting"), (NOW.timestamp() - 240, "Running")])
    document = observed_document(REF, observation, NOW, history=collected)
    assert spent(document["goodput"]) == {"starting": 360, "training": 240}
    assert document["goodput"]["gpu_hours"] is None
    assert observed_document(REF, Observation(Phase.RUNNING), NOW)["goodput"] is None


def test_segments_are_bounded_without_gaps() -> None:
    job = ended(1, 0, 59)
    begin = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()
    points = [[number, begin + 10 * number, 1.0 / number] for number in range(1, 350)]
    evaluations = [[number, begin + 10 * number + 4, 1.0 / number] for number in range(4, 350, 4)]
    collected = MetricHistory.of({"loss": points, "eval_loss": evaluations})
    spent_whole = document_of(job, collected)["attempts"][0]["goodput"]
    assert len(spent_whole["segments"]) <= 100
    fewer = with_segments(spent_whole, 7)
    assert len(fewer["segments"]) == 7
    assert fewer["segments"][0]["start"] == spent_whole["start"]
    assert fewer["segments"][-1]["end"] == spent_whole["end"]
    assert all(a["end"] == b["start"] for a, b in pairwise(fewer["segments"]))
    assert fewer["seconds"] == spent_whole["seconds"]
    assert with_segments(spent_whole, 0)["segments"] == []


def test_an_evaluation_becomes_a_part_of_the_lineage() -> None:
    metric = {"candidate": 0.9, "champion": 0.8, "difference": 0.1, "interval": [0.05, 0.15], "method": "bootstrap"}
    document = with_evaluation(of(), evaluation(metrics={"accuracy": metric}))
    reason = documents.decision(passed=True)["reason"]
    assert document["lineage"]["evaluation"] == {"passed": True, "summary": reason}
    assert document["evaluation"]["report"]["confusion"] == documents.evaluation_report()["confusion"]
    assert document["evaluation"]["report"]["metrics"] == {"accuracy": metric}
    assert SECRET not in json.dumps(document)
    assert document["notes"] == []
    without = with_evaluation(of(), evaluation() | {"decision": None})
    assert without["evaluation"]["decision"] is None
    assert without["lineage"]["evaluation"]["passed"] is None
    assert of()["evaluation"] is None


def test_an_evaluation_report_is_shown_as_it_was_made() -> None:
    models = ({"uri": "s3://b/m", "digest": "sha256:1"}, {"uri": "s3://b/c", "digest": "sha256:2"})
    one = {"metrics": {"f1": 0.5}, "scores": {"f1": [1, 0]}, "slice_of": {"x": ["a", "b"]}}
    other = {"metrics": {"f1": 0}, "scores": {"f1": [0, 0]}, "slice_of": {"x": ["a", "b"]}}
    scores = [Scores.parse(each, "candidate") for each in (one, other)]
    made = compare(*scores, models=models, dataset={"uri": "d"})
    decision = Gate.model_validate({"metrics": {"f1": {"min_improvement": 0.1}}}).decide(made)
    document = with_evaluation(of(), {"report": made.as_dict(), "decision": decision.as_dict(), "uri": ""})
    assert document["evaluation"] == {"report": made.as_dict(), "decision": decision.as_dict(), "uri": ""}


def test_an_evaluation_is_bounded() -> None:
    metrics = {f"m{index}": evaluation()["report"]["metrics"]["accuracy"] for index in range(150)}
    given = evaluation(
        metrics=metrics,
        slices={f"s{index}": {"metrics": metrics, "examples": 1} for index in range(300)},
        confusion={"labels": list(range(130)), "counts": [[1] * 130] * 130},
    )
    given["decision"]["checks"] = [given["decision"]["checks"][0]] * 2000
    document = with_evaluation(with_evaluation(of(), given), given)
    shown = document["evaluation"]["report"]
    assert (len(shown["slices"]), len(shown["slices"]["s0"]["metrics"]), len(shown["metrics"])) == (200, 20, 100)
    assert {len(row) for row in shown["confusion"]["counts"]} == {100}
    assert len(document["notes"]) == 4
    assert len(json.dumps(document)) < 1_000_000
