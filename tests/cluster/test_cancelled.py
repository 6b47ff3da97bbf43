"""`trainjob cancel` and Ctrl-C on a cluster, where logs are deleted with their pods: both print the last lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from tests.cluster.launchers import launcher_environment
from tests.processes import wait_until
from tests.testcluster import images
from tests.testcluster.access import TRAINER, Access

pytestmark = pytest.mark.timeout(400)

# A progress bar as tqdm draws it: carriage returns, and a newline when it is complete. SIGTERM ends the process:
# the first process of a container would otherwise ignore it for 30 s.
TRAINING = r"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step in range(1, 31):
    sys.stdout.write(f"\rstep {step}/30")
    sys.stdout.flush()
print("\nloss 0.25", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["cancel", "cancel --json", "Ctrl-C"])
def test_status_and_logs_are_printed_before_a_deletion(real_node: Access, tmp_path: Path, way: str) -> None:
    program = str(Path(sys.executable).parent / "trainjob")
    with real_node.namespace("real", real=True) as namespace, (tmp_path / "run.log").open("w+") as log:
        settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace, "NO_COLOR": "1"}
        environment = {**launcher_environment(), **settings, "KUBECONFIG": str(real_node.kubeconfig)}
        asked = ("--runtime=torch-distributed", f"--image={images.PYTHON}", "--", "python3", "-c", TRAINING)
        run = subprocess.Popen([program, "run", *asked], env=environment, stdout=log, stderr=log)
        try:
            wait_until("the training has logged a loss", lambda: "[node-0] loss 0.25" in _text(log), 120, poll=0.3)
            assert "[node-0] step 30/30" in _text(log)
            (job,) = real_node.api.find(TRAINER, "TrainJob", namespace)
            name = job["metadata"]["name"]
            if way == "Ctrl-C":
                run.send_signal(signal.SIGINT)
                run.wait(90)
                output = _text(log)
                output = output[output.index(f"cancelled {namespace}/{name}") :]
            else:
                cancel = [program, "cancel", name, *way.split()[1:]]
                done = subprocess.run(cancel, env=environment, capture_output=True, text=True, timeout=90, check=True)
                output = done.stdout
        finally:
            run.kill()
            run.wait()
        assert real_node.api.get(TRAINER, "TrainJob", namespace, name) is None
    if way == "cancel --json":
        answer = json.loads(output)
        assert answer["last"]["phase"] == "Running"
        assert answer["last"]["logs"]["node-0"][-2:] == ["step 30/30", "loss 0.25"]
    else:
        assert f"cancelled {namespace}/{name}" in output
        lines = output.splitlines()
        begin = lines.index("last lines of node-0:")
        assert lines[begin + 1 : begin + 3] == ["  | step 30/30", "  | loss 0.25"]


def _text(log: IO[str]) -> str:
    log.seek(0)
    return log.read()
