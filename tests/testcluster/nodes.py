"""Simulated nodes: kwok simulates their kubelets, so they have any capacity, and tests control their pods.

Variables of a pod's containers (a TrainJob's ``trainer.env``) or annotations (a runtime's pod template) control what
the pod does, e.g. ``SIMULATED_EXIT_CODE=3`` or ``simulated.trainjob.test/exit-code: "3"``; see `BEHAVIOR`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]

LABEL = "trainjob.test/node"
"""Label of every node: ``simulated`` or ``real``."""

GPU = "nvidia.com/gpu"

BEHAVIOR = {
    "start": "100ms",  # from scheduled to running; "never" stays in ContainerCreating
    "waiting": "",  # reason why the pod never starts, e.g. ImagePullBackOff
    "run": "1s",  # from running to the end; "never" runs until it is deleted
    "exit-code": "0",
    "reason": "",  # of the termination, e.g. OOMKilled; default: Completed or Error
    "message": "",  # the termination message; with `waiting` the waiting message
    "ranks": "",  # completion indices with this exit code, e.g. "1,3"; the others never end. Empty: all
    "failures": "",  # number of failing runs before one succeeds, for pods that restart in place. Empty: all fail
    "stop": "100ms",  # from deletion to the end, by SIGTERM
}
"""Settings of a simulated pod, with the defaults. Durations are Go's: 100ms, 1.5s, 2m."""


def variable(setting: str) -> str:
    """Name of the environment variable of a setting: ``exit-code`` is ``SIMULATED_EXIT_CODE``."""
    return f"SIMULATED_{setting.upper().replace('-', '_')}"


def annotation(setting: str) -> str:
    """Name of the annotation of a setting."""
    return f"simulated.trainjob.test/{setting}"


def simulate(**settings: object) -> list[dict[str, str]]:
    """Environment variables of a container, e.g. ``simulate(exit_code=3, run="5s")``."""
    names = {key: key.replace("_", "-") for key in settings}
    if unknown := set(names.values()) - set(BEHAVIOR):
        raise ValueError(f"unknown setting: {', '.join(sorted(unknown))}; known: {', '.join(BEHAVIOR)}")
    return [{"name": variable(names[key]), "value": str(value)} for key, value in settings.items()]


def run_until_finished() -> Object:
    """A runtime patch: the pods of `node` run until `Access.finish`."""
    template = {"metadata": {"annotations": {annotation("run"): "never"}}}
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
    """The documents of kwok's configuration: the stages of nodes (kwok's) and of pods (by `BEHAVIOR`).

    Args:
        node_stages: kwok's stages for nodes.
        log_file: The log of every simulated container, in the kubelet's format.
    """
    logs = {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "ClusterLogs",
        "metadata": {"name": "all"},
        "spec": {"logs": [{"logsFile": log_file, "previousLogsFile": log_file}]},
    }
    return [*node_stages, *_pod_stages(), logs]


def _query(name: str) -> str:
    """The value of a setting, in kwok's query language (jq)."""
    variables = f'[.spec.containers[].env[]? | select(.name == "{variable(name)}") | .value]'
    annotations = f'[.metadata.annotations["{annotation(name)}"]]'
    return f'(({variables} + {annotations}) | map(select(. != null)) | (.[0] // "{BEHAVIOR[name]}"))'


def _template(name: str) -> str:
    """Set ``$name`` to the value of a setting, in kwok's template language (Go's)."""
    local = name.replace("-", "")
    return (
        f'{{{{ ${local} := "{BEHAVIOR[name]}" }}}}'
        f'{{{{ with .metadata.annotations }}}}{{{{ with index . "{annotation(name)}" }}}}'
        f"{{{{ ${local} = . }}}}{{{{ end }}}}{{{{ end }}}}"
        f'{{{{ range .spec.containers }}}}{{{{ range .env }}}}{{{{ if eq .name "{variable(name)}" }}}}'
        f"{{{{ ${local} = .value }}}}{{{{ end }}}}{{{{ end }}}}{{{{ end }}}}\n"
    )


_RANK = '(.metadata.annotations["batch.kubernetes.io/job-completion-index"] // "0")'
_RESTARTS = "(.status.containerStatuses[0].restartCount // 0)"

# The next state of a running pod: "never", "restart", "failed" or "succeeded".
_END = f"""
{_query("exit-code")} as $code | {_query("ranks")} as $ranks | {_query("failures")} as $failures | {_RANK} as $rank |
if {_query("run")} == "never" then "never"
elif $code == "0" or ($failures != "" and ({_RESTARTS} >= ($failures | tonumber))) then "succeeded"
elif $ranks != "" and ($ranks | split(",") | index($rank)) == null then "never"
elif .spec.restartPolicy == "Never" then "failed"
else "restart" end
"""
_START = f'if {_query("waiting")} != "" then "never" else {_query("start")} end'


def _condition(kind: str, status: bool, reason: str = "") -> str:
    return f'- {{type: {kind}, status: "{status}", lastTransitionTime: {{{{ Now | Quote }}}}, reason: "{reason}"}}\n'


def _conditions(ready: bool, reason: str = "") -> str:
    lines = _condition("Initialized", True) + _condition("PodReadyToStartContainers", True)
    return f"conditions:\n{lines}{_condition('Ready', ready, reason)}{_condition('ContainersReady', ready, reason)}"


