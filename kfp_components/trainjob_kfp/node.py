"""The program of each node of a `distributed` component: runs the component's function under the runtime's launcher.

The node's command is this module's source (``python3 -c``), so the image needs only Python and KFP, as for the
component itself. It also needs this package if artifacts are remote. The only argument is JSON:

* ``function``, ``source``: the name of the function, and the module that KFP generated from it;
* ``executor_input``: the executor input as KFP's launcher passes it to a step;
* ``inputs``, ``outputs``: the locations of remote artifacts, by their URIs in the executor input.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_MAX_MESSAGE = 4096  # bytes: kubelet, MaxContainerTerminationMessageLength

# Run by each process that torchrun starts. Only rank 0 writes the outputs; otherwise several processes would write the
# same file. KFP's executor decides this by Vertex AI's variable CLUSTER_SPEC.
_PROCESS = """\
import json, os, runpy
names = ("RANK", "OMPI_COMM_WORLD_RANK", "JAX_PROCESS_ID", "DMLC_TASK_ID", "JOB_COMPLETION_INDEX")
rank = int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))
os.environ["CLUSTER_SPEC"] = json.dumps({"task": {"type": "chief" if rank == 0 else "worker"}})
runpy.run_module("kfp.dsl.executor_main", run_name="__main__")
"""


def main(payload: str) -> int:
    """Run the function; return the exit code."""
    if "OMPI_MCA_orte_default_hostfile" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.execvp(_program("mpirun"), ["mpirun", *sys.orig_argv])
    directory = Path(tempfile.mkdtemp(prefix="trainjob-"))
    try:
        return _run(json.loads(payload), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(given: dict[str, Any], directory: Path) -> int:
    local_paths = {}
    for i, (uri, location) in enumerate(given["inputs"].items()):
        local_paths[uri] = _download(location, directory / "inputs" / str(i))
    for i, uri in enumerate(given["outputs"]):
        local_paths[uri] = str(directory / "outputs" / str(i))
    executor_input = given["executor_input"]
    outputs = executor_input["outputs"]
    for side in (executor_input.get("inputs", {}), outputs):
        for artifacts in side.get("artifacts", {}).values():
            for artifact in artifacts.get("artifacts", []):
                artifact["uri"] = local_paths.get(artifact["uri"], artifact["uri"])
    outputs["outputFile"] = str(directory / "executor_output.json")
    for name, parameter in outputs.get("parameters", {}).items():
        parameter["outputFile"] = str(directory / "parameters" / name)
    module, process = directory / "ephemeral_component.py", directory / "process.py"
    module.write_text(given["source"], encoding="utf-8")
    process.write_text(_PROCESS, encoding="utf-8")
    words = ["--component_module_path", str(module), "--function_to_execute", given["function"]]
    words += ["--executor_input", json.dumps(executor_input)]
    launcher = _program("torchrun") if "PET_NNODES" in os.environ else sys.executable
    child = subprocess.Popen([launcher, str(process), *words], env={**os.environ, "_KFP_RUNTIME": "true"})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    if code == 0 and int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("JOB_COMPLETION_INDEX") or 0) == 0:
        for uri, location in given["outputs"].items():
            _upload(Path(local_paths[uri]), location)
        _report_outputs(outputs, given["function"])
    return code if code >= 0 else 128 - code


def _program(name: str) -> str:
    if (path := shutil.which(name)) is None:
        print(f'exec: "{name}": executable file not found in $PATH', file=sys.stderr)  # as runc for a command
        sys.exit(127)  # as a shell
    return path


def _download(location: str, directory: Path) -> str:
    from trainjob.data import copy

    copy(location, str(directory), progress=lambda line: print(line, flush=True))
    single = directory / location.rpartition("/")[2]
    return str(single if single.is_file() else directory)


def _upload(path: Path, location: str) -> None:
    """Upload a file, or all files of a directory, to the location of the artifact."""
    from trainjob.data.locations import parse_store
    from trainjob.data.stores.opening import open_writable

    parent, _, name = location.rpartition("/")
    store = open_writable(parse_store(parent + "/"))
    for each in [path] if path.is_file() else sorted(path.rglob("*")):
        if each.is_file():
            with each.open("rb") as file:
                relative = each.relative_to(path).as_posix()
                target = name if each == path else f"{name}/{relative}"
                store.write(target, iter(lambda: file.read(1 << 20), b""), each.stat().st_size)


def _report_outputs(outputs: dict[str, Any], function: str) -> None:
    """Add the function's outputs to the termination message, which can have progress that the function reported."""
    written = json.loads(Path(outputs["outputFile"]).read_text(encoding="utf-8"))
    results = {
        "parameterValues": written.get("parameterValues", {}),
        "metadata": {
            name: [each.get("metadata", {}) for each in value["artifacts"]]
            for name, value in written.get("artifacts", {}).items()
        },
        "files": {
            name: Path(each["outputFile"]).read_text(encoding="utf-8", errors="replace")
            for name, each in outputs.get("parameters", {}).items()
            if Path(each["outputFile"]).is_file()
        },
    }
    log = Path(os.environ.get("TRAINJOB_TERMINATION_LOG") or "/dev/termination-log")
    try:
        message = json.loads(log.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the function may have written anything
        message = {}
    if not isinstance(message, dict) or message.get("trainjob") != 1:
        message = {"trainjob": 1}
    others = message.get("outputs")
    message["outputs"] = {
        **(others if isinstance(others, dict) else {}),
        "kfp": json.dumps(results, separators=(",", ":")),
    }
    text = json.dumps(message, separators=(",", ":"))
    if len(text) > _MAX_MESSAGE:
        sys.exit(
            f"the outputs of {function} take {len(text)} bytes, but a termination message holds {_MAX_MESSAGE}: return "
            "less, or write the data to an artifact"
        )
    log.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
