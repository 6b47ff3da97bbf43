"""Mutation testing of the core: change one expression at random and check that a test fails.

    python tests/mutants.py --sample 200 --seed 7

Each mutant is a copy of the package with one change, before the real package on the path. A mutant is killed if a
test of its module fails, or if the tests take longer than five minutes. Survivors are printed as a diff. Pauses,
constants of modules and numbers above 1 are not changed: a test need not notice a limit of 61 s instead of 60 s.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "components" / "trainjob"

_UNIT = "tests/unit/test_"
TESTS = {
    "_jobs/launching.py": f"{_UNIT}lifecycle*.py {_UNIT}first_crash.py {_UNIT}cli_crashes.py",
    "_jobs/waiting.py": f"{_UNIT}lifecycle.py {_UNIT}first_crash.py {_UNIT}results.py {_UNIT}cli_crashes.py",
    "status.py": f"{_UNIT}status.py {_UNIT}blockers.py {_UNIT}lifecycle.py {_UNIT}diagnosis_e*.py",
    "_manifest/render.py": f"{_UNIT}manifest.py {_UNIT}lifecycle.py {_UNIT}spec*.py",
    "_diagnosis": f"{_UNIT}diagnosis*.py {_UNIT}blockers.py {_UNIT}report.py",
    "data/transfer.py": f"{_UNIT}data_t*.py {_UNIT}data_steps.py tests/stores/test_manifests.py",
    "registry": f"{_UNIT}registry*.py tests/registry/test_kubeflow*.py tests/registry/test_mlflow_errors.py "
    "tests/registry/test_contract.py tests/registry/test_mlflow.py",
}
"""File or directory of the package -> the tests that must detect a change in it."""

_SECONDS = 300
_PAUSE = re.compile(r"\.sleep\(|^(await )?[\w.]*pause\(")  # calls without an effect that a test can observe
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: The changed file.
        line: Line of the change.
        source: The complete file after the change.
        tests: The tests that must detect the change.
    """

    file: Path
    line: int
    source: str
    tests: tuple[str, ...]

    def diff(self) -> str:
        """The change, as lines of a diff."""
        before = ast.unparse(ast.parse(self.file.read_text())).splitlines()
        lines = difflib.unified_diff(before, self.source.splitlines(), lineterm="", n=1)
        return "\n".join(f"    {line}" for line in list(lines)[3:])


def mutants_of(file: Path, tests: Sequence[str]) -> Iterator[Mutant]:
    """All mutants of one file."""
    tree = ast.parse(file.read_text())
    for number, node in enumerate(_inside(tree)):
        for change in range(len(_changed(node))):
            mutated = copy.deepcopy(tree)
            target = list(_inside(mutated))[number]
            replacement = _changed(target)[change]
            source = ast.unparse(_Replacing(target, replacement).visit(mutated))
            yield Mutant(file, getattr(node, "lineno", 0), source, tuple(tests))


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _inside(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of all function bodies, without annotations, docstrings, log messages and raised errors' texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _walk(statement)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Raise):
        return  # nested functions are visited separately
    if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or "_log." in ast.unparse(node)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _changed(node: ast.AST) -> list[ast.AST]:  # noqa: C901, PLR0911, PLR0912 - a table of kinds
    """The possible replacements of `node`."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in _COMPARED:
            return [ast.Compare(left, [_COMPARED[type(op)]()], right)]
        case ast.BoolOp(op, values):
            return [ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)]
        case ast.UnaryOp(ast.Not(), operand):
            return [operand]
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED and not isinstance(left, ast.Constant | ast.JoinedStr):
            return [ast.BinOp(left, _COMPUTED[type(op)](), right)]
        case ast.Constant(bool() as value):
            return [ast.Constant(not value)]
        case ast.Constant(int() as value) if value in (0, 1):
            return [ast.Constant(value + 1)]
        case ast.IfExp(test, body, orelse):
            return [ast.IfExp(test, orelse, body)]
        case ast.If(ast.Name() | ast.Call() | ast.Attribute() as test, body, orelse):
            return [ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)]
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            return [ast.Return(ast.Constant(None))]
        case ast.Expr(ast.Call() | ast.Await()) if not _PAUSE.search(ast.unparse(node)):
            return [ast.Pass()]
        case ast.Break():
            return [ast.Continue()]
        case ast.Continue():
            return [ast.Break()]
        case ast.Dict(keys, values) if values:
            return [ast.Dict(keys[:n] + keys[n + 1 :], values[:n] + values[n + 1 :]) for n in range(len(values))]
        case ast.Call(function, arguments, keywords) if keywords:
            return [ast.Call(function, arguments, keywords[:n] + keywords[n + 1 :]) for n in range(len(keywords))]
    return []


# ---------------------------------------------------------------- running


def every() -> list[Mutant]:
    """All mutants of the core."""
    found: list[Mutant] = []
    for name, tests in TESTS.items():
        path = PACKAGE / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        expanded = [str(each.relative_to(ROOT)) for pattern in tests.split() for each in sorted(ROOT.glob(pattern))]
        for file in files:
            found += mutants_of(file, expanded)
    return found


def survives(mutant: Mutant, directory: Path) -> bool:
    """Whether all tests pass with the mutant; `directory` has a copy of the package."""
    copied = directory / "trainjob" / mutant.file.relative_to(PACKAGE)
    copied.write_text(mutant.source)
    environment = {**os.environ, "PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=_SECONDS, check=False)
        return ran.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copyfile(mutant.file, copied)


def main() -> int:
    """Run a sample and print the score; return 0 if the score is at least the required one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="number of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the sample")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time (%(default)s)")
    parser.add_argument("--least", type=float, default=90.0, help="score in percent below which it fails (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the result into docs/development/campaigns.md")
    options = parser.parse_args()
    candidates = [mutant for mutant in every() if options.only in str(mutant.file)]
    chosen = random.Random(options.seed).sample(candidates, min(options.sample, len(candidates)))
    print(f"{len(chosen)} of {len(candidates)} mutants, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            directory = Path(temporary) / str(number)
            shutil.copytree(PACKAGE, directory / "trainjob", ignore=shutil.ignore_patterns("__pycache__"))
            free.put(directory)

        def run(mutant: Mutant) -> bool:
            directory = free.get()
            try:
                return survives(mutant, directory)
            finally:
                free.put(directory)

        alive = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for number, (mutant, survived) in enumerate(zip(chosen, pool.map(run, chosen), strict=True), 1):
                where = f"{mutant.file.relative_to(ROOT)}:{mutant.line}"
                print(f"{number:4} {'SURVIVED' if survived else 'killed'} {where}", flush=True)
                if survived:
                    alive.append(mutant)
                    print(mutant.diff(), flush=True)
    score = 100 * (len(chosen) - len(alive)) / max(1, len(chosen))
    result = f"{len(chosen) - len(alive)} of {len(chosen)} killed: {score:.0f} %, seed {options.seed}"
    print(result)
    if options.write:
        _write(f"{time.strftime('%Y-%m-%d', time.gmtime())}: {result}, {len(candidates)} possible changes.")
    return 0 if score >= options.least else 1


def _write(result: str) -> None:
    page = ROOT / "docs" / "development" / "campaigns.md"
    section = rf"\g<1>{result}\n\g<2>"
    page.write_text(
        re.sub(r"(<!-- mutants -->\n).*?(<!-- end -->)", section, page.read_text(), count=1, flags=re.DOTALL)
    )


if __name__ == "__main__":
    sys.exit(main())
