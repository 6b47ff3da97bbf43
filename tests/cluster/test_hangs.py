"""A hang on a real node, whose kubelet serves the logs. tests/local/test_hangs.py draws other kinds of hangs."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tests.testcluster import images
from tests.testcluster.access import Access

from trainjob import TrainJobSpec, progress
from trainjob.backends.kubernetes.backend import KubernetesBackend
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.diagnosis import Category
from trainjob.errors import JobHung
from trainjob.lifecycle import cancel, give_up, given_up, launch
from trainjob.verdicts import RetryVerdict
from trainjob.waiting import wait

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

PROGRESS = Path(progress.__file__).read_text()
# The image has no trainjob: the script brings the file that may be copied next to it. The first process of a container
# ignores SIGSTOP.
_START = """
import subprocess, sys
open("/tmp/progress.py", "w").write(sys.argv[1])
open("/tmp/train.py", "w").write(sys.argv[2])
sys.exit(subprocess.call([sys.executable, "/tmp/train.py"]))
"""
_TRAIN = """
import os, signal, time
import progress
rank = int(os.environ["PET_NODE_RANK"])
for step in range(60):
    progress.step(step)
    time.sleep(0.05)
    if rank == 1 and step == 50:
        os.kill(os.getpid(), signal.SIGSTOP)
def wait_for_rank_1():
    time.sleep(600)
wait_for_rank_1()
"""


async def test_a_stopped_process_is_named_by_the_logs_of_its_pods(real_node: Access) -> None:
    words = [_START, PROGRESS, _TRAIN]
    command = ["python3", "-c", *(word.replace("$", "$$") for word in words)]
    fields = {"runtime": "torch-distributed", "image": images.PYTHON, "num_nodes": 2, "stall_timeout": "4s"}
    backend = KubernetesBackend(Credentials(kubeconfig=str(real_node.kubeconfig)))
    notices: list[str] = []
    with real_node.namespace("hangs", real=True) as namespace:
        ref = await launch(backend, TrainJobSpec.parse({**fields, "command": command}), "hangs", namespace=namespace)
        with anyio.fail_after(150), pytest.raises(JobHung) as caught:
            await wait(backend, ref, on_change=lambda _, notice: notices.append(notice))
        diagnosis = caught.value.diagnosis
        assert (diagnosis.category, diagnosis.rank) == (Category.HANG, "node-1"), diagnosis.text()
        assert diagnosis.retry is RetryVerdict.INFRASTRUCTURE
        assert "node-1 does not respond any more at step" in diagnosis.summary
        assert any("wait_for_rank_1" in line for line in diagnosis.log), "the stack of the rank that waits"
        assert any("measured by the steps that the ranks count" in notice for notice in notices)
        await give_up(backend, ref, diagnosis)
        stopped = await backend.get(namespace, ref.name)
        assert stopped is not None
        assert given_up(stopped) == diagnosis
        await cancel(backend, ref)
    await backend.aclose()
