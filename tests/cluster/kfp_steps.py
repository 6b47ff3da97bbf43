"""Runs pipeline steps on the real node: pods with the command of a compiled component, as a KFP backend starts them.

The behavior of a backend was measured (KFP 2.17.0, Argo Workflows 4.0.5): the executor input, the pod's service
account, the parent processes of Python, and when they end after Terminate.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.pods import evict, pods_of
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import RealNode

from trainjob._install import objects
from trainjob.job import JobRef, job_name
from trainjob.status import CANCELLED

COMPILED = Path(__file__).parents[2] / "kfp_components" / "trainjob_kfp" / "compiled"
ACCOUNT = "pipeline-runner"
_OUTPUTS = "/tmp/kfp_outputs"

ARGO = "argoproj.io/v1alpha1"
_ANYTHING = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
WORKFLOWS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "workflows.argoproj.io"},
    "spec": {
        "group": "argoproj.io",
        "scope": "Namespaced",
        "names": {"kind": "Workflow", "plural": "workflows", "singular": "workflow"},
        "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": _ANYTHING}],
    },
}
"""A minimal CustomResourceDefinition of Argo's Workflows, enough for owner references."""

# The processes of a step's container: Argo's wrapper is the first in its PID namespace; below it, in a separate process
# group, are KFP's launcher, sh and Python. The wrapper forwards a signal to that group. The launcher has no handler and
# exits at once; the wrapper polls for that once a second and exits, and then the kernel kills all other processes of
# the namespace. The first argument of this replacement is the time until then.
_WRAPPER = """
import os, signal, sys, time
seconds, command = float(sys.argv[1]), sys.argv[2:]
launcher = os.fork()
if not launcher:
    os.setpgid(0, 0)
    os.execvp("sh", ["sh", "-c", '"$@"; exit $?', "launcher", *command])
def stop(number, frame):
    os.killpg(launcher, number)
    os.write(1, b"the wrapper has forwarded SIGTERM\\n")
    time.sleep(seconds)
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) & 255)
"""
FORWARDED = "the wrapper has forwarded SIGTERM"
SUSPEND_REQUESTED = "SIGTERM: the TrainJob was asked to stop (suspend)"

KEPT = "SIGTERM: the TrainJob keeps running: its step's next pod waits for it (EvictionByEvictionAPI)"
DELETED = "SIGTERM: the TrainJob was deleted"

# Seconds from SIGTERM to the last output of Python after Terminate, from 48 trials on a KFP backend.
_TRIALS = 48
_BELOW = {3: 0.1, 19: 0.3, 24: 0.4, 40: 1.0}  # number of trials -> seconds that all of them stayed below
_SHORTEST, _LONGEST = 0.021, 2.97
_MEASURED = [(0.5 / _TRIALS, _SHORTEST), *((n / _TRIALS, seconds) for n, seconds in _BELOW.items())]
_MEASURED.append((1 - 0.5 / _TRIALS, _LONGEST))


def time_left(share: float) -> float:
    """The seconds that `share` of the measured trials did not exceed, linearly interpolated.

    This is the inverse of the measured distribution: evenly spaced shares from 0 to 1 give the same portion of short
    times as the measurement.
    """
    for (below, shorter), (above, longer) in pairwise(_MEASURED):
        if share <= above:
            return shorter + (longer - shorter) * max(0.0, share - below) / (above - below)
    return _LONGEST


