"""The fake Kubeflow Model Registry: as the real server, and as the official clients see it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry
from tests.registry import recorder

from trainjob.registry import connect

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "a" * 64
AIRFLOW = "airflow/prod/retrain/scheduled__2026-01-01T00:00:00+00:00/-1/export"


def _official(version: str, url: str) -> dict[str, Any]:
    python = Path(
        os.environ.get(f"TRAINJOB_REGISTRY_{version.upper()}_PYTHON", ROOT / f".venv-registry-{version}/bin/python")
    )
    if not python.exists():
        pytest.skip(f"no client of API {version}: make .venv-registry-{version}/stamp")
    program = [str(python), str(ROOT / "tests/registry/official_client.py"), url]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_it_replies_as_the_real_server() -> None:
    with FakeRegistry(("v1alpha3",)) as fake:
        answered = list(recorder.replies(fake.url, "v1alpha3"))
    assert answered == recorder.read()


@pytest.mark.full
@pytest.mark.parametrize("version", ["v1", "v1alpha3"])
def test_official_client(version: str) -> None:
    with FakeRegistry((version,)) as fake:
        registry = connect(f"kubeflow+{fake.url}")
        tags = {"trainjob.bytes": "12345678901", "trainjob.provenance.run": AIRFLOW}
        registry.register("ours", "s3://m/1", export_id="e", digest=DIGEST, metrics={"acc": 0.5}, tags=tags)
        result = _official(version, fake.url)
        theirs = registry.list("digits")
        alias = registry.promote("digits", "1", alias="champion", metric="accuracy")
        tried = registry.promote("digits", "2", alias="champion")
    properties = {"accuracy": 0.75, "epochs": 3, "best": True, "note": "ä"}
    assert result["version"] == ["2", "ada", "a description", properties]
    assert result["artifact"] == ["s3://models/digits/2", "UNKNOWN", "kfp", "team"]
    assert result["updated"] == [{"only": "this"}, "LIVE"]
    assert result["versions"] == ["1", "2"]
    name, author, held, uri, state, source = result["ours"]
    assert (name, author, uri, state) == ("ours", "Apache Airflow", "s3://m/1", "LIVE")
    assert held == {"trainjob.export_id": "e", "trainjob.digest": DIGEST, "trainjob.metric.acc": 0.5, **tags}
    run = "scheduled__2026-01-01T00%3A00%3A00%2B00%3A00"
    assert source == ["airflow", "dagrun", f"retrain/{run}/export/-1", "retrain/scheduled__2026-01-01T00:00:00+00:00"]
    # Versions that the official client registered, read by this project.
    assert [(each.version, each.uri, each.digest) for each in theirs] == [
        ("1", "s3://models/digits/1", ""), ("2", "s3://models/digits/2", "")
    ]  # fmt: skip
    assert dict(theirs[0].metrics) == {"accuracy": 0.5}
    assert theirs[0].tags == {"epochs": "3", "best": "true", "note": "ä"}
    assert (alias.promoted, tried.promoted) == (True, True)
