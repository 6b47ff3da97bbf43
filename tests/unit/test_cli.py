"""Parsing, texts and exit codes of the command line, without jobs."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NoReturn

import click
import pytest
import yaml
from click.testing import CliRunner
from tests.unit.program import Program

from trainjob import __version__
from trainjob._support.display import numeric, rounded, short
from trainjob.cli.exits import exit_code
from trainjob.cli.hints import _COMMANDS, _OPTIONS
from trainjob.cli.options import job_name, pair
from trainjob.cli.program import COMMANDS, program
from trainjob.cli.spec_files import parse_spec, slug_of
from trainjob.cli.texts import table
from trainjob.errors import (
    BackendUnavailable,
    Category,
    ConfigurationError,
    Diagnosis,
    InvalidSpec,
    NotFound,
    QueueTimeout,
    Rejected,
    RetryVerdict,
    RunTimeout,
    SpecMismatch,
    Stuck,
    TrainJobError,
    TrainJobFailed,
)

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path))
    monkeypatch.delenv("TRAINJOB_NAMESPACE", raising=False)


def trainjob(*words: str, input: str | None = None) -> str:  # noqa: A002 - the name of CliRunner's parameter
    result = CliRunner().invoke(program, words, input=input, standalone_mode=False, catch_exceptions=False)
    return result.stdout


def test_pairs_and_job_names_are_parsed() -> None:
    assert pair("A=b=c") == ("A", "b=c")
    assert pair("A=") == ("A", "")
    assert job_name("train-1") == ("", "train-1")
    assert job_name("ml/train-1") == ("ml", "train-1")
    for wrong in ("A", "=b"):
        with pytest.raises(click.BadParameter):
            pair(wrong)
    for key in ("a/b/c", "x/"):  # `test_names` has more
        assert job_name(key) == ("", key)


# --- specs from files and options


def test_options_alone_make_a_spec() -> None:
    words = "render --runtime torch-distributed --image img:1 --num-nodes 2 --num-proc-per-node 4 --env A=b --env C=d=e"
    more = "--input dataset=s3://b/d --output model=s3://b/m --resources-per-node gpu=1 --label team=vision"
    manifest = yaml.safe_load(
        trainjob(*words.split(), *more.split(), "--key", "k", "--", "torchrun", "train.py", "--", "-n")
    )
    assert manifest["metadata"]["labels"]["team"] == "vision"
    assert manifest["spec"]["trainer"] == {
        "numNodes": 2,
        "numProcPerNode": 4,
        "image": "img:1",
        "command": ["torchrun", "train.py", "--", "-n"],
        "env": [
            {"name": "TRAINJOB_INPUT_DATASET", "value": "s3://b/d"},
            {"name": "TRAINJOB_OUTPUT_MODEL", "value": "s3://b/m"},
            {"name": "A", "value": "b"},
            {"name": "C", "value": "d=e"},
        ],
        "resourcesPerNode": {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
    }


def test_options_extend_or_replace_fields_of_a_file() -> None:
    text = """
        runtime: torch-distributed
        numNodes: 8
        env: [{name: A, value: old}, {name: B, value: kept}]
        inputs: {dataset: s3://b/d}
        args: [--old]
        command: [old]
    """
    fields = {"num_nodes": 2, "env": {"A": "new"}, "inputs": {"model": "hf://m"}, "command": ["new"]}
    spec = parse_spec(io.BytesIO(text.encode()), fields)
    assert spec.num_nodes == 2
    assert spec.env == {"A": "new", "B": "kept"}
    assert spec.inputs == {"dataset": "s3://b/d", "model": "hf://m"}
    assert (spec.command, spec.args) == (["new"], [])
    spec = parse_spec(io.BytesIO(b"{runtime: r, env: {A: a}}"), {"env": {"B": "b"}})
    assert spec.env == {"A": "a", "B": "b"}


def test_a_complete_manifest_rejects_options() -> None:
    text = b"{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob, spec: {runtimeRef: {name: r}}}"
    assert parse_spec(io.BytesIO(text), {}).manifest is not None
    with pytest.raises(InvalidSpec, match="image: cannot be combined with a whole manifest"):
        parse_spec(io.BytesIO(text), {"image": "i"})


@pytest.mark.parametrize("text", [b"a: [", b"- a", b"", b"\xff\xfe\x00", b"runtime: r\nimagee: x"])
def test_invalid_specs_are_rejected(text: bytes) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(io.BytesIO(text), {})


def test_render_reads_standard_input_and_writes_json() -> None:
    spec = "{runtime: torch-distributed, command: [a]}"
    manifest = json.loads(trainjob("-n", "ml", "render", "-", "--json", "--key", "nightly/train", input=spec))
    assert manifest["metadata"]["namespace"] == "ml"
    assert manifest["metadata"]["name"].startswith("train-")
    assert yaml.safe_load(trainjob("render", "-", "--key", "nightly/train", "-n", "ml", input=spec)) == manifest
    without = yaml.safe_load(trainjob("render", "--key", "k", "--", "true"))
    assert without["spec"]["runtimeRef"]["name"] == "trainjob-step", "a run without a runtime has that of steps"


def test_slug_comes_from_the_file_or_the_command() -> None:
    named = io.BytesIO()
    named.name = "jobs/nightly.yaml"
    assert slug_of(named, ["python", "train.py"]) == "nightly"
    assert slug_of(None, ["python", "/x/train.py", "--a"]) == "train"
    assert slug_of(None, ["/bin/echo", "hi"]) == "echo"
    assert slug_of(None, []) == "job"


# --- usage and exit codes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "No such command"),
        (["run"], "nothing to run: give a SPEC file"),
        (["run", "no-such-file.yaml"], "no-such-file.yaml"),
        (["run", "--runtime", "r", "--num-nodes", "0"], "num-nodes"),
        (["run", "--runtime", "r", "--env", "A"], "is not NAME=VALUE"),
        (["run", "--runtime", "r", "--run-timeout", "soon"], "is not a duration"),
        (["run", "--runtime", "r", "--env", "HF_TOKEN=hf_abcdefghijklmnopqrst", "--", "x"], "secretKeyRef"),
        (["run", "--backend", "moon", "--runtime", "r", "--", "x"], "unknown backend 'moon'"),
        (["run", "--backend", "kubernetes", "--runtime", "torch-distributed", "--", "x"], "TRAINJOB_BACKEND=local"),
        (["run", "--runtime", "no-such-runtime", "--", "x"], "runtime 'no-such-runtime' does not exist"),
        (["run", "--runtime", "r", "--on-crash-action", "keep", "--", "x"], "give one of them"),
        (["wait", "x", "--fail-on-first-crash", "--on-crash-action", "delete"], "delete"),
        (["status", " "], "is blank: write NAME, NAMESPACE/NAME or the key of a TrainJob"),
        # What users of kubectl type, and what exists in its place.
        (["get", "jobs"], "No such command 'get'. Use trainjob list, or trainjob status NAME."),
        (["version"], "No such command 'version'. Use trainjob --version."),
        (["list", "-o", "json"], "No such option '-o'. Use --json."),
        (["run", "-f", "x.yaml"], "No such option '-f'. Use the file as an argument: trainjob run FILE."),
        (["run", "--gpus", "8"], "No such option '--gpus'. Use --resources-per-node gpu=NUMBER."),
    ],
)
def test_usage_errors_exit_with_2(program: Program, words: list[str], message: str) -> None:
    code, out, err = program(words[0], "--json", *words[1:])
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    error = json.loads(out)["error"]
    assert error["exit_code"] == 2
    assert message in error["message"]


def test_what_the_hints_name_exists() -> None:
    assert not _COMMANDS.keys() & program.commands.keys()
    options = {name for each in program.commands.values() for option in each.params for name in option.opts}
    for text in (*_COMMANDS.values(), *_OPTIONS.values()):
        words = text.replace(",", "").split()
        named = {after for word, after in pairwise(words) if word == "trainjob"}
        assert not {word for word in words if word.startswith("-")} - options - {"--version"}, text
        assert not named - {*program.commands, "--version"}, text


def test_json_error_lists_all_problems(program: Program) -> None:
    _, out, _ = program("run", "--json", "--runtime", "r", "--label", "a b=c", "--input", "d=nothing")
    error = json.loads(out)["error"]
    assert error["type"] == "InvalidSpec"
    assert [problem["path"] for problem in error["problems"]] == ["labels.a b", "inputs.d"]


def test_json_after_the_dashes_belongs_to_the_command(program: Program) -> None:
    code, out, _ = program("run", "--runtime", "no-such-runtime", "--", "x", "--json")
    assert (code, out) == (2, "")


def failed(category: Category, retry: RetryVerdict) -> TrainJobFailed:
    return TrainJobFailed(Diagnosis(category, retry, "it failed"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(Category.USER_CODE, RetryVerdict.USER), 1),
        (failed(Category.USER_CODE, RetryVerdict.UNKNOWN), 1),
        (failed(Category.OUTAGE, RetryVerdict.INFRASTRUCTURE), 3),
        (failed(Category.CONFIGURATION, RetryVerdict.CONFIGURATION), 2),
        (failed(Category.PREEMPTED, RetryVerdict.PREEMPTED), 3),
        (failed(Category.QUOTA, RetryVerdict.QUOTA), 3),
        (failed(Category.DELETED, RetryVerdict.CONFIGURATION), 5),
        (InvalidSpec([]), 2),
        (ConfigurationError("x"), 2),
        (Rejected("x"), 2),
        (SpecMismatch("x"), 2),
        (BackendUnavailable("x"), 3),
        (Stuck("x"), 2),
        (QueueTimeout("x"), 4),
        (RunTimeout("x"), 4),
        (NotFound("x"), 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TrainJobError) else str(value),
)
def test_errors_have_exit_codes(error: TrainJobError, code: int) -> None:
    assert exit_code(error) == code


def test_internal_errors_exit_with_70(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("oops")

    monkeypatch.setattr("trainjob._backends.local.backend.LocalBackend.find", broken)
    code, _, err = program("list")
    assert (code, "RuntimeError: oops" in err) == (70, True)


def test_version_and_help_are_printed(program: Program) -> None:
    assert program("--version")[:2] == (0, f"trainjob, version {__version__}\n")
    for command in ("run", "wait"):
        code, out, _ = program(command, "-h")
        assert code == 0
        assert "4    a timeout expired; the job keeps running" in out


def test_help_imports_no_command() -> None:
    script = """
import sys, trainjob.cli.program
heavy = ("pydantic", "rich", "anyio", "asyncio", "yaml", "trainjob._backends")
try:
    trainjob.cli.program.main(["--help"])
finally:
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_line_of_the_help(name: str) -> None:
    assert program.commands[name].name == name
    line = COMMANDS[name][1]
    assert len(line) < 70
    assert line.endswith(".")
    assert line in exit_text("--help")
    assert exit_text(name, "--help").startswith(f"Usage: trainjob {name} ")


def exit_text(*words: str) -> str:
    return CliRunner().invoke(program, words, prog_name="trainjob", catch_exceptions=False).output


def test_ctrl_c_during_an_import_ends_the_program() -> None:
    """Pydantic turns it into a RuntimeError, others catch all exceptions; a job would then still be launched."""
    script = """
import os, signal, sys
class Swallowing:
    def find_spec(self, name, *_):
        if name == "pydantic":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Swallowing())
from trainjob.cli import main
main(["render", "--runtime", "trainjob-step", "--", "true"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


# --- texts


def test_durations_numbers_and_metrics_are_shortened() -> None:
    durations = {-1: "0.0s", 0.96: "0.9s", 1: "1s", 59.9: "59s", 80: "1m20s", 7500: "2h05m", 273600: "3d04h"}
    assert {seconds: short(seconds) for seconds in durations} == durations
    numbers: list[float | str] = [1797.0, 0.912345678, 1e-7, float("nan"), "adam", 7, True]
    assert [rounded(each) for each in numbers] == ["1797", "0.912346", "1e-07", "nan", "adam", "7", "true"]
    assert numeric({"a": 0.5, "b": 7, "c": True, "d": "x", "e": float("nan")}) == {"a": 0.5, "b": 7}


def test_table_columns_fit_their_names() -> None:
    job = {"phase": "Running", "attempt": 1, "seconds": {"age": 80.0}, "progress": 41.7, "key": "k" * 90}
    lines = table([{**job, "name": "a"}, {**job, "name": "b" * 33, "progress": None}]).splitlines()
    assert lines[0].split() == ["NAME", "PHASE", "ATTEMPT", "AGE", "DURATION", "PROGRESS", "KEY"]
    assert click.unstyle(lines[1]).split() == ["a", "Running", "1", "1m20s", "42%", "k" * 90]
    assert len({click.unstyle(line).find("k" * 90) for line in lines[1:]}) == 1
