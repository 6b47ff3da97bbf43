"""Simulated nodes: kwok simulates their kubelets, so they have any capacity, and tests control their pods.

Variables of a pod's containers (a TrainJob's ``trainer.env``) or annotations of the same names (a runtime's pod
template) control what the pod does, e.g. ``SIMULATED_EXIT_CODE=3``; see `SETTINGS`. stages.yaml reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

LABEL = "trainjob.test/node"
"""Label of every node: ``simulated`` or ``real``."""

GPU = "nvidia.com/gpu"

SETTINGS = (
    "start",  # from scheduled to running: 100ms; "never" stays in ContainerCreating
    "waiting",  # reason why the pod never starts, e.g. ImagePullBackOff
    "run",  # from running to the end: 1s; "never" runs until it is deleted
    "exit_code",  # 0
    "reason",  # of the termination, e.g. OOMKilled; default: Completed or Error
    "message",  # the termination message; with `waiting` the waiting message
    "ranks",  # completion indices with this exit code, e.g. "1,3"; the others never end. Default: all
    "failures",  # number of failing runs before one succeeds, for pods that restart in place. Default: all fail
    "stop",  # from deletion to the end, by SIGTERM: 100ms
)
"""Settings of a simulated pod, with the defaults. Durations are Go's: 100ms, 1.5s, 2m."""


def variable(setting: str) -> str:
    """Name of the environment variable or annotation of a setting: ``exit_code`` is ``SIMULATED_EXIT_CODE``."""
    return f"SIMULATED_{setting.upper()}"


def simulate(**settings: object) -> list[dict[str, str]]:
    """Environment variables of a container, e.g. ``simulate(exit_code=3, run="5s")``."""
    if unknown := settings.keys() - set(SETTINGS):
        raise ValueError(f"unknown setting: {', '.join(sorted(unknown))}; known: {', '.join(SETTINGS)}")
    return [{"name": variable(setting), "value": str(value)} for setting, value in settings.items()]


def run_until_finished() -> Object:
    """A runtime patch: the pods of `node` run until `Access.finish`."""
    template = {"metadata": {"annotations": {variable("run"): "never"}}}
    job = {"name": "node", "template": {"spec": {"template": template}}}
    return {"training_runtime_spec": {"template": {"spec": {"replicated_jobs": [job]}}}}


RESERVED: Object = {"key": "trainjob.test/reserved", "effect": "NoSchedule"}
"""Taint of nodes of a single test: pods of other tests must not run there."""

ADMITTED: Object = {"key": RESERVED["key"], "operator": "Exists"}
"""Toleration of `RESERVED`."""


def node(index: int, gpus: int, cpus: int = 64, memory: str = "512Gi") -> Object:
    """A node object for kwok."""
    name = f"simulated-{index}"
    capacity = {"cpu": str(cpus), "memory": memory, "pods": "1000", GPU: str(gpus)}
    labels = {LABEL: "simulated", "kubernetes.io/hostname": name, "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}},
        "status": {
            "allocatable": capacity,
            "capacity": capacity,
            # kwok sets the address when a node becomes ready, and removes it when that happens again, as after missing
            # heartbeats, unless there is a name as well. Without the address the logs of the pods cannot be read.
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        },
    }


def volumes(number: int = 24) -> list[Object]:
    """PersistentVolumes of 20 GiB, in place of a provisioner, for the PVCs of the torchtune runtimes.

    A volume is bound only once, so the default is more than the tests of one run need.
    """
    spec = {"capacity": {"storage": "20Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/spare"}}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"spare-{index}"}, "spec": spec}
        for index in range(number)
    ]


def configuration(node_stages: Sequence[Object], log_file: str) -> list[Object]:
    """The documents of kwok's configuration: the stages of nodes (kwok's) and of pods (by `SETTINGS`).

    Args:
        node_stages: kwok's stages for nodes.
        log_file: The log of every simulated container, in the kubelet's format.
    """
    common, *stages = yaml.safe_load_all((Path(__file__).parent / "files" / "stages.yaml").read_text())
    for stage in stages:
        spec = stage["spec"]
        for expression in spec["selector"]["matchExpressions"]:
            expression["key"] = common["functions"] + expression["key"]
        if delay := spec["delay"].get("durationFrom"):
            delay["expressionFrom"] = common["functions"] + delay["expressionFrom"]
        if template := spec["next"].get("statusTemplate"):
            spec["next"]["statusTemplate"] = common["template"] + template
    logs = {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "ClusterLogs",
        "metadata": {"name": "all"},
        "spec": {"logs": [{"logsFile": log_file, "previousLogsFile": log_file}]},
    }
    return [*node_stages, *stages, logs]
