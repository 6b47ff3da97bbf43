"""`trainjob report` for steps that failed, whose outputs KFP drops, and for whole runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kfp.test_steps import FAILING, RUN, document_of, script

from trainjob._manifest.workflow_labels import KFP_RUN

if TYPE_CHECKING:
    from tests.kfp.conftest import Steps

# A pipeline as a user writes it: a training that completes, and one that fails. kfp.local stops at a failure.
PIPELINE = """
from kfp import dsl, local
from trainjob_kfp import train

GOOD = 'from trainjob import progress; progress.report(metrics={"loss": 0.25})'

@dsl.pipeline
def sweep() -> None:
    given = {"runtime": "jax-distributed", "backend": "local"}
    good = train(command=["python", "-c", GOOD], **given)
    train(command=["python", "-c", 'raise ValueError("no labels")'], **given).after(good)

local.init(local.SubprocessRunner(use_venv=False), raise_on_error=False)
sweep()
"""


def trainjob(steps: Steps, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the program in the directory of the steps."""
    program = [sys.executable, "-c", "from trainjob.cli import main; main()", *words]
    return subprocess.run(
        program, cwd=steps.directory, env=steps.variables(), capture_output=True, text=True, timeout=120, check=False
    )


def test_the_last_line_of_a_failed_step_makes_its_page(steps: Steps) -> None:
    ended = steps.run("train", **script(FAILING), num_nodes=2)
    assert (ended.code, ended.output) == (1, {}), ended.log
    label, _, command = ended.log.splitlines()[-1].partition(": trainjob ")
    assert label == "report"
    words = shlex.split(command)
    made = trainjob(steps, words)
    assert made.returncode == 0, made.stderr
    document = document_of((steps.directory / words[-1]).read_text())
    assert (document["phase"], document["task"]) == ("Failed", "train")
    assert document["diagnosis"]["summary"].startswith("node-1 exited with code 7")
    assert document["logs"]


def test_the_run_of_a_failed_step_has_a_page(steps: Steps) -> None:
    assert steps.run("train", **script(FAILING), num_nodes=2).code == 1
    document = report(steps, RUN)
    assert RUN in document["title"]
    assert [(each["task"], each["phase"]) for each in document["trainings"]] == [("train", "Failed")]


def test_a_run_of_kfp_local_has_a_page_that_compares_its_trainings(steps: Steps) -> None:
    file = steps.directory / "sweep.py"
    file.write_text(PIPELINE)
    log = subprocess.run(
        [sys.executable, file],
        cwd=steps.directory,
        env=steps.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    ).stdout
    (run,) = {job["metadata"]["labels"][KFP_RUN] for job in steps.jobs()}
    assert re.fullmatch(r"sweep-\d{4}(-\d{2}){5}-\d{6}", run), log[-3000:]
    document = report(steps, run)
    trainings = {each["task"]: each for each in document["trainings"]}
    assert {name: each["phase"] for name, each in trainings.items()} == {"train": "Complete", "train-2": "Failed"}
    assert trainings["train"]["metrics"] == {"loss": 0.25}
    assert f"report: trainjob --backend local report default/{trainings['train-2']['name']}" in log


def report(steps: Steps, run: str) -> dict[str, Any]:
    """The document in the page of a run."""
    page = Path("run.html")
    made = trainjob(steps, ["--backend", "local", "report", run, "-o", str(page)])
    assert made.returncode == 0, made.stderr
    document = document_of((steps.directory / page).read_text())
    assert document["kind"] == "workflow", json.dumps(document)[:300]
    return document
