"""``trainjob export``: models of jobs of the local backend, with MLflow on SQLite."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from tests.processes import eventually

from trainjob import JobRef, TrainJobClient
from trainjob.data import file_manifest
from trainjob.data.evaluate import evaluate
from trainjob.errors import NotFound
from trainjob.registry import Registry

CHAMPION = "models:/digits@champion"
TRAINING = """
import json, os, struct, sys
from pathlib import Path
from trainjob import progress

folder = Path(sys.argv[1])
folder.mkdir()
header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
(folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
progress.report(metrics={"accuracy": 0.5})
progress.report(metrics={"accuracy": 0.97, "loss": float("nan"), "top@5": 1, "optimizer": "adam"})
progress.report(outputs={"model": folder.as_uri(), "epochs": 3, "relative": "out/model", "log": "s3://logs/1"})
"""


@pytest.fixture
def registry(file_registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    yield file_registry
    with TrainJobClient() as client:
        for job in client.list():
            client.cancel(JobRef.of(job))


@pytest.fixture
def trained(registry: Registry, tmp_path: Path) -> JobRef:
    """A job that wrote a model to ``<tmp_path>/out``."""
    del registry
    (tmp_path / "train.py").write_text(TRAINING)
    spec: dict[str, Any] = {
        "runtime": "trainjob-step",
        "command": [sys.executable, f"{tmp_path}/train.py", f"{tmp_path}/out"],
        "inputs": {"data": "s3://data/digits", "start": "models:/digits@champion"},
        "outputs": {"declared": f"file://{tmp_path}/out"},
    }
    with TrainJobClient() as client:
        ref = client.launch(spec, "airflow/here/dag/run/-1/train")
        client.wait(ref)
    return ref


@pytest.fixture
def export(trainjob: Any) -> Any:
    return partial(trainjob, "export")


def test_the_model_of_a_job_is_exported_with_metrics_and_provenance(
    registry: Registry, database: Path, trained: JobRef, export: Any, home: Path, tmp_path: Path
) -> None:
    promoted = ("--alias", "champion", "--metric", "accuracy", "--min-improvement", "0.01")
    code, out, err = export(str(trained), "--name", "digits", *promoted, "--json")
    assert code == 0, err
    assert "metrics with names that registries do not accept are left out: 'top@5'" in err
    done = json.loads(out)
    assert (done["name"], done["version"], done["promoted"], done["parameters"]) == ("digits", "1", True, 4)
    assert done["uri"].startswith(f"file://{home}/models/digits/")
    version = registry.resolve("digits", "champion")
    assert (version.uri, version.digest, version.metrics) == (done["uri"], done["digest"], {"accuracy": 0.97})
    recorded = json.loads(version.tags["trainjob.provenance.trainjob"])
    assert (recorded["namespace"], recorded["name"], recorded["uid"]) == ("default", trained.name, trained.uid)
    assert (recorded["key"], recorded["runtime"]) == ("airflow/here/dag/run/-1/train", "trainjob-step")
    assert recorded["outputs"]["model"] == f"file://{tmp_path}/out"
    assert (recorded["metrics"]["optimizer"], recorded["metrics"]["top@5"]) == ("adam", 1)
    assert len(recorded["spec_hash"]) == 64
    assert version.tags["trainjob.provenance.run"] == "airflow/here/dag/run/-1/train"
    curve = MlflowClient(f"sqlite:///{database}").get_metric_history(version.run_id, "accuracy")
    assert [(point.step, point.value) for point in curve] == [(1, 0.5), (2, 0.97)]
    folder = Path(done["uri"].removeprefix("file://"))
    predicate = json.loads((folder / file_manifest.PROVENANCE).read_text())["predicate"]
    assert predicate["buildDefinition"]["resolvedDependencies"] == [
        {"name": "dataset data", "uri": "s3://data/digits"},
        {"name": "base model start", "uri": "models:/digits@champion"},
    ]
    metadata = predicate["runDetails"]["metadata"]
    assert metadata["invocationId"] == "airflow/here/dag/run/-1/train"
    assert metadata["startedOn"] <= metadata["finishedOn"]
    card = (folder / file_manifest.CARD).read_text()
    for row in (f"uid `{trained.uid}`", "| Runtime | `trainjob-step` |", f"| Finished | `{recorded['finished']}` |"):
        assert row in card

    code, out, _ = export(trained.name, "--name", "digits", "--quiet")
    assert (code, out.splitlines()[0]) == (0, "digits 1")
    assert len(registry.list("digits")) == 1
    code, out, _ = export(trained.name, "--name", "digits", "--export-id", "again", "--target", str(tmp_path / "m"))
    assert (code, out.splitlines()[0]) == (0, "digits 2")


def test_a_declared_output_and_added_provenance_are_exported(
    registry: Registry, trained: JobRef, export: Any, tmp_path: Path
) -> None:
    (tmp_path / "more.json").write_text('{"code": {"uri": "git+https://git.example/x", "revision": "main"}}')
    more = ("--output", "declared", "--provenance", f"@{tmp_path}/more.json", "--target", str(tmp_path / "models"))
    assert export(trained.name, "--name", "digits", *more)[0] == 0
    version = registry.resolve("digits", "1")
    assert version.uri.startswith(f"file://{tmp_path}/models/")
    assert json.loads(version.tags["trainjob.provenance.code"])["revision"] == "main"
    assert version.tags["trainjob.export_id"] == f"trainjob/{trained}/{trained.uid}/declared"


REFUSED = [
    (("--metrics", '{"accuracy": 1}'), "No such option"),
    (("--provenance", '{"trainjob": {"name": "other"}, "code": "x"}'), "has trainjob, which TrainJob default/"),
    (("--provenance", "[]"), "--provenance must be a JSON object"),
    (("--provenance", '{"images": ["x"]}'), "has images, which TrainJob default/"),
    (("--output", "weights"), "its text outputs: declared, model, relative, log"),
    (("--output", "epochs"), "has no location as output 'epochs'"),
    (("--output", "relative"), "is the relative path"),
    (("--metric", "accuracy"), "--metric has no effect without --alias"),
    (("--alias", "champion", "--metric", "f1"), "the metrics given are: accuracy"),
    (("--alias", "v1"), "is not a valid alias"),
    (("--target", "ftp://x"), "ftp://"),
]


def test_invalid_options_are_refused_before_the_upload(
    registry: Registry, trained: JobRef, export: Any, home: Path
) -> None:
    for words, message in REFUSED:
        code, out, err = export(trained.name, "--name", "digits", *words)
        assert (code, out) == (2, ""), words
        assert message in err
    assert not (home / "models").exists()
    assert registry.list("digits") == []


def test_only_a_complete_job_is_exported(registry: Registry, export: Any, tmp_path: Path) -> None:
    with TrainJobClient() as client:
        runs = client.launch({"runtime": "trainjob-step", "command": ["sleep", "300"]}, "runs")
        code, _, err = export(runs.name, "--name", "digits")
        assert (code, f"Wait for it: trainjob wait {runs}" in err) == (2, True)
        fails = client.launch({"runtime": "trainjob-step", "command": ["sh", "-c", "echo no data; exit 3"]}, "fails")
        eventually(lambda: "failed" in export(fails.name, "--name", "digits")[2])
        code, out, _ = export(fails.name, "--name", "digits", "--json")
        assert (code, json.loads(out)["error"]["diagnosis"]["exit_code"]) == (1, 3)
        assert export("nosuch", "--name", "digits")[0] == 5
        with pytest.raises(NotFound, match="with UID other"):
            client.export(JobRef(fails.namespace, fails.name, "other"), name="digits")
    assert registry.list("digits") == []
    assert not list(tmp_path.rglob("MANIFEST.json"))


def test_an_evaluation_takes_the_place_of_the_metrics(
    registry: Registry, trained: JobRef, export: Any, home: Path, tmp_path: Path
) -> None:
    """Its gate decides about the alias, and its file or directory is the location."""
    (tmp_path / "test.txt").write_text("1 2 3")
    write = 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\'{"metrics": {"accuracy": 0.4}}\')'
    command = [sys.executable, "-c", write, "{scores}"]

    def evaluated(name: str, gate: Any) -> str:
        target, model = str(tmp_path / name), str(tmp_path / "out")
        evaluate(model, str(tmp_path / "test.txt"), target, command=command, champion=CHAMPION, gate=gate)
        return target

    passes, fails = ({"metrics": {"accuracy": {"min": least}}} for least in (0.3, 0.5))
    refused = {
        (evaluated("without", None), "--alias", "champion"): "has no gate, which decides whether 'champion' moves",
        (evaluated("failed", fails), "--metric", "accuracy", "--alias", "champion"): "has no effect with --evaluation",
    }
    for words, message in refused.items():
        code, out, err = export(trained.name, "--name", "digits", "--evaluation", *words)
        assert (code, out) == (2, ""), words
        assert message in err
    assert not (home / "models").exists()
    assert registry.list("digits") == []

    words = (trained.name, "--name", "digits", "--alias", "champion", "--json", "--evaluation")
    code, out, err = export(*words, f"{tmp_path}/failed")
    assert (code, json.loads(out)["promoted"]) == (0, False), err
    assert json.loads(out)["reason"].startswith("'champion' stays: metrics.accuracy.min: accuracy is 0.4")
    assert export(*words, f"{tmp_path}/failed")[1] == out, "the same again is the same version"
    report = f"{evaluated('passed', passes)}/{file_manifest.EVALUATION}"
    code, out, err = export(*words, report, "--export-id", "passed")
    assert (code, json.loads(out)["promoted"]) == (0, True), err
    versions = registry.list("digits")
    assert [each.tags["trainjob.evaluation.passed"] for each in versions] == ["false", "true"]
    assert [each.metrics for each in versions] == [{"accuracy": 0.4}] * 2
    assert json.loads(versions[1].tags["trainjob.provenance.trainjob"])["metrics"]["accuracy"] == 0.97
