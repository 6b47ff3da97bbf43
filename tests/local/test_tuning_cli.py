"""`trainjob tune` as people and scripts use it, and the page of a study."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from tests.local.test_tuning import SCRIPT, SPACE
from tests.processes import eventually

TRAINJOB = str(Path(sys.executable).parent / "trainjob")


class Shell:
    """Runs the command with a separate home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TRAINJOB_")}
        self.environment = clean | {"TRAINJOB_BACKEND": "local", "TRAINJOB_HOME": str(home), "TERM": "xterm"}
        home.mkdir(exist_ok=True)
        (home / "trial.py").write_text(SCRIPT)

    def study(self, seconds: float = 0, **fields: Any) -> str:
        command = [sys.executable, str(self.home / "trial.py"), "--x=$(KUBEFLOW_TRAINER_OPT_X)"]
        template = {
            "runtime": "trainjob-step",
            "command": command,
            "outputs": {"model": (self.home / "models").as_uri()},
            "env": {"STEP_SECONDS": str(seconds)},
        }
        made = {"space": SPACE, "metric": "loss", "direction": "minimize", "max_trials": 3, "parallel": 2}
        path = self.home / "study.yaml"
        path.write_text(yaml.safe_dump(made | {"template": template} | fields))
        return str(path)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return subprocess.Popen([TRAINJOB, *words], env=self.environment, cwd=self.home, text=True, **(pipes | options))

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, out + err
        return out, err

    def running(self) -> list[str]:
        """Names of the running jobs."""
        jobs = json.loads(self.run("list", "--json")[0])["jobs"]
        return [job["name"] for job in jobs if job["phase"] == "Running"]


@pytest.fixture
def shell(home: Path) -> Shell:
    return Shell(home)


@pytest.mark.full
def test_a_study_is_run_continued_and_shown(shell: Shell) -> None:
    out, err = shell.run("tune", shell.study(), "--key", "digits/search")
    lines = out.splitlines()
    assert len([line for line in lines if " complete  loss " in line]) == 3
    assert "3 trials: 3 complete" in lines
    best = next(line for line in lines if line.startswith("best: trial "))
    assert f"trainjob status {best.rpartition(' ')[2]}" in err
    assert f"to continue it after an interruption: trainjob tune {shell.home}/study.yaml --key digits/search" in err
    again, _ = shell.run("tune", shell.study(max_trials=4), "--key", "digits/search", "--json")
    events = [json.loads(line) for line in again.splitlines()]
    assert events[0]["event"] == "study"
    assert Path(events[0]["journal"].removeprefix("file://")).parent == shell.home / "studies"
    assert events[-1]["event"] == "result"
    assert len(events[-1]["trials"]) == 4
    assert {"running", "complete"} <= {event["state"] for event in events if event["event"] == "trial"}
    document = json.loads(shell.run("report", "digits/search", "--json")[0])
    assert (document["kind"], document["state"], document["key"]) == ("study", "ended", "digits/search")
    assert document["best"] == events[-1]["best"]["number"]
    assert len(document["trials"]) == 4
    assert set(document["importances"]) == {"x", "n"}
    assert shell.run("report", "digits/search", "-o", "page.html")[0] == "page.html\n"
    assert "digits/search" in (shell.home / "page.html").read_text()


@pytest.mark.full
def test_ctrl_c_cancels_the_running_trials(shell: Shell) -> None:
    process = shell.start("tune", shell.study(seconds=60), "--key", "k")
    eventually(lambda: len(shell.running()) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cancelled 2 trials" in err
    assert f"continue the study: trainjob tune {shell.home}/study.yaml --key k" in err
    assert "Traceback" not in err
    eventually(lambda: not shell.running())
    document = json.loads(shell.run("report", "k", "--json")[0])
    assert (document["kind"], document["state"], len(document["trials"])) == ("study", "running", 2)


@pytest.mark.full
def test_a_terminal_shows_a_bar(shell: Shell) -> None:
    master, terminal = pty.openpty()
    try:
        process = shell.start("tune", shell.study(seconds=0.1), "--key", "k", stdout=terminal, stderr=terminal)
        os.close(terminal)
        text = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(master, 65536):
                text += part
        process.wait(60)
    finally:
        os.close(master)
    assert process.returncode == 0
    assert "━".encode() in text
    assert re.search(rb"[12] complete", text)
    assert b"Ctrl-C cancels the running trials" in text


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"template": None}, ["template: is missing (write the fields of the TrainJob of a trial below it)"]),
        ({"template": {"rutime": "x"}, "metrik": 1}, ["template.rutime: no such field", "metrik: no such field"]),
        ({"space": {}}, ["space: "]),
    ],
)
def test_a_file_with_problems(shell: Shell, change: dict[str, Any], problems: list[str]) -> None:
    _, err = shell.run("tune", shell.study(**change), code=2)
    for problem in problems:
        assert problem in err


@pytest.mark.full
def test_an_optuna_storage_is_the_workspace_and_its_password_is_a_reference(shell: Shell) -> None:
    url = f"sqlite:///{shell.home}/studies.db"
    _, err = shell.run("tune", shell.study(max_trials=1), "--key", "a/b", "--workspace", url)
    assert "the template does not use KUBEFLOW_TRAINER_OPT_N: the script must read that from its environment" in err
    (trial,) = optuna.load_study(study_name="a/b", storage=url).trials
    assert trial.state is optuna.trial.TrialState.COMPLETE
    shell.environment["TRAINJOB_WORKSPACE"] = url
    assert len(json.loads(shell.run("report", "a/b", "--json")[0])["trials"]) == 1
    out, err = shell.run(
        "tune", shell.study(), "--workspace", "postgresql+psycopg2://me:hunter2@127.0.0.1:1/db", code=2
    )
    assert "hunter2" not in out + err
    url = "postgresql+psycopg2://me:$(DB_PASSWORD)@127.0.0.1:1/db"
    shell.environment |= {"DB_PASSWORD": "hunter2", "TRAINJOB_WORKSPACE": url}
    out, err = shell.run("tune", shell.study(), code=3)
    assert f"{url}: connection to server" in " ".join(err.split())
    assert "hunter2" not in out + err


def test_a_study_without_a_complete_trial(shell: Shell) -> None:
    (shell.home / "trial.py").write_text("raise SystemExit(3)")
    _, err = shell.run("tune", shell.study(max_trials=1), code=1)
    assert "no trial of study" in err
    assert "node-0 exited with code 3" in err
