"""The real node: real processes run, find each other, and their logs are read."""

from __future__ import annotations

from pathlib import Path

from tests.processes import wait_until
from tests.testcluster import images
from tests.testcluster.access import TRAINER, Access, condition, trainjob
from tests.testcluster.control_plane import Cluster

# Rank 1 connects to rank 0 by the address from Trainer, and both end.
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
    """Steps launch TrainJobs from inside the cluster this way."""
    script = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
request = urllib.request.Request("https://kubernetes.default.svc/api")
request.add_header("Authorization", "Bearer " + open(folder + "/token").read())
context = ssl.create_default_context(cafile=folder + "/ca.crt")
print(urllib.request.urlopen(request, context=context, timeout=20).status)
"""
    assert _run(real_node, images.PYTHON, "python3", "-c", script) == "200\n"


def test_a_layer_on_top_of_an_image(real_node: Access, own_cluster: Cluster, tmp_path: Path) -> None:
    """Images with this package, or with the dependencies of a training, are built this way."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "hello.py").write_text("print('hello from a layer')\n")
    images.write_layer(tmp_path / "layer.tar", tmp_path / "root", "opt")
    below = images.layers_of(images.ensure()[images.PYTHON], tmp_path)
    images.write_image(tmp_path / "image.tar", "trainjob.test/hello:1", [*below, tmp_path / "layer.tar"], {})
    assert own_cluster.real_node
    own_cluster.real_node.load(tmp_path / "image.tar")
    assert _run(real_node, "trainjob.test/hello:1", "python3", "/opt/hello.py") == "hello from a layer\n"


def _run(cluster: Access, image: str, *command: str) -> str:
    """The log of a pod that runs `command`."""
    with cluster.namespace("real", real=True) as namespace:
        container = {"name": "step", "image": image, "command": list(command)}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "step", "namespace": namespace},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        }
        cluster.api.create(pod)

        def ended() -> str:
            found = cluster.api.get("v1", "Pod", namespace, "step") or {}
            phase = str(found.get("status", {}).get("phase"))
            return phase if phase in ("Succeeded", "Failed") else ""

        assert wait_until("the pod ends", ended, 60, poll=0.2) == "Succeeded"
        return cluster.pod_log(namespace, "step")
