"""Searches and exports end the same through each integration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.integrations.integration import Fields, Integration

from trainjob.data.evaluate import evaluate
from trainjob.registry import connect
from trainjob.registry.base import Registry

MODEL = """
import pathlib, sys
from trainjob import progress
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
head = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
(folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes([5]))
progress.report(metrics={"accuracy": 0.5}, outputs={"model": folder.as_uri()})
"""
SCORES = """
import json, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps({"metrics": {"accuracy": 0.5}}))
"""
TRIAL = """
import os
from trainjob import progress
x = float(os.environ["KUBEFLOW_TRAINER_OPT_X"])
progress.report(step=1, total_steps=1, metrics={"loss": (x - 2) ** 2})
"""
STUDY: dict[str, Any] = {
    "space": {"x": {"type": "float", "low": 1, "high": 3, "step": 1}},
    "metric": "loss",
    "direction": "minimize",
    "sampler": {"name": "grid"},
    "max_trials": 3,
    "parallel": 3,
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        yield connect()


@pytest.fixture
def trained(integration: Integration, tmp_path: Path) -> Fields:
    """The result of a training that wrote a model."""
    command = [sys.executable, "-c", MODEL, str(tmp_path / "trained")]
    return integration.train({"runtime": "trainjob-step", "command": command}).result


def test_an_export_registers_the_model_with_its_metrics(
    integration: Integration, registry: Registry, trained: Fields, tmp_path: Path
) -> None:
    for _ in range(2):
        ended = integration.export(trained, (tmp_path / "models").as_uri(), name="m", alias="champion")
        assert ended.outcome == 0, ended
        assert (ended.result["version"], ended.result["promoted"]) == ("1", True)
    (version,) = registry.list("m")
    assert version.metrics == {"accuracy": 0.5}
    assert registry.resolve("m", "champion").version == "1"


@pytest.mark.parametrize(("least", "promoted"), [(0.4, True), (0.6, False)])
def test_the_gate_of_an_evaluation_decides_about_the_alias(
    integration: Integration, registry: Registry, trained: Fields, tmp_path: Path, least: float, promoted: bool
) -> None:
    (tmp_path / "test.txt").write_text("0 1 2\n")
    evaluated = evaluate(
        trained["outputs"]["model"],
        str(tmp_path / "test.txt"),
        str(tmp_path / "evaluation"),
        command=[sys.executable, "-c", SCORES, "{scores}", "{model}", "{dataset}"],
        gate={"metrics": {"accuracy": {"min": least}}},
    )
    ended = integration.export(
        trained, (tmp_path / "models").as_uri(), name="m", alias="champion", evaluation=evaluated.uri
    )
    assert ended.outcome == 0, ended
    assert (ended.result["version"], ended.result["promoted"]) == ("1", promoted)
    (version,) = registry.list("m")
    assert version.tags["trainjob.evaluation.passed"] == str(promoted).lower()
    assert version.aliases == (("champion",) if promoted else ())


def test_a_study_finds_the_best_trial(integration: Integration) -> None:
    ended = integration.tune(STUDY, {"runtime": "trainjob-step", "command": [sys.executable, "-c", TRIAL]})
    assert ended.outcome == 0, ended
    best = ended.result["best"]
    assert (best["parameters"], best["value"], best["state"]) == ({"x": 2.0}, 0.0, "complete")
    assert len(ended.result["trials"]) == 3


def test_a_study_without_a_complete_trial_fails(integration: Integration) -> None:
    template = {"runtime": "trainjob-step", "command": [sys.executable, "-c", "raise ValueError('wrong data')"]}
    ended = integration.tune({**STUDY, "max_trials": 1}, template)
    assert ended.outcome == integration.outcome(1, certain=True), "a retry would find the same failures"
    assert "max_trials of 1 is reached; trial 0 of job" in ended.message
    assert "wrong data" in ended.message
