"""Parts of the failures in `failures`: specs, scripts, and changes of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import yaml
from tests.cluster.pods import evict, pods_of
from tests.processes import ComponentError, wait_until
from tests.testcluster import images, kueue, nodes
from tests.testcluster.access import TRAINER, Access, condition
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import NAME, RealNode

from trainjob.job import JobRef

Object = dict[str, Any]

REGISTRY = "127.0.0.1:5000"
"""Address of the registry on the real node, which has no image and never completes ``/slow``; see `corpus.registry`."""


def python(script: str, nodes: int = 1, **fields: Any) -> Object:
    return {"runtime": "torch-distributed", "num_nodes": nodes, "command": ["python3", "-c", script], **fields}


def shell(script: str) -> Object:
    return {"runtime": "torch-distributed", "command": ["sh", "-c", script]}


def one_of(nodes: int, script: str, **fields: Any) -> Object:
    """Rank 1 runs `script`; the others sleep."""
    lines = ["import os, sys, time", "if os.environ['PET_NODE_RANK'] != '1': time.sleep(600)"]
    return python("\n".join([*lines, script]), nodes, **fields)


def simulated(nodes: int = 1, gpus: int = 0, **fields: Any) -> Object:
    resources = {"resources_per_node": {"gpu": gpus}} if gpus else {}
    return {"runtime": "torch-distributed", "num_nodes": nodes, **resources, **fields}


def endless(**fields: Any) -> Object:
    """A job of a simulated pod that does not end."""
    return simulated(env=simulate(run="never"), **fields)


def patched(pod: Mapping[str, Any]) -> Object:
    """A change to the pods of the nodes."""
    node = {"name": "node", "template": {"spec": {"template": {"spec": dict(pod)}}}}
    return {"runtime_patches": [{"training_runtime_spec": {"template": {"spec": {"replicated_jobs": [node]}}}}]}


def container(name: str, script: str) -> Object:
    return {"name": name, "image": images.PYTHON, "command": ["sh", "-c", script]}


def mounted(volume: Object, path: str = "/mnt/volume", **options: Any) -> Object:
    mount = {"name": volume["name"], "mountPath": path, **options}
    return patched({"volumes": [volume], "containers": [{"name": "node", "volumeMounts": [mount]}]})


def claim(name: str) -> Object:
    """A mounted PersistentVolumeClaim."""
    return mounted({"name": "data", "persistentVolumeClaim": {"claimName": name}})


def secret_key(secret: str) -> Object:
    """A script with a variable from a key of a Secret."""
    return python("", env={"TOKEN": {"valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}})


def queued(queue: str) -> Object:
    return {"labels": {kueue.QUEUE_LABEL: queue}}


def stages(
    *steps: str,
    job: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
) -> Object:
    """Spec of a runtime whose replicated jobs run one after the other and whose pods are not restarted.

    Args:
        steps: Names of the replicated jobs.
        job: Additional fields of the spec of each Job.
        pod: Additional fields of the spec of each pod.
        node: Additional fields of the container of the last step.
    """
    jobs: list[Object] = []
    for step in steps:
        container: Object = {"name": step, "image": images.PYTHON, **((node or {}) if step == steps[-1] else {})}
        if step.endswith("-initializer"):
            container["volumeMounts"] = [{"name": "initializer", "mountPath": "/workspace"}]
            container["command"] = ["sh", "-c", "echo no such dataset >&2; exit 4"]
        template: Object = {"restartPolicy": "Never", "containers": [container], **(pod or {})}
        template["volumes"] = [{"name": "initializer", "emptyDir": {}}, *template.get("volumes", [])]
        label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer" if step == "node" else step}
        spec = {"backoffLimit": 0, **(job or {}), "template": {"spec": template}}
        depends = {"dependsOn": [{"name": jobs[-1]["name"], "status": "Complete"}]} if jobs else {}
        jobs.append({"name": step, "template": {"metadata": {"labels": label}, "spec": spec}, **depends})
    return {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": jobs}}}


NODE = stages("node")
OWN: Object = {"runtime": {"name": "own", "kind": "TrainingRuntime"}}


def own(spec: Object, *others: Object) -> Callable[[Access, str], AbstractContextManager[None]]:
    """Create a runtime `own`, and other objects, in the job's namespace."""
    metadata = {"name": "own", "labels": {"trainer.kubeflow.org/framework": "torch"}}
    runtime = {"apiVersion": TRAINER, "kind": "TrainingRuntime", "metadata": metadata, "spec": spec}

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        with applied(*others)(cluster, where):
            cluster.add_runtime({**runtime, "metadata": {**metadata, "namespace": where}})
            yield

    return made


