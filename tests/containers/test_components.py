"""Every compiled component in the step image, run by kfp.local's DockerRunner."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from trainjob import registry

if TYPE_CHECKING:
    from tests.containers.conftest import Run, Servers

COMPILED = Path(__file__).parents[2] / "kfp_components" / "trainjob_kfp" / "compiled"


TRAINING = "from trainjob import progress; progress.report(metrics={'answer': 42})"
TRIAL = "import sys; from trainjob import progress; progress.report(metrics={'loss': float(sys.argv[1])})"


def _model() -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


GIVEN: dict[str, dict[str, Any]] = {
    "initialize_dataset": {"source": "s3://digits/components/data.csv"},
    "initialize_model": {"source": "s3://digits/components/model/"},
    "train": {"runtime": "trainjob-step", "command": ["python", "-c", TRAINING]},
    "tune": {
        "study": {
            "space": {"lr": {"type": "float", "low": 0.5, "high": 1}}, "metric": "loss", "direction": "minimize",
            "max_trials": 2,
        },
        "runtime": "trainjob-step", "command": ["python", "-c", TRIAL, "$(KUBEFLOW_TRAINER_OPT_LR)"],
        "workspace": "s3://digits/components/studies", "outputs": {"model": "s3://digits/components/trials"},
    },
    "cleanup": {"run_id": "0d9f8a9e-6c1d-4a53-9f0e-2f1d5b1c7a11"},
    "evaluate_model": {
        "candidate": "s3://digits/components/model/", "dataset": "s3://digits/components/data.csv",
        "target": "s3://digits/components/evaluation", "gate": {"metrics": {"accuracy": {"min": 0.5}}},
        "command": ["sh", "-c", "echo '{\"metrics\": {\"accuracy\": 1}}' > $0", "{scores}"],
    },
    "export_model": {
        "source": "s3://digits/components/model/", "target": "s3://digits/components/exported", "name": "component",
    },
}  # fmt: skip

CASES = [
    pytest.param(component, {**GIVEN[component], **more}, id=f"{component}, {where}")
    for component in sorted(file.stem for file in COMPILED.glob("*.yaml") if file.stem != "wait")
    for where, more in {"as a TrainJob": {}, "in its own pod": {"in_pod": True}}.items()
    if not (component in ("train", "tune", "cleanup", "evaluate_model") and more)
]


@pytest.mark.parametrize(("component", "given"), CASES)
def test_each_component_runs_in_the_step_image(
    component: str,
    given: dict[str, Any],
    request: pytest.FixtureRequest,
    servers: Servers,
    in_containers: Run,
) -> None:
    image: str = request.getfixturevalue("step_image_with_optuna" if component == "tune" else "step_image")
    compiled = (COMPILED / f"{component}.yaml").read_text()
    (executor,) = yaml.safe_load(compiled.split("\n---\n")[0])["deploymentSpec"]["executors"].values()
    servers.bucket.put_object(Key="components/data.csv", Body=b"1,2\n")
    servers.bucket.put_object(Key="components/model/model.safetensors", Body=_model())

    outputs = in_containers(compiled.replace(executor["container"]["image"], image), **given).outputs

    if component == "train":
        assert outputs["result"]["metrics"] == {"answer": 42}
    elif component == "tune":
        assert outputs["result"]["counts"]["complete"] == 2
        assert 0.5 <= outputs["result"]["best"]["value"] <= 1
        assert outputs["model_uri"].startswith("s3://digits/components/trials/")
    elif component == "cleanup":
        assert outputs["stopped"] == []
    elif component == "evaluate_model":
        assert (outputs["passed"], outputs["evaluation"]) == (True, "s3://digits/components/evaluation")
        assert outputs["result"]["metrics"] == {"accuracy": 1}
    elif component == "export_model":
        assert outputs["uri"].startswith("s3://digits/components/exported/")
        assert registry.connect(f"mlflow+{servers.mlflow}").list("component")[-1].uri == outputs["uri"]
    else:
        assert Path(outputs["uri"].removeprefix("file://")).exists()
        assert outputs["digest"].startswith("sha256:")


def test_wait_reports_a_missing_job(
    step_image: str, servers: Servers, in_containers: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """A container has only its own local jobs, so `wait` finds none; tests/kfp tests waiting."""
    compiled = (COMPILED / "wait.yaml").read_text()
    (executor,) = yaml.safe_load(compiled)["deploymentSpec"]["executors"].values()
    with pytest.raises(RuntimeError):
        in_containers(compiled.replace(executor["container"]["image"], step_image), job="nosuch", run_id="x")
    assert "error: there is no TrainJob default/nosuch" in capfd.readouterr().out
