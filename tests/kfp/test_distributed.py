"""`distributed` components as KFP's launcher runs them: all ranks run the function, and rank 0 writes the outputs."""

# No `from __future__ import annotations`: KFP reads those of components as objects.
import inspect
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from kfp import compiler, dsl
from tests.hostile_documents import DOCUMENTS, mutations

from trainjob import ConfigurationError, TrainJobResult
from trainjob_kfp import STEP_IMAGE, distributed, distribution, node

if TYPE_CHECKING:
    from tests.kfp.conftest import Steps

pytestmark = pytest.mark.timeout(200)

FROM_KFP = {"shape": {"n": 3.0, "name": "[[trainjob:trainjob--x]]-2.0"}, "trainjob--x": 'say "hi"'}
"""As kfp.local passes numbers inside of a parameter, and a value inside of an argument."""


@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def fit(
    epochs: int,
    shape: dict,  # type: ignore[type-arg]  # as KFP has it
    data: dsl.Input[dsl.Dataset],
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    note: dsl.OutputPath(str),  # type: ignore[valid-type]
) -> NamedTuple("Outputs", [("loss", float), ("names", list)]):  # type: ignore[valid-type]
    import os
    from pathlib import Path
    from typing import Any

    rank, ranks = os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"]
    print(f"rank {rank} of {ranks} reads {Path(data.path).read_text()!r} as {shape}", flush=True)
    if rank == "0":
        Path(model.path).write_text("weights")
        model.metadata["framework"] = "none"
        metrics.log_metric("loss", 0.25)
        Path(note).parent.mkdir(parents=True, exist_ok=True)
        Path(note).write_text("noted")
    outputs: Any = (1.0 / epochs, ["a", "b"])
    return outputs


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of the compiled component."""
    path = tmp_path_factory.mktemp("compiled") / "fit.yaml"
    made = distributed(fit, runtime="jax-distributed", num_nodes=2, labels={"team": "a"})
    compiler.Compiler().compile(made, str(path))
    return path


def start(steps: "Steps", component: Path) -> Any:
    (steps.directory / "data.txt").write_text("1,2")
    data = {"name": "data", "type": {"schemaTitle": "system.Dataset"}, "uri": str(steps.directory / "data.txt")}
    return steps.start("fit", compiled=component, artifacts={"data": [data]}, epochs=4, **FROM_KFP)


def test_all_ranks_run_the_function_and_rank_0_writes_the_outputs(steps: "Steps", component: Path) -> None:
    ended = steps.end("fit", start(steps, component))
    assert ended.code == 0, ended.log
    for rank in (0, 1):
        assert f"[node-{rank}] rank {rank} of 2 reads '1,2' as {{'n': 3, 'name': 'say \"hi\"-2.0'}}" in ended.log
    assert ended.output["parameterValues"] == {"loss": 0.25, "names": ["a", "b"]}
    (model,) = ended.output["artifacts"]["model"]["artifacts"]
    (metrics,) = ended.output["artifacts"]["metrics"]["artifacts"]
    assert model["uri"] == str(steps.artifact_root("fit") / "model"), "KFP's URI is kept"
    assert Path(model["uri"]).read_text() == "weights"
    assert (model["metadata"], metrics["metadata"]) == ({"framework": "none"}, {"loss": 0.25})
    assert (steps.artifact_root("fit") / "note").read_text() == "noted"
    (job,) = steps.jobs()
    assert job["metadata"]["labels"]["team"] == "a"

    again = steps.end("fit", start(steps, component))
    assert again.output == ended.output
    assert len(steps.jobs()) == 1, "running the execution again creates no second job"


def test_the_step_does_not_import_kfps_authoring_api(component: Path, tmp_path: Path) -> None:
    """The import takes a second, and needs modules that a step image without KFP's dependencies does not have."""
    spec = yaml.safe_load(component.read_text())
    container = spec["deploymentSpec"]["executors"]["exec-fit"]["container"]
    *before, python, _, module = container["command"]
    program = f"import sys, {module}; print([name for name in sys.modules if name.startswith('kfp')])"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {"PATH": path, "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([*before, python, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_outputs_longer_than_the_termination_message_are_refused(steps: "Steps", tmp_path: Path) -> None:
    @dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
    def talk() -> str:
        return "x" * 5000

    path = tmp_path / "talk.yaml"
    compiler.Compiler().compile(distributed(talk, runtime="jax-distributed"), str(path))
    ended = steps.end("talk", steps.start("talk", compiled=path))
    assert ended.code == 1
    assert "the outputs of talk take 5" in ended.log
    assert "return less, or write the data to an artifact" in json.dumps(ended.log)


OUTPUTS = {"parameters": {"note": {"outputFile": "note"}}, "artifacts": {"m": {"artifacts": [{}]}}, "outputFile": "out"}
REPORTED = {"parameterValues": {"a": 1}, "metadata": {"m": [{"x": 1}]}, "files": {"note": "noted"}}


def test_outputs_that_something_else_has_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (data.decode("utf-8", "replace") for data in DOCUMENTS.values()):
        result = TrainJobResult("ns", "fit", "uid", 1, outputs={"kfp": text})
        with pytest.raises(ConfigurationError, match="TrainJob ns/fit is complete, but its outputs are not those"):
            distribution._write_outputs(OUTPUTS, result)
    for changed in mutations(REPORTED):
        with suppress(ConfigurationError):
            result = TrainJobResult("ns", "fit", "uid", 1, outputs={"kfp": json.dumps(changed)})
            distribution._write_outputs(OUTPUTS, result)


@pytest.mark.parametrize(
    ("variable", "launcher"), [("PET_NNODES", "torchrun"), ("OMPI_MCA_orte_default_hostfile", "mpirun")]
)
def test_a_missing_launcher_is_named(variable: str, launcher: str, tmp_path: Path) -> None:
    given = {"function": "fit", "source": "", "executor_input": {"outputs": {}}, "inputs": {}, "outputs": {}}
    words = [sys.executable, "-c", inspect.getsource(node), json.dumps(given)]
    environment = {"PATH": str(tmp_path), variable: "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (127, f'exec: "{launcher}": executable file not found in $PATH\n')
