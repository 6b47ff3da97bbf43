"""What the package brings for a cluster."""

from __future__ import annotations

from pathlib import Path

import yaml

import trainjob
from trainjob.data.program import STEP_RUNTIME

INSTALL = Path(trainjob.__file__).parent / "install"


def test_the_step_runtime_names_the_image_of_this_version() -> None:
    runtime = yaml.safe_load((INSTALL / "trainjob-step.yaml").read_text())
    assert runtime["metadata"]["name"] == STEP_RUNTIME
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"trainjob-step:{trainjob.__version__}"
    assert f"trainjob-step:{trainjob.__version__} ." in (INSTALL / "Dockerfile").read_text()