@dataclass(frozen=True)
class Execution:
    """One execution of a task of a run, as KFP's driver creates it; all its tries share it.

    The pipeline sets `parameters`; the others have their defaults. The driver generates `uuid`.
    """

    component: str
    parameters: Mapping[str, Any]
    run: str = field(default_factory=lambda: str(uuid.uuid4()))
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def task(self) -> str:
        """Name of the task in the pipeline."""
        return self.component.replace("_", "-")

    @property
    def job(self) -> str:
        """Name of its first TrainJob."""
        return job_name(f"kfp/{self.run}/{self.uuid}/{self.task}", 1)

    @property
    def path(self) -> str:
        """The path of artifacts in the bucket, without their names."""
        return f"mlpipeline/v2/artifacts/nightly/{self.run}/{self.task}/{self.uuid}"

    def command(self, retry: int = 0) -> list[str]:
        """The command and arguments of the container, as KFP's launcher fills them in."""
        definition, container = _compiled(self.component)
        inputs = (definition.get("inputDefinitions") or {}).get("parameters") or {}
        defaults = {name: each["defaultValue"] for name, each in inputs.items() if "defaultValue" in each}
        outputs = definition.get("outputDefinitions") or {}
        types = {name: each["artifactType"] for name, each in (outputs.get("artifacts") or {}).items()}
        names = {name: name for name in types} | {"executor-logs": f"executor-logs-{retry}"}  # every step has it
        types["executor-logs"] = {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}
        artifacts = {
            name: {"artifacts": [{"name": name, "type": types[name], "uri": f"minio://{self.path}/{last}"}]}
            for name, last in names.items()
        }
        parameters = {
            name: {"outputFile": f"{_OUTPUTS}/{self.path}/{name}"} for name in outputs.get("parameters") or {}
        }
        executor_input = {
            "inputs": {"parameterValues": {**defaults, **self.parameters}},
            "outputs": {
                "artifacts": artifacts,
                "parameters": parameters,
                "outputFile": f"{_OUTPUTS}/{self.path}/output_metadata.json",
            },
        }
        words: list[str] = [*container["command"], *container["args"]]
        return [word.replace("{{$}}", json.dumps(executor_input)) for word in words]


