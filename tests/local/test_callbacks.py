"""The callbacks of `trainjob.callbacks`, with the real libraries: a tiny model, 6 steps on a CPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.local.conftest import TORCH_PYTHON, needs_torch

from trainjob import progress

pytestmark = [
    pytest.mark.timeout(400),  # the libraries take 10 s to import on an idle machine
    pytest.mark.full,
    needs_torch,
]

HUGGINGFACE = """
from trainjob.callbacks.huggingface import ProgressCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}

data = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 12
arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, eval_strategy="epoch",
    prediction_loss_only=True, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
)
callback = ProgressCallback()
Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]).train()
counted = reporting._counter.count, reporting._counter.number()
another_rank = SimpleNamespace(is_world_process_zero=False, global_step=99, max_steps=100)
callback.on_step_end(None, another_rank, None)
callback.on_log(None, another_rank, None, {"loss": 1e9})
callback.on_train_end(None, another_rank, None)
assert reporting._counter.number() == {"step": 99}, "another rank counts its steps, too"
assert counted[0] >= 6 and counted[1] == {"step": 6}, counted
"""

LIGHTNING = """
from trainjob.callbacks.lightning import ProgressCallback

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        loss = (self.layer(batch) ** 2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("eval_loss", (self.layer(batch) ** 2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=4)
class EachStep(ProgressCallback):  # reports each step, as if it took a second
    def on_train_batch_end(self, *arguments):
        self._reported = -1e9
        super().on_train_batch_end(*arguments)

callback = EachStep()
LightningTrainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir="out", callbacks=[callback],
).fit(Model(), data, data)
counted = reporting._counter.count, reporting._counter.number()
another_rank = SimpleNamespace(
    is_global_zero=False, global_step=99, estimated_stepping_batches=100, callback_metrics={"loss": 1e9}
)
callback.on_train_batch_end(another_rank)
assert reporting._counter.number() == {"step": 99}, "another rank counts its steps, too"
assert counted[0] >= 6 and counted[1] == {"step": 6}, counted
callback.on_train_epoch_end(another_rank)
callback.on_train_end(another_rank)
"""


TENSORS = """
from trainjob.callbacks.metrics import numbers

tensors = {
    "brain": torch.tensor(0.5, dtype=torch.bfloat16), "learned": torch.tensor([0.25], requires_grad=True),
    "whole": torch.tensor(3), "flag": torch.tensor([True]),
    "vector": torch.zeros(2), "empty": torch.zeros(0), "meta": torch.zeros(1, device="meta"),
}
done, rate = torch.tensor([40.0]), torch.tensor(0.5)
progress.report(step=torch.tensor(7), progress=done, metrics=tensors, outputs={"rate": rate})
progress.step(torch.tensor([8]))
assert (reporting._counter.count, reporting._counter.step) == (2, 8)
assert numbers(tensors).keys() == {"brain", "learned", "whole", "flag"}
"""

# One process for all scripts: the imports take longer than the trainings.
ALL = """
import os
import sys
from types import SimpleNamespace

import torch
from lightning.pytorch import LightningModule, Trainer as LightningTrainer
from transformers import Trainer, TrainingArguments
from trainjob import progress
from trainjob.progress import reporting

for script, log in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:
        os.environ["TRAINJOB_TERMINATION_LOG"] = log
        exec(script)
        progress.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit("failed")
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, progress.Report | None]:
    """The reports of the trainings at their end."""
    place = tmp_path_factory.mktemp("callbacks")
    scripts = {"huggingface": HUGGINGFACE, "lightning": LIGHTNING, "tensors": TENSORS}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KUBEFLOW_", "TRAINJOB_"))}
    components = str(Path(progress.__file__).parents[2])
    env |= {"PYTHONPATH": components, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [word for name, script in scripts.items() for word in (script, str(place / name))]
    ended = subprocess.run(
        [TORCH_PYTHON, "-c", ALL, *words], env=env, capture_output=True, text=True, timeout=300, cwd=place, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return {name: progress.read((place / name).read_text()) for name in scripts}


@pytest.mark.parametrize("library", ["huggingface", "lightning"])
def test_a_training_is_reported(reports: dict[str, progress.Report | None], library: str) -> None:
    report = reports[library]
    assert report is not None
    assert report.progress == 100
    assert report.remaining_seconds == 0
    assert report.history["loss"][-1][0] == 6
    assert report.history["loss"][-1][2] < report.history["loss"][0][2], "another rank would report 1e9"
    assert [step for step, _, _ in report.history["eval_loss"]] == [3, 6], "both epochs end with an evaluation"
    assert {step for step, _, _ in report.history["loss"]} == set(range(1, 7))


def test_tensors_of_one_element_are_numbers_and_others_are_left_out(reports: dict[str, progress.Report | None]) -> None:
    report = reports["tensors"]
    assert report is not None
    assert report.metrics == {"brain": 0.5, "learned": 0.25, "whole": 3, "flag": True}
    assert (report.progress, report.details, report.outputs) == (40, {"step": 7}, {"rate": 0.5})
