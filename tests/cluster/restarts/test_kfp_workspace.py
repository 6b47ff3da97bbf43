"""The pipeline dags_examples/kfp/train_torch.py in pods: PyTorch on two nodes, which share the workspace.

The PVC is the one that KFP creates for a run. Its volume belongs to root, and the step image runs as another user, who
can write because of ``fsGroup`` in the runtime trainjob-step. The kubelet ignores ``fsGroup`` for volumes of type
``hostPath``, and for those of type ``local`` if another pod has mounted them. Therefore the pods of the steps, which do
not need the volume, do not mount it here, although they do in KFP. tests/kfp tests GPUs, which this node does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.kfp_steps import Execution, Result, Steps
from tests.testcluster import images, step_image as steps
from tests.testcluster.nodes import LABEL

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
MOUNTED = "/kfp-workspace"
USER = 65532  # the user of components/trainjob/_install/Dockerfile; the image of the tests sets no user
Object = dict[str, Any]


@dataclass
class Run:
    """A run of the pipeline with its compiled tasks; `workspace` is the directory of the PVC."""

    steps: Steps
    tasks: Object
    workspace: Path
    claim: str
    id: str

    def run(self, task: str, passed_on: Object, **more: Any) -> Result:
        """Run one task to its successful end, with the outputs of other tasks and `more` parameters."""
        compiled = self.tasks[task]["inputs"]["parameters"]
        parameters = {
            name: each["runtimeValue"]["constant"]
            if "runtimeValue" in each
            else passed_on[each.get("componentInputParameter", name)]
            for name, each in compiled.items()
        }
        execution = Execution(task.replace("-", "_"), parameters | more, run=self.id)
        ended = self.steps.run(execution)
        assert ended.code == 0, ended.log
        return ended

    def config(self, *packages: str) -> Object:
        """The task config that KFP passes to a task: the workspace, and `packages` of this machine for Python."""
        config: Object = {
            "volumes": [{"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": self.claim}}],
            "volumeMounts": [{"name": "kfp-workspace", "mountPath": MOUNTED}],
        }
        for site in packages:
            config["volumes"].append({"name": "packages", "hostPath": {"path": site}})
            config["volumeMounts"].append({"name": "packages", "mountPath": "/opt/packages", "readOnly": True})
            config["env"] = [{"name": "PYTHONPATH", "value": "/opt/packages"}]
        return config


@pytest.fixture(scope="module")
def run(kfp_steps: Steps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of the compiled pipeline; the jobs of its steps run as the user of the step image."""
    file = tmp_path_factory.mktemp("compiled") / "train_torch.yaml"
    command = [sys.executable, str(ROOT / "dags_examples" / "kfp" / "train_torch.py"), "--compile", str(file)]
    subprocess.run(command, env={**os.environ, "TRAINJOB_EXAMPLES": steps.EXAMPLES}, check=True)
    pipeline, platform = yaml.safe_load_all(file.read_text())
    dags = [pipeline["root"]["dag"], pipeline["components"]["comp-exit-handler-1"]["dag"]]
    tasks = {name: task for dag in dags for name, task in dag["tasks"].items()}

    cluster, namespace = kfp_steps.cluster, kfp_steps.namespace
    asked = platform["platforms"]["kubernetes"]["pipelineConfig"]["workspace"]
    made = Run(kfp_steps, tasks, cluster.directory / "workspace", f"{namespace}-kfp-workspace", str(uuid.uuid4()))
    made.workspace.mkdir(mode=0o755)
    common, claim = asked["kubernetes"]["pvcSpecPatch"], {"name": made.claim, "namespace": namespace}
    here = [{"key": LABEL, "operator": "In", "values": ["real"]}]
    volume = {
        **common,
        "capacity": {"storage": asked["size"]},
        "claimRef": claim,
        "local": {"path": str(made.workspace)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}},
    }
    wanted = {**common, "resources": {"requests": {"storage": asked["size"]}}}
    core = {"apiVersion": "v1"}
    cluster.api.create({**core, "kind": "PersistentVolume", "metadata": {"name": made.claim}, "spec": volume})
    cluster.api.create({**core, "kind": "PersistentVolumeClaim", "metadata": claim, "spec": wanted})

    runtime = steps.runtime(steps.STEP_RUNTIME, kfp_steps.image)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    pod["securityContext"] = {**pod.get("securityContext", {}), "runAsUser": USER, "runAsGroup": 0}
    cluster.add_runtime(runtime)
    yield made
    cluster.add_runtime(steps.runtime(steps.STEP_RUNTIME, kfp_steps.image))
    cluster.api.delete("v1", "PersistentVolume", "", made.claim)


@pytest.fixture(scope="module")
def dataset(run: Run) -> str:
    """Directory to which the pipeline's first step has downloaded the data."""
    source = {"pipelinechannel--dataset": f"file://{steps.EXAMPLES}/data/digits.csv.gz"}
    ended = run.run("initialize-dataset", source, task_config=run.config())
    return str(ended.output["parameterValues"]["uri"])


def test_a_step_that_is_not_root_writes_to_the_workspace(run: Run, dataset: str) -> None:
    assert dataset == f"file://{MOUNTED}/dataset"
    assert run.workspace.stat().st_uid == 0
    downloaded = run.workspace / "dataset" / "digits.csv.gz"
    assert downloaded.stat().st_uid == USER
    assert downloaded.read_bytes() == (ROOT / "dags_examples" / "data" / "digits.csv.gz").read_bytes()


def test_two_nodes_train_in_the_workspace_and_the_next_step_reads_it(run: Run, dataset: str) -> None:
    site = images.torch_packages()
    if not site:
        pytest.skip("TRAINJOB_TORCH_PYTHON does not name the Python 3.11 of an environment with PyTorch")
    passed_on = {
        "pipelinechannel--image": run.steps.image,
        "pipelinechannel--initialize-dataset-uri": dataset,
        "pipelinechannel--epochs": 2.0,
    }
    # PyTorch is mounted, so torchrun is started as a module. The unchanged pipeline writes its model to S3.
    command = run.tasks["train"]["inputs"]["parameters"]["command"]["runtimeValue"]["constant"]
    by_module = ["python", "-m", "torch.distributed.run"]
    changed = [each for word in command for each in (by_module if word == "torchrun" else [word])]
    model = f"file://{MOUNTED}/model"
    trained = run.run("train", passed_on, command=changed, outputs={"model": model}, task_config=run.config(site))

    assert "[node-0] rank 0 of 2 starts" in trained.log
    assert "[node-1] rank 1 of 2 starts" in trained.log
    values = trained.output["parameterValues"]
    assert values["model_uri"] == model
    assert values["result"]["metrics"]["accuracy"] > 0.5
    config = json.loads((run.workspace / "model" / "config.json").read_text())
    assert config["accuracy"] == pytest.approx(values["result"]["metrics"]["accuracy"])
    assert list((run.workspace / "checkpoints").iterdir()), "checkpoints were written"

    next_step = Execution(
        "initialize_model",
        {"source": f"{model}/", "target": f"file://{MOUNTED}/next", "task_config": run.config()},
        run=run.id,
    )
    ended = run.steps.run(next_step)
    assert ended.code == 0, ended.log
    read = run.workspace / "next" / "model.safetensors"
    assert read.stat().st_uid == USER
    assert read.read_bytes() == (run.workspace / "model" / "model.safetensors").read_bytes()

    cleaned = run.run("cleanup", {})
    assert cleaned.output["parameterValues"] == {"stopped": []}
