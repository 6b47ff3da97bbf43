from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import trainjob
import trainjob.data
import trainjob.integration
from trainjob import errors
from trainjob._diagnosis import Category, Diagnosis
from trainjob.errors import InvalidSpec, Problem, RanksRemain, TrainJobFailed
from trainjob.verdicts import RetryVerdict

ROOT = Path(__file__).parents[2]
NAMES = [(module, name) for module in (trainjob, trainjob.data, trainjob.integration) for name in dir(module)]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value))
def test_every_public_name_can_be_imported(module: ModuleType, name: str) -> None:
    assert getattr(module, name) is not None


def test_all_public_names_are_imported_by_a_star() -> None:
    imported: dict[str, object] = {}
    exec("from trainjob import *", imported)
    assert imported.keys() - {"__builtins__"} == set(dir(trainjob))


def test_the_import_contract_lists_all_private_modules() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (listed,) = [each["forbidden_modules"] for each in contracts if each["name"].startswith("Integrations import")]
    found = {f"trainjob.{module.name}" for module in pkgutil.iter_modules(trainjob.__path__)}
    public = {f"trainjob.{name}" for name in ("checkpoints", "data", "integration", "progress", "registry")}
    assert set(listed) == found - public - {"trainjob.__main__"} | {"trainjob.data.*", "trainjob.registry.*"}


def test_every_error_is_public() -> None:
    assert {error.__name__ for error in ERRORS} <= set(dir(trainjob))


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        # In strict mode, mypy reports an unnecessary ignore: so this also checks that the name is missing for mypy.
        _ = trainjob.Nothing  # type: ignore[attr-defined]


def printed(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_does_not_slow_down_a_dag_file() -> None:
    program = "import sys, trainjob; print([m for m in ('pydantic', 'anyio', 'yaml', 'asyncio') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )


def test_a_supervisor_imports_the_standard_library_only() -> None:
    program = (
        "import sys; before = set(sys.modules); import trainjob._backends.local.supervisor; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'trainjob'}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )


ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.TrainJobError)
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_has_a_verdict_and_is_documented(error: type[errors.TrainJobError]) -> None:
    assert error.retry in RetryVerdict
    assert error.__doc__
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_errors_with_values_survive_a_process_boundary() -> None:
    invalid = pickle.loads(pickle.dumps(InvalidSpec([Problem("a.b", "is wrong", "write c")])))
    assert invalid.problems == (Problem("a.b", "is wrong", "write c"),)
    assert "a.b: is wrong (write c)" in str(invalid)
    diagnosis = Diagnosis(Category.IMAGE, RetryVerdict.CONFIGURATION, "no such image", job="ns/x")
    failed = pickle.loads(pickle.dumps(TrainJobFailed(diagnosis)))
    assert failed.diagnosis == diagnosis
    assert failed.retry is RetryVerdict.CONFIGURATION
    assert str(failed).startswith("TrainJob ns/x failed: no such image")


def test_ranks_that_remain_are_waited_for_in_another_process() -> None:
    remain = pickle.loads(pickle.dumps(RanksRemain("node-0 has not ended", 60.0)))
    assert (str(remain), remain.seconds, remain.retry) == ("node-0 has not ended", 60.0, RetryVerdict.INFRASTRUCTURE)


@pytest.mark.parametrize(
    ("verdict", "retryable"), [("user", 0), ("infrastructure", 1), ("preempted", 1), ("quota", 1), ("configuration", 0)]
)
def test_verdicts_are_retryable_or_final(verdict: str, retryable: int) -> None:
    assert RetryVerdict(verdict).retryable == bool(retryable)
