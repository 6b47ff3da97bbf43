"""Mutation testing of the product: change one place at random, and see whether a test fails.

    python -m tests.mutants --sample 40 --seed 7

First all tests of `FOLDERS` that are not marked `full` run once, to learn which of them execute which line and how long
they take. Each mutant is a copy of the packages with one change, before the real ones on the path. It is killed if one
of the tests that execute the changed lines fails, the fastest first, for at most 45 s of their time. If no test
executes them in its own process, the tests of files that name the module run. Survivors are printed as a diff. Pauses,
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData
from tests.lanes import read

ROOT = Path(__file__).parents[1]
PACKAGES = ("components/trainjob", "airflow_provider/trainjob_airflow", "kfp_components/trainjob_kfp")
FOLDERS = tuple(
    f"tests/{name}"
    for name in ("unit", "contract", "simulation", "integrations", "registry", "stores", "kfp", "airflow", "local")
)
KNOWN = ROOT / ".test-output" / "mutants"
"""Coverage and results of the unchanged product."""

_BUDGET = 45.0  # seconds of the tests of one mutant, as measured without it
_SECONDS = 150
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
        file: The changed file, relative to the repository.
        lines: First and last line of the change.
        source: The complete file after the change.
    """

    file: str
    lines: tuple[int, int]
    source: str

    def diff(self) -> str:
        """The change, as lines of a diff."""
        before = ast.unparse(ast.parse((ROOT / self.file).read_text())).splitlines()
        lines = difflib.unified_diff(before, self.source.splitlines(), lineterm="", n=1)
        return "\n".join(f"    {line}" for line in list(lines)[3:])


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of one file."""
    tree = ast.parse(file.read_text())
    for number, node in enumerate(_inside(tree)):
        for change in range(len(_changed(node))):
            mutated = copy.deepcopy(tree)
            target = list(_inside(mutated))[number]
            source = ast.unparse(_Replacing(target, _changed(target)[change]).visit(mutated))
            line = getattr(node, "lineno", 0)
            lines = (line, getattr(node, "end_lineno", None) or line)
            yield Mutant(str(file.relative_to(ROOT)), lines, source)


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
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
        return  # nested functions are visited separately
    if isinstance(node, ast.Raise):
        yield node
        return
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
        case ast.Raise():
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


# ---------------------------------------------------------------- the tests of a mutant


class Known:
    """What the tests execute, and how long they take, without a mutant."""

    def __init__(self) -> None:
        self.seconds = {test.name: test.seconds for test in read(KNOWN / "results.xml") if not test.failed}
        self._data = CoverageData(str(KNOWN / "coverage"))
        self._data.read()
        self._texts = {file: (ROOT / file).read_text() for file in {name.partition("::")[0] for name in self.seconds}}

    @staticmethod
    def learn() -> None:
        """Run the tests once."""
        KNOWN.mkdir(parents=True, exist_ok=True)
        options = ["-m", "not full", "--ignore=tests/airflow/system", "-n", "2", "-q", "-p", "no:cacheprovider"]
        coverage = ["--cov", "--cov-context=test", "--cov-report="]
        results = [f"--junitxml={KNOWN / 'results.xml'}", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *FOLDERS, *options, *coverage, *results]
        environment = {**os.environ, "COVERAGE_FILE": str(KNOWN / "coverage")}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that have to notice a mutant, the fastest first."""
        lines = self._data.contexts_by_lineno(str(ROOT / mutant.file))
        first, last = mutant.lines
        contexts = {each for line in range(first, last + 1) for each in lines.get(line, ())}
        found = {each.rpartition("|")[0] for each in contexts} & self.seconds.keys()
        module = mutant.file.partition("/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not found:
            naming = {file for file, text in self._texts.items() if re.search(rf"\b{module}\b", text)}
            found = {name for name in self.seconds if name.partition("::")[0] in naming}
        chosen, spent = [], 0.0
        for name in sorted(found, key=lambda each: self.seconds[each]):
            spent += self.seconds[name]
            if spent <= _BUDGET:
                chosen.append(name)
        return chosen


def survives(mutant: Mutant, tests: Sequence[str], directory: Path) -> bool:
    """Whether all tests pass with the mutant; `directory` has copies of the packages."""
    copied = directory / mutant.file
    copied.write_text(mutant.source)
    (directory / "tests.txt").write_text("\n".join(tests) + "\n")
    path = os.pathsep.join([*(str(directory / Path(each).parent) for each in PACKAGES), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={directory / 'temporary'}"]
    command = [sys.executable, "-m", "pytest", *options, f"@{directory / 'tests.txt'}"]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=_SECONDS, check=False)
        assert ran.returncode in (0, 1, 2), ran.stdout.decode()  # 2: the mutant cannot be imported
        return ran.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copyfile(ROOT / mutant.file, copied)


# ---------------------------------------------------------------- running


def main() -> int:
    """Run a sample and print the score; return 0 if the score is at least the required one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40, help="number of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the sample")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time (%(default)s)")
    parser.add_argument("--least", type=float, default=90.0, help="score in percent below which it fails (%(default)s)")
    parser.add_argument("--known", action="store_true", help="use what the last run has learned about the tests")
    options = parser.parse_args()
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if options.only in str(file))
    candidates = [mutant for file in files for mutant in mutants_of(file)]
    chosen = random.Random(options.seed).sample(candidates, min(options.sample, len(candidates)))
    print(f"{len(chosen)} of {len(candidates)} mutants, seed {options.seed}", flush=True)
    if not options.known:
        Known.learn()
    known, alive = Known(), 0
    with tempfile.TemporaryDirectory() as temporary:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            for package in PACKAGES:
                copied = Path(temporary, str(number), package)
                shutil.copytree(ROOT / package, copied, ignore=shutil.ignore_patterns("__pycache__"))
            free.put(Path(temporary, str(number)))

        def run(mutant: Mutant) -> tuple[int, bool]:
            tests, directory = known.tests(mutant), free.get()
            try:
                return len(tests), not tests or survives(mutant, tests, directory)
            finally:
                free.put(directory)

        with ThreadPoolExecutor(options.jobs) as pool:
            for number, (mutant, (tests, survived)) in enumerate(zip(chosen, pool.map(run, chosen), strict=True), 1):
                result = f"SURVIVED {tests} tests" if survived else "killed"
                print(f"{number:4} {result} {mutant.file}:{mutant.lines[0]}", flush=True)
                if survived:
                    alive += 1
                    print(mutant.diff(), flush=True)
    score = 100 * (len(chosen) - alive) / max(1, len(chosen))
    print(f"{len(chosen) - alive} of {len(chosen)} killed: {score:.0f} %, seed {options.seed}")
    return 0 if score >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
