"""What a failed step leaves, whose outputs KFP drops, and `trainjob report` for it and for whole runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

from tests.kfp.conftest import RUN, Steps, document_of, script

FAILING = """
import os, sys
print("about to fail", flush=True)
sys.exit(7 if os.environ["JAX_PROCESS_ID"] == "1" else 0)
"""


def output_of(steps: Steps, *program: str) -> str:
    """Run a Python program in the directory of the steps; return all that it prints."""
    ended = subprocess.run(
        [sys.executable, *program],
        cwd=steps.directory,
        env=steps.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def reported(steps: Steps, words: list[str]) -> dict[str, Any]:
    """Run `trainjob` with words that end with the file of a page; return the document in the page."""
    output_of(steps, "-c", "from trainjob.cli import main; main()", *words)
    return document_of((steps.directory / words[-1]).read_text())


def run_page(steps: Steps, run: str) -> dict[str, Any]:
    """The document in the page of a run."""
    document = reported(steps, ["--backend", "local", "report", run, "-o", "run.html"])
    assert document["kind"] == "workflow", json.dumps(document)[:300]
    return document


def test_a_failed_step_explains_itself_and_has_pages(steps: Steps) -> None:
    """In its log, its termination message, and the page that the command in its last line makes."""
    ended = steps.run("train", **script(FAILING), num_nodes=2)
    assert (ended.code, ended.output) == (1, {}), ended.log
    assert "Traceback" not in ended.log
    assert ended.termination_message.startswith("TrainJob default/train-")
    assert ended.log.endswith(f"{ended.termination_message}\n")
    for text in (
        "failed: node-1 exited with code 7",
        "| about to fail",
        "category: user code; can be retried: the failure may not repeat",
    ):
        assert text in ended.termination_message

    (name,) = [job["metadata"]["name"] for job in steps.jobs()]
    last = ended.log.splitlines()[-1]
    assert last == f"report: trainjob --backend local report default/{name} -o {name}.html"
    document = reported(steps, shlex.split(last.partition(": trainjob ")[2]))
    assert (document["phase"], document["task"]) == ("Failed", "train")
    assert document["diagnosis"]["summary"].startswith("node-1 exited with code 7")
    assert document["logs"]
    page = run_page(steps, RUN)
    assert RUN in page["title"]
    assert [(each["task"], each["phase"]) for each in page["trainings"]] == [("train", "Failed")]
