"""The example trainings with real processes, as Trainer's runtimes start them."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tests.local.conftest import TORCH_PYTHON, needs_torch
from tests.processes import free_port

from trainjob import progress
from trainjob.evaluation import Scores

ROOT = Path(__file__).parents[2]
DATA = ROOT / "dags_examples" / "data"
TRAINING = ROOT / "dags_examples" / "training"

# Each takes seconds on an idle machine; three starts of PyTorch took 88 s on two busy cores.
pytestmark = pytest.mark.timeout(400)


@dataclass
class Ended:
    codes: list[int]
    output: list[str]
    """Output of each process for JAX, of all processes together for torchrun."""

    @property
    def text(self) -> str:
        return "\n".join(self.output)


def run_all(commands: Sequence[Sequence[object]], environments: Sequence[dict[str, str]]) -> Ended:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KUBEFLOW_", "JAX_", "TRAINJOB_"))}
    started = [
        subprocess.Popen(
            [*map(str, words)], env=clean | extra, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for words, extra in zip(commands, environments, strict=True)
    ]
    try:
        output = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return Ended([process.returncode for process in started], output)


def script(name: str, *words: object) -> Ended:
    """Run a script of the examples in one process."""
    return run_all([[sys.executable, TRAINING / name, *words]], [{}])


def jax(log: Path, *arguments: object) -> Ended:
    """Two processes with the environment of Trainer's JAX plugin (pkg/runtime/framework/plugins/jax)."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, TRAINING / "digits_jax.py", "--dataset", DATA, *arguments]
    shared = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": address}
    ranks = [{"JAX_PROCESS_ID": str(rank), "TRAINJOB_TERMINATION_LOG": f"{log}-{rank}"} for rank in (0, 1)]
    return run_all([command] * 2, [shared | rank for rank in ranks])


