"""The examples of dags_examples/kfp: each compiles to a pipeline that a KFP backend can run, and requests a valid
TrainJob. Those that need no cluster run here, with kfp.local and real trainings."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kfp import dsl
from tests.fakes.model_registry import FakeRegistry
from tests.kfp.pipelines import dangling, validated

from trainjob import registry
from trainjob._spec import TrainJobSpec
from trainjob_kfp.execution import TRAINING_ARGUMENTS, Execution
from trainjob_kfp.runtime import spec_of

if TYPE_CHECKING:
    from tests.kfp.conftest import Steps

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "dags_examples" / "kfp").glob("*.py"))
MOUNTED = {
    "volumes": [{"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": "w-kfp-workspace"}}],
    "volume_mounts": [{"name": "kfp-workspace", "mountPath": "/kfp-workspace"}],
}

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def compiled(example: Path, directory: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile an example as a user does; a warning is an error."""
    path = directory / f"{example.stem}.yaml"
    command = [sys.executable, "-W", "error", str(example), "--compile", str(path), *options]
    subprocess.run(command, check=True, cwd=directory)
    return validated(path)


def tasks(spec: dict[str, Any]) -> dict[str, Any]:
    """All tasks, including those in loops, conditions and exit handlers."""
    dags = [spec["root"], *spec["components"].values()]
    return {name: task for each in dags for name, task in each.get("dag", {}).get("tasks", {}).items()}


def rendered_spec(spec: dict[str, Any], task: str, parameters: dict[str, Any], config: dict[str, Any]) -> TrainJobSpec:
    """The spec that a task of `train` launches; `parameters` are the values inside its constants."""
    component = tasks(spec)[task]["componentRef"]["name"]
    definitions = spec["components"][component]["inputDefinitions"]["parameters"]
    given = {name: each["defaultValue"] for name, each in definitions.items() if "defaultValue" in each}
    inputs = tasks(spec)[task]["inputs"]["parameters"]
    given |= {name: each["runtimeValue"]["constant"] for name, each in inputs.items() if "runtimeValue" in each}
    execution = Execution("kfp/run/uuid/train", "run", "train", {**given, **parameters})
    plain = {name: execution.plain(value) for name, value in given.items()}
    return spec_of(execution, {name: plain[name] for name in TRAINING_ARGUMENTS}, {**plain, "task_config": config})


@each_example
def test_each_example_compiles_for_a_backend(example: Path, tmp_path: Path) -> None:
    spec, _ = compiled(example, tmp_path)
    assert spec["pipelineInfo"]["name"] == example.stem.replace("_", "-")
    assert spec["pipelineInfo"]["description"]
    assert dangling(spec) == []


@each_example
def test_each_example_documents_how_to_run_it(example: Path) -> None:
    text = ast.get_docstring(ast.parse(example.read_text()))
    assert text
    assert f"python dags_examples/kfp/{example.name} --compile {example.stem}.yaml" in text
    assert ("--local" in text) == ('"--local"' in example.read_text())


def test_the_documentation_lists_all_examples() -> None:
    linked = re.findall(r"\(\.\./\.\./dags_examples/kfp/(\w+)\.py\)", (ROOT / "docs" / "how-to" / "kfp.md").read_text())
    assert set(linked) == {example.stem for example in EXAMPLES}


def test_retrain_digits_with_another_framework(tmp_path: Path) -> None:
    spec, _ = compiled(ROOT / "dags_examples" / "kfp" / "retrain_digits.py", tmp_path, "--framework", "torch")
    steps = {"initialize-dataset", "initialize-model", "train", "evaluate-model", "export-model"}
    assert set(spec["root"]["dag"]["tasks"]) == steps
    assert spec["root"]["inputDefinitions"]["parameters"]["runtime"]["defaultValue"] == "torch-distributed"


def test_finetune_llm_requests_lora(tmp_path: Path) -> None:
    spec, _ = compiled(ROOT / "dags_examples" / "kfp" / "finetune_llm.py", tmp_path)
    # KFP passes numbers as floats.
    values = {
        "trainjob--dataset": "hf://me/data",
        "trainjob--epochs": 3.0,
        "trainjob--lora_rank": 16.0,
    }
    job = rendered_spec(spec, "train", values, {})
    assert job.torchtune is not None
    assert job.torchtune.epochs == 3
    assert job.torchtune.peft_config is not None
    assert job.torchtune.peft_config.lora_rank == 16
    assert job.initializer is not None
    assert job.initializer.dataset is not None
    assert job.initializer.dataset.storage_uri == "hf://me/data"
    assert tasks(spec)["train"]["retryPolicy"]["backoffMaxDuration"] == f"{30 * 24 * 3600}s"


def test_train_torch_passes_the_task_settings_to_the_job(tmp_path: Path) -> None:
    spec, kubernetes = compiled(ROOT / "dags_examples" / "kfp" / "train_torch.py", tmp_path)
    container = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    assert container["resources"]["accelerator"]["resourceCount"] == "8"
    assert set(kubernetes["exec-train"]) == {"configMapAsEnv", "nodeSelector", "secretAsEnv", "tolerations"}
    passed = {each["field"] for each in spec["components"]["comp-train"]["taskConfigPassthroughs"]}
    assert {"RESOURCES", "ENV", "KUBERNETES_NODE_SELECTOR", "KUBERNETES_TOLERATIONS", "KUBERNETES_VOLUMES"} <= passed

    values = {
        "trainjob--initialize-dataset-uri": "file:///kfp-workspace/dataset",
        "trainjob--epochs": 20.0,
    }
    job = rendered_spec(spec, "train", values, {**MOUNTED, "resources": {"limits": {"nvidia.com/gpu": "8"}}})
    assert job.inputs == {"dataset": "file:///kfp-workspace/dataset"}
    assert job.checkpoints == "file:///kfp-workspace/checkpoints"
    assert "/kfp-workspace" in json.dumps(job.runtime_patches)
    # KFP mounts the workspace only for a step that has its path in a text parameter.
    target = tasks(spec)["initialize-dataset"]["inputs"]["parameters"]["target"]["runtimeValue"]["constant"]
    assert target == f"file://{dsl.WORKSPACE_PATH_PLACEHOLDER}/dataset"
    assert tasks(spec)["cleanup"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


@pytest.mark.full
@pytest.mark.timeout(500)
def test_tune_digits_exports_the_best(steps: "Steps") -> None:
    steps.python = sys.executable  # with Optuna
    with FakeRegistry() as fake:
        steps.environment["TRAINJOB_REGISTRY"] = f"kubeflow+{fake.url}"
        log = steps.run_example("tune_digits.py", "--trials", "2", "--parallel", "1", "--epochs", "3")
        records = registry.connect(steps.environment["TRAINJOB_REGISTRY"])
        (version,) = records.list("digits")
        assert records.resolve("digits", "champion").version == version.version

    accuracies = {}
    for config in steps.directory.glob("local_outputs/tune-digits-*/tune/model/*/config.json"):
        accuracies[config.parent.name] = json.loads(config.read_text())["accuracy"]
    assert set(accuracies) == {"0", "1"}
    best = max(accuracies, key=lambda number: accuracies[number])
    assert f"best: trial {best}, accuracy" in log
    (exported,) = (steps.home / "models").rglob("config.json")
    assert json.loads(exported.read_text())["accuracy"] == accuracies[best]
    assert version.metrics["accuracy"] > 0.5, "on the dataset of the evaluation"
