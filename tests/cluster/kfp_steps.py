"""Steps of a pipeline on the real node: pods that run a compiled component's own command, as a KFP backend starts them.

What a backend does there was measured on one (KFP 2.17.0, Argo Workflows 4.0.5): the executor input, the pod's account,
which processes are above Python, and what becomes of them after Terminate.
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
from tests.processes import wait_until
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import RealNode

from trainjob.install import objects
from trainjob.manifest import job_name
from trainjob.status import CANCELLED

COMPILED = Path(__file__).parents[2] / "kfp_components" / "trainjob_kfp" / "compiled"
ACCOUNT = "pipeline-runner"
_OUTPUTS = "/tmp/kfp_outputs"

ARGO = "argoproj.io/v1alpha1"
WORKFLOWS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "workflows.argoproj.io"},
    "spec": {
        "group": "argoproj.io",
        "scope": "Namespaced",
        "names": {"kind": "Workflow", "plural": "workflows", "singular": "workflow"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            },
        ],
    },
}
"""The definition of Argo's Workflows, as far as owners go."""

# The processes of a step's container: Argo's wrapper is the first one of its PID namespace; below it, in a group of
# their own, are KFP's launcher, sh and Python. The wrapper passes a signal on to that group. The launcher, which has no
# handler, is dead at once; the wrapper polls for that once a second, ends, and with it the kernel ends whatever is left
# in the namespace. How long that takes is an argument here.
_WRAPPER = """
import os, signal, sys, time
seconds, command = float(sys.argv[1]), sys.argv[2:]
launcher = os.fork()
if not launcher:
    os.setpgid(0, 0)
    os.execvp("sh", ["sh", "-c", '"$@"; exit $?', "launcher", *command])
def stop(number, frame):
    os.killpg(launcher, number)
    os.write(1, b"the wrapper has passed SIGTERM on\\n")
    time.sleep(seconds)
    os._exit(143)
signal.signal(signal.SIGTERM, stop)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) & 255)
"""
PASSED_ON = "the wrapper has passed SIGTERM on"
ASKED = "SIGTERM: the TrainJob was asked to stop (suspend)"

KEPT = "SIGTERM: the TrainJob keeps running: its step's next pod waits for it (EvictionByEvictionAPI)"
DELETED = "SIGTERM: the TrainJob was deleted"

# Seconds from SIGTERM to the last sign of life of Python after Terminate: what is known of 48 trials on a KFP backend.
_TRIALS = 48
_BELOW = {3: 0.1, 19: 0.3, 24: 0.4, 40: 1.0}  # number of trials -> seconds that they did not reach
_SHORTEST, _LONGEST = 0.021, 2.97
_KNOWN = [(0.5 / _TRIALS, _SHORTEST), *((n / _TRIALS, seconds) for n, seconds in _BELOW.items())]
_KNOWN.append((1 - 0.5 / _TRIALS, _LONGEST))


def time_left(share: float) -> float:
    """The seconds that `share` of the measured trials did not exceed; linear between those that are known.

    That is the inverse of their distribution: with evenly spread shares from 0 to 1 as arguments it gives as many short
    ones as were measured.
    """
    for (below, shorter), (above, longer) in pairwise(_KNOWN):
        if share <= above:
            return shorter + (longer - shorter) * max(0.0, share - below) / (above - below)
    return _LONGEST


