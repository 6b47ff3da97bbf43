"""Evaluate, gate, export: a champion that has earned it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.keys import key_pair
from tests.trees import model

from trainjob import progress
from trainjob.data import export, file_manifest, initialize
from trainjob.data.__main__ import TRY_AGAIN, main
from trainjob.data.evaluate import CommandFailed, Evaluated, Function, evaluate
from trainjob.data.export_evaluation import Evaluation
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    InvalidGate,
    RegistryConflict,
    SourceNotFound,
)
from trainjob.registry import Registry

CHAMPION = "models:/digits@champion"
GATE = {"metrics": {"accuracy": {"min_improvement": 0, "min": 0.2}}}
# The last byte of the "model" is how many of ten examples it gets right.
SCRIPT = """
import json, os, pathlib, sys
model, dataset, scores = sys.argv[1:]
assert (model, dataset) == (os.environ["TRAINJOB_MODEL"], os.environ["TRAINJOB_DATASET"])
right = pathlib.Path(model, "model.safetensors").read_bytes()[-1]
examples = pathlib.Path(dataset).read_text().split()
each = [int(number < right) for number, _ in enumerate(examples)]
print("evaluated", right, "with", len(examples), "examples")
found = {"metrics": {"accuracy": sum(each) / len(each)}, "scores": {"accuracy": each}, "slice_of": {"digit": examples}}
pathlib.Path(scores).write_text(json.dumps(found))
"""
FUNCTION = '''
def score(model: str, dataset: str) -> dict:
    """Scores of one model."""
    import pathlib
    right = pathlib.Path(model, "model.safetensors").read_bytes()[-1]
    return {"metrics": {"accuracy": right / 10}}
'''


class Work:
    """Models, a dataset and a script in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dataset = directory / "test.txt"
        self.dataset.write_text("3 3 5 5 5 3 5 3 5 3\n")
        self.script = directory / "score.py"
        self.script.write_text(SCRIPT)
        self.command = [sys.executable, str(self.script), "{model}", "{dataset}", "{scores}"]

    def model(self, right: int) -> str:
        path = self.directory / f"model-{right}"
        return str(path) if path.exists() else model(path, right)

    def evaluate(self, right: int, **options: Any) -> Evaluated:
        target = self.directory / f"evaluation-{right}-{random.getrandbits(30)}"
        given: dict[str, Any] = {"command": self.command, "champion": CHAMPION, "gate": GATE} | options
        return evaluate(self.model(right), self.dataset.as_uri(), str(target), **given)

    def export(self, right: int, evaluated: Evaluated | str, **options: Any) -> Any:
        uri = evaluated if isinstance(evaluated, str) else evaluated.uri
        given: dict[str, Any] = {"name": "digits", "export_id": f"run-{right}", "alias": "champion"} | options
        return export(self.model(right), str(self.directory / "models"), evaluation=uri, **given)


@pytest.fixture
def work(tmp_path: Path, file_registry: Registry) -> Work:
    return Work(tmp_path)


def test_a_champion_has_to_be_beaten(work: Work, file_registry: Registry) -> None:
    first, better, worse = (work.export(right, work.evaluate(right)) for right in (5, 8, 6))
    assert [(each.version, each.promoted) for each in (first, better, worse)] == [
        ("1", True),
        ("2", True),
        ("3", False),
    ]
    rule = "metrics.accuracy.min_improvement: accuracy:"
    assert first.reason.startswith(f"'champion' points to version 1: {rule}")
    assert worse.reason.startswith(f"'champion' stays: {rule} candidate 0.6, champion")
    assert file_registry.resolve("digits", "champion").version == "2"
    tags = [each.tags["trainjob.evaluation.passed"] for each in file_registry.list("digits")]
    assert tags == ["true", "true", "false"], "the verdict of every version, also of those that did not pass"
    assert file_registry.resolve("digits", "3").metrics == {"accuracy": 0.6}


