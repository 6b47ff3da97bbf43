"""The objects of an API server as tests need them: jobs, pods and their containers' states, Events, conditions.

Each has what the product reads of it, and plain values for everything that a test does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]

CREATED, STARTED, ENDED = (f"2026-11-21T10:0{minute}:00Z" for minute in (0, 1, 5))
"""When a job was created, its containers started, and they ended."""

JOBSET = "jobset.sigs.k8s.io/jobset-name"
STEP = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX = "batch.kubernetes.io/job-completion-index"


# ---------------------------------------------------------------- TrainJobs


def condition(kind: str, reason: str = "", *, value: str = "True", message: str = "", time: str = ENDED) -> Object:
    """A condition of a job or pod."""
    reason = reason or kind
    return {"type": kind, "status": value, "reason": reason, "message": message or reason, "lastTransitionTime": time}


FAILED = condition("Failed", "FailedJobs", message="jobset failed due to one or more job failures")
COMPLETE = condition("Complete", "AllJobsCompleted", message="jobset completed successfully")
SUSPENDED = condition("Suspended", message="TrainJob is suspended", time=CREATED)
RESUMED = condition("Suspended", "Resumed", value="False", message="TrainJob is resumed", time=STARTED)


def trainjob(
    *conditions: Object,
    name: str = "x",
    namespace: str = "ns",
    spec: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **status: Any,
) -> Object:
    """A job with conditions; `spec` is added to a runtime, `metadata` to a name, a UID and the time of creation."""
    own = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "creationTimestamp": CREATED}
    about = {"labels": dict(labels or {}), "annotations": dict(annotations or {})}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {**own, **about, **(metadata or {})},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, **(spec or {})},
        "status": {**({"conditions": list(conditions)} if conditions else {}), **status},
    }


def counts(step: str = "node", **counters: int) -> Object:
    """An entry of ``jobsStatus``: how many of a step's jobs are ready, active, succeeded, failed and suspended."""
    return {"name": step, **dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0), **counters}


# ---------------------------------------------------------------- pods


RUNNING: Object = {"running": {"startedAt": STARTED}}


def ended(code: int, **terminated: Any) -> Object:
    """The state of a container that ended with a code; other fields as named, for example ``finishedAt``."""
    reason = "Error" if code else "Completed"
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": STARTED, "finishedAt": ENDED, **terminated}}


def waiting(reason: str, message: str = "") -> Object:
    """The state of a container that waits."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def pod(
    rank: int = 0,
    state: Object | None = None,
    last: Object | None = None,
    *,
    job: str = "x",
    step: str = "node",
    container: str = "node",
    init: bool = False,
    node: str = "n1",
    metadata: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    **status: Any,
) -> Object:
    """The pod of a rank, with one container in a state; running by default.

    Args:
        rank: Its completion index.
        state: State of the container.
        last: State of the container's run before.
        job: Name of the TrainJob.
        step: Name of the replicated job.
        container: Name of the container.
        init: Whether it is an init container.
        node: Name of the node.
        metadata: Added to name, UID, labels and time of creation.
        spec: Added to containers and node.
        status: Fields of the status.
    """
    state = RUNNING if state is None else state
    code = state.get("terminated", {}).get("exitCode")
    phase = "Running" if init or code is None else "Failed" if code else "Succeeded"
    shown = {"name": container, "restartCount": int(last is not None), "state": state, "lastState": last or {}}
    own = {
        "name": f"{job}-{step}-0-{rank}-abcde",
        "namespace": "ns",
        "uid": f"uid-{job}-{step}-{rank}",
        "creationTimestamp": CREATED,
        "labels": {JOBSET: job, STEP: step, INDEX: str(rank)},
    }
    containers: Object = {"containers": [{"name": "node" if init else container, "resources": {}}]}
    if init:
        containers["initContainers"] = [{"name": container, "resources": {}}]
    return {
        "metadata": {**own, **(metadata or {})},
        "spec": {**containers, "nodeName": node, **(spec or {})},
        "status": {"phase": phase, "initContainerStatuses" if init else "containerStatuses": [shown], **status},
    }


# ---------------------------------------------------------------- Events


def event(
    reason: str,
    message: str = "",
    *,
    time: str = ENDED,
    last: str = "",
    about: Mapping[str, Any] | str = "x-node-0-0-abcde",
    container: str = "",
    kind: str = "Pod",
    **fields: Any,
) -> Object:
    """An Event about the object of that name, or about one of its containers, from `time` to `last`."""
    involved = {"kind": kind, "name": about} if isinstance(about, str) else dict(about)
    if container:
        involved["fieldPath"] = f"spec.containers{{{container}}}"
    times = {"firstTimestamp": time, "lastTimestamp": last or time}
    return {"type": "Warning", "reason": reason, "message": message, "involvedObject": involved, **times, **fields}
