"""What the scheduler and the kubelet report of pods: why they do not start, and why they were stopped."""

from __future__ import annotations

from trainjob._diagnosis.meaning import RERUN
from trainjob._diagnosis.reasons.rule import rule
from trainjob.verdicts import Category, RetryVerdict

_UNSCHEDULABLE = "Unschedulable FailedScheduling"
_MOUNT = "FailedMount FailedAttachVolume FailedMapVolume"
# Set by the node controller, `kubectl cordon`, autoscalers and cloud providers. They are temporary.
_NODE_TAINT = (
    r"node\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler|DeletionCandidateOfClusterAutoscaler"
    r"|node\.cloudprovider\.kubernetes\.io/|karpenter\.sh/"
)
_UNAVAILABLE = rf"untolerated taint\(s\)(?! \{{)|were unschedulable|were not ready|{_NODE_TAINT}"
_VOLUME_ELSEWHERE = "volume node affinity|PersistentVolume's node affinity"

RULES = (
    # --- the scheduler
    rule(
        _UNSCHEDULABLE,
        r"persistentvolumeclaim .* not found",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the PersistentVolumeClaim, or correct its name",
        permanent=True,
    ),
    rule(
        _UNSCHEDULABLE,
        r"unbound .*PersistentVolumeClaim|did(n't| not) find available persistent volumes",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "check why the PersistentVolumeClaim is not bound (kubectl describe pvc): its storage class and provisioner",
    ),
    rule(
        _UNSCHEDULABLE,
        "Insufficient |Too many pods",
        Category.SCHEDULING,
        RetryVerdict.INFRASTRUCTURE,
        "wait for free capacity, request less per node, or add nodes",
    ),
    rule(  # the volume's own node may be one of those that are not ready
        _UNSCHEDULABLE,
        rf"^(?=.*({_VOLUME_ELSEWHERE}))(?=.*({_UNAVAILABLE}))",
        Category.SCHEDULING,
        RetryVerdict.UNKNOWN,
        "use a volume that can be attached to the nodes, or wait: the volume's own node may not be ready",
    ),
    rule(
        _UNSCHEDULABLE,
        _VOLUME_ELSEWHERE,
        Category.SCHEDULING,
        RetryVerdict.CONFIGURATION,
        "use a volume that can be attached to the nodes: it belongs to other nodes or to another zone",
    ),
    rule(  # all matching nodes
        _UNSCHEDULABLE,
        rf"^(?!.*(affinity/selector|untolerated taint\(s\)(?! \{{)|untolerated taint(\(s\))? \{{(?!{_NODE_TAINT})))"
        rf".*(were unschedulable|were not ready|{_NODE_TAINT})",
        Category.SCHEDULING,
        RetryVerdict.INFRASTRUCTURE,
        "wait until nodes are ready and schedulable again, or check their state",
    ),
    rule(  # the message does not name the matching nodes; since Kubernetes 1.35 it does not name taints
        _UNSCHEDULABLE,
        _UNAVAILABLE,
        Category.SCHEDULING,
        RetryVerdict.UNKNOWN,
        "correct node selector, affinity or tolerations of the job or its runtime, or wait: nodes may be not ready",
    ),
    rule(
        _UNSCHEDULABLE,
        "node affinity/selector|untolerated taint",
        Category.SCHEDULING,
        RetryVerdict.CONFIGURATION,
        "correct node selector, affinity or tolerations of the job or its runtime: no node matches them",
    ),
    rule(
        f"{_UNSCHEDULABLE} SchedulingGated",
        "",
        Category.SCHEDULING,
        RetryVerdict.INFRASTRUCTURE,
        "check what the scheduler waits for: kubectl describe pod",
    ),
    # --- volumes and sandboxes, by the kubelet
    rule(
        _MOUNT,
        "registered CSI drivers|CSINode",
        Category.CONFIGURATION,
        RetryVerdict.INFRASTRUCTURE,
        "check that the volume's CSI driver runs on the node",
    ),
    rule(
        _MOUNT,
        "Multi-Attach|already (used|exclusively attached)",
        Category.CONFIGURATION,
        RetryVerdict.INFRASTRUCTURE,
        "wait until the other pod has released the volume, or use one with access mode ReadWriteMany",
    ),
    rule(
        _MOUNT,
        "hostPath type check failed",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the path of the hostPath volume on the node, or correct path and type",
    ),
    rule(
        _MOUNT,
        "(secret|configmap|persistentvolumeclaim)s? .*not found|non-existent",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the ConfigMap, Secret or PersistentVolumeClaim to mount, or correct its name and keys",
        permanent=True,
    ),
    rule(
        _MOUNT,
        "",
        Category.CONFIGURATION,
        RetryVerdict.INFRASTRUCTURE,
        "check whether the volume can be attached to the node",
    ),
    rule(
        "FailedCreatePodSandBox NetworkNotReady",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        "check the node: its container runtime or network has a problem",
    ),
    # --- pods that were stopped: DisruptionTarget and the kubelet's reasons
    rule(
        "PreemptionByScheduler Preempting Preempted",
        "",
        Category.PREEMPTED,
        RetryVerdict.PREEMPTED,
        f"{RERUN} when capacity is available, or raise its priority",
        termination="was preempted by a pod of higher priority",
    ),
    rule(
        "Evicted TerminationByKubelet",
        r"exceed\w* (its local ephemeral storage limit|the limit|the total limit)|local storage usage exceeds",
        Category.USER_CODE,
        RetryVerdict.UNKNOWN,
        "write less to the node's disk, or raise ephemeral-storage or the volume's size limit",
    ),
    rule(
        "Evicted TerminationByKubelet",
        r"low on resource: memory|condition: .*\bMemoryPressure\b",
        Category.OUT_OF_MEMORY,
        RetryVerdict.INFRASTRUCTURE,
        "request as much memory as the job uses: pods that use more than they request are evicted first",
        resource="memory",
    ),
    rule(
        "Evicted TerminationByKubelet",
        r"low on resource: pids|condition: .*\bPIDPressure\b",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}; start fewer processes and threads (DataLoader workers) if it happens again",
    ),
    rule(
        "Evicted TerminationByKubelet",
        r"low on resource: ephemeral-storage|condition: .*\bDiskPressure\b",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}; request the ephemeral-storage that it writes: pods that use more than requested are evicted first",
    ),
    rule(
        "Evicted TerminationByKubelet Terminated Shutdown NodeShutdown",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}; check the node if it happens often",
    ),
    rule(
        "DeletionByTaintManager TaintManagerEviction",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        RERUN,
        termination="lost its node: the node was tainted or does not respond",
    ),
    rule(
        "DeletionByPodGC NodeLost",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        RERUN,
        termination="lost its node: the node was removed",
    ),
    rule(
        "NodeNotReady",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        "check the node; if it does not return, Kubernetes replaces its pods (by default after five minutes)",
    ),
    rule(
        "EvictionByEvictionAPI",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        RERUN,
        termination="was evicted: its node is being drained",
    ),
    rule(
        "UnexpectedAdmissionError",
        "unhealthy|no healthy devices",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}; check the node's devices: the kubelet reports them as unhealthy",
    ),
    rule(
        "NodeAffinity UnexpectedAdmissionError OutOfcpu OutOfmemory OutOfpods OutOfnvidia.com/gpu",
        "",
        Category.SCHEDULING,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}: the node had less free capacity than the scheduler assumed",
    ),
)
