"""Events, states and messages that change the meaning of a termination."""

from __future__ import annotations

from typing import Any

import pytest
from tests.objects import STEP, Object, condition, counts, ended, event, pod, trainjob, waiting

from trainjob._diagnosis import diagnosis_of, reasons
from trainjob._diagnosis.blockers import around, first
from trainjob._support.kube_objects import has_trained
from trainjob.status import QUEUE_LABEL, Phase, observe
from trainjob.verdicts import Category, Diagnosis, Evidence, RetryVerdict

USER, UNKNOWN, QUOTA = RetryVerdict.USER, RetryVerdict.UNKNOWN, RetryVerdict.QUOTA
CONFIGURATION, INFRASTRUCTURE = RetryVerdict.CONFIGURATION, RetryVerdict.INFRASTRUCTURE

NODES = {"trainer": {"numNodes": 2}}
FAILED = trainjob(condition("Failed", "FailedJobs", message="jobset failed"), spec=NODES)
RUNNING = trainjob(spec=NODES, jobsStatus=[counts(active=1)])
KILLED = pod(last=ended(137))
OOM = ended(137, reason="OOMKilled")


def diagnosed(pods: list[Object], *events: Object, job: Object = FAILED, log: list[str] | None = None) -> Diagnosis:
    """The diagnosis of pods, which have all written the same log."""
    logs = {each["metadata"]["name"]: log for each in pods} if log else {}
    return diagnosis_of(Evidence(job, pods, logs, events))


def raised(*lines: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', *lines]


# ---------------------------------------------------------------- probes and hooks


def killing(message: str = "Container node failed liveness probe, will be restarted", **about: Any) -> Object:
    return event("Killing", message, **{"container": "node", **about})


UNHEALTHY = event("Unhealthy", "Liveness probe failed: cat: /tmp/healthy: No such file or directory", container="node")


@pytest.mark.parametrize("code", [137, 143, 1])
def test_a_liveness_probe_explains_the_kill(code: int) -> None:
    found = diagnosed([pod(last=ended(code))], UNHEALTHY, killing())
    assert found.summary == (
        "node-0 was killed by the kubelet because its liveness probe failed: "
        "cat: /tmp/healthy: No such file or directory"
    )
    assert (found.category, found.retry, found.exit_code) == (Category.CONFIGURATION, UNKNOWN, code)
    assert "liveness probe" in found.advice
    assert "memory" not in found.text()


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (killing("Container node failed startup probe, will be restarted"), "startup probe"),
        (event("FailedPostStartHook", "PostStartHook failed", container="node"), "postStart hook"),
        (killing(time="2026-11-21T10:01:00Z", last="2026-11-21T10:09:00Z"), "liveness probe"),  # repeated
        (killing("Stopping container node"), ""),
        (killing(container="proxy"), ""),
        (killing(about="x-node-0-1-fghij"), ""),
        (killing(time="2026-11-21T10:06:00Z"), ""),
        (killing(time="2026-11-21T10:01:00Z"), ""),
        (event("Unhealthy", "Readiness probe failed: no", container="node"), ""),
    ],
)
def test_only_an_event_about_the_container_at_its_end_explains_the_kill(other: Object, cause: str) -> None:
    by = f"the kubelet because its {cause} failed" if cause else "signal 9 (SIGKILL)"
    assert diagnosed([KILLED], other).summary == f"node-0 was killed by {by}"


# ---------------------------------------------------------------- memory


def limited(where: str) -> Object:
    made = pod(last=OOM)
    target = made["spec"]["containers"][0] if where == "container" else made["spec"]
    target["resources"] = {"limits": {"memory": "1Gi"}}
    return made