def torch(script: Path, *arguments: object, **environment: str) -> Ended:
    """Two processes of torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    components = str(ROOT / "components")  # trainjob is not installed in that environment
    fixed = {"PYTHONPATH": components, "OMP_NUM_THREADS": "1"}
    return run_all([[TORCH_PYTHON, *launcher, script, *arguments]], [fixed | environment])


def digits_torch(log: Path, *arguments: object, **environment: str) -> Ended:
    words = ("--dataset", DATA.as_uri(), *arguments)
    return torch(TRAINING / "digits_torch.py", *words, TRAINJOB_TERMINATION_LOG=f"{log}-0", **environment)


def reported(log: Path) -> progress.Report:
    """The report of rank 0."""
    report = progress.read(Path(f"{log}-0").read_text())
    assert report is not None
    return report


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", TRAINING / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def accuracy_of(directory: Path, ended: Ended, report: progress.Report, digits: Any, framework: str) -> float:
    """Check that the stored model has the weights of every rank and the reported accuracy; return the accuracy."""
    assert ended.codes == [0] * len(ended.codes), ended.text
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        metadata = file.metadata()
    ends = dict(re.findall(r"rank (\d) ends with weights (\w+)", ended.text))
    assert ends == {"0": digits.digest(weights), "1": digits.digest(weights)}

    data = digits.load(str(DATA))
    hidden = np.maximum(data.test_images @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
    answers = (hidden @ weights["output.weight"].T + weights["output.bias"]).argmax(axis=1)
    accuracy = float((answers == data.test_labels).mean())
    config = json.loads((directory / "config.json").read_text())
    assert accuracy > 0.95
    assert [float(report.metrics["accuracy"]), config["accuracy"]] == pytest.approx([accuracy] * 2, abs=1e-6)
    assert config["framework"] == metadata["framework"] == framework
    assert config["dataset_sha256"] == hashlib.sha256((DATA / "digits.csv.gz").read_bytes()).hexdigest()
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    return accuracy


@pytest.fixture(scope="module")
def champion(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended, progress.Report]:
    """One JAX training of two processes that the tests share."""
    directory = tmp_path_factory.mktemp("jax")
    ended = jax(directory / "log", "--output", directory / "model")
    assert ended.codes == [0, 0], ended.text
    assert not (directory / "log-1").exists(), "only rank 0 reports"
    return directory / "model", ended, reported(directory / "log")


@pytest.mark.full
def test_two_jax_processes_train_one_model(champion: tuple[Path, Ended, progress.Report], digits: ModuleType) -> None:
    directory, ended, report = champion
    assert [re.findall(r"rank (\d) of 2 starts", text) for text in ended.output] == [["0"], ["1"]]
    epochs = [re.findall(r"^epoch (\d+)/20 loss [\d.]+ accuracy [\d.]+$", text, re.MULTILINE) for text in ended.output]
    assert epochs == [[str(n) for n in range(1, 21)], []]
    accuracy_of(directory, ended, report, digits, "jax")
    assert (report.progress, report.remaining_seconds) == (100, 0)
    assert set(report.metrics) == {"loss", "accuracy", "epoch"}
    assert report.outputs == {"model": directory.as_uri()}


def test_the_evaluation_uses_images_that_no_training_reads(
    champion: tuple[Path, Ended, progress.Report], digits: ModuleType, tmp_path: Path
) -> None:
    data, (images, labels) = digits.load(str(DATA)), digits.held_out(str(DATA))
    assert [len(each) for each in (data.train_images, data.test_images, images, labels)] == [1437, 180, 180, 180]
    everything = np.concatenate([images, data.test_images, data.train_images])
    with gzip.open(DATA / "digits.csv.gz") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.int32)[:, :64]
    assert sorted(map(tuple, (everything * 16).astype(int).tolist())) == sorted(map(tuple, rows.tolist()))

    ended = script("evaluate_digits.py", champion[0], DATA, tmp_path / "scores.json")
    assert ended.codes == [0], ended.text
    scores = Scores.parse(json.loads((tmp_path / "scores.json").read_text()), "candidate")
    assert scores.metrics["accuracy"] > 0.95
    assert f"accuracy {scores.metrics['accuracy']:.4f}" in ended.text
    assert scores.examples == sum(each.examples or 0 for each in scores.slices.values()) == 180
    assert set(scores.slices) == {f"digit={digit}" for digit in range(10)}
    assert scores.confusion is not None
    assert sum(scores.confusion["counts"][7]) == scores.slices["digit=7"].examples


def test_two_processes_compute_the_same_as_one(champion: tuple[Path, Ended, progress.Report], tmp_path: Path) -> None:
    ended = script("digits_jax.py", "--dataset", DATA, "--output", tmp_path / "one")
    assert ended.codes == [0], ended.text
    with (
        safe_open(champion[0] / "model.safetensors", framework="numpy") as two,
        safe_open(tmp_path / "one" / "model.safetensors", framework="numpy") as one,
    ):
        for name in two.keys():  # noqa: SIM118 - not a dict
            # The sums differ only in the order of their terms.
            np.testing.assert_allclose(two.get_tensor(name), one.get_tensor(name), atol=2e-3)


def test_a_remote_location_is_refused_with_advice(tmp_path: Path) -> None:
    ended = script("digits_jax.py", "--dataset", "s3://bucket/digits", "--output", tmp_path)
    assert ended.codes == [1]
    assert "s3://bucket/digits is not a local path: start this script by `trainjob exec" in ended.text


@pytest.mark.full
@needs_torch
def test_two_torch_processes_train_one_model(
    champion: tuple[Path, Ended, progress.Report], digits: ModuleType, tmp_path: Path
) -> None:
    output, log = tmp_path / "model", tmp_path / "log"
    ended = digits_torch(log, "--output", output.as_uri())
    assert sorted(re.findall(r"rank (\d) of 2 starts", ended.text)) == ["0", "1"]
    before = accuracy_of(output, ended, reported(log), digits, "torch")
    assert reported(log).outputs == {"model": output.as_uri()}

    # Each framework continues from the other's model.
    continued = ("--epochs", 2, "--learning-rate", 0.01, "--output", tmp_path / "continued")
    ended = jax(log, "--model", output, *continued)
    assert accuracy_of(tmp_path / "continued", ended, reported(log), digits, "jax") >= before
    ended = digits_torch(log, "--model", champion[0], *continued)
    accuracy_of(tmp_path / "continued", ended, reported(log), digits, "torch")


@pytest.mark.full
@needs_torch
def test_a_failed_torch_rank_ends_the_other_and_the_next_run_resumes(tmp_path: Path) -> None:
    """`tests/local/test_recovery.py` tests more interruptions, with JAX."""
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoints" / "of-this-work"
    undisturbed = digits_torch(log, "--epochs", 4, "--output", tmp_path / "undisturbed")
    arguments = ("--epochs", 4, "--output", tmp_path / "model")
    failure = ("--fail-at-epoch", 3, "--fail-rank", 1, "--exit-code", 7)
    ended = digits_torch(log, *arguments, *failure, TRAINJOB_CHECKPOINT=str(checkpoint))
    assert ended.codes == [1]
    assert re.search(r"exitcode\s*: 7", ended.text)
    assert not (tmp_path / "model").exists()
    ended = digits_torch(log, *arguments, TRAINJOB_CHECKPOINT=str(checkpoint))
    assert ended.codes == [0], ended.text
    assert sorted(re.findall(r"rank (\d) resumes after epoch 2\n", ended.text)) == ["0", "1"]
    assert re.findall(r"^epoch (\d)/4", ended.text, re.MULTILINE) == ["3", "4"]
    assert reported(log).metrics["resumed_after_epoch"] == 2
    ends = [sorted(re.findall(r"rank \d ends with weights \w+", each.text)) for each in (undisturbed, ended)]
    assert ends[0] == ends[1] != []
    assert not list(checkpoint.iterdir())


@pytest.mark.full
@needs_torch
def test_ranks_that_write_one_checkpoint_resume_from_the_latest_complete_one(tmp_path: Path) -> None:
    """`trainjob.checkpoints` with PyTorch's distributed checkpoints."""
    train, checkpoints = Path(__file__).with_name("distributed_checkpoints.py"), tmp_path / "checkpoints"
    ended = torch(train, TRAINJOB_CHECKPOINT=str(checkpoints), FAIL_AT="3")
    assert re.search(r"exitcode\s*: 7", ended.text), ended.text
    assert (checkpoints / "unfinished-3").is_dir()
    ended = torch(train, TRAINJOB_CHECKPOINT=str(checkpoints))
    assert ended.codes == [0], ended.text
    ends = re.findall(r"rank (\d) resumed after step 2 and ends with 160\n", ended.text)  # 5 steps, 32 elements
    assert sorted(ends) == ["0", "1"], ended.text
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000004-step-4", "000005-step-5"]
