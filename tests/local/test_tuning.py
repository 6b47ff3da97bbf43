"""Hyperparameter search with real trials on the local backend, and `trainjob tune` as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from tests.local.conftest import Jobs
from tests.local.searches import SCRIPT, SPACE, Searches, loss, study_of, template_of
from tests.local.shell import INTERRUPTED, Shell, Terminal, events, interrupt
from tests.processes import eventually

from trainjob.errors import StudyFailed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def searches(jobs: Jobs, tmp_path: Path) -> Searches:
    return Searches(jobs, tmp_path)


def test_a_study_finds_the_best_trial_and_is_continued(searches: Searches) -> None:
    result = searches.run(max_trials=6)
    assert [trial.state for trial in result.trials] == ["complete"] * 6
    assert result.best.value == min(trial.value for trial in result.trials if trial.value is not None)
    assert result.reason == "max_trials of 6 is reached"
    for trial in result.trials:
        assert trial.value == pytest.approx(loss(trial.parameters), abs=1e-3)
        assert trial.outputs == {"model": (searches.directory / "models" / str(trial.number)).as_uri()}
        assert [step for step, _ in trial.values][-1] == 5
    assert json.loads(json.dumps(result.as_dict()))["best"]["number"] == result.best.number
    assert max(len([trial for trial in trials if trial.state == "running"]) for trials in searches.seen) == 2
    assert searches.run(max_trials=6) == result
    assert searches.count("study", 6) == [1] * 6, "no trial ran again"
    more = searches.run(max_trials=8, parallel=3)
    assert (more.trials[:6], len(more.trials)) == (result.trials, 8)


def test_failed_trials_do_not_fail_the_study_up_to_a_limit(searches: Searches) -> None:
    searches.script.write_text(SCRIPT.replace("for step", "if n == 2: raise SystemExit(3)\nfor step"))
    result = searches.run(space={"x": SPACE["x"], "n": {"type": "int", "low": 1, "high": 2}}, max_trials=6)
    failed = [trial for trial in result.trials if trial.state == "failed"]
    assert {trial.parameters["n"] for trial in failed} == {2}
    assert failed[0].reason == "node-0 exited with code 3"
    assert result.best.parameters["n"] == 1
    searches.script.write_text("raise SystemExit(1)")
    with pytest.raises(StudyFailed, match="2 trials have failed, more than max_failed_trials"):
        searches.run("failures", max_trials=50, max_failed_trials=1, parallel=1)


def test_of_several_ranks_that_report_the_first_one_counts(searches: Searches) -> None:
    searches.script.write_text(
        "import os\nfrom trainjob import progress\nrank = int(os.environ['JOB_COMPLETION_INDEX'])\n"
        "progress.report(metrics={'loss': rank + float(os.environ['KUBEFLOW_TRAINER_OPT_X'])})\n"
    )
    result = searches.run(template=searches.template | {"num_nodes": 2}, max_trials=2)
    assert [trial.value for trial in result.trials] == [trial.parameters["x"] for trial in result.trials]


GRID = {"x": {"type": "categorical", "choices": [0.5, 1]}, "n": SPACE["n"]}


@pytest.mark.parametrize(
    ("fields", "reason", "trials"),
    [
        ({"stop_at": 100.0}, "loss has reached 100", range(1, 4)),
        ({"max_seconds": 3, "parallel": 1}, "max_seconds of 3.0 have passed", range(1, 50)),
        ({"space": GRID, "sampler": {"name": "grid"}}, "the grid has no further combination", range(6, 7)),
    ],
    ids=["value", "time", "grid"],
)
def test_a_study_ends_before_max_trials(searches: Searches, fields: dict[str, Any], reason: str, trials: range) -> None:
    template = template_of(searches.directory, seconds=0.1)
    result = searches.run(template=template, max_trials=50, **fields)
    assert result.reason == reason
    assert len(result.trials) in trials
    assert {trial.state for trial in result.trials} <= {"complete", "stopped"}
    if "space" in fields:
        assert len({json.dumps(trial.parameters, sort_keys=True) for trial in result.trials}) == 6
        assert result.best.parameters == {"x": 1, "n": 1}


# ---------------------------------------------------------------- the command line


def written(shell: Shell, seconds: float = 0, **fields: Any) -> str:
    """Write the file of a study; return its path."""
    path = shell.home / "study.yaml"
    template = template_of(shell.home, seconds)
    path.write_text(yaml.safe_dump(study_of(max_trials=3, template=template) | fields))
    return str(path)


@pytest.mark.full
def test_a_study_is_run_continued_and_shown(trainjob: Shell) -> None:
    out, err = trainjob.both("tune", written(trainjob), "--key", "digits/search")
    lines = out.splitlines()
    assert len([line for line in lines if " complete  loss " in line]) == 3
    assert "3 trials: 3 complete" in lines
    best = next(line for line in lines if line.startswith("best: trial "))
    assert f"trainjob status {best.rpartition(' ')[2]}" in err
    assert f"to continue it after an interruption: trainjob tune {trainjob.home}/study.yaml --key digits/search" in err
    reported = events(trainjob("tune", written(trainjob, max_trials=4), "--key", "digits/search", "--json"))
    assert reported[0]["event"] == "study"
    assert Path(reported[0]["journal"].removeprefix("file://")).parent == trainjob.home / "studies"
    assert reported[-1]["event"] == "result"
    assert len(reported[-1]["trials"]) == 4
    assert {"running", "complete"} <= {event["state"] for event in reported if event["event"] == "trial"}
    document = trainjob.json("report", "digits/search")
    assert (document["kind"], document["state"], document["key"]) == ("study", "ended", "digits/search")
    assert document["best"] == reported[-1]["best"]["number"]
    assert (len(document["trials"]), set(document["importances"])) == (4, {"x", "n"})
    assert trainjob("report", "digits/search", "-o", "page.html") == "page.html\n"
    assert "digits/search" in (trainjob.home / "page.html").read_text()


@pytest.mark.full
def test_ctrl_c_cancels_the_running_trials(trainjob: Shell) -> None:
    def running() -> list[str]:
        return [job["name"] for job in trainjob.json("list")["jobs"] if job["phase"] == "Running"]

    process = trainjob.start("tune", written(trainjob, seconds=60), "--key", "k")
    eventually(lambda: len(running()) == 2)
    code, _, err = interrupt(process)
    assert (code, "Traceback" in err) == (INTERRUPTED, False)
    assert "cancelled 2 trials" in err
    assert f"continue the study: trainjob tune {trainjob.home}/study.yaml --key k" in err
    eventually(lambda: not running())
    document = trainjob.json("report", "k")
    assert (document["kind"], document["state"], len(document["trials"])) == ("study", "running", 2)


@pytest.mark.full
def test_a_terminal_shows_a_bar(trainjob: Shell) -> None:
    terminal = Terminal(trainjob, "tune", written(trainjob, seconds=0.1), "--key", "k")
    assert terminal.wait() == 0
    assert "━" in terminal.text
    assert re.search(r"[12] complete", terminal.text)
    assert "Ctrl-C cancels the running trials" in terminal.text


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"template": None}, ["template: is missing (write the fields of the TrainJob of a trial below it)"]),
        ({"template": {"rutime": "x"}, "metrik": 1}, ["template.rutime: no such field", "metrik: no such field"]),
        ({"space": {}}, ["space: "]),
    ],
)
def test_a_file_with_problems(trainjob: Shell, change: dict[str, Any], problems: list[str]) -> None:
    _, err = trainjob.both("tune", written(trainjob, **change), code=2)
    assert [problem for problem in problems if problem not in err] == []


@pytest.mark.full
def test_an_optuna_storage_is_the_workspace_and_its_password_is_a_reference(trainjob: Shell) -> None:
    url = f"sqlite:///{trainjob.home}/studies.db"
    _, err = trainjob.both("tune", written(trainjob, max_trials=1), "--key", "a/b", "--workspace", url)
    assert "the template does not use KUBEFLOW_TRAINER_OPT_N: the script must read that from its environment" in err
    (trial,) = optuna.load_study(study_name="a/b", storage=url).trials
    assert trial.state is optuna.trial.TrialState.COMPLETE
    trainjob.environment["TRAINJOB_WORKSPACE"] = url
    assert len(trainjob.json("report", "a/b")["trials"]) == 1
    literal = "postgresql+psycopg2://me:hunter2@127.0.0.1:1/db"
    assert "hunter2" not in "".join(trainjob.both("tune", written(trainjob), "--workspace", literal, code=2))
    url = "postgresql+psycopg2://me:$(DB_PASSWORD)@127.0.0.1:1/db"
    trainjob.environment |= {"DB_PASSWORD": "hunter2", "TRAINJOB_WORKSPACE": url}
    out, err = trainjob.both("tune", written(trainjob), code=3)
    assert f"{url}: connection to server" in " ".join(err.split())
    assert "hunter2" not in out + err