@dataclass(frozen=True)
class Execution:
    """One execution of a task of a run, as KFP's driver draws it up; all tries of it are the same.

    Attributes:
        component: Which of our components it runs, e.g. ``train``.
        parameters: What the pipeline gives to it; the rest are its defaults.
        run: Id of the run.
        uuid: What the driver draws for the execution.
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
    def place(self) -> str:
        """What is below an artifact's bucket, up to the artifact's name."""
        return f"mlpipeline/v2/artifacts/nightly/{self.run}/{self.task}/{self.uuid}"

    def command(self, retry: int = 0) -> list[str]:
        """The command and arguments of the container, as KFP's launcher fills them in."""
        definition, container = _compiled(self.component)
        inputs = (definition.get("inputDefinitions") or {}).get("parameters") or {}
        defaults = {name: each["defaultValue"] for name, each in inputs.items() if "defaultValue" in each}
        outputs = definition.get("outputDefinitions") or {}
        types = {name: each["artifactType"] for name, each in (outputs.get("artifacts") or {}).items()}
        names = {name: name for name in types} | {"executor-logs": f"executor-logs-{retry}"}  # of every step
        types["executor-logs"] = {"schemaTitle": "system.Artifact", "schemaVersion": "0.0.1"}
        artifacts = {
            name: {"artifacts": [{"name": name, "type": types[name], "uri": f"minio://{self.place}/{last}"}]}
            for name, last in names.items()
        }
        parameters = {
            name: {"outputFile": f"{_OUTPUTS}/{self.place}/{name}"} for name in outputs.get("parameters") or {}
        }
        executor_input = {
            "inputs": {"parameterValues": {**defaults, **self.parameters}},
            "outputs": {
                "artifacts": artifacts,
                "parameters": parameters,
                "outputFile": f"{_OUTPUTS}/{self.place}/output_metadata.json",
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
class Ended:
    """What is left of a try.

    Attributes:
        code: Exit code.
        log: All of it.
        message: The container's termination message.
        output: What it gave to KFP, parameterValues and artifacts; empty if it gave nothing.
    """

    code: int
    log: str
    message: str
    output: dict[str, Any]


def admit(cluster: Access, namespace: str, *others: str, grant: bool = True) -> None:
    """Make the account of a pipeline's pods, with the rights that `trainjob install` gives it.

    Args:
        cluster: Where.
        namespace: Of the pods.
        others: More namespaces in which they may launch jobs.
        grant: Whether it gets the rights at all.
    """
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": namespace}}
    cluster.api.apply(account)
    for where in (namespace, *others) if grant else ():
        for each in objects("rbac", namespace=where, service_accounts=[(namespace, ACCOUNT)]):
            cluster.api.apply(each)
        asked = {"group": TRAINER.partition("/")[0], "resource": "trainjobs", "verb": "create"}
        cluster.until_allowed(f"system:serviceaccount:{namespace}:{ACCOUNT}", namespace=where, **asked)


class Steps:
    """Runs steps as pods of a namespace.

    Args:
        cluster: With the real node and the step image.
        namespace: Of the pods; see `admit`.
        image: The step image.
    """

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
        """Create the pod of one try.

        Args:
            execution: What it is a try of.
            retry: Ordinal of the try where the task has ``set_retry``, from 0.
            seconds_left: For a try that is going to be terminated: how long Python lives on after SIGTERM.
            workflow: The object that owns the pod, as the run's Workflow does.
            named: Whether the step knows the name of its pod, so that it can watch it.
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

    def run(self, execution: Execution, *, retry: int | None = None) -> Ended:
        """One try, to its end."""
        return self.end(self.start(execution, retry=retry))

    def end(self, tried: Try, timeout: float = 120) -> Ended:
        """Wait for the end of a try."""
        state = lambda: (self._status(tried).get("state") or {}).get("terminated")  # noqa: E731
        terminated = wait_until(f"{tried.pod} ends", state, timeout, poll=0.2)
        written = self._outputs(tried.pod) / tried.execution.place / "output_metadata.json"
        return Ended(
            int(terminated["exitCode"]),
            self.log(tried),
            str(terminated.get("message") or ""),
            json.loads(written.read_text()) if written.exists() else {},
        )

    def log(self, tried: Try, **params: str) -> str:
        """The log of a try so far; empty as long as its container has not started."""
        try:
            return self.cluster.pod_log(self.namespace, tried.pod, **params)
        except ApiError as error:
            if error.status not in (400, 404):  # the latter where its kubelet has not heard of a new pod yet
                raise
            return ""

    def signal(self, tried: Try, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the first process of a try's container, as Argo does for Terminate."""
        self.node.kill_container(self._status(tried)["containerID"], how)

    def evict(self, tried: Try) -> tuple[Ended, str]:
        """Evict a try's pod, as ``kubectl drain`` does, and wait for its end; what is left, and its log with times."""
        pods = f"{self.cluster.api.path('v1', 'Pod', self.namespace, tried.pod)}"
        hold: dict[str, Any] = {
            "metadata": {"finalizers": ["tests.trainjob.dev/hold"]}
        }  # its status is read afterwards
        self.cluster.api.patch("v1", "Pod", self.namespace, tried.pod, hold)
        try:
            metadata = {"name": tried.pod, "namespace": self.namespace}
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            self.cluster.api.request("POST", f"{pods}/eviction", eviction)
            return self.end(tried), self.log(tried, timestamps="true")
        finally:
            self.cluster.api.patch("v1", "Pod", self.namespace, tried.pod, {"metadata": {"finalizers": None}})

    def vanish(self, tried: Try) -> None:
        """Delete a pod without any notice, as where its node is lost."""
        self.cluster.api.delete("v1", "Pod", self.namespace, tried.pod, grace=0)

    def job(self, execution: Execution, namespace: str = "") -> dict[str, Any] | None:
        """The first TrainJob of an execution, None if there is none."""
        return self.cluster.api.get(TRAINER, "TrainJob", namespace or self.namespace, execution.job)

    def _outputs(self, pod: str) -> Path:
        return self.cluster.directory / "kfp-outputs" / pod

    def _status(self, tried: Try) -> dict[str, Any]:
        found = self.cluster.api.get("v1", "Pod", self.namespace, tried.pod) or {}
        statuses: list[dict[str, Any]] = (found.get("status") or {}).get("containerStatuses") or [{}]
        return statuses[0]


def owner_reference(owner: Mapping[str, Any]) -> dict[str, str]:
    """How `owner` stands in the metadata of what belongs to it."""
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
    """SIGKILL for the Python that runs the component, as the kernel does where memory runs out."""
    (python,) = [pid for pid, words in processes(tried).items() if "kfp.dsl.executor_main" in words]
    os.kill(python, signal.SIGKILL)


def suspended(trainjob: dict[str, Any] | None) -> bool:
    """Whether a step has suspended its job, so that the next try continues with it."""
    if trainjob is None:
        return False
    return CANCELLED in (trainjob["metadata"].get("annotations") or {}) and trainjob["spec"].get("suspend") is True