def _node(*taints: Object, **spec: Any) -> Callable[[Access, str], AbstractContextManager[None]]:
    """A simulated node only for pods that select it by the name of their namespace."""

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        node = nodes.node(0, 8)
        node["metadata"] |= {"name": where, "labels": {**node["metadata"]["labels"], "trainjob.test/own": where}}
        cluster.api.create({**node, "spec": {"taints": [nodes.RESERVED, *taints], **spec}})
        try:
            yield
        finally:
            cluster.api.delete("v1", "Node", "", where)

    return made


own_node = _node()
tainted_node = _node({"key": "reserved", "value": "others", "effect": "NoSchedule"})
cordoned_node = _node(unschedulable=True)
ON_OWN_NODE = patched({"nodeSelector": {"trainjob.test/own": "$NAMESPACE"}, "tolerations": [nodes.ADMITTED]})
"""``$NAMESPACE`` in a spec is the namespace of the job, ``$API_SERVER`` the API server's address for the real node."""


def remove_node(cluster: Access, ref: JobRef) -> None:
    cluster.api.delete("v1", "Node", "", ref.namespace)


def silence_node(cluster: Access, ref: JobRef) -> None:
    """Stop the heartbeats of a node, as after a kill of its kubelet: kwok ignores nodes with another label."""
    cluster.api.patch("v1", "Node", "", ref.namespace, {"metadata": {"labels": {nodes.LABEL: "silent"}}})


def taint_node(cluster: Access, ref: JobRef) -> None:
    taints = [{"key": "out-of-order", "effect": "NoExecute"}]
    cluster.api.patch("v1", "Node", "", ref.namespace, {"spec": {"taints": taints}})


@contextmanager
def restored_kubelet(cluster: Access, _where: str) -> Iterator[None]:
    """Undo `press_memory`."""
    node = node_of(cluster)
    file = node.directory / "kubelet.yaml"
    text = file.read_text()
    try:
        yield
    finally:
        file.write_text(text)
        _restart_kubelet(node)
        kubelet = node.components["kubelet"]
        wait_until("the node has no memory pressure", lambda: not _pressed(cluster), 60, poll=0.5, among=[kubelet])


def press_memory(cluster: Access, _ref: JobRef) -> None:
    """Let the kubelet report memory pressure, by a threshold of 99 % free memory."""
    node = node_of(cluster)
    file = node.directory / "kubelet.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**config, "evictionHard": {"memory.available": "99%"}}))
    _restart_kubelet(node)


def node_of(cluster: Access) -> RealNode:
    if not isinstance(cluster, Cluster) or cluster.real_node is None:
        raise ComponentError("only the kubelet of a node that these tests started can be reconfigured")
    return cluster.real_node


def _restart_kubelet(node: RealNode) -> None:
    kubelet = node.components["kubelet"]
    group = kubelet.pid

    def ended() -> bool:
        try:
            os.killpg(group or 0, 0)
        except ProcessLookupError:
            return True
        return False

    kubelet.kill()
    # It ends a little later than nsenter, which started it in the node's namespaces, and keeps its port until then.
    wait_until("the kubelet has ended", ended, 60)
    kubelet.start()


def _pressed(cluster: Access) -> bool:
    found = cluster.api.get("v1", "Node", "", NAME) or {}
    taints = [each["key"] for each in found["spec"].get("taints") or []]
    return taints != [nodes.LABEL] or condition(found, "Ready") is None


def kill_rank_1(cluster: Access, ref: JobRef) -> None:
    """Kill the container of rank 1 by SIGKILL, as the kernel does when memory runs out."""
    node_of(cluster).kill_container(container_of_rank_1(cluster, ref))


