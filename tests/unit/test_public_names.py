from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainjob
import trainjob.data
from trainjob import errors
from trainjob.errors import Category, Diagnosis, InvalidSpec, Problem, RanksRemain, RetryVerdict, TrainJobFailed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["trainjob", "trainjob.data"])
def test_all_public_names_are_imported_by_a_star(module: str) -> None:
    imported: dict[str, object] = {}
    exec(f"from {module} import *", imported)
    assert imported.keys() - {"__builtins__"} == set(dir(importlib.import_module(module)))


_PACKAGES = ("checkpoints", "data", "evaluation", "progress", "registry", "tuning")
PUBLIC = ("", ".callbacks.huggingface", ".callbacks.lightning", *(f".{name}" for name in _PACKAGES))
"""The public modules of `trainjob`, after its name; ``trainjob.__init__`` names them in its docstring."""


def imports_of_pages() -> Iterator[tuple[str, str, str]]:
    """Page, module and name of each import of `trainjob` in the Python of documentation and examples."""
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "dags_examples").rglob("*.py")),
    ]
    for page in pages:
        text = page.read_text()
        blocks = (
            [text] if page.suffix == ".py" else re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
        )
        for block in blocks:
            for node in ast.walk(ast.parse(textwrap.dedent(block))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainjob":
                    yield from ((str(page.relative_to(ROOT)), node.module or "", each.name) for each in node.names)
                elif isinstance(node, ast.Import):
                    for each in node.names:
                        if each.name.split(".")[0] == "trainjob":
                            yield str(page.relative_to(ROOT)), each.name, ""


def test_pages_import_public_names_only() -> None:
    found = [*imports_of_pages()]
    assert len(found) > 30
    public = {f"trainjob{name}" for name in PUBLIC}
    hidden = {each for each in found if each[1] not in public}
    for page, name, member in {*found} - hidden:
        if ".callbacks." in name:  # imports the library that it serves
            continue
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [each for each in dir(module) if not each.startswith("_")]
        if member and member not in names and f"{name}.{member}" not in public:
            hidden.add((page, name, member))
    assert not hidden


def test_each_public_package_is_named_in_the_documentation_of_trainjob() -> None:
    packages = {f"trainjob{name}".removesuffix(".huggingface").removesuffix(".lightning") for name in PUBLIC[1:]}
    assert packages == set(re.findall(r"`(trainjob\.\w+)`", trainjob.__doc__ or ""))


def test_every_error_is_public() -> None:
    assert {error.__name__ for error in ERRORS} <= set(dir(trainjob))


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        # In strict mode, mypy reports an unnecessary ignore: so this also checks that the name is missing for mypy.
        _ = trainjob.Nothing  # type: ignore[attr-defined]


WAITER = "trainjob._jobs.waiting, trainjob._backends.kubernetes.backend, trainjob._jobs.progress_log, trainjob.settings"
"""What a process that waits imports. It reads no spec: pydantic would take 11 MB."""


HEAVY = {"kubernetes", "jinja2", "mlflow", "obstore", "huggingface_hub", "requests", "pydantic_settings"}
"""Packages of megabytes, which every waiter for cluster jobs would load."""


def printed(program: str) -> list[str]:
    """The words that a program prints in a new process."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def new_modules(imported: str) -> set[str]:
    """The modules that an import loads in a new process."""
    return {*printed(f"import sys; before = {{*sys.modules}}; import {imported}; print(*{{*sys.modules}} - before)")}


@pytest.mark.parametrize(
    ("imported", "without"),
    [
        ("trainjob", {"pydantic", "anyio", "yaml", "asyncio"}),
        (WAITER, {"pydantic"}),
        ("trainjob.cli.run, trainjob._backends.kubernetes.backend", HEAVY),
    ],
    ids=["a DAG file", "a waiter", "`trainjob run`"],
)
def test_what_an_import_leaves_out(imported: str, without: set[str]) -> None:
    assert new_modules(imported) & without == set()


def test_a_supervisor_imports_the_standard_library_only() -> None:
    packages = {name.partition(".")[0] for name in new_modules("trainjob._backends.local.supervisor")}
    assert packages - sys.stdlib_module_names == {"trainjob"}


ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.TrainJobError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_a_verdict_and_is_documented(error: type[errors.TrainJobError]) -> None:
    assert error.retry in RetryVerdict
    assert error.__doc__


def test_errors_with_values_survive_a_process_boundary() -> None:
    invalid = pickle.loads(pickle.dumps(InvalidSpec([Problem("a.b", "is wrong", "write c")])))
    assert invalid.problems == (Problem("a.b", "is wrong", "write c"),)
    assert "a.b: is wrong (write c)" in str(invalid)
    many = InvalidSpec([Problem("a", "is wrong")] * 250)
    for _ in range(3):  # from process to process
        assert str(many).endswith("- and 150 more problems")
        many = pickle.loads(pickle.dumps(many))
    diagnosis = Diagnosis(Category.IMAGE, RetryVerdict.CONFIGURATION, "no such image", job="ns/x")
    failed = pickle.loads(pickle.dumps(TrainJobFailed(diagnosis)))
    assert failed.diagnosis == diagnosis
    assert failed.retry is RetryVerdict.CONFIGURATION
    assert str(failed).startswith("TrainJob ns/x failed: no such image")


def test_ranks_that_remain_are_waited_for_in_another_process() -> None:
    remain = pickle.loads(pickle.dumps(RanksRemain("node-0 has not ended", 60.0)))
    assert (str(remain), remain.seconds, remain.retry) == ("node-0 has not ended", 60.0, RetryVerdict.INFRASTRUCTURE)


def test_verdicts_are_retryable_or_final() -> None:
    retryable = {verdict.value for verdict in RetryVerdict if verdict.retryable}
    assert retryable == {"infrastructure", "preempted", "quota", "unknown"}
