"""The workspace of the pipeline dags_examples/kfp/train_torch.py in pods.

The PVC is the one that KFP creates for a run. Its volume belongs to root, and the step image runs as another user, who
can write because of ``fsGroup`` in the runtime trainjob-step. The kubelet ignores ``fsGroup`` for volumes of type
``hostPath``, and for those of type ``local`` if another pod has mounted them. Therefore the pods of the steps, which do
not need the volume, do not mount it here, although they do in KFP. tests/kfp tests GPUs, which this node does not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kfp_steps import Execution, Steps
from tests.testcluster import step_image as steps
from tests.testcluster.nodes import LABEL

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
MOUNTED = "/kfp-workspace"
USER = 65532  # the user of components/trainjob/_install/Dockerfile; the image of the tests sets no user
Object = dict[str, Any]


@pytest.fixture
def workspace(kfp_steps: Steps, tmp_path: Path) -> Iterator[Path]:
    """Directory of the PVC that the compiled pipeline requests."""
    file = tmp_path / "train_torch.yaml"
    command = [sys.executable, str(ROOT / "dags_examples" / "kfp" / "train_torch.py"), "--compile", str(file)]
    subprocess.run(command, env={**os.environ, "TRAINJOB_EXAMPLES": steps.EXAMPLES}, check=True)
    _, platform = yaml.safe_load_all(file.read_text())
    asked = platform["platforms"]["kubernetes"]["pipelineConfig"]["workspace"]
    api, directory = kfp_steps.cluster.api, kfp_steps.cluster.directory / "workspace"
    directory.mkdir(mode=0o755)
    claim = {"name": kfp_steps.namespace, "namespace": kfp_steps.namespace}
    common, here = asked["kubernetes"]["pvcSpecPatch"], [{"key": LABEL, "operator": "In", "values": ["real"]}]
    volume = {
        **common,
        "capacity": {"storage": asked["size"]},
        "claimRef": claim,
        "local": {"path": str(directory)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}},
    }
    wanted = {**common, "resources": {"requests": {"storage": asked["size"]}}}
    core = {"apiVersion": "v1"}
    api.create({**core, "kind": "PersistentVolume", "metadata": {"name": kfp_steps.namespace}, "spec": volume})
    api.create({**core, "kind": "PersistentVolumeClaim", "metadata": claim, "spec": wanted})
    yield directory
    api.delete("v1", "PersistentVolume", "", kfp_steps.namespace)


@pytest.fixture
def as_its_user(kfp_steps: Steps) -> Iterator[None]:
    """The jobs of the steps run as the user of the step image."""
    runtime = steps.runtime(steps.STEP_RUNTIME, kfp_steps.image)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    pod["securityContext"] = {**pod.get("securityContext", {}), "runAsUser": USER, "runAsGroup": 0}
    kfp_steps.cluster.add_runtime(runtime)
    yield
    kfp_steps.cluster.add_runtime(steps.runtime(steps.STEP_RUNTIME, kfp_steps.image))


def test_steps_that_are_not_root_share_the_workspace(kfp_steps: Steps, workspace: Path, as_its_user: None) -> None:
    config: Object = {
        "volumes": [{"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": kfp_steps.namespace}}],
        "volumeMounts": [{"name": "kfp-workspace", "mountPath": MOUNTED}],
    }
    source = f"file://{steps.EXAMPLES}/data/digits.csv.gz"
    for name in ("dataset", "next"):
        asked = {"source": source, "target": f"file://{MOUNTED}/{name}", "task_config": config}
        ended = kfp_steps.run(Execution("initialize_dataset", asked))
        assert ended.code == 0, ended.log
        source = f"{ended.output['parameterValues']['uri']}/"
        assert source == f"file://{MOUNTED}/{name}/"
        downloaded = workspace / name / "digits.csv.gz"
        assert downloaded.stat().st_uid == USER
        assert downloaded.read_bytes() == (ROOT / "dags_examples" / "data" / "digits.csv.gz").read_bytes()
    assert workspace.stat().st_uid == 0