def container_of_rank_1(cluster: Access, ref: JobRef) -> str:
    """Reference of the container of rank 1, once it runs."""

    def running() -> list[str]:
        statuses = [each for pod in pods_of(cluster, ref, 1) for each in pod["status"].get("containerStatuses") or []]
        return [status["containerID"] for status in statuses if "running" in status["state"]]

    wait_until("rank 1 runs", running, 60)
    (container,) = running()
    return container


def evict_all(cluster: Access, ref: JobRef) -> None:
    """Evict the pods, as ``kubectl drain`` does."""
    for pod in pods_of(cluster, ref):
        evict(cluster, ref.namespace, pod["metadata"]["name"])


def delete(cluster: Access, ref: JobRef) -> None:
    cluster.api.delete(TRAINER, "TrainJob", ref.namespace, ref.name)


def job(where: str, name: str, gpus: int, **metadata: Any) -> Object:
    """Another job, which uses the resources that a failure needs."""
    asked = {nodes.GPU: str(gpus)}
    trainer = {"numNodes": 1, "resourcesPerNode": {"requests": asked, "limits": asked}, "env": simulate(run="never")}
    return {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": {"name": name, "namespace": where, **metadata},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }


def applied(*objects: Object) -> Callable[[Access, str], AbstractContextManager[None]]:
    """Create these objects in the job's namespace."""

    @contextmanager
    def made(cluster: Access, where: str) -> Iterator[None]:
        for each in objects:
            cluster.api.create({**each, "metadata": {**each["metadata"], "namespace": where}})
        yield

    return made


def quota(name: str, **hard: str) -> Object:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


CPU_QUOTA = quota("cpu", **{"limits.cpu": "64"})
GPU_QUOTA = quota("gpus", **{f"requests.{nodes.GPU}": "4"})


@contextmanager
def full_gpu_quota(cluster: Access, where: str) -> Iterator[None]:
    """A quota that a pod uses up. The quota controller counted that pod itself.

    Admission counts a pod before it exists. If the controller counts again before it has seen the pod, the quota is
    free for the 5 s until it counts once more. So the pod is there before the quota.
    """
    cluster.api.create(job(where, "first", 4))
    wait_until("the pod of the first job exists", lambda: cluster.api.find("v1", "Pod", where), 60)
    with applied(GPU_QUOTA)(cluster, where):

        def used() -> bool:
            found = cluster.api.get("v1", "ResourceQuota", where, "gpus") or {}
            return bool((found.get("status") or {}).get("used", {}).get(f"requests.{nodes.GPU}") == "4")

        wait_until("the first job uses the quota", used)
        yield


UNBOUND_CLAIM: Object = {  # larger than any volume
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "data"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}},
}
SETTINGS: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a.json": "{}"}}
KEYS: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"user": "x"}}
LIMITS: Object = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "limits"},
    "spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]},
}


def with_volume(path: str, source: Object, **mount: Any) -> Object:
    """A runtime whose node has a volume at that path."""
    mounts = [{"name": "volume", "mountPath": path, **mount}]
    return stages("node", pod={"volumes": [{"name": "volume", **source}]}, node={"volumeMounts": mounts})


SUB_PATH = with_volume("/opt/settings.json", {"configMap": {"name": "settings"}}, subPath="settings.json")


PROBE: Object = {
    "exec": {"command": ["cat", "/tmp/healthy"]},
    "periodSeconds": 1,
    "failureThreshold": 1,
    "timeoutSeconds": 30,
}
RESTARTS: Object = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 1}
FAIL_JOB: Object = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}


@contextmanager
def restricted(cluster: Access, where: str) -> Iterator[None]:
    """Enforce the Pod Security Standard ``restricted`` in the namespace."""
    cluster.restrict(where)
    yield


