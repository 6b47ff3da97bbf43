"""Every snippet of README.md and docs/ runs as it stands there.

A ```python block is run as a script, a ```console block line by line (lines that begin with ``$ ``). Blocks of one page
share a directory, in their order, which is Airflow's folder of DAGs as well. A block after a comment
``<!-- shown only: reason -->`` is not run. What a line exports holds for the rest of its page.

The tutorial runs beside the examples, as in a checkout. The pages of Airflow and the tutorial share a migrated database.

The pages of `ALONE` run where nothing is installed but the package itself, without extras, and nothing is set: as for
somebody who has just installed it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.warm import PYTHON, Warm

ALONE = ("README.md", "command-line.md", "on-this-machine.md")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- shown only: [^>]+ -->\s*)?^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[tuple[str, str]]:
    return [(kind, text) for shown_only, kind, text in BLOCK.findall(page.read_text()) if not shown_only]


CORE = ["trainjob.cli", "trainjob.client", "trainjob.lifecycle", "trainjob.waiting", "trainjob.backends.local.backend"]
MLFLOW = ["trainjob.registry.mlflow", "mlflow.tracking", "mlflow.store.model_registry.sqlalchemy_store"]
AIRFLOW = ["airflow.__main__", "airflow.cli.cli_parser", "airflow.cli.commands.dag_command", "airflow.sdk"]


@contextmanager
def warm(page: Path, environment: Mapping[str, str], python: str) -> Iterator[Warm]:
    """What the page's commands and scripts import, imported once."""
    programs, modules = {PYTHON: "", "trainjob": "trainjob.cli:main"}, CORE
    if page.name.startswith(("airflow", "tutorial")):
        programs, modules = {**programs, "airflow": "airflow.__main__:main"}, [*CORE, *AIRFLOW]
    elif page.name == "model-registries.md":
        modules = [*CORE, *MLFLOW, "mlflow.store.tracking.sqlalchemy_store"]
    elif page.name.startswith("kfp"):
        modules = [*CORE, "kfp.local", "kfp.kubernetes", "trainjob_kfp"]
    with Warm(programs, modules, environment, python) as running:
        yield running


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if runnable(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_snippets_run(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bin_ = request.getfixturevalue("core") if page.name in ALONE else Path(sys.executable).parent
    environment = {
        **os.environ,
        "TRAINJOB_BACKEND": "local",
        "TRAINJOB_HOME": str(tmp_path / "home"),
        "TRAINJOB_REGISTRY": f"mlflow+sqlite:///{tmp_path / 'registry.db'}",
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("airflow")),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "DOCS": str(ROOT),
    }
    if page.name in ALONE:
        unset = ("TRAINJOB_", "KUBE", "PYTHON", "VIRTUAL_ENV")
        environment = {name: value for name, value in environment.items() if not name.startswith(unset)}
        environment["HOME"] = str(tmp_path)
    with warm(page, environment, str(bin_ / "python")) as running:
        for number, (kind, text) in enumerate(runnable(page)):
            if kind == "python":
                script = tmp_path / f"snippet_{number}.py"
                script.write_text(text)
                commands = [[str(running.bin / PYTHON), str(script)]]
            else:
                lines = re.sub(r"\\\n>? *", "", text).splitlines()
                commands = [["sh", "-ec", line.removeprefix("$ ")] for line in lines if line.startswith("$ ")]
            for command in commands:
                if command[-1].startswith("export "):
                    environment |= dict(each.split("=", 1) for each in shlex.split(command[-1], comments=True)[1:])
                done = subprocess.run(
                    command,
                    cwd=tmp_path,
                    env=running.environment(environment),
                    capture_output=True,
                    text=True,
                    timeout=300,
                    check=False,
                )
                assert done.returncode == 0, f"{page.name}, block {number}: {command[-1]}\n{done.stdout}\n{done.stderr}"
