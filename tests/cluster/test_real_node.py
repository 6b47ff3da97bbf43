"""The real node: processes that really run, find each other and are heard."""

from __future__ import annotations

import pytest
from tests.cluster import images
from tests.cluster.access import TRAINER, Access, condition, trainjob
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.timeout(900)  # the first one may build programs and images

# Rank 1 greets rank 0 by the name that Trainer gives it, and both end.
_GREETING = """
import os, socket, time
rank, address = os.environ["PET_NODE_RANK"], (os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"]))
if rank == "0":
    server = socket.create_server(("", address[1]))
    print("heard:", server.accept()[0].recv(100).decode(), flush=True)
    open("/dev/termination-log", "w").write("heard")
else:
    for _ in range(100):
        try:
            with socket.create_connection(address, timeout=5) as greeting:
                greeting.sendall(b"rank 1 is here")
            break
        except OSError:
            time.sleep(0.2)
    else:
        raise SystemExit("rank 0 was not found")
"""


def test_two_ranks_find_each_other_and_complete(real_node: Access) -> None:
    with real_node.namespace("real", real=True) as namespace:
        trainer = {"numNodes": 2, "image": images.PYTHON, "command": ["python3", "-c", _GREETING]}
        real_node.api.create(trainjob("job", namespace, trainer=trainer))

        def completed() -> object:
            return condition(real_node.api.get(TRAINER, "TrainJob", namespace, "job"), "Complete")

        wait_until("the job completes", completed, 90, poll=0.2)
        pods = {
            pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: pod
            for pod in real_node.api.find("v1", "Pod", namespace)
        }
        assert real_node.pod_log(namespace, pods["0"]["metadata"]["name"]) == "heard: rank 1 is here\n"
        ended = pods["0"]["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (0, "heard")


def test_a_pod_reaches_the_api_server_by_its_service(real_node: Access) -> None:
    """What a step that launches TrainJobs from inside the cluster does."""
    script = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
request = urllib.request.Request("https://kubernetes.default.svc/api")
request.add_header("Authorization", "Bearer " + open(folder + "/token").read())
context = ssl.create_default_context(cafile=folder + "/ca.crt")
print(urllib.request.urlopen(request, context=context, timeout=20).status)
"""
    with real_node.namespace("real", real=True) as namespace:
        container = {"name": "step", "image": images.PYTHON, "command": ["python3", "-c", script]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "step", "namespace": namespace},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        real_node.api.create(pod)

        def ended() -> str:
            found = real_node.api.get("v1", "Pod", namespace, "step") or {}
            phase = str(found.get("status", {}).get("phase"))
            return phase if phase in ("Succeeded", "Failed") else ""

        phase = wait_until("the pod ends", ended, 60, poll=0.2)
        assert (phase, real_node.pod_log(namespace, "step")) == ("Succeeded", "200\n")