@contextmanager
def volume_elsewhere(cluster: Access, where: str) -> Iterator[None]:
    """A PersistentVolumeClaim that is bound to a volume of a node that does not exist."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}]}
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/data"},
        "claimRef": {"namespace": where, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
    }
    claim = {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": where}
    cluster.api.create(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": where}, "spec": volume},
    )
    metadata = {"name": "data", "namespace": where}
    cluster.api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})

    def bound() -> bool:
        found = cluster.api.get("v1", "PersistentVolumeClaim", where, "data") or {}
        return bool((found.get("status") or {}).get("phase") == "Bound")

    try:
        wait_until("the PVC is bound", bound)
        yield
    finally:
        cluster.api.delete("v1", "PersistentVolume", "", where)


@contextmanager
def queue(cluster: Access, where: str, name: str = "small", policy: str = "None", **amounts: object) -> Iterator[None]:
    """A LocalQueue whose ClusterQueue has the name of the namespace; by default with room for 8 GPUs."""
    made = kueue.cluster_queue(where, **{"gpu": 8, **amounts})  # type: ignore[arg-type]  # cpu and gpu are objects
    cluster.api.apply({**made, "spec": {**made["spec"], "stopPolicy": policy}})
    cluster.api.create(kueue.local_queue(where, name, where))
    try:
        yield
    finally:
        cluster.api.delete(kueue.API, "ClusterQueue", "", where)


@contextmanager
def full_queue(cluster: Access, where: str) -> Iterator[None]:
    with queue(cluster, where):
        cluster.api.create(job(where, "first", 8, labels={kueue.QUEUE_LABEL: "small"}))

        def admitted() -> bool:
            first = cluster.api.get(TRAINER, "TrainJob", where, "first") or {}
            return (first.get("spec") or {}).get("suspend") is False

        wait_until("the first job holds the quota", admitted)
        yield


def outrank_in_queue(cluster: Access, ref: JobRef) -> None:
    cluster.api.apply(kueue.priority_class("urgent", 1000))
    labels = {kueue.QUEUE_LABEL: "small", kueue.PRIORITY_LABEL: "urgent"}
    cluster.api.create(job(ref.namespace, "urgent", 8, labels=labels))


@contextmanager
def own_node_and_priority(cluster: Access, where: str) -> Iterator[None]:
    """A simulated node, and a priority class of pods that preempt others."""
    with own_node(cluster, where):
        cluster.add_priority_class(where)
        try:
            yield
        finally:
            cluster.api.delete("scheduling.k8s.io/v1", "PriorityClass", "", where)


def outrank(cluster: Access, namespace: str, selector: Mapping[str, str]) -> None:
    """Create a pod of higher priority, of the class of the namespace's name, that needs 8 GPUs of a reserved node."""
    gpus = {"requests": {nodes.GPU: "8"}, "limits": {nodes.GPU: "8"}}
    container = {"name": "x", "image": images.PYTHON, "resources": gpus, "env": simulate(run="never")}
    priority = {"priorityClassName": namespace, "nodeSelector": dict(selector), "tolerations": [nodes.ADMITTED]}
    pod = {"metadata": {"name": "urgent", "namespace": namespace}, "spec": {**priority, "containers": [container]}}
    cluster.api.create({"apiVersion": "v1", "kind": "Pod", **pod})


def outrank_on_node(cluster: Access, ref: JobRef) -> None:
    """Create a pod of higher priority for the node that the job fills."""
    outrank(cluster, ref.namespace, {"trainjob.test/own": ref.namespace})


def remove_runtime(cluster: Access, ref: JobRef) -> None:
    """Delete the runtime, then resume the suspended job."""
    cluster.api.delete(TRAINER, "TrainingRuntime", ref.namespace, "own")
    with suppress(ApiError):  # Trainer's webhook refuses every change to a job whose runtime is gone
        cluster.api.patch(TRAINER, "TrainJob", ref.namespace, ref.name, {"spec": {"suspend": False}})


# ---------------------------------------------------------------- scripts

