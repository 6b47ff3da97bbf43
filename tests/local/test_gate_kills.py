"""SIGKILL at random times, requests and writes of an export with an evaluation, which is then run again.

A campaign (`tests.campaigns`) of 300 kills. After each kill, and after the second run, the champion is a version whose
evaluation has passed its gate: the old champion, or the new version if its gate has passed against the old one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import campaigns
from tests.fakes import model_registry as registries
from tests.local.killing import Content, Folder, Kubeflow, Mlflow, Records, Trap, manifest_of, run
from tests.local.test_kills import Happened, _weights, _written

from trainjob.data import file_manifest
from trainjob.data.export_evaluation import Evaluation
from trainjob.evaluation import Gate, Scores, compare
from trainjob.registry import connect

pytestmark = pytest.mark.timeout(900)

REGISTRIES = ("mlflow", "kubeflow")
EACH = -(-campaigns.runs(300, 10) // len(REGISTRIES))

NEW: Content = {"model.safetensors": _weights(1, 90_000), "config.json": b"{}"}
OLD: Content = {"model.safetensors": _weights(2, 90_000), "config.json": b"{}"}
NEW_DIGEST, OLD_DIGEST = (file_manifest.parse(manifest_of(files), "").digest for files in (NEW, OLD))
GATE = Gate.read({"metrics": {"acc": {"min_improvement": 0}}})


@dataclass(frozen=True)
class Evaluated:
    """What the evaluation of a candidate says.

    Attributes:
        accuracy: Of the candidate; the old champion has 0.5.
        against: Digest of the champion that it was evaluated against.
        gate: Whether it has a gate.
        promoted: Whether its export may move the alias.
    """

    accuracy: float
    against: str = OLD_DIGEST
    gate: bool = True
    promoted: bool = False

    def write(self, folder: Path) -> str:
        """Write the report; return the location of its directory."""
        uri = f"file://{folder}"
        scores = [Scores.parse({"metrics": {"acc": each}}, "model") for each in (self.accuracy, 0.5)]
        models = {"uri": "file:///new", "digest": NEW_DIGEST}, {"uri": "file:///old", "digest": self.against}
        report = compare(*scores, models=models, dataset={"uri": "file:///test", "digest": "sha256:" + "d" * 64})
        folder.mkdir(parents=True)
        decision = GATE.decide(report) if self.gate else None
        (folder / file_manifest.EVALUATION).write_bytes(Evaluation(uri, report, decision).as_json())
        return uri


EVALUATIONS = {
    "better": Evaluated(0.9, promoted=True),
    "worse": Evaluated(0.4),
    "without a gate": Evaluated(0.9, gate=False),
    "against another champion": Evaluated(0.9, against="sha256:" + "0" * 64),
}


def _register_champion(uri: str) -> None:
    registry = connect(uri)
    tags = {"trainjob.evaluation.passed": "true"}
    registry.register("m", "file:///old", export_id="old", digest=OLD_DIGEST, metrics={"acc": 0.5}, tags=tags)
    assert registry.promote("m", "1", alias="champion").promoted


def _check(records: Records, evaluated: Evaluated, target: Path) -> str:
    """Check that the champion has passed its gate; return how far the export came."""
    registry = connect(records.uri)
    champion = registry.resolve("m", "champion")
    assert champion.tags["trainjob.evaluation.passed"] == "true"
    versions = registry.list("m")
    assert len(versions) <= records.rows() <= 2, "two versions of one export"
    for version in versions[1:]:
        assert version.digest == NEW_DIGEST
        assert version.metrics == {"acc": evaluated.accuracy}, "not that of the evaluation"
        report = json.loads((target / file_manifest.EVALUATION).read_text())
        passed = report["decision"] and str(report["decision"]["passed"]).lower()
        assert version.tags.get("trainjob.evaluation.passed") == passed, "the tag contradicts the report"
    if champion.version == "1":
        return f"{records.rows() - 1} version, not promoted" if (target / file_manifest.NAME).exists() else "no model"
    assert evaluated.promoted
    assert champion.digest == NEW_DIGEST
    return "promoted"


@contextmanager
def _trapped(trap: Trap, records: Records, chance: random.Random) -> Iterator[None]:
    """Let the fake registry count requests and kill the export at one: before, after or instead of its effect."""
    if records.fake is None:
        yield
        return
    fault = [None, registries.Fault(cut=True), registries.Fault(), registries.LOST][chance.randrange(4)]
    records.fake.fault = lambda _: fault if trap.request("registry") else None
    try:
        yield
    finally:
        records.fake.settle()
        records.fake.fault = lambda _: None


@pytest.mark.full
@pytest.mark.parametrize("registry", REGISTRIES)
def test_no_kill_promotes_a_model_that_has_not_passed(
    registry: str, tmp_path: Path, record_property: campaigns.Record
) -> None:
    campaigns.begin(record_property, EACH)
    Folder(tmp_path).put(str(tmp_path / "trained"), NEW)
    base: Mlflow | Kubeflow
    base = Mlflow(tmp_path / "mlflow", _register_champion) if registry == "mlflow" else Kubeflow(_register_champion)
    environment = {"TMPDIR": str(tmp_path / "left")}  # killed programs leave temporary files
    Path(environment["TMPDIR"]).mkdir()
    trap = Trap()
    measured: dict[str, tuple[float, int]] = {}  # duration and requests of an export that is not killed

    def arguments(records: Records, evaluation: str, target: Path) -> list[str]:
        return [
            *("export", "--source", str(tmp_path / "trained"), "--target", str(target), "--name", "m"),
            *("--export-id", "a", "--alias", "champion", "--evaluation", evaluation, "--registry", records.uri),
        ]

    def model_of(target: Path) -> Path:
        return next((target / "m").glob("*"), target / "m" / "none") if (target / "m").exists() else target / "m"

    @contextmanager
    def export(name: str, number: str) -> Iterator[tuple[Records, list[str], Path]]:
        target = tmp_path / f"models-{number}"
        evaluation = EVALUATIONS[name].write(tmp_path / f"evaluation-{number}")
        with base.opened(champion=True) as records:
            yield records, arguments(records, evaluation, target), target

    killed, found = 0, Counter[str]()
    for number in range(EACH):
        chance = random.Random(f"{campaigns.SEED}/{registry}/{number}")
        name = chance.choice([*EVALUATIONS])
        evaluated = EVALUATIONS[name]
        complete = "promoted" if evaluated.promoted else "1 version, not promoted"
        if name not in measured:
            with export(name, name) as (records, words, target):
                with _trapped(trap, records, chance):
                    measured[name] = run(words, environment, trap)[0], trap.requests["registry"]
                assert _check(records, evaluated, model_of(target)) == complete
        length, requests = measured[name]
        with export(name, str(number)) as (records, words, target):
            happened: Happened = lambda: True  # noqa: E731 - the time counts from the start
            instant = chance.uniform(0, length)
            if number % 2:
                instant = 0.0
                if records.state is not None:
                    happened = _written(records.state, chance)
                else:
                    trap.at, happened = ("registry", chance.randint(1, requests)), lambda: False
            with _trapped(trap, records, chance):
                took, dead = run(words, environment, trap, (happened, instant))
            trap.at = None
            killed += dead
            if not dead:
                measured[name] = min(length, took), requests  # other programs slowed the measurement
            left = _check(records, evaluated, model_of(target))
            found[left] += 1
            run(words, environment, trap)
            assert _check(records, evaluated, model_of(target)) == complete
        campaigns.done(f"{registry}/{number}: {name}, {'killed' if dead else 'not killed'}; left: {left}")
    print(f"{registry}: {killed} of {EACH} exports were killed; left: {dict(found)}")
    if EACH >= 10:  # with fewer runs, most can end before the kill by chance
        assert killed >= EACH // 2, "most exports ended before the kill"
        assert len(found) > 1, "the kills hit one state only"
