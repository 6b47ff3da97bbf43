"""Every snippet of README.md and docs/ runs as it stands there.

A ```python block is run as a script, a ```console block line by line (lines that begin with ``$ ``). Blocks of one page
share a directory, in their order, which is Airflow's folder of DAGs as well. A block after a comment
``<!-- shown only: reason -->`` is not run. What a line exports holds for the rest of its page.

The pages about Airflow share one directory, one database and one process that has imported Airflow. The tutorial has
the examples beside it, as in a checkout.

The pages of `ALONE` run where nothing is installed but the package itself, without extras, and nothing is set: as for
somebody who has just installed it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.warm import PYTHON, Warm

FIRST = ("README.md", "index.md", "tutorial.md")
"""The pages that a newcomer follows; the others are left to `make test-all`."""
ALONE = ("README.md", "command-line.md", "on-this-machine.md")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- shown only: [^>]+ -->\s*)?^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[tuple[str, str]]:
    return [
        (kind, text)
        for shown_only, kind, text in BLOCK.findall(page.read_text())
        if not shown_only and (kind == "python" or re.search(r"^\$ ", text, re.MULTILINE))
    ]


CORE = [
    "trainjob.cli",
    "trainjob.client",
    "trainjob._jobs.launching",
    "trainjob._jobs.waiting",
    "trainjob._backends.local.backend",
]
MLFLOW = ["trainjob.registry.mlflow", "mlflow.tracking", "mlflow.store.model_registry.sqlalchemy_store"]
AIRFLOW = ["airflow.__main__", "airflow.cli.cli_parser", "airflow.cli.commands.dag_command", "airflow.sdk"]


def about_airflow(page: Path) -> bool:
    return page.name.startswith("airflow")


@contextmanager
def warm(page: Path, environment: Mapping[str, str], python: str) -> Iterator[Warm]:
    """What the page's commands and scripts import, imported once."""
    programs, modules = {PYTHON: "", "trainjob": "trainjob.cli:main"}, CORE
    if about_airflow(page):
        programs, modules = {**programs, "airflow": "airflow.__main__:main"}, [*CORE, *AIRFLOW]
    elif page.name == "model-registries.md":
        modules = [*CORE, *MLFLOW, "mlflow.store.tracking.sqlalchemy_store"]
    elif page.name.startswith("kfp"):
        modules = [*CORE, "kfp.local", "kfp.kubernetes", "trainjob_kfp"]
    with Warm(programs, modules, environment, python) as running:
        yield running


@dataclass
class Place:
    """Where the snippets of a page run."""

    directory: Path
    environment: dict[str, str]
    running: Warm

    def run(self, command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.directory,
            env=self.running.environment(environment),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


Opener = Callable[[Path, Path], Place]


@pytest.fixture(scope="session")
def open_place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens a place in a directory for a page; that of the pages about Airflow once."""
    shared: list[Place] = []

    def opened(page: Path, directory: Path) -> Place:
        if about_airflow(page) and shared:
            return shared[0]
        bin_ = request.getfixturevalue("core") if page.name in ALONE else Path(sys.executable).parent
        environment = {
            **os.environ,
            "TRAINJOB_BACKEND": "local",
            "TRAINJOB_HOME": str(directory / "home"),
            "TRAINJOB_REGISTRY": f"mlflow+sqlite:///{directory / 'registry.db'}",
            "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
            "AIRFLOW__CORE__DAGS_FOLDER": str(directory),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "DOCS": str(ROOT),
        }
        if page.name in ALONE:
            unset = ("TRAINJOB_", "KUBE", "PYTHON", "VIRTUAL_ENV")
            environment = {name: value for name, value in environment.items() if not name.startswith(unset)}
            environment["HOME"] = str(directory)
        place = Place(directory, environment, stack.enter_context(warm(page, environment, str(bin_ / "python"))))
        if about_airflow(page):
            done = place.run(["airflow", "db", "migrate"], environment)
            assert done.returncode == 0, done.stderr
            shared.append(place)
        return place

    with ExitStack() as stack:
        yield opened


def exported(line: str, place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """What a line ``export NAME=VALUE …`` sets, as a shell expands it."""
    found = subprocess.run(
        ["sh", "-ec", f"{line}\nenv -0"],
        cwd=place.directory,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    values = dict(each.split("=", 1) for each in found.stdout.split("\0") if each)
    return {name: values[name] for name in (word.split("=")[0] for word in shlex.split(line, comments=True)[1:])}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in FIRST else pytest.mark.full) for page in PAGES if runnable(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_snippets_run(page: Path, open_place: Opener, tmp_path: Path) -> None:
    place = open_place(page, tmp_path)
    environment = place.environment
    if page.name == "tutorial.md":
        (tmp_path / "dags_examples").symlink_to(ROOT / "dags_examples")
    for number, (kind, text) in enumerate(runnable(page)):
        if kind == "python":
            script = place.directory / f"{page.stem.replace('-', '_')}_snippet_{number}.py"
            script.write_text(text)
            commands = [[str(place.running.bin / PYTHON), str(script)]]
        else:
            lines = re.sub(r"\\\n>? *", "", text).splitlines()
            commands = [["sh", "-ec", line.removeprefix("$ ")] for line in lines if line.startswith("$ ")]
        for command in commands:
            if command[-1].startswith("export "):
                environment = environment | exported(command[-1], place, environment)
            done = place.run(command, environment)
            assert done.returncode == 0, f"{page.name}, block {number}: {command[-1]}\n{done.stdout}\n{done.stderr}"