@pytest.mark.parametrize(
    ("killed", "retry", "text"),
    [
        (pod(last=OOM), INFRASTRUCTURE, "its node ran out of memory"),
        (pod(last=ended(1, reason="OOMKilled")), INFRASTRUCTURE, "its node ran out of memory"),
        (limited("container"), UNKNOWN, "more memory than its limit"),
        (limited("pod"), UNKNOWN, "more memory than its limit"),
        (pod(last=OOM, container="unpack", init=True), INFRASTRUCTURE, "container unpack"),
    ],
)
def test_out_of_memory_names_the_limit_or_the_node(killed: Object, retry: RetryVerdict, text: str) -> None:
    for events in ([], [killing()]):  # also if a probe failed
        found = diagnosed([killed], *events)
        assert (found.category, found.retry) == (Category.OUT_OF_MEMORY, retry)
        assert text in found.summary
        assert ("of this container" in found.advice) == ("unpack" in text)


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (135, []),
        (1, raised("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error. It is possible")),
        (1, raised("OSError: [Errno 28] No space left on device: '/dev/shm/torch_1_2'")),
        (1, raised("RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)")),
        (1, raised("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: Resource temporarily")),
    ],
)
def test_full_shared_memory_is_detected(code: int, log: list[str]) -> None:
    found = diagnosed([pod(last=ended(code))], log=log)
    assert "/dev/shm" in found.advice
    assert (found.category, found.retry) == (Category.OUT_OF_MEMORY, UNKNOWN)


@pytest.mark.parametrize(
    ("finished", "summary"),
    [("2026-11-21T10:05:00Z", "was killed by signal 9"), ("2026-11-21T10:20:10Z", "its pod was deleted")],
)
def test_a_kill_before_the_deletion_is_not_caused_by_it(finished: str, summary: str) -> None:
    gone = pod(0, ended(137, finishedAt=finished))
    gone["metadata"] |= {"deletionTimestamp": "2026-11-21T10:20:40Z", "deletionGracePeriodSeconds": 30}
    assert summary in diagnosed([gone]).summary


BARRIER = (
    "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. "
    "Id: [Init]Wait_for_all_tasks_to_register::0. # of tasks that reached the barrier: {}. "
    "The first task at the barrier: /job:jax_worker/replica:0/task:0."
)


@pytest.mark.parametrize(
    ("joined", "nodes", "text"),
    [
        ("2/3", 2, "it waits for 3 processes, but the job has 2 nodes"),
        ("1/2", 2, "the right number of processes (2 nodes), that no process failed earlier"),  # one is missing
        ("3/4", 2, "that no process failed earlier"),  # two processes per node, one is missing
        ("1/2", 1, "it waits for 2 processes, but the job has 1 nodes"),
    ],
)
def test_advice_for_a_barrier_depends_on_the_number_of_nodes(joined: str, nodes: int, text: str) -> None:
    job = FAILED | {"spec": {"trainer": {"numNodes": nodes}}}
    pods = [pod(rank, last=ended(1)) for rank in range(nodes)]
    found = diagnosed(pods, job=job, log=raised(BARRIER.format(joined)))
    assert found.retry is UNKNOWN, found.text()
    assert text in found.advice


# ---------------------------------------------------------------- nodes


NOT_READY = event("NodeNotReady", "Node is not ready", time="2026-11-21T10:04:00Z")
UNREADY = pod(conditions=[condition("Ready", value="False")])
REPLACED = pod(phase="Pending", metadata={"name": "x-node-0-0-other", "creationTimestamp": "2026-11-21T10:04:30Z"})


def test_a_not_ready_node_of_a_running_rank_is_reported() -> None:
    found = diagnosed([UNREADY], NOT_READY, job=RUNNING)
    assert (found.category, found.retry, found.phase) == (Category.NODE_LOST, INFRASTRUCTURE, Phase.STARTING)
    assert "NodeNotReady" in found.summary
    assert "launch the job again" not in found.advice, "that would start a second training"
    finding = first(around([], [NOT_READY]))
    assert finding is not None, "a waiter lists pending pods only"
    seen = observe(RUNNING, observe(trainjob(jobsStatus=[counts(ready=1)])), finding.blocker)
    assert (seen.phase, seen.has_run, seen.stuck) == (Phase.RESTARTING, True, False)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(pod(conditions=[condition("Ready")]), id="ready again"),
        pytest.param(UNREADY | {"status": UNREADY["status"] | {"phase": "Succeeded"}}, id="ended"),
        pytest.param(REPLACED, id="replaced"),
    ],
)
def test_a_node_that_recovered_is_not_a_blocker(now: Object) -> None:
    assert first(around([now], [NOT_READY])) is None


