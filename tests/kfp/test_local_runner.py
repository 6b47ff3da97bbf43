"""The example pipeline with kfp.local, twice."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from trainjob import registry

if TYPE_CHECKING:
    from tests.kfp.conftest import Steps


@pytest.mark.full
@pytest.mark.timeout(900)  # 30 to 60 s on two idle cores, most of it imports of MLflow and JAX
def test_the_second_run_starts_from_the_champion_of_the_first(steps: Steps) -> None:
    uri = f"mlflow+sqlite:///{steps.directory / 'registry.db'}"
    steps.environment |= {
        "TRAINJOB_REGISTRY": uri,
        "TRAINJOB_WORKSPACE": (steps.directory / "workspace").as_uri(),
        "TRAINJOB_LOCAL_ENVIRONMENTS": json.dumps(
            {"jax-distributed": sys.prefix}
        ),  # the environment of the steps has no JAX
    }
    logs = [steps.run_example("retrain_digits.py", "--epochs", epochs) for epochs in ("2", "4")]

    assert "starting fresh, since if_missing is 'fresh'" in logs[0]
    assert "starting fresh" not in logs[1]
    assert "[node-0] epoch 2/2" in logs[0]
    assert "[node-0] epoch 4/4" in logs[1]
    assert len(steps.jobs()) == 10
    assert "there is no models:/digits@champion: the candidate is evaluated without a champion" in logs[0]
    assert "[node-0] evaluating the champion, models:/digits@champion" in logs[1]

    records = registry.connect(uri)
    versions = {version.version: version for version in records.list("digits")}
    assert set(versions) == {"1", "2"}
    champion = records.resolve("digits", "champion")
    assert champion.metrics["accuracy"] == max(version.metrics["accuracy"] for version in versions.values())
    assert champion.metrics["accuracy"] > 0.9
    assert champion.tags["trainjob.evaluation.passed"] == "true"