@cache
def _compiled(component: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The definition of a compiled component, and its container."""
    found = yaml.safe_load((COMPILED / f"{component}.yaml").read_text())
    name = component.replace("_", "-")
    executor: dict[str, Any] = found["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
    return found["components"][f"comp-{name}"], executor


@dataclass(frozen=True)
class Try:
    """A pod that runs an execution."""

    execution: Execution
    pod: str


@dataclass(frozen=True)
class Result:
    """The result of a try."""

    code: int
    log: str
    message: str
    """The container's termination message."""
    output: dict[str, Any]
    """Outputs for KFP, parameterValues and artifacts; empty if there are none."""


def create_account(cluster: Access, namespace: str, *others: str, grant: bool = True) -> None:
    """Create the service account of a pipeline's pods, with the permissions of `trainjob install`, also in `others`."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": namespace}}
    cluster.api.apply(account)
    for where in (namespace, *others) if grant else ():
        for each in objects("rbac", namespace=where, service_accounts=[(namespace, ACCOUNT)]):
            cluster.api.apply(each)
        asked = {"group": TRAINER.partition("/")[0], "resource": "trainjobs", "verb": "create"}
        cluster.wait_for_permission(f"system:serviceaccount:{namespace}:{ACCOUNT}", namespace=where, **asked)


class Steps:
    """Runs steps as pods of a namespace (see `create_account`) on the real node."""

    def __init__(self, cluster: Cluster, namespace: str, image: str) -> None:
        assert cluster.real_node
        self.cluster = cluster
        self.node: RealNode = cluster.real_node
        self.namespace = namespace
        self.image = image

    def start(
        self,
        execution: Execution,
        *,
        retry: int | None = None,
        seconds_left: float | None = None,
        workflow: Mapping[str, Any] | None = None,
        named: bool = True,
    ) -> Try:
        """Create the pod of one try, the `retry`-th from 0 if the task has ``set_retry``.

        Args:
            execution: The execution that the try belongs to.
            retry: Number of the try.
            seconds_left: Seconds that Python keeps running after SIGTERM, for a try that the test terminates.
            workflow: Owner of the pod, such as the run's Workflow.
            named: Whether the step has the name of its pod in its environment, so that it can read the pod.
        """
        name = f"{execution.task}-{secrets.token_hex(4)}"
        command = execution.command(retry or 0)
        if seconds_left is not None:
            command = ["python3", "-I", "-S", "-c", _WRAPPER, str(seconds_left), *command]
        reference = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        environment: list[dict[str, Any]] = [{"name": "ARGO_CONTAINER_NAME", "value": "main"}]
        if named:
            environment.append({"name": "KFP_POD_NAME", **reference})
        if retry is not None:
            environment.append({"name": "KFP_RETRY_INDEX", "value": str(retry)})
        outputs = self._outputs(name)
        outputs.mkdir(parents=True)
        container = {
            "name": "main",
            "image": self.image,
            "command": command,
            "env": environment,
            "volumeMounts": [{"name": "outputs", "mountPath": _OUTPUTS}],
        }
        spec = {
            "serviceAccountName": ACCOUNT,
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "outputs", "hostPath": {"path": str(outputs)}}],
        }
        labels = {"pipeline/runid": execution.run}
        owner = {} if workflow is None else {"ownerReferences": [owner_reference(workflow)]}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels, **owner}
        self.cluster.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return Try(execution, name)

    def run(self, execution: Execution, *, retry: int | None = None) -> Result:
        """Run one try to its end."""
        return self.end(self.start(execution, retry=retry))

    def end(self, tried: Try, timeout: float = 240) -> Result:
        """Wait for the end of a try."""
        state = lambda: (self._status(tried).get("state") or {}).get("terminated")  # noqa: E731
        terminated = wait_until(f"{tried.pod} ends", state, timeout, poll=0.2)
        written = self._outputs(tried.pod) / tried.execution.path / "output_metadata.json"
        return Result(
            int(terminated["exitCode"]),
            self.log(tried),
            str(terminated.get("message") or ""),
            json.loads(written.read_text()) if written.exists() else {},
        )

    def log(self, tried: Try, **params: str) -> str:
        """The current log of a try; empty until its container has started."""
        try:
            return self.cluster.pod_log(self.namespace, tried.pod, **params)
        except ApiError as error:
            if error.status not in (400, 404):  # 404: the kubelet does not have the new pod yet
                raise
            return ""

    def signal(self, tried: Try, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the first process of a try's container, as Argo does for Terminate."""
        self.node.kill_container(self._status(tried)["containerID"], how)

    def evict(self, tried: Try) -> tuple[Result, str]:
        """Evict a try's pod, as ``kubectl drain`` does, and wait for its end; return the result and the timed log."""
        hold = {"metadata": {"finalizers": ["tests.trainjob.dev/hold"]}}  # its status is read afterwards
        self.cluster.api.patch("v1", "Pod", self.namespace, tried.pod, hold)
        try:
            evict(self.cluster, self.namespace, tried.pod)
            return self.end(tried), self.log(tried, timestamps="true")
        finally:
            self.cluster.api.patch("v1", "Pod", self.namespace, tried.pod, {"metadata": {"finalizers": None}})

    def force_delete(self, tried: Try) -> None:
        """Delete a pod without a grace period, as after the loss of its node."""
        self.cluster.api.delete("v1", "Pod", self.namespace, tried.pod, grace=0)

    def job(self, execution: Execution, namespace: str = "") -> dict[str, Any] | None:
        """The first TrainJob of an execution, None if there is none."""
        return self.cluster.api.get(TRAINER, "TrainJob", namespace or self.namespace, execution.job)

    def pods(self, execution: Execution) -> list[dict[str, Any]]:
        """The running pods of the first TrainJob of an execution."""
        found = pods_of(self.cluster, JobRef(self.namespace, execution.job, ""))
        return [pod for pod in found if pod["status"]["phase"] == "Running"]

    def _outputs(self, pod: str) -> Path:
        return self.cluster.directory / "kfp-outputs" / pod

    def _status(self, tried: Try) -> dict[str, Any]:
        found = self.cluster.api.get("v1", "Pod", self.namespace, tried.pod) or {}
        statuses: list[dict[str, Any]] = (found.get("status") or {}).get("containerStatuses") or [{}]
        return statuses[0]


def owner_reference(owner: Mapping[str, Any]) -> dict[str, str]:
    """The owner reference to `owner` for the metadata of a dependent object."""
    metadata = owner["metadata"]
    return {**{name: owner[name] for name in ("apiVersion", "kind")}, "name": metadata["name"], "uid": metadata["uid"]}


def processes(tried: Try) -> dict[int, list[str]]:
    """The processes of a try, which runs on this machine: process id -> command line."""
    found = {}
    for directory in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if f"KFP_POD_NAME={tried.pod}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_text().split("\0")
    return found


def kill_python(tried: Try) -> None:
    """Send SIGKILL to the Python that runs the component, as the kernel does when memory runs out."""
    (python,) = [pid for pid, words in processes(tried).items() if "kfp.dsl.executor_main" in words]
    os.kill(python, signal.SIGKILL)


def suspended(trainjob: dict[str, Any] | None) -> bool:
    """Whether a step has suspended the job, so that the next try resumes it."""
    if trainjob is None:
        return False
    return CANCELLED in (trainjob["metadata"].get("annotations") or {}) and trainjob["spec"].get("suspend") is True