# ---------------------------------------------------------------- advice for a job that still runs

PREEMPTED = "Preempted to accommodate"


def test_advice_for_a_preempted_job_in_the_queue_is_to_wait() -> None:
    queued = trainjob(spec={"suspend": True}, labels={QUEUE_LABEL: "q"})
    pending = condition("QuotaReserved", "Pending", value="False", message=PREEMPTED)
    workload = {"status": {"conditions": [pending, condition("Evicted", "Preempted", message=PREEMPTED)]}}
    found = diagnosis_of(Evidence(queued, workload=workload))
    assert (found.category, found.phase) == (Category.PREEMPTED, Phase.QUEUED)
    assert found.advice.startswith("wait: the cluster restarts it")


def test_advice_for_a_drained_node_depends_on_the_phase() -> None:
    drained = pod(phase="Failed", conditions=[condition("DisruptionTarget", "EvictionByEvictionAPI")])
    assert diagnosed([drained], job=RUNNING).advice.startswith("wait: the cluster restarts it")
    assert diagnosed([drained]).advice.startswith("launch the job again")


UNREADY_TAINT = "0/2 nodes are available: 2 node(s) had untolerated taint {node.kubernetes.io/not-ready: }."
CASES = [
    # CreateContainerConfigError by its cause
    ("CreateContainerConfigError", 'secret "keys" not found', CONFIGURATION, True, "create the Secret"),
    ("CreateContainerConfigError", "couldn't find key token in Secret ns/keys", CONFIGURATION, True,
     "create the Secret"),
    ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root (pod: x, container: node)",
     CONFIGURATION, True, "runAsUser"),
    ("CreateContainerConfigError",
     "container has runAsNonRoot and image has non-numeric user (nobody), cannot verify user is non-root",
     CONFIGURATION, True, "runAsUser"),
    ("CreateContainerConfigError", 'failed to prepare subPath for volumeMount "data" of container "node"',
     CONFIGURATION, True, "subPath"),
    ("CreateContainerConfigError", "services have not yet been read at least once, cannot construct envvars",
     INFRASTRUCTURE, False, "API server"),
    ("CreateContainerConfigError", "something new", UNKNOWN, False, "that the message names"),
    # containers that do not start
    ("StartError", 'exec: "tran": executable file not found in $PATH: unknown', CONFIGURATION, False,
     "check that the command exists"),
    ("StartError", 'exec: "./run.sh": permission denied: unknown', CONFIGURATION, False,
     "check that the command exists"),
    ("StartError", 'chdir to cwd ("/work") set in config.json failed: no such file', CONFIGURATION, False,
     "workingDir"),
    ("StartError", "nvidia-container-cli: initialization error: nvml error", INFRASTRUCTURE, False, "GPU driver"),
    ("StartError", "container init was OOM-killed (memory limit too low?): unknown", CONFIGURATION, False, "memory"),
    ("RunContainerError", "fork/exec: resource temporarily unavailable", INFRASTRUCTURE, False, "node"),
    ("CreateContainerError", "failed to generate spec: unable to find user app: no matching entries in passwd file",
     CONFIGURATION, False, "user"),
    ("StartError",
     'error mounting "/a" to rootfs at "/b.json": not a directory: Are you trying to mount a directory onto a file',
     CONFIGURATION, False, "subPath"),
    ("StartError", "something new", UNKNOWN, False, "that the message names"),
    # images
    (
        "ErrImagePull",
        'failed to do request: Head "https://r/v2/": tls: failed to verify certificate: x509: certificate signed by '
        "unknown authority",
        CONFIGURATION,
        True,
        "certificate authority",
    ),
    ("ErrImagePull", "write /var/lib/x: no space left on device", INFRASTRUCTURE, False, "disk space"),
    ("ImagePullBackOff", "429 Too Many Requests - toomanyrequests: limit", INFRASTRUCTURE, False, "limits the number"),
    ("ErrImagePull", "no match for platform in manifest: not found", CONFIGURATION, True, "architecture"),
    ("ErrImagePull", "http: server gave HTTP response to HTTPS client", CONFIGURATION, True, "HTTPS"),
    ("ErrImagePull", "dial tcp: lookup regstry.io: no such host", INFRASTRUCTURE, False, "host name"),
    ("ErrImagePull", "manifest unknown", CONFIGURATION, True, "name and tag"),
    ("ErrImagePull", "dial tcp 1.2.3.4:443: i/o timeout", INFRASTRUCTURE, False, "reach"),
    ("Failed", 'Failed to pull image "r/a:1": tls: x509: certificate has expired', CONFIGURATION, True, "certificate"),
    ("Failed", 'Failed to pull image "r/a:1": i/o timeout', INFRASTRUCTURE, False, "reach"),
    # quotas
    ("FailedCreate", 'Error creating: pods "x" is forbidden: failed quota: cpu: must specify limits.cpu for: node',
     CONFIGURATION, True, "resources_per_node"),
    (
        "FailedCreate",
        'pods "x" is forbidden: exceeded quota: c, requested: cpu=2,memory=4Gi, used: cpu=0,memory=1Gi, limited: cpu=1,'
        "memory=2Gi",
        CONFIGURATION,
        True,
        "exceeds the total quota",
    ),
    ("FailedCreate", 'pods "x" is forbidden: exceeded quota: c, requested: cpu=2, used: cpu=10, limited: cpu=10',
     QUOTA, False, "wait"),
    ("FailedCreate", 'pods "x" is forbidden: status unknown for quota: c, resources: cpu', QUOTA, False, "wait"),
    ("FailedCreate",
     'pods "x" is forbidden: unable to create new content in namespace ns because it is being terminated',
     CONFIGURATION, True, "namespace"),
    ("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', CONFIGURATION, True,
     "Security"),
    ("TrainJobResourcesCreationFailed",
     'Internal error occurred: failed calling webhook "a.b": connect: connection refused', INFRASTRUCTURE, False,
     "webhook"),
    # the scheduler
    ("Unschedulable", UNREADY_TAINT, INFRASTRUCTURE, False, "ready"),
    ("Unschedulable", UNREADY_TAINT.replace("taint {", "taint(s) {"), INFRASTRUCTURE, False, "ready"),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) were unschedulable.", INFRASTRUCTURE, False, "ready"),
    ("Unschedulable",
     "0/2 nodes are available: 1 node(s) were unschedulable, 1 node(s) didn't match Pod's node affinity/selector.",
     UNKNOWN, False, "selector"),
    ("Unschedulable", "0/2 nodes are available: 2 node(s) had untolerated taint(s).", UNKNOWN, False, "tolerations"),
    ("Unschedulable", "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", CONFIGURATION,
     False, "selector"),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) had untolerated taint {gpu: true}.", CONFIGURATION, False,
     "tolerations"),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) had volume node affinity conflict.", CONFIGURATION, False,
     "volume"),
    ("Unschedulable",
     "0/2 nodes are available: 1 node(s) had volume node affinity conflict, 1 node(s) were unschedulable.", UNKNOWN,
     False, "may not be ready"),
    # volumes
    ("FailedMount", 'MountVolume.SetUp failed for volume "a" : configmap "settings" not found', CONFIGURATION, True,
     "create the ConfigMap"),
    ("FailedMount", "driver name ebs.csi.aws.com not found in the list of registered CSI drivers", INFRASTRUCTURE,
     False, "CSI driver"),
    ("FailedMount", "hostPath type check failed: /data is not a directory", CONFIGURATION, False, "hostPath"),
    ("FailedAttachVolume", 'Multi-Attach error for volume "a" Volume is already used by pod(s) b', INFRASTRUCTURE,
     False, "released"),
    # Kueue
    ("Pending", "couldn't assign flavors to pod set node: resource nvidia.com/gpu unavailable in ClusterQueue",
     CONFIGURATION, True, "ClusterQueue"),
    ("Pending", "couldn't assign flavors to pod set node: flavor default doesn't match node affinity", CONFIGURATION,
     True, "flavor"),
    (
        "Pending",
        "couldn't assign flavors to pod set node: untolerated taint {a b NoSchedule} in flavor spot, insufficient "
        "unused quota for nvidia.com/gpu in flavor default, 4 more needed",
        QUOTA,
        False,
        "wait",
    ),
    # the kubelet
    ("Evicted", "The node was low on resource: pids.", INFRASTRUCTURE, False, "processes"),
    ("Evicted", "The node was low on resource: ephemeral-storage.", INFRASTRUCTURE, False, "ephemeral-storage"),
    ("UnexpectedAdmissionError", "Allocate failed due to no healthy devices present", INFRASTRUCTURE, False, "devices"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "message", "retry", "permanent", "advice"), CASES, ids=[f"{case[0]}-{case[1][:40]}" for case in CASES]
)
def test_messages_have_verdict_and_advice(
    reason: str, message: str, retry: RetryVerdict, permanent: bool, advice: str
) -> None:
    found = reasons.find(reason, message)
    assert found is not None
    assert (found.retry, found.permanent) == (retry, permanent), found
    assert advice in found.advice, found.advice


