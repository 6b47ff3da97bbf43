"""The table of arguments, and the signatures of the operators, the components, the commands and Python against it."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import click
import pytest

from trainjob import TrainJobClient, TrainJobSpec, WaitOptions
from trainjob._spec.arguments import ARGUMENTS, Argument, wrong_value
from trainjob.cli.job_options import argument
from trainjob.cli.program import program
from trainjob.wait_options import option_names

ROOT = Path(__file__).parents[2]
AIRFLOW = "airflow_provider/trainjob_airflow/"
KFP = "kfp_components/trainjob_kfp/"

STEPS = ("initialize_dataset", "initialize_model", "evaluate_model", "export_model")
OMITTED = dict.fromkeys(
    ((step, "fail_on_first_crash") for step in STEPS), "a job of one rank, which Trainer fails without a restart"
)
"""Arguments that a component does not have, and why."""

OF_TRIALS = "inputs outputs queue_timeout start_timeout run_timeout fail_fast fail_on_first_crash on_kill_action"
OWN_TEXTS = {
    ("evaluate_model", "command"): "it evaluates one model",
    ("evaluate_model", "runtime"): "it has a default",
    ("evaluate_model", "image"): "there is one node",
    **{("tune", name): "it concerns trials" for name in OF_TRIALS.split()},
}
"""Arguments that mean something else in a component, and why."""

WITHOUT_A_DEFAULT = {"train": ("runtime",)}
EMPTY = {"text": "", "words": [], "mapping": {}, "duration": 0}
"""What stands for no value in KFP, whose components cannot have None."""


def function(path: str, name: str, owner: str = "") -> ast.FunctionDef:
    """A function or method, read without an import of Airflow or KFP, which may be missing in unit tests."""
    found: Any = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    if owner:
        found = next(node for node in ast.walk(found) if isinstance(node, ast.ClassDef) and node.name == owner)
    return next(node for node in ast.walk(found) if isinstance(node, ast.FunctionDef) and node.name == name)


def defaults(found: ast.FunctionDef) -> dict[str, Any]:
    """The parameters with their defaults; those without one are left out."""
    pairs = zip(found.args.kwonlyargs, found.args.kw_defaults, strict=True)
    return {each.arg: ast.unparse(default) for each, default in pairs if default is not None}


def rows(face: str) -> list[Argument]:
    return [row for row in ARGUMENTS.values() if face in row.faces]


def plain(text: str) -> str:
    """A text of a docstring on one line, without marks of code."""
    return " ".join(text.replace("`", "").split())


def entries(docstring: str) -> dict[str, str]:
    """Name -> text of each argument or attribute in a docstring."""
    indent = r"^    (\w+): ((?:.+\n)(?:^ {8}.*\n)*)"
    return {name: plain(text) for name, text in re.findall(indent, inspect.cleandoc(docstring) + "\n", re.MULTILINE)}


def test_the_operator_has_each_argument_with_its_default_and_text() -> None:
    path = AIRFLOW + "operators/trainjob.py"
    found = defaults(function(AIRFLOW + "operators/base.py", "__init__", "TrainJobTask"))
    found |= defaults(function(path, "__init__", "TrainJobOperator"))
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    (operator,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainJobOperator"]
    documented = entries(ast.get_docstring(operator) or "")
    for row in rows("operator"):
        assert found.get(row.name) == repr(row.default), f"{row.name}: the table has {row.default!r}"
        assert documented[row.name].startswith(row.text.rstrip(".")), (
            f"the docstring of TrainJobOperator describes {row.name} anew"
        )


def test_python_describes_each_argument_as_the_table_does() -> None:
    tree = ast.parse(Path(inspect.getfile(TrainJobSpec)).read_text(encoding="utf-8"))
    (spec,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainJobSpec"]
    documented = entries(WaitOptions.__doc__ or "")
    for field, text in itertools.pairwise(spec.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            documented[field.target.id] = plain(ast.literal_eval(text.value))
    for row in rows("python"):
        assert documented[row.name].startswith(row.text.rstrip(".")), f"the field {row.name} is described anew"


@pytest.mark.parametrize(
    "component",
    ["train", "tune", "wait", "distributed", *STEPS],
)
def test_a_component_has_each_argument_with_its_default_and_text(component: str) -> None:
    path = f"{KFP}{component}.py" if component == "distributed" else f"{KFP}{component}/component.py"
    there = function(path, component)
    found, documented = defaults(there), entries(ast.get_docstring(there) or "")
    wanted = rows("component") if component == "train" else [ARGUMENTS[name] for name in option_names()]
    for row in wanted:
        if (component, row.name) in OMITTED:
            assert row.name not in found, f"{component} has {row.name}: remove it from OMITTED"
        elif row.name not in WITHOUT_A_DEFAULT.get(component, ()):
            empty = repr(EMPTY.get(row.kind, row.default)) if row.default is None else repr(row.default)
            # Of a count, KFP's default is 1 or, for the runtime's, 0.
            assert found.get(row.name) in ((empty,) if row.kind != "count" else ("0", "1")), row.name
            assert row.name in documented, f"the docstring of {component} in {path} has no {row.name}"
    for name, default in found.items():
        if name in ARGUMENTS and ARGUMENTS[name].default is not None:
            assert default == repr(ARGUMENTS[name].default), f"{component}: {name}"
    for name in (documented.keys() & ARGUMENTS.keys()) - {each for owner, each in OWN_TEXTS if owner == component}:
        text = ARGUMENTS[name].text.rstrip(".")
        assert documented[name].startswith(text), f"the docstring of {component} describes {name} anew"


@pytest.mark.parametrize("command", ["run", "wait", "tune", "render"])
def test_the_options_of_commands_are_those_of_the_table(command: str) -> None:
    options = {each.name: each for each in program.commands[command].params if isinstance(each, click.Option)}
    for row in rows("command"):
        if row.name not in options or not row.flag:
            assert command != "run" or not row.flag, f"`trainjob run` has no option {row.flag}"
            continue
        assert options[row.name].opts == [row.flag]
        assert (options[row.name].help or "").startswith(row.text)
        default = options[row.name].to_info_dict()["default"]
        assert default in (None, False), "the default is that of the spec or of the table"
    if command in ("run", "wait", "tune"):
        assert {*option_names()} <= options.keys()


def test_python_has_each_argument() -> None:
    python = {*TrainJobSpec.model_fields, *option_names(), *inspect.signature(TrainJobClient.wait).parameters}
    assert {row.name for row in rows("python")} <= python
    assert {row.name for row in ARGUMENTS.values() if row.name in option_names()} == {*option_names()}
    for name in option_names():
        assert getattr(WaitOptions(), name) == ARGUMENTS[name].default


@pytest.mark.parametrize("row", ARGUMENTS.values(), ids=lambda row: row.name)
def test_wrong_values_are_refused_in_the_words_of_the_table(row: Argument) -> None:
    if row.kind == "choice":
        assert [wrong_value(row.name, each) for each in row.choices] == [""] * len(row.choices)
        assert wrong_value(row.name, "delete") == "must be 'suspend', 'cancel' or 'keep', not 'delete'"
    elif row.kind == "switch":
        assert wrong_value(row.name, True) == wrong_value(row.name, False) == ""
        assert wrong_value(row.name, "no") == "must be True or False, not 'no'"
    else:
        assert wrong_value(row.name, object()) == "", "the spec or the wait options check it"


def test_a_row_without_an_option_makes_none() -> None:
    assert [row.name for row in rows("command") if not row.flag] == ["command", "args"]
    assert argument("on_crash_action")(lambda: None) is not None
