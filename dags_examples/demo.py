"""``make demo``: runs the retraining workflow from Airflow and from Kubeflow Pipelines on this machine.

Both run the same five steps on the local backend, with MLflow on a SQLite file as the registry. The first run starts
fresh and its model becomes the champion. The second starts from that champion, evaluates both models on held-out
images, and replaces the champion only if its model passes the gate. All files are under ``.demo``, which the next start
deletes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainjob import Phase, TrainJobClient, observe
from trainjob.registry import connect as connect_registry

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / ".demo"
BIN = Path(sys.executable).parent

ENVIRONMENT = {
    "TRAINJOB_BACKEND": "local",
    "TRAINJOB_HOME": str(DEMO / "home"),
    "TRAINJOB_REGISTRY": f"mlflow+sqlite:///{DEMO / 'registry.db'}",
    "TRAINJOB_WORKSPACE": f"file://{DEMO / 'workspace'}",
    "TRAINJOB_MODELS": f"file://{DEMO / 'models'}",
    "AIRFLOW_HOME": str(DEMO / "airflow"),
    "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags_examples" / "airflow"),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
}

console = Console()
if not console.is_terminal:
    console = Console(width=130)  # a log file has no width; the tables need this much


def run(title: str, *command: str) -> None:
    """Run one part with its output in a log file; print the end of the log if it fails."""
    log = DEMO / (title.lower().replace(" ", "-") + ".log")
    start = time.monotonic()
    with console.status(f"{title} … ({log.relative_to(ROOT)})"), log.open("wb") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode
    if code != 0:
        console.print(f"[red]{title} failed[/] with exit code {code}; last lines of {log.relative_to(ROOT)}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-40:]))
        sys.exit(1)
    console.print(f"{title}: {time.monotonic() - start:.0f} s")


def main() -> None:
    """Run both workflows and print a summary."""
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    os.environ.update(ENVIRONMENT)
    run("Airflow database", str(BIN / "airflow"), "db", "migrate")
    # Few epochs, so that the second run can still improve the model.
    params = {"epochs": 4, "workspace": ENVIRONMENT["TRAINJOB_WORKSPACE"], "models": ENVIRONMENT["TRAINJOB_MODELS"]}
    run("Retraining from Airflow", str(BIN / "airflow"), "dags", "test", "retrain_digits", "--conf", json.dumps(params))
    run(
        "Retraining from Kubeflow Pipelines",
        sys.executable,
        str(ROOT / "dags_examples" / "kfp" / "retrain_digits.py"),
        "--local",
    )
    summary()


def summary() -> None:
    """Print steps, durations and metrics of both runs, and the registered versions with their locations."""
    with TrainJobClient() as client:
        jobs = sorted(client.list(), key=lambda job: str(job["metadata"]["creationTimestamp"]))
    steps = Table(title="TrainJobs (trainjob list)", title_justify="left")
    for column in ("run from", "step", "TrainJob", "phase", "seconds", "accuracy", "loss"):
        right = column in ("seconds", "accuracy", "loss")
        steps.add_column(column, justify="right" if right else "left", no_wrap=True)
    for job in jobs:
        steps.add_row(*_row(job))
    console.print(steps)

    versions = Table(title="Registered versions of 'digits'", title_justify="left")
    for column in ("version", "aliases", "accuracy", "gate", "model"):
        versions.add_column(column, overflow="fold")
    registered = sorted(connect_registry().list("digits"), key=lambda version: int(version.version))
    for version in registered:
        measured, passed = f"{version.metrics['accuracy']:.4f}", version.tags["trainjob.evaluation.passed"] == "true"
        gate = "[green]passed[/]" if passed else "[red]did not pass[/]"
        versions.add_row(version.version, ", ".join(version.aliases), measured, gate, version.uri)
    console.print(versions)
    for version in registered:
        rule, reason = (version.tags[f"trainjob.evaluation.{name}"] for name in ("rule", "reason"))
        console.print(f"Gate of version {version.version}: {rule}: {reason}", highlight=False)
    console.print(
        "To look at the jobs:\n"
        f"  export TRAINJOB_BACKEND=local TRAINJOB_HOME={_shown(DEMO / 'home')}\n"
        f"  {_shown(BIN / 'trainjob')} list\n"
        f"  {_shown(BIN / 'trainjob')} logs {next(_name(job) for job in jobs if _name(job).startswith('train-'))}"
    )
    champions = [version for version in registered if "champion" in version.aliases]
    good = all(version.metrics["accuracy"] > 0.9 for version in registered)
    earned = all(version.tags["trainjob.evaluation.passed"] == "true" for version in champions)
    if len(registered) != 2 or len(champions) != 1 or not good or not earned:
        sys.exit("expected two versions, one champion that passed its gate, and accuracies above 0.9")


def _shown(path: Path) -> Path:
    """The path as a command names it: relative to the checkout, unless it is outside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _name(job: Mapping[str, Any]) -> str:
    return str(job["metadata"]["name"])


def _row(job: Mapping[str, Any]) -> tuple[str, ...]:
    observation = observe(job)
    key = str(job["metadata"]["annotations"]["trainjob.dev/key"])
    began = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    seconds = f"{(observation.finished - began).total_seconds():.1f}" if observation.finished else ""
    metrics = [
        f"{float(observation.metrics[name]):.4f}" if name in observation.metrics else ""
        for name in ("accuracy", "loss")
    ]
    color = "green" if observation.phase is Phase.COMPLETE else "red"
    return (
        {"airflow": "Airflow", "kfp": "KFP"}.get(key.partition("/")[0], key),
        key.rpartition("/")[2],
        _name(job),
        f"[{color}]{observation.phase}[/]",
        seconds,
        *metrics,
    )


if __name__ == "__main__":
    main()