@pytest.mark.parametrize(
    ("error", "category", "advice"),
    [
        ("RuntimeError: Found no NVIDIA driver on your system.", Category.CONFIGURATION, "resources_per_node"),
        ("RuntimeError: No CUDA GPUs are available", Category.CONFIGURATION, "resources_per_node"),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file", Category.CONFIGURATION, "GPU"),
        ("RuntimeError: CUDA error: no kernel image is available for execution", Category.IMAGE, "CUDA version"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", Category.UNKNOWN, "DataLoader worker"),
    ],
)
def test_errors_of_gpus_and_workers_have_advice(error: str, category: Category, advice: str) -> None:
    found = diagnosed([pod(last=ended(1))], log=raised(error))
    assert (found.category, found.retry) == (category, UNKNOWN)
    assert advice in found.advice


# ---------------------------------------------------------------- summaries and helpers


def test_a_log_of_one_line_is_quoted() -> None:
    found = diagnosed([pod(last=ended(1))], log=["giving up"])
    assert found.summary == "node-0 exited with code 1; last log line: giving up"


def test_exit_code_of_a_stopped_pod_is_that_of_the_training_container() -> None:
    evicted = pod(0, ended(143), reason="Evicted", message="The node was low on resource: memory.")
    evicted["status"]["containerStatuses"].insert(0, {"name": "proxy", "state": ended(9)})
    evicted["spec"]["containers"].insert(0, {"name": "proxy"})
    assert diagnosed([evicted]).exit_code == 143


@pytest.mark.parametrize("began", [pod(0, ended(0)), pod(0, {}, ended(0))], ids=["now", "before"])
def test_has_trained_requires_a_started_training_container(began: Object) -> None:
    assert has_trained(began)
    assert not has_trained(pod(0, waiting("ImagePullBackOff")))
    began["metadata"]["labels"][STEP] = "dataset-initializer"
    assert not has_trained(began)


@pytest.mark.parametrize("mounted", [False, True])
def test_a_failed_mount_is_outdated_once_an_init_container_runs(mounted: bool) -> None:
    state = {"running": {}} if mounted else waiting("PodInitializing")
    starting = pod(0, state, container="fetch", init=True, phase="Pending")
    failed = event("FailedMount", "failed to sync configmap cache: timed out waiting for the condition")
    assert (first(around([starting], [failed])) is None) is mounted
