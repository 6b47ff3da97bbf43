"""Locations of inputs and outputs: ``pvc://claim/path`` is mounted; local ones need no staging, see `tests/stores`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.trees import tree

from trainjob import InvalidSpec, TrainJobSpec
from trainjob._manifest.render import render
from trainjob._support import volumes
from trainjob.data import copy, initialize, read_manifest
from trainjob.data.options import Export
from trainjob.errors import ConfigurationError, UnsafePath


def body(**fields: Any) -> dict[str, Any]:
    """The spec of the TrainJob."""
    spec: dict[str, Any] = render(TrainJobSpec.parse({"runtime": "trainjob-step", **fields}), "key", 1, "ns")["spec"]
    return spec


def mounted(spec: dict[str, Any]) -> dict[str, str]:
    """Path in the nodes -> PersistentVolumeClaim."""
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    claim_of = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    assert (patch["manager"], job["name"], container["name"]) == ("trainjob.dev/claims", "node", "node")
    return {mount["mountPath"]: claim_of[mount["name"]] for mount in container["volumeMounts"]}


def test_the_locations_of_a_step_are_mounted() -> None:
    options = Export(source="pvc://scratch/trained", target="pvc://models/", name="digits", export_id="pvc//x")
    spec = body(command=options.to_command())
    assert mounted(spec) == {"/mnt/trainjob-claims/scratch": "scratch", "/mnt/trainjob-claims/models": "models"}
    assert {"--source=pvc://scratch/trained", "--target=pvc://models/"} <= set(spec["trainer"]["command"])


def test_inputs_and_outputs_of_a_training_are_mounted_on_its_nodes() -> None:
    inputs = {"dataset": "pvc://data.v1/my%20set", "model": "s3://models/pvc://no", "none": ""}
    spec = body(command=["train"], inputs=inputs, outputs={"model": "pvc://data.v1"})
    assert mounted(spec) == {"/mnt/trainjob-claims/data.v1": "data.v1"}
    assert {each["name"]: each.get("value", "") for each in spec["trainer"]["env"]} == {
        "TRAINJOB_INPUT_DATASET": "file:///mnt/trainjob-claims/data.v1/my%20set",
        "TRAINJOB_INPUT_MODEL": "s3://models/pvc://no",
        "TRAINJOB_INPUT_NONE": "",
        "TRAINJOB_OUTPUT_MODEL": "file:///mnt/trainjob-claims/data.v1",
    }
    assert "runtimePatches" not in body(command=["train", "--note=see-pvc://x", "pvc:/y"], inputs={"a": "s3://b"})


def test_reported_paths_become_pvc_locations() -> None:
    assert volumes.as_claim("file:///mnt/trainjob-claims/models/my%20model") == "pvc://models/my%20model"
    assert volumes.as_claim("/mnt/trainjob-claims/models") == "pvc://models"
    for other in ("file:///mnt/trainjob-claims", "s3://b/mnt/trainjob-claims/x", "/mnt/trainjob-claimsx/y", ""):
        assert volumes.as_claim(other) == other


@pytest.mark.parametrize("uri", ["pvc://", "pvc:///x", "pvc://Claim/x", "pvc:claim", "pvc://-x/y"])
def test_invalid_pvc_locations_are_rejected(uri: str) -> None:
    with pytest.raises(InvalidSpec, match=r"inputs\.dataset: .* is not a URI"):
        body(command=["train"], inputs={"dataset": uri})


def test_an_unmounted_pvc_is_not_created_as_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    with pytest.raises(
        ConfigurationError, match="PersistentVolumeClaim models is not mounted at /mnt/trainjob-claims/models: a job"
    ):
        copy(str(tmp_path), "pvc://models/new")
    assert not volumes.directory("models").exists()


def test_files_are_copied_between_pvcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "MOUNT", str(tree(tmp_path, {"one/set/a b.csv": b"1", "two/x": b""})))
    done = initialize("pvc://one/set/", "pvc://two/there")
    assert done.uri == "pvc://two/there"
    assert (tmp_path / "two" / "there" / "a b.csv").read_text() == "1"
    manifest = read_manifest("pvc://two/there")
    assert manifest is not None
    assert manifest.digest == done.digest
    with pytest.raises(ConfigurationError, match="overlaps"):
        copy("pvc://two/there", "pvc://two")
    with pytest.raises(UnsafePath):
        copy("pvc://two/../one/set", "pvc://two/x")


PROGRAM = [str(Path(sys.executable).parent / "trainjob"), "exec", "--"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def test_local_locations_are_not_staged_and_the_command_replaces_the_process(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.argv[1], os.environ['TRAINJOB_INPUT_DATA'])"
    uri = tmp_path.as_uri()
    done = run(sys.executable, "-c", code, f"--data={uri}", TRAINJOB_INPUT_DATA=uri, TRAINJOB_INPUT_MODEL="")
    assert done.stdout.split() == [str(os.getpid()), f"--data={uri}", uri]


def test_commands_that_cannot_start_have_exit_codes() -> None:
    done = run("nosuch-program")
    assert (done.returncode, "nosuch-program" in done.stderr) == (127, True)
    assert run().returncode == 2