def _containers(state: str, *, ready: bool = False, last: str = "{{ $last }}", restarts: str = "$restarts") -> str:
    """`containerStatuses`: every container of the pod in the same state."""
    return (
        "{{ $root := . }}"
        "{{ $restarts := 0 }}{{ $started := Now }}{{ $last := `{}` }}"
        "{{ with .status.containerStatuses }}{{ $first := index . 0 }}{{ $restarts = $first.restartCount }}"
        "{{ with $first.state.running }}{{ $started = .startedAt }}{{ end }}"
        "{{ with $first.lastState }}{{ $last = toJson . }}{{ end }}{{ end }}\n"
        "containerStatuses:\n"
        "{{ range .spec.containers }}"
        f"- {{name: {{{{ .name | Quote }}}}, image: {{{{ .image | Quote }}}}, ready: {str(ready).lower()}, "
        f"started: {str(ready).lower()}, restartCount: {{{{ {restarts} }}}}, state: {state}, lastState: {last}}}\n"
        "{{ end }}\n"
    )


_RUNNING = "{running: {startedAt: {{ Now | Quote }}}}"


def _terminated(code: str, reason: str, message: str = '""') -> str:
    times = "startedAt: {{ $started | Quote }}, finishedAt: {{ Now | Quote }}"
    return f"{{terminated: {{exitCode: {code}, reason: {reason}, message: {message}, {times}}}}}"


def _pod_stages() -> list[Object]:
    settings = _template("reason") + _template("message") + _template("exit-code")
    failure = _terminated("{{ $exitcode }}", '{{ or $reason "Error" | Quote }}', "{{ $message | Quote }}")
    address = (
        "hostIP: {{ NodeIPWith .spec.nodeName | Quote }}\n"
        "podIP: {{ PodIPWith .spec.nodeName (or .spec.hostNetwork false) (or .metadata.uid ``) (or .metadata.name ``)"
        " (or .metadata.namespace ``) | Quote }}\n"
    )
    waiting = '{waiting: {reason: {{ or $waiting "ContainerCreating" | Quote }}, message: {{ $text | Quote }}}}'
    created = (
        _template("waiting")
        + _template("message")
        + '{{ $text := "" }}{{ if $waiting }}{{ $text = $message }}{{ end }}\n'
        + f"phase: Pending\nstartTime: {{{{ Now | Quote }}}}\n{address}"
        + _conditions(False, "ContainersNotReady")
        + _containers(waiting)
    )
    succeeded = _terminated("0", "Completed", "{{ $message | Quote }}")
    restart = _containers(_RUNNING, ready=True, last=failure, restarts="add $restarts 1")
    return [
        _stage("create", {".status.podIP": None}, "0s", created),
        _stage(
            "start",
            {".status.phase": ["Pending"], ".status.podIP": True, _START: ("never",)},
            _query("start"),
            "phase: Running\n" + _conditions(True) + _containers(_RUNNING, ready=True),
        ),
        _stage("restart", {".status.phase": ["Running"], _END: ["restart"]}, _query("run"), settings + restart),
        _stage(
            "succeed",
            {".status.phase": ["Running"], _END: ["succeeded"]},
            _query("run"),
            settings + "phase: Succeeded\n" + _conditions(False, "PodCompleted") + _containers(succeeded),
        ),
        _stage(
            "fail",
            {".status.phase": ["Running"], _END: ["failed"]},
            _query("run"),
            settings + "phase: Failed\n" + _conditions(False, "PodFailed") + _containers(failure),
        ),
        # Like a kubelet: first the containers end, then the object is deleted. The Job controller removes its finalizer
        # from a pod only after the pod has ended.
        _stage(
            "stop",
            {".status.phase": ["Running", "Pending"]},
            _query("stop"),
            "phase: Failed\n" + _conditions(False, "PodFailed") + _containers(_terminated("143", "Error")),
            deleted=True,
        ),
        _stage("delete", {".status.phase": ["Succeeded", "Failed"]}, "0s", "", deleted=True),
    ]


def _stage(
    name: str, when: Mapping[str, Sequence[str] | bool | None], delay: str, status: str, *, deleted: bool = False
) -> Object:
    """A Stage. `when` is query -> values that match (list), that do not (tuple), whether it has one (True, None)."""
    expressions: list[Object] = [{"key": ".metadata.deletionTimestamp", "operator": _presence(deleted)}]
    for key, wanted in when.items():
        if wanted is None or isinstance(wanted, bool):
            expressions.append({"key": key, "operator": _presence(bool(wanted))})
        else:
            operator = "NotIn" if isinstance(wanted, tuple) else "In"
            expressions.append({"key": key, "operator": operator, "values": list(wanted)})
    immediate = {"durationMilliseconds": 0}
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": f"pod-{name}"},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {"matchExpressions": expressions},
            "delay": immediate if delay == "0s" else immediate | {"durationFrom": {"expressionFrom": delay}},
            "next": {"statusTemplate": status} if status else {"delete": True},
        },
    }


def _presence(there: bool) -> str:
    return "Exists" if there else "DoesNotExist"
