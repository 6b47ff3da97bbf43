"""Documents of running jobs show what their ranks use, by the metrics API. It needs metrics-server: `make campaign`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.backends import opened
from tests.cluster.waits import document_when, until_phase
from tests.testcluster import images
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster

from trainjob import Phase, TrainJobSpec
from trainjob._install import objects
from trainjob._jobs.launching import launch
from trainjob._pages.live import LiveReader

(ROLE,) = [each for each in objects("rbac") if each["kind"] == "Role"]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

# Half a core and 64 MiB; on 2 cores, other tests need the rest.
BUSY = """
import time
memory = bytearray(64 << 20)
for index in range(0, len(memory), 4096):
    memory[index] = 1
while True:
    stop = time.monotonic() + 0.05
    while time.monotonic() < stop:
        pass
    time.sleep(0.05)
"""


@pytest.fixture
def metrics_server(own_cluster: Cluster) -> Iterator[None]:
    with own_cluster.metrics_api():
        yield


async def test_running_ranks_show_what_they_use(real_node: Access, own_cluster: Cluster, metrics_server: None) -> None:
    with own_cluster.namespace("real", real=True) as namespace:
        async with opened(own_cluster.kubeconfig_for(ROLE["rules"], namespace)) as backend:
            fields = {"image": images.PYTHON, "command": ["python3", "-c", BUSY], "num_nodes": 2}
            asked = TrainJobSpec.parse({"runtime": "torch-distributed", **fields})
            ref = await launch(backend, asked, "busy", namespace=namespace)
            await until_phase(backend, ref, Phase.RUNNING)
            reader = LiveReader(backend, seconds=1)
            document = await document_when(reader, ref, lambda seen: len(seen["resources"]["used"] or ()) == 2)
            assert {each["rank"] for each in document["resources"]["used"]} == {"node-0", "node-1"}
            for each in document["resources"]["used"]:
                assert 0.02 < each["cpu"] < 2, each
                assert 64 << 20 < each["memory"] < 1 << 30, each
            own_cluster.pause("metrics-server")
            try:
                document = await document_when(reader, ref, lambda seen: seen["resources"]["used"] is None, 30)
            finally:
                own_cluster.resume("metrics-server")
            assert document["phase"] == "Running"
