"""A job whose runtime was deleted: Trainer's webhook refuses every change to it from then on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import yaml
from tests.cluster import failing as make
from tests.processes import read_until, wait_until
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import TrainJobSpec, WaitOptions
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs import report
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.errors import Stuck

pytestmark = pytest.mark.timeout(400)


def test_a_job_that_completes_without_its_runtime_is_a_success(cluster: Access, namespace: str, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(make.OWN | {"runtime_patches": [run_until_finished()]}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINJOB_", "KUBE"))}
    environment = {**clean, "KUBECONFIG": str(cluster.kubeconfig)}
    words = ["run", "--no-logs", "--key", "a", "-n", namespace, str(spec)]
    command = [str(Path(sys.executable).with_name("trainjob")), *words]
    with make.own(make.NODE)(cluster, namespace):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            read_until(process, "Running")
            cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
            cluster.finish(namespace)
            out, _ = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 0, out
        assert "the TrainJob could not be marked as delivered, so the same key returns this result again" in out


@pytest.mark.anyio
async def test_waiting_for_a_job_without_its_runtime_fails(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    with make.own(make.NODE)(cluster, namespace):
        ref = await launch(backend, TrainJobSpec.parse(make.OWN | {"suspend": True}), "a", namespace=namespace)
        cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
        with anyio.fail_after(10), pytest.raises(Stuck, match="its TrainingRuntime own does not exist anymore"):
            await wait(backend, ref, WaitOptions(fail_fast=True))
        assert (await report.diagnose(backend, namespace, ref.name)).observation.stuck


@pytest.mark.anyio
async def test_suspending_a_job_without_its_runtime_deletes_it(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    with make.own(make.NODE)(cluster, namespace):
        asked = TrainJobSpec.parse(make.OWN | {"env": simulate(run="never")})
        ref = await launch(backend, asked, "a", namespace=namespace)
        wait_until("it runs", lambda: cluster.api.find("v1", "Pod", namespace), 60)
        cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
        assert await cancel(backend, ref, "suspend")
        assert await backend.get(namespace, ref.name) is None
