"""Runs steps as KFP's launcher does: the command of the compiled component, with an executor input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kfp.executor_input import executor_input
from tests.kfp.step_backend import StepBackend
from tests.processes import rest_of

from trainjob import TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob.job import JobRef

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "dags_examples" / "kfp"
COMPILED = ROOT / "kfp_components" / "trainjob_kfp" / "compiled"
STEP_PYTHON = os.environ.get("TRAINJOB_STEP_PYTHON", sys.executable)
"""Python of an environment like that of the step image: this package, and KFP without its dependencies."""

RUN = "0d9f8a9e-6c1d-4a53-9f0e-2f1d5b1c7a11"
TASK_UUID = "5f7c1a52-58f0-4d0e-8a0e-6c2f4c9b7d33"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # kfp.local warns about every image without "python" in its name.
            item.add_marker(pytest.mark.filterwarnings("ignore:.*non-Python base image:RuntimeWarning"))


@dataclass
class Ended:
    code: int
    log: str
    output: dict[str, Any]
    """Outputs that the component wrote for KFP: parameterValues and artifacts; empty if there are none."""
    termination_message: str


@dataclass
class Steps:
    """Runs each component in a separate process, on the local backend in a directory of the test."""

    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    python: str = STEP_PYTHON

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def artifact_root(self, component: str) -> Path:
        return self.directory / "artifacts" / "pipeline" / RUN / component.replace("_", "-") / TASK_UUID

    def start(
        self,
        component: str,
        *,
        compiled: Path | None = None,
        artifacts: Mapping[str, list[Any]] | None = None,
        **parameters: Any,
    ) -> subprocess.Popen[str]:
        """Start a component as the launcher does: ``{{$}}`` is the executor input, with defaults filled in.

        Args:
            component: Name of the component.
            compiled: Its YAML, if it is not a component of this package.
            artifacts: Its input artifacts.
            parameters: Its input parameters.
        """
        spec = yaml.safe_load((compiled or COMPILED / f"{component}.yaml").read_text())
        definition = spec["components"][f"comp-{component.replace('_', '-')}"]
        container = spec["deploymentSpec"]["executors"][f"exec-{component.replace('_', '-')}"]["container"]
        root = self.artifact_root(component)
        logs = {  # every step has it; its URI is the only one that changes between tries
            "name": "executor-logs",
            "type": {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"},
            "uri": str(root / f"executor-logs-{self.environment.get('KFP_RETRY_INDEX', '0')}"),
        }
        given = executor_input(definition, root, parameters, artifacts or {}, {"executor-logs": [logs]})
        words = [*container["command"], *container["args"]]
        command = [word.replace("{{$}}", json.dumps(given)) for word in words]
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def variables(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TRAINJOB_", "KFP_", "KUBERNETES_"))}
        # KFP's command does not delete the program that it writes to a `mktemp` directory; a pod's end deletes it.
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            **clean,
            "TMPDIR": str(temporary),
            "PYTHONFAULTHANDLER": "1",
            "PATH": f"{Path(self.python).parent}{os.pathsep}{os.environ['PATH']}",
            "TRAINJOB_HOME": str(self.home),
            "TRAINJOB_BACKEND": "local",
            "TRAINJOB_TERMINATION_LOG": str(self.directory / "termination-log"),
            **self.environment,
        }

    def output_file(self, component: str) -> Path:
        return self.artifact_root(component) / "output_metadata.json"

    def run(self, component: str, **parameters: Any) -> Ended:
        process = self.start(component, **parameters)
        return self.end(component, process)

    def end(self, component: str, process: subprocess.Popen[str], seconds: float = 100) -> Ended:
        log = rest_of(process, seconds)
        written, message = self.output_file(component), self.directory / "termination-log"
        return Ended(
            process.returncode,
            log,
            json.loads(written.read_text()) if written.exists() else {},
            message.read_text() if message.exists() else "",
        )

    @staticmethod
    def signal(process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to the process group, as Argo does."""
        os.killpg(process.pid, number)

    def run_example(self, name: str, *arguments: str) -> str:
        """Run a script of dags_examples/kfp with kfp.local; return its output."""
        ended = subprocess.run(
            [sys.executable, "-W", "error", str(EXAMPLES / name), "--local", *arguments],
            cwd=self.directory,
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def client(self) -> TrainJobClient:
        return TrainJobClient(LocalBackend(self.home), "default")

    def jobs(self) -> list[Any]:
        with self.client() as client:
            return client.list()


def script(text: str, *args: str) -> dict[str, Any]:
    """Parameters of a training that runs a program on each node."""
    return {"runtime": "jax-distributed", "command": ["python", "-c", text], "args": list(args)}


def document_of(page: str) -> dict[str, Any]:
    """The document in a page."""
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def nested(depth: int) -> dict[str, Any]:
    """Mappings inside each other."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path)
    yield made
    for process in made.processes:
        with suppress(ProcessLookupError):
            made.signal(process, signal.SIGKILL)
        with process:  # closes its output
            pass
    with made.client() as client:
        for job in client.list():
            client.cancel(JobRef.of(job))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> StepBackend:
    """A cluster in this process."""
    monkeypatch.setattr("trainjob._backends.kubernetes.pod_watch._GROUP_SECONDS", 0.01)
    return StepBackend()


@pytest.fixture
def client(backend: StepBackend) -> Iterator[TrainJobClient]:
    """A client of that cluster."""
    with TrainJobClient(backend, "ns") as made:
        yield made