SLEEP = "import time; time.sleep(600)"
CHAINED = """
def load(row):
    return row["label"]
try:
    load({})
except KeyError as error:
    raise RuntimeError("epoch 3 cannot be read") from error
"""
# The output of PyTorch 2; the test machine has no GPU.
GPU_MEMORY = '''
import sys
print("""[rank0]: Traceback (most recent call last):
[rank0]:   File "/opt/train.py", line 41, in <module>
[rank0]:     loss = model(batch).mean()
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB
of which 1.05 GiB is free. Including non-PyTorch memory, this process has 78.05 GiB memory in use.""", file=sys.stderr)
sys.exit(1)
'''
HANDLED = """
import sys, traceback
try:
    raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
except MemoryError:
    traceback.print_exc()
print("batch size 64 -> 32", file=sys.stderr)
sys.exit("the loss is not a number, giving up")
"""
OUTAGE = """
import urllib.request
urllib.request.urlopen("http://127.0.0.1:9/models")
"""
USAGE = """
import argparse
parser = argparse.ArgumentParser(prog="train.py")
parser.add_argument("--epochs", type=int)
parser.parse_args(["--eopchs", "3"])
"""
ABORT = """
import os, sys
sys.stderr.write("terminate called after throwing an instance of 'std::runtime_error'\\n  what():  no such operator\\n")
sys.stderr.flush()
os.abort()
"""
SERVER = """
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({})
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/model")
"""
"""Sends a request to a server that answers with the given status."""
SHARED_MEMORY = """
import mmap, os
size = 256 << 20  # a container has 64 MiB
file = os.open("/dev/shm/batch", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, size)
batch = mmap.mmap(file, size)
for start in range(0, size, 1 << 20):
    batch[start : start + (1 << 20)] = bytes(1 << 20)
"""
ARM = (
    r"printf '\177ELF\002\001\001\0\0\0\0\0\0\0\0\0\002\0\267\0' > /tmp/train; "
    "chmod 755 /tmp/train; /tmp/train"
)
"""The first bytes of a program for ARM."""
PROCESSES = """
import os, jax
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], 3, int(os.environ["JAX_PROCESS_ID"]), initialization_timeout=10,
    cluster_detection_method="deactivate",
)
"""
"""Waits for three processes."""
SCRIPT = "printf '#!/bin/{}\\necho up\\n' > /tmp/train.sh; {} /tmp/train.sh; /tmp/train.sh"
"""Writes a script with the given interpreter, runs the given command on it, and calls it."""
NOISE = """
import os, sys, time
out = sys.stdout.buffer
out.write(b"\\xff\\xfe latin-1: caf\\xe9 \\x00 \\x1b[31mred\\x1b[0m\\n")
out.write(("\\u65e5\\u672c\\u8a9e " * 3 + "\\n").encode("utf-16"))
for n in range(3):
    out.write(b"x" * (1 << 20) + b"\\n")
out.flush()
time.sleep(1)  # standard output and error reach the log by two pipes
raise LookupError("no such layer: 7")
"""
JAX = """
import os, signal, time
import jax, numpy
from jax.experimental import multihost_utils
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]), cluster_detection_method="deactivate"
)
for step in range(1000):
    if step == 3 and jax.process_index() == 1:
        os.END
    multihost_utils.process_allgather(numpy.ones(4))
    print("step", step, flush=True)
"""
TORCH = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
for step in range(1000):
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("step 3 has no labels")
    dist.all_reduce(torch.ones(4))
    print("step", step, flush=True)
"""


def jax(end: str) -> Object:
    return {"runtime": "jax-distributed", "num_nodes": 2, "command": ["python3", "-c", JAX.replace("END", end)]}


def torch(processes: int, command: str) -> Object:
    start = f"open('/tmp/train.py', 'w').write({TORCH!r})\n{command}"
    return {
        "runtime": "torch-distributed",
        "num_nodes": 2,
        "num_proc_per_node": processes,
        "command": ["python3", "-c", start],
        "env": {"PYTHONPATH": "/opt/torch", "OMP_NUM_THREADS": "1"},
    }


PLAIN_TORCH = """
import os, runpy
for theirs, ours in (("RANK", "NODE_RANK"), ("WORLD_SIZE", "NNODES"), ("MASTER_ADDR",) * 2, ("MASTER_PORT",) * 2):
    os.environ[theirs] = os.environ["PET_" + ours]
runpy.run_path("/tmp/train.py", run_name="__main__")
"""
TORCHRUN = "import sys; sys.argv[1:] = ['/tmp/train.py']\nfrom torch.distributed.run import main; main()"