def test_the_report_stands_beside_the_model(work: Work) -> None:
    evaluated = work.evaluate(5, code={"uri": "git+https://example.com/code", "revision": "c" * 40})
    exported = work.export(5, evaluated)
    folder = Path(exported.uri.removeprefix("file://"))
    kept = Evaluation.read(str(folder))
    assert (kept.report, kept.decision) == (evaluated.report, evaluated.decision)
    assert kept.report.code["revision"] == "c" * 40
    statement = json.loads((folder / file_manifest.TEST_RESULT).read_text())
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["subject"][0]["digest"]["sha256"] == exported.digest.removeprefix("sha256:")
    assert statement["predicate"]["result"] == "PASSED"
    assert [each["name"] for each in statement["predicate"]["configuration"]] == [
        "dataset",
        "code",
        file_manifest.EVALUATION,
    ]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = work.export(5, evaluated)
    assert (again.version, again.promoted) == ("1", True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    initialize(exported.uri, str(work.directory / "copy"))
    assert not (work.directory / "copy" / file_manifest.EVALUATION).exists(), "it is not a part of the model"


def test_the_signature_covers_the_evaluation(work: Work) -> None:
    private, public = key_pair(work.directory)
    exported = work.export(5, work.evaluate(5), sign=str(private))
    initialize(exported.uri, str(work.directory / "copy"), verify_key=str(public))
    report = Path(exported.uri.removeprefix("file://")) / file_manifest.EVALUATION
    report.write_bytes(report.read_bytes().replace(b'"candidate": 0.5', b'"candidate": 0.9'))
    with pytest.raises(Exception, match=file_manifest.EVALUATION):
        initialize(exported.uri, str(work.directory / "copy2"), verify_key=str(public))


def test_a_retry_does_not_move_the_alias_back(work: Work, file_registry: Registry) -> None:
    first = work.evaluate(5)
    work.export(5, first)
    assert work.export(8, work.evaluate(8)).promoted
    retry = work.export(5, first)
    assert (retry.version, retry.promoted) == ("1", False)
    assert retry.reason == "'champion' stays: this export has moved it before, and version 2 holds it now"
    assert file_registry.resolve("digits", "champion").version == "2"


def test_another_model_than_the_evaluated_one_is_refused(work: Work, file_registry: Registry) -> None:
    evaluated = work.evaluate(5)
    with pytest.raises(ConfigurationError, match=r"is the evaluation of another model: .*model-9 has digest sha256:"):
        work.export(9, evaluated)
    assert file_registry.list("digits") == []


def test_an_export_without_the_evaluation_is_not_promoted_by_another_one(work: Work, file_registry: Registry) -> None:
    other = work.evaluate(9)
    export(work.model(5), str(work.directory / "models"), name="digits", export_id="run-5")
    with pytest.raises(RegistryConflict, match=r"'run-5' was used to export .* without this evaluation"):
        work.export(5, other)
    with pytest.raises(RegistryConflict, match=r"'run-5' was used to export .* without this evaluation"):
        work.export(5, work.evaluate(5))
    assert file_registry.resolve("digits", "1").aliases == ()


def test_a_champion_that_has_changed_since_is_not_replaced(work: Work, file_registry: Registry) -> None:
    without, first = work.evaluate(7), work.evaluate(5)
    work.export(5, first)
    late = work.export(7, without)
    assert not late.promoted
    assert "evaluated against no champion, and version 1 holds the alias now" in late.reason
    evaluated = work.evaluate(6)
    assert work.export(8, work.evaluate(8)).version == "3"
    late = work.export(6, evaluated)
    assert not late.promoted
    assert "the model was evaluated against version 1, and version 3 holds the alias now" in late.reason
    assert file_registry.resolve("digits", "champion").version == "3"


def test_of_two_exports_at_once_each_reports_which_version_stands(
    work: Work, file_registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have checked the champion before one of them moves the alias."""
    work.export(5, work.evaluate(5))
    first, second = work.evaluate(7), work.evaluate(8)
    promote = type(file_registry).promote
    others: list[Any] = []

    def moved_meanwhile(self: Any, *words: Any, **options: Any) -> Any:
        verdict = promote(self, *words, **options)
        if not others:
            others.append(None)
            others[0] = work.export(8, second)
        return verdict

    monkeypatch.setattr(type(file_registry), "promote", moved_meanwhile)
    monkeypatch.setattr(Evaluation, "refusal", lambda *_: "")
    done = work.export(7, first)
    assert (done.version, done.promoted) == ("2", False)
    assert done.reason == "'champion' points to version 3: another export has moved it at the same time"
    assert (others[0].version, others[0].promoted) == ("3", True)
    assert others[0].reason.startswith("'champion' points to version 3: metrics.accuracy.min_improvement: ")
    assert "another export has moved it to version 2 at the same time, which was not evaluated" in others[0].reason
    assert file_registry.resolve("digits", "champion").version == "3"


def test_without_a_gate_no_alias_moves(work: Work) -> None:
    exported = work.export(5, work.evaluate(5, gate=None))
    assert (exported.promoted, exported.reason) == (False, "'champion' stays: the evaluation has no gate")


def test_the_gate_decides_alone(work: Work) -> None:
    evaluated = work.evaluate(5)
    with pytest.raises(ConfigurationError, match="metric and min_improvement cannot be combined with evaluation"):
        work.export(5, evaluated, metric="accuracy")


def test_a_missing_or_damaged_evaluation_is_refused(work: Work) -> None:
    with pytest.raises(SourceNotFound):
        work.export(5, str(work.directory / "nothing"))
    evaluated = work.evaluate(5)
    path = Path(evaluated.uri.removeprefix("file://")) / file_manifest.EVALUATION
    good = path.read_text()
    for bad in ("", "{}", good[:-20], good.replace('"passed": true', '"passed": false', 1)):
        path.write_text(bad)
        with pytest.raises(CorruptData, match="is not an evaluation report"):
            work.export(5, evaluated)


def test_a_function_evaluates_both_models(work: Work) -> None:
    work.export(5, work.evaluate(5))
    evaluated = work.evaluate(8, command=(), function=Function("score", FUNCTION))
    compared = evaluated.report.metrics["accuracy"]
    assert (compared.candidate, compared.champion, compared.interval) == (0.8, 0.5, None)
    assert evaluated.report.code["digest"].startswith("sha256:")


def test_the_same_evaluation_is_the_same_report(work: Work) -> None:
    work.export(5, work.evaluate(5))
    first, second = work.evaluate(8), work.evaluate(8)
    assert first.digest == second.digest
    work.script.write_text(SCRIPT + "\n# changed\n")
    assert work.evaluate(8).digest != first.digest, "other code"


@pytest.mark.parametrize(
    ("script", "error", "problem"),
    [
        ("raise SystemExit(3)", CommandFailed, "the evaluation of the candidate exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", CommandFailed, "exited with code 137"),
        ("", ConfigurationError, "the evaluation of the candidate wrote no scores"),
        ("w('{')", ConfigurationError, "the scores of the candidate are not valid JSON"),
        ('w(\'{"metrics": {"a": NaN}}\')', ConfigurationError, "the scores of the candidate are not valid JSON"),
        ("w('{\"metrics\": {}}')", ConfigurationError, "metrics is missing"),
        ("w('[' * 100000)", ConfigurationError, "the scores of the candidate are not valid JSON"),
    ],
)
def test_a_bad_evaluation_fails(work: Work, script: str, error: type[Exception], problem: str) -> None:
    work.script.write_text(f"import sys, pathlib\nw = pathlib.Path(sys.argv[3]).write_text\n{script}")
    with pytest.raises(error, match=problem):
        work.evaluate(5)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"gate": {}}, InvalidGate, "invalid gate: has no rule"),
        ({"command": []}, ConfigurationError, "set exactly one of command and function"),
        ({"command": ["/nonexistent/python"]}, ConfigurationError, "the command /nonexistent/python cannot be started"),
        ({"dataset_digest": "sha256:" + "0" * 64}, ChecksumMismatch, "has SHA-256"),
        ({"champion": "/nonexistent/model"}, SourceNotFound, "does not exist"),
    ],
)
def test_invalid_arguments_are_refused(work: Work, options: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        work.evaluate(5, **options)


def test_a_champion_whose_files_are_gone_is_an_error(work: Work) -> None:
    exported = work.export(5, work.evaluate(5))
    shutil.rmtree(exported.uri.removeprefix("file://"))
    with pytest.raises(SourceNotFound):
        work.evaluate(8)


@pytest.mark.full
def test_the_program_reports_the_decision(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    log = work.directory / "message"
    log.touch()
    target = work.directory / "evaluation"
    words = [
        *("evaluate", "--candidate", work.model(5), "--dataset", str(work.dataset), "--target", str(target)),
        *("--champion", CHAMPION, "--gate", json.dumps(GATE), "--", *work.command),
    ]
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(log))
    done = subprocess.run([sys.executable, "-m", "trainjob.data", *words], capture_output=True, text=True, check=True)
    assert "evaluated 5 with 10 examples" in done.stdout
    assert "the gate passed: metrics.accuracy.min_improvement" in done.stdout
    reported = progress.read(log.read_text())
    assert reported is not None
    assert reported.metrics == {"accuracy": 0.5}
    assert reported.outputs["passed"] is True
    assert reported.outputs["uri"] == target.as_uri()
    assert main([*words[: words.index("--") + 1], sys.executable, "-c", "raise SystemExit(3)"]) == 3, (
        "the diagnosis reads the author's log"
    )
    assert main(["evaluate", *words[1:7], "--gate", "{}", "--", *work.command]) == 2
    assert main(["evaluate", "--candidate", "/nonexistent", *words[3:7], "--", *work.command]) != TRY_AGAIN
