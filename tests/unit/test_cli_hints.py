"""What the command line answers to words of kubectl, and to a run without a runtime."""

from __future__ import annotations

from itertools import pairwise

import pytest
import yaml
from tests.unit.program import Program

from trainjob.cli.hints import _COMMANDS, _OPTIONS
from trainjob.cli.program import program


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get", "jobs"], "No such command 'get'. Use trainjob list, or trainjob status NAME."),
        (["describe", "x"], "No such command 'describe'. Use trainjob diagnose NAME."),
        (["stop", "x"], "No such command 'stop'. Use trainjob cancel NAME."),
        (["version"], "No such command 'version'. Use trainjob --version."),
        (["list", "-o", "json"], "No such option '-o'. Use --json."),
        (["run", "-f", "x.yaml"], "No such option '-f'. Use the file as an argument: trainjob run FILE."),
        (["run", "--gpus", "8"], "No such option '--gpus'. Use --resources-per-node gpu=NUMBER."),
        (["run", "--nodes", "2"], "No such option '--nodes'. Use --num-nodes NUMBER."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_error_names_what_exists(program: Program, words: list[str], message: str) -> None:
    code, _, err = program(*words)
    assert code == 2
    assert message in err


def test_what_the_hints_name_exists() -> None:
    assert not _COMMANDS.keys() & program.commands.keys()
    options = {name for each in program.commands.values() for option in each.params for name in option.opts}
    for text in (*_COMMANDS.values(), *_OPTIONS.values()):
        words = text.replace(",", "").split()
        named = {after for word, after in pairwise(words) if word == "trainjob"}
        assert not {word for word in words if word.startswith("-")} - options - {"--version"}, text
        assert not named - {*program.commands, "--version"}, text


def test_a_run_without_a_runtime_has_that_of_steps(program: Program) -> None:
    code, out, _ = program("render", "--key", "k", "--", "true")
    assert code == 0
    assert yaml.safe_load(out)["spec"]["runtimeRef"]["name"] == "trainjob-step"
