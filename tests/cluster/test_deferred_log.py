"""The log of a deferred Airflow task while a training on the real node draws a progress bar."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.cluster.launchers import launcher_environment
from tests.processes import wait_until
from tests.testcluster import images
from tests.testcluster.access import TRAINER, Access

from trainjob import Phase, TrainJobClient
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob.status import observe

pytestmark = pytest.mark.timeout(300)

# A progress bar as tqdm draws it, which never ends its line. containerd passes such a line on in parts of 16 KiB, which
# this bar fills in 3 s. SIGTERM ends the process: the first process of a container would otherwise ignore it for 30 s.
TRAINING = r"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step in range(100_000):
    sys.stdout.write(f"\r  7%|{'#' * 40}{' ' * 60}| step {step:06}/100000 [00:12<02:31,  6.61it/s, loss=0.25]")
    sys.stdout.flush()
    time.sleep(0.02)
"""
# Airflow reads its home at its first import, so it cannot run in this process. No server provides connections here.
TRIGGER = """
import asyncio, json, logging, sys
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook
from trainjob_airflow.triggers.trainjob import TrainJobTrigger

async def none(self):
    return Target()

async def main(job):
    trigger = TrainJobTrigger(trainjob_conn_id="trainjob_default", **job)
    trigger._log = logging.getLogger("trigger")
    async for event in trigger.run():
        print(json.dumps(event.payload), flush=True)

TrainJobHook._aresolve = none
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
logging.getLogger("httpx").setLevel(logging.WARNING)
asyncio.run(main(json.loads(sys.argv[1])))
"""
STATE = re.compile(r"^\[node-0\] .* step (\d{6})/100000 \[.*loss=0\.25\]$", re.MULTILINE)


def test_a_progress_bar_is_in_the_log_while_it_is_drawn(real_node: Access, tmp_path: Path) -> None:
    with real_node.namespace("deferred", real=True) as namespace:
        settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace, "NO_COLOR": "1"}
        settings |= {"KUBECONFIG": str(real_node.kubeconfig), "AIRFLOW_HOME": str(tmp_path)}
        backend = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
        spec = {"runtime": "torch-distributed", "image": images.PYTHON, "command": ["python3", "-c", TRAINING]}
        with TrainJobClient(backend, namespace) as client, (tmp_path / "trigger.log").open("w") as log:
            ref = client.launch(spec, "deferred")
            command = [sys.executable, "-c", TRIGGER, json.dumps({**asdict(ref), "key": "deferred", "tried": 1})]
            environment = {**launcher_environment(), **settings}
            trigger = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
            try:

                def steps() -> list[int]:
                    return [int(step) for step in STATE.findall((tmp_path / "trigger.log").read_text())]

                wait_until("the log has three states of the bar", lambda: len(steps()) >= 3, 200, poll=0.5)
                assert trigger.poll() is None, "the task is deferred"
                job = real_node.api.get(TRAINER, "TrainJob", namespace, ref.name)
                assert observe(job).phase is Phase.RUNNING
                shown = steps()
                assert shown == sorted(set(shown)), "each state is newer than the one before"
                client.cancel(ref)
                assert trigger.wait(60) == 0
            finally:
                trigger.kill()
                trigger.wait()
        logged = (tmp_path / "trigger.log").read_text()
    assert "\r" not in logged
    assert "log streaming failed" not in logged
    assert json.loads(logged.splitlines()[-1])["status"] == "failed", "it was deleted"
