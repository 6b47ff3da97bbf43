"""Jobs that fail or make no progress, each in a different way: how to produce each, and the expected diagnosis.

`tests/cluster/test_diagnosis.py` produces all of them on real controllers and a real kubelet; `corpus` records their
evidence for the unit tests and for the table of docs/reference/failures.md. The diagnoses are in failures.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from tests.cluster import failing as make
from tests.testcluster.access import Access

from trainjob.errors import Category, RetryVerdict
from trainjob.job import JobRef


@dataclass(frozen=True)
class Failure:
    """One way to fail.

    Attributes:
        name: Name, also of its file in the corpus.
        how: How it is produced, for the table in the documentation.
        category: Expected category.
        retry: Expected retry verdict.
        summary: A regular expression that the summary must match.
        spec: Spec of the job. On the real node the default image has Python.
        node: ``real`` if pods have to run, ``jax`` or ``torch`` if the pods need that package.
        before: Creates prerequisites, and removes them at the end.
        after: Applied to the job once it runs; to a suspended job at once.
        alone: Whether to run it after the others, because it disturbs them.
        slow: Whether it takes long and is started first.
        job_name: Name of the job, if trainjob does not launch it.
        rank: Expected rank.
        exit_code: Expected exit code.
        failed: Whether the job must have failed before the diagnosis; the shipped runtimes restart ranks for minutes.
        shown_log: A regular expression that the shown log lines must match.
        victim: A rank that fails because it loses `rank`. It must have ended when the diagnosis is made.
    """

    name: str
    how: str
    category: Category
    retry: RetryVerdict
    summary: str
    spec: Mapping[str, Any]
    node: Literal["simulated", "real", "jax", "torch"] = "simulated"
    before: Callable[[Access, str], AbstractContextManager[None]] | None = None
    after: Callable[[Access, JobRef], None] | None = None
    alone: bool = False
    slow: bool = False
    job_name: str = ""
    rank: str = ""
    exit_code: int | None = None
    failed: bool = False
    shown_log: str = ""
    victim: str = ""


Fields = dict[str, Any]


def _simulated(spec: make.Object, **fields: Any) -> Fields:
    return {"spec": spec, **fields}


def _real(script: str | make.Object, **fields: Any) -> Fields:
    """A Python script, or a spec."""
    return {"spec": make.python(script) if isinstance(script, str) else script, "node": "real", **fields}


def _own(script: str | make.Object, runtime: make.Object = make.NODE, **fields: Any) -> Fields:
    """A job of a runtime in its namespace."""
    made = _real(script, **{"before": make.own(runtime), **fields})
    return {**made, "spec": made["spec"] | make.OWN}


_CAUSES: dict[str, Fields] = {
    # --- the training code
    "syntax-error": _own("def train(:"),
    "import-error": _own("from json import nosuch"),
    "aborted": _own(make.ABORT),
    "host-unknown": _own("import urllib.request; urllib.request.urlopen('http://nosuch.invalid/model')"),
    "server-overloaded": _own(make.SERVER.format(503)),
    "access-denied": _own(make.SERVER.format(403)),
    "certificate-unknown": _own("import urllib.request; urllib.request.urlopen('https://kubernetes.default.svc')"),
    "shared-memory-full": _own(make.SHARED_MEMORY),
    "disk-full": _own(
        "open('/mnt/model', 'wb').write(bytes(8 << 20))",
        make.with_volume("/mnt", {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
    ),
    "volume-read-only": _own("open('/mnt/model', 'wb')", make.with_volume("/mnt", {"emptyDir": {}}, readOnly=True)),
    "file-not-writable": _own(
        "open('/model', 'wb')", make.stages("node", node={"securityContext": {"runAsUser": 1000}})
    ),
    "program-of-another-architecture": _own(make.shell(make.ARM)),
    "sub-path-missing": _own(
        "open('/opt/settings.json').read()",
        before=make.own(make.SUB_PATH, make.SETTINGS),
    ),
    "pod-failure-policy": _own(
        "raise SystemExit(42)", make.stages("node", job={"backoffLimit": 5, "podFailurePolicy": make.FAIL_JOB})
    ),
    "processes-missing": _real(
        {"runtime": "jax-distributed", "num_nodes": 1, "command": ["python3", "-c", make.PROCESSES]}, node="jax"
    ),
    # --- probes and hooks
    "liveness-probe": _own(make.SLEEP, make.stages("node", node={"livenessProbe": make.PROBE}, pod=make.RESTARTS)),
    "startup-probe": _own(make.SLEEP, make.stages("node", node={"startupProbe": make.PROBE}, pod=make.RESTARTS)),
    "post-start-hook": _own(
        make.SLEEP,
        make.stages(
            "node", node={"lifecycle": {"postStart": {"exec": {"command": ["cat", "/tmp/nosuch"]}}}}, pod=make.RESTARTS
        ),
    ),
    "exit-code": _real(make.one_of(3, "sys.exit(3)")),
    "exception": _own(make.one_of(2, "raise ValueError('the answer is not 42')")),
    "exception-chained": _real(make.CHAINED),
    "exception-noise": _real(make.NOISE),
    "module-missing": _real("import nosuchpackage"),
    "handled-exception": _own(make.HANDLED),
    "service-down": _own(make.OUTAGE),
    "argument-unknown": _own(make.USAGE),
    "script-missing": _own({"command": ["python3", "/opt/train.py"]}),
    "program-missing": _own(make.shell("no-such-program --epochs 3")),
    "script-not-executable": _own(make.shell(make.SCRIPT.format("sh", "chmod 644"))),
    "script-of-windows": _own(make.shell(make.SCRIPT.format("sh\\r", "chmod 755"))),
    "torchrun": _real(make.torch(1, make.TORCHRUN), node="torch", slow=True),
    "gloo-torch": _real(make.torch(1, make.PLAIN_TORCH), node="torch", slow=True),
    "gloo-jax": _real(make.jax("_exit(7)"), node="jax", slow=True),
    "segmentation-fault": _real("import ctypes; ctypes.string_at(0)"),
    "killed": _real(make.python(make.SLEEP, 2), after=make.kill_rank_1),
    "crash-loop": _real("import sys; print('again', flush=True); sys.exit(5)", slow=True),
    "init-container": _own(
        {}, make.stages("node", pod={"initContainers": [make.container("fetch", "echo no route; exit 9")]})
    ),
    "sidecar": _own(
        {"command": ["sh", "-c", "exit 3"]},
        make.stages(
            "node", pod={"initContainers": [make.container("proxy", "sleep 600") | {"restartPolicy": "Always"}]}
        ),
    ),
    "initializer": _own(
        {"initializer": {"dataset": {"storage_uri": "s3://bucket/nosuch"}}}, make.stages("dataset-initializer", "node")
    ),
    "deadline": _real(
        make.python("import time; print('epoch 1', flush=True); time.sleep(600)", active_deadline_seconds=8)
    ),
    # --- memory
    "out-of-memory": _real(make.one_of(2, "x = b'x' * (1 << 30)", resources_per_node={"memory": "64Mi"})),
    "out-of-gpu-memory": _real(make.GPU_MEMORY),
    # --- nodes
    "evicted-disk": _real(
        make.python(
            "import time; open('/big', 'wb').write(bytes(40_000_000)); time.sleep(600)",
            resources_per_node={"storage": "8Mi"},
        ),
        slow=True,
    ),
    # It has a request: under memory pressure, a restarted kubelet refuses pods without one.
    "evicted-memory": _real(
        make.python(
            "import time; x = b'x' * (300 << 20); time.sleep(600)", resources_per_node={"requests": {"memory": "16Mi"}}
        ),
        before=make.restored_kubelet,
        after=make.press_memory,
        alone=True,
    ),
    "node-gone": _simulated(make.endless() | make.ON_OWN_NODE, before=make.own_node, after=make.remove_node, slow=True),
    "node-tainted": _simulated(make.endless() | make.ON_OWN_NODE, before=make.own_node, after=make.taint_node),
    "node-drained": _simulated(make.endless(), after=make.evict_all),
    "preempted-by-scheduler": _simulated(
        make.endless(gpus=8) | make.ON_OWN_NODE, before=make.own_node_and_priority, after=make.outrank_on_node
    ),
    "preempted-by-kueue": _simulated(
        make.endless(gpus=8) | make.queued("small"), before=make.queue, after=make.outrank_in_queue
    ),
    # --- images and containers
    "image-missing": _real(make.simulated(image=f"{make.REGISTRY}/nosuch:1")),
    "registry-unreachable": _real(make.simulated(image="127.0.0.1:1/nosuch:1")),
    "image-name-invalid": _real(make.simulated(image="a" * 256)),  # the spec refuses other invalid names
    "command-missing": _real({"runtime": "torch-distributed", "command": ["tran", "--epochs=3"]}),
    "secret-missing": _real(make.secret_key("nosuch")),
    "configmap-missing": _real(make.python("") | make.mounted({"name": "settings", "configMap": {"name": "nosuch"}})),
    "image-being-pulled": _real(make.simulated(image=f"{make.REGISTRY}/slow:1")),
    "slow-start": _own({}, make.stages("node", pod={"initContainers": [make.container("fetch", "sleep 600")]})),
    "run-as-non-root": _own({}, make.stages("node", pod={"securityContext": {"runAsNonRoot": True}})),
    "secret-key-missing": _real(make.secret_key("keys"), before=make.applied(make.KEYS)),
    "secret-volume-missing": _real(
        make.python("") | make.mounted({"name": "keys", "secret": {"secretName": "nosuch"}})
    ),
    "configmap-key-missing": _real(
        make.python("")
        | make.mounted({"name": "settings", "configMap": {"name": "settings", "items": [{"key": "b", "path": "b"}]}}),
        before=make.applied(make.SETTINGS),
    ),
    "host-path-missing": _real(
        make.python("") | make.mounted({"name": "data", "hostPath": {"path": "/nosuch", "type": "Directory"}})
    ),
    "directory-onto-file": _own({}, make.with_volume("/etc/passwd", {"emptyDir": {}})),
    "command-not-executable": _real({"runtime": "torch-distributed", "command": ["/etc/passwd"]}),
    "image-certificate-unknown": _real(make.simulated(image="$API_SERVER/nosuch:1")),
    # --- the scheduler
    "unschedulable-cordoned": _simulated(make.simulated() | make.ON_OWN_NODE, before=make.cordoned_node),
    "volume-of-another-node": _simulated(make.simulated() | make.claim("data"), before=make.volume_elsewhere),
    "node-not-ready": _simulated(
        make.endless() | make.ON_OWN_NODE, before=make.own_node, after=make.silence_node, slow=True
    ),
    "unschedulable-gpus": _simulated(make.simulated(2, gpus=1000)),
    "unschedulable-selector": _simulated(make.simulated() | make.patched({"nodeSelector": {"gpu": "nosuch"}})),
    "unschedulable-taint": _simulated(make.simulated() | make.ON_OWN_NODE, before=make.tainted_node),
    "claim-missing": _simulated(make.simulated() | make.claim("nosuch")),
    "claim-pending": _simulated(make.simulated() | make.claim("data"), before=make.applied(make.UNBOUND_CLAIM)),
    # --- quotas and queues
    "resource-quota": _simulated(make.simulated(gpus=4), before=make.full_gpu_quota),
    "resource-quota-too-small": _simulated(make.simulated(gpus=8), before=make.applied(make.GPU_QUOTA)),
    "resource-quota-demands-limits": _simulated(make.simulated(), before=make.applied(make.CPU_QUOTA)),
    "limit-range": _simulated(make.simulated(resources_per_node={"memory": "2Gi"}), before=make.applied(make.LIMITS)),
    "pod-security": _simulated(make.simulated(), before=make.restricted),
    "priority-class-missing": _own({}, make.stages("node", pod={"priorityClassName": "nosuch"}), node="simulated"),
    "queue-resource-missing": _simulated(
        make.simulated(resources_per_node={"example.com/fpga": 1}) | make.queued("small"), before=make.queue
    ),
    "queue-stopped": _simulated(
        make.simulated(gpus=1) | make.queued("small"), before=partial(make.queue, policy="Hold")
    ),
    "queue-full": _simulated(make.simulated(gpus=8) | make.queued("small"), before=make.full_queue),
    "queue-too-small": _simulated(make.simulated(2, gpus=8) | make.queued("small"), before=make.queue),
    "queue-missing": _simulated(make.simulated() | make.queued("nosuch")),
    # --- admission
    "name-too-long": _simulated(make.simulated(), job_name="n" * 60),
    "patch-refused": _simulated(
        make.simulated()
        | {"runtime_patches": [{"training_runtime_spec": {"template": {"metadata": {"labels": {"a": "not a value"}}}}}]}
    ),
    "volume-refused": _simulated(
        make.simulated() | make.patched({"volumes": [{"name": "Not_A_Name", "emptyDir": {}}]})
    ),
    "service-account-missing": _simulated(make.simulated() | make.patched({"serviceAccountName": "nosuch"})),
    "runtime-removed": _own({"suspend": True}, node="simulated", after=make.remove_runtime),
    # --- deletion
    "deleted": _simulated(make.endless(), after=make.delete),
}


def _read() -> tuple[Failure, ...]:
    listed = yaml.safe_load((Path(__file__).parent / "failures.yaml").read_text())
    assert listed.keys() == _CAUSES.keys()
    failures = []
    for name, row in listed.items():
        expected = row.pop("expected")
        verdict: Fields = {"category": Category(expected.pop("category")), "retry": RetryVerdict(expected.pop("retry"))}
        failures.append(Failure(name, **row, **verdict, **expected, **_CAUSES[name]))
    return tuple(failures)


FAILURES = _read()
