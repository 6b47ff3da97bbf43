"""`trainjob report` of jobs of this machine."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from click.testing import CliRunner
from tests.local.conftest import Jobs
from tests.page.parsed import Parsed

from trainjob import JobRef
from trainjob.cli.program import program


def report(jobs: Jobs, *words: str, code: int = 0) -> str:
    with contextlib.chdir(jobs.home):
        done = CliRunner().invoke(program, ["report", "--backend", "local", *words])
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


def page(jobs: Jobs, name: str) -> Any:
    """The document that a page embeds."""
    return Parsed((jobs.home / name).read_text()).data["document"]


def found(jobs: Jobs, name: str) -> Any:
    return json.loads(report(jobs, name, "--json"))


def workflow(jobs: Jobs, dag: str) -> JobRef:
    origin = {"dag_id": dag, "run_id": "manual", "task_id": "train"}
    return jobs.client.launch({"runtime": "trainjob-step", "command": ["true"]}, f"airflow/{dag}", origin=origin)


def test_a_report_of_a_job_a_key_and_a_workflow(jobs: Jobs) -> None:
    jobs.fails("echo first; exit 3", "study/a")
    second, other = jobs.run("echo second", "study/a"), jobs.run("true", "study/b")
    jobs.client.wait(workflow(jobs, "digits"))
    assert report(jobs, second.name) == f"{second.name}.html\n"
    of_job = page(jobs, f"{second.name}.html")
    assert (of_job["kind"], of_job["phase"], of_job["key"]) == ("training", "Complete", "study/a")
    assert [each["phase"] for each in of_job["attempts"]] == ["Failed", "Complete"]
    assert of_job["logs"][-1]["text"] == "second"

    assert report(jobs, "study/a", "-o", "key.html") == "key.html\n"
    assert page(jobs, "key.html")["name"] == second.name
    assert report(jobs, f"default/{other.name}", "-o", "-").startswith("<!doctype html>")

    assert report(jobs, "study") == "study.html\n"
    of_prefix = page(jobs, "study.html")
    assert (of_prefix["kind"], of_prefix["title"]) == ("workflow", "study/")
    assert [each["key"] for each in of_prefix["trainings"]] == ["study/a", "study/b"]
    for name in ("manual", "digits/manual"):
        assert report(jobs, name, "-o", "run.html") == "run.html\n"
        assert page(jobs, "run.html")["title"] == "DAG digits, run manual"

    of_other = found(jobs, "study/b")
    assert (of_other["kind"], of_other["name"]) == ("training", other.name)
    assert not (jobs.home / f"{other.name}.html").exists()


def test_a_name_comes_before_a_key_and_a_key_before_a_workflow(jobs: Jobs) -> None:
    first = jobs.run("true", "first")
    same = jobs.run("true", first.name)
    inner = jobs.run("true", "first/inner")
    assert found(jobs, first.name)["key"] == "first"
    assert found(jobs, "first")["name"] == first.name
    assert found(jobs, "first/")["trainings"][0]["name"] == inner.name
    assert found(jobs, same.name)["key"] == first.name


def test_a_report_of_something_unknown_or_ambiguous(jobs: Jobs) -> None:
    for dag in ("digits", "letters"):
        workflow(jobs, dag)
    unknown = report(jobs, "no/such", code=2)
    assert "nothing is named 'no/such'; looked for:\n  TrainJob no/such\n  jobs with the key 'no/such'" in unknown
    assert "list the jobs: trainjob --backend local list -n default\n" in unknown
    ambiguous = report(jobs, "manual", code=2)
    assert "'manual' names 2 workflows; write DAG/RUN for one of them:" in ambiguous
    assert "\n  DAG digits, run manual\n  DAG letters, run manual\n" in ambiguous
    assert found(jobs, "letters/manual")["title"] == "DAG letters, run manual"


@pytest.mark.parametrize("what", ["", " ", "/", "..", "-", "a" * 5000, "\x1b]0;x\x07", "<script>", "../../etc/passwd"])
def test_a_strange_name_is_unknown(jobs: Jobs, what: str) -> None:
    jobs.home.mkdir()
    text = report(jobs, "--", what, code=2)
    assert "looked for:" in text
    assert "\x1b" not in text
    assert len(text) < 3000
