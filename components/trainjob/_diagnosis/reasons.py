"""The meaning of the reasons that Kubernetes, JobSet, Trainer and Kueue report.

One table for failures and for blockers, since the same objects report both. It holds the reasons of container states
(kubelet), pods (kubelet, scheduler, ``DisruptionTarget``), Events and Kueue's Workloads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from trainjob.verdicts import RetryVerdict


class Category(StrEnum):
    """The kind of a failure. The values are a stable contract."""

    USER_CODE = "user code"
    OUT_OF_MEMORY = "out of memory"
    IMAGE = "image"
    SCHEDULING = "scheduling"
    QUOTA = "quota"
    PREEMPTED = "preempted"
    NODE_LOST = "node lost"
    ADMISSION = "admission"
    CONFIGURATION = "configuration"
    DEADLINE = "deadline"
    DELETED = "deleted"
    OUTAGE = "outage"
    """A service that the job needs did not answer, or a disk had an error."""
    HANG = "hang"
    """No rank made progress for `stall_timeout`."""
    UNKNOWN = "unknown"
    NONE = "none"
    """No failure: the job is running or complete."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a reason.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        advice: What to do.
        termination: How a container terminated, after the name of its rank; empty to quote reason and message.
        permanent: It cannot resolve itself.
        final: Why a retry cannot help; empty if the verdict explains it.
        resource: The resource in `resources_per_node` of which the node needs more, as ``memory``; empty if none.
    """

    category: Category
    retry: RetryVerdict
    advice: str
    termination: str = ""
    permanent: bool = False
    final: str = ""
    resource: str = ""


_UNKNOWN = RetryVerdict.UNKNOWN
_INFRASTRUCTURE = RetryVerdict.INFRASTRUCTURE
_CONFIGURATION = RetryVerdict.CONFIGURATION


def _rule(
    reasons: str,
    message: str,
    category: Category,
    retry: RetryVerdict,
    advice: str,
    *,
    termination: str = "",
    permanent: bool = False,
    resource: str = "",
) -> tuple[list[str], re.Pattern[str], Meaning]:
    """One rule of the table: reasons, a regular expression to find in the message, and their meaning."""
    meaning = Meaning(category, retry, advice, termination, permanent, resource=resource)
    return reasons.split(), re.compile(message, re.DOTALL), meaning


_LONGEST = 4096  # characters of a message that are searched; that of an Event has at most 1,024

RERUN = "launch the job again"
"""Begin of the advice for a failed job that may succeed when it is launched again, see `while_running`."""

NO_MEMORY_LIMIT = "the container has no memory limit"
"""Message for an OOMKilled container without a memory limit: the kubelet gives none."""

_START = "StartError ContainerCannotRun RunContainerError CreateContainerError"
_PULL = "ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable"
_MISSING = (
    "not found|does not exist|manifest unknown|access denied|[Uu]nauthorized|authorization failed"
    "|no basic auth|403 Forbidden"
)
_UNSCHEDULABLE = "Unschedulable FailedScheduling"
_MOUNT = "FailedMount FailedAttachVolume FailedMapVolume"
_REFUSED = "FailedCreate JobCreationFailed TrainJobResourcesCreationFailed"
_TOO_MUCH = "raise the queue's quota, or request less: the job exceeds the total quota"
_ENV_MISSING = "create the Secret or ConfigMap in the job's namespace, or correct its name and key in env"
# Set by the node controller, `kubectl cordon`, autoscalers and cloud providers. They are temporary.
_NODE_TAINT = (
    r"node\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler|DeletionCandidateOfClusterAutoscaler"
    r"|node\.cloudprovider\.kubernetes\.io/|karpenter\.sh/"
)
_UNAVAILABLE = rf"untolerated taint\(s\)(?! \{{)|were unschedulable|were not ready|{_NODE_TAINT}"
_VOLUME_ELSEWHERE = "volume node affinity|PersistentVolume's node affinity"

# The first rule that matches counts.
_RULES = (
    # --- containers, by the kubelet
    _rule(
        "OOMKilled",
        f"^{NO_MEMORY_LIMIT}$",
        Category.OUT_OF_MEMORY,
        _INFRASTRUCTURE,
        "set the memory in resources_per_node, so that the scheduler reserves it; or use a smaller batch",
        termination="was killed because its node ran out of memory (OOMKilled; the container has no memory limit)",
        resource="memory",
    ),
    _rule(
        "OOMKilled",
        "",
        Category.OUT_OF_MEMORY,
        _UNKNOWN,
        "raise the memory in resources_per_node, or use a smaller batch",
        termination="was killed because it used more memory than its limit (OOMKilled)",
        resource="memory",
    ),
    _rule(
        _START,
        "exec format error",
        Category.IMAGE,
        _CONFIGURATION,
        "build the image for the nodes' architecture",
        permanent=True,
    ),
    _rule(
        _START,
        "failed to reserve container|[Dd]eadline ?[Ee]xceeded|[Rr]esource temporarily unavailable|no space left",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "wait, or check the node: it is too busy or its disk is too full to start containers",
    ),
    _rule(
        _START,
        "OOM-killed|memory limit too low",
        Category.OUT_OF_MEMORY,
        _CONFIGURATION,
        "raise the memory in resources_per_node: the limit is too low to start the container",
        resource="memory",
    ),
    _rule(
        _START,
        r"(?i)nvidia-container|nvml|\bCDI\b|could not select device driver|device plugin",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "check the node: its GPU driver or device plugin fails",
    ),
    _rule(
        _START,
        "chdir to cwd",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct workingDir of the container, or create the directory in the image",
    ),
    _rule(
        _START,
        "no matching entries in (passwd|group) file|unable to find (user|group)",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct the user in the image or in securityContext: the image does not have it",
    ),
    _rule(
        _START,
        "subPath|[Nn]ot a directory|mount a directory onto a file|error mounting",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct mountPath and subPath of the volume: subPath is missing, or a directory is mounted onto a file",
    ),
    _rule(
        _START,
        "exec: |no such file or directory|[Pp]ermission denied|not found|^$",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "check that the command exists in the image (local backend: in the environment)",
    ),
    _rule(
        _START,
        "",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the problem that the message names, in the spec or on the node",
    ),
    _rule(
        "CreateContainerConfigError",
        "timed out|failed to sync|not yet been read|host IP",
        Category.CONFIGURATION,
        _INFRASTRUCTURE,
        "check whether the node can reach the API server",
    ),
    _rule(
        "CreateContainerConfigError",
        "(?i)non-?root|non-numeric user",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "set runAsUser to a numeric user other than 0, or use an image with such a user: runAsNonRoot is set",
        permanent=True,
    ),
    _rule(
        "CreateContainerConfigError",
        "subPath",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct subPath of the volumeMount, or create it in the volume",
        permanent=True,
    ),
    _rule(
        "CreateContainerConfigError",
        "not found|couldn't find key|references non-existent",
        Category.CONFIGURATION,
        _CONFIGURATION,
        _ENV_MISSING,
        permanent=True,
    ),
    _rule(
        "CreateContainerConfigError",
        "",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the problem that the message names, in the container's configuration",
    ),
    _rule(  # as an Event, for users who may not list pods
        "Failed",
        "^Error: (secret|configmap) .*not found|^Error: couldn't find key",
        Category.CONFIGURATION,
        _CONFIGURATION,
        _ENV_MISSING,
        permanent=True,
    ),
    # --- containers that the kubelet killed: only Events report this
    _rule(
        "Killing",
        "failed liveness probe",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the liveness probe in the runtime (command, timeoutSeconds, failureThreshold), or its target",
        termination="was killed by the kubelet because its liveness probe failed",
    ),
    _rule(
        "Killing",
        "failed startup probe",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the startup probe in the runtime (command, periodSeconds, failureThreshold), or its target",
        termination="was killed by the kubelet because its startup probe failed",
    ),
    _rule(
        "Killing PostStartHookError FailedPostStartHook",
        "PostStartHook|postStart|[Ll]ifecycle hook|^$",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the postStart hook in the runtime: its command or its dependencies",
        termination="was killed by the kubelet because its postStart hook failed",
    ),
    _rule(
        "PreStopHookError",
        "",
        Category.CONFIGURATION,
        _UNKNOWN,
        "fix the preStop hook in the runtime: its command or its dependencies",
    ),
    _rule(
        "ContainerStatusUnknown", "", Category.NODE_LOST, _INFRASTRUCTURE, RERUN, termination="was lost with its node"
    ),
    # --- images
    _rule(
        "InvalidImageName InspectFailed", "", Category.IMAGE, _CONFIGURATION, "correct the image name", permanent=True
    ),
    _rule(
        "ErrImageNeverPull",
        "",
        Category.IMAGE,
        _CONFIGURATION,
        "load the image onto the nodes, or allow it to be pulled",
        permanent=True,
    ),
    *(
        _rule(reasons, about + pattern, Category.IMAGE, retry, advice, permanent=permanent)
        for reasons, about in (
            (_PULL, ""),
            ("Failed BackOff", "(?=.*[Ii]mage).*"),
        )  # as an Event, for users who may not list pods
        for pattern, retry, advice, permanent in (
            (
                "(no space left on device)",
                _INFRASTRUCTURE,
                "free disk space on the node: the image does not fit",
                False,
            ),
            (
                "(x509: |failed to verify certificate|certificate signed by unknown authority)",
                _CONFIGURATION,
                "add the registry's certificate authority to the nodes, or renew the registry's certificate",
                True,
            ),
            (
                "(server gave HTTP response to HTTPS client)",
                _CONFIGURATION,
                "enable HTTPS in the registry, or configure the nodes' container runtime to use HTTP",
                True,
            ),
            (
                "(no match for platform|does not match the specified platform|no matching manifest)",
                _CONFIGURATION,
                "build the image for the nodes' architecture",
                True,
            ),
            (
                "(toomanyrequests|429 Too Many Requests|rate limit)",
                _INFRASTRUCTURE,
                "wait, or pull with credentials (image_pull_secrets): the registry limits the number of pulls",
                False,
            ),
            (
                "(no such host)",
                _INFRASTRUCTURE,
                "check the registry's host name in the image, and the nodes' DNS",
                False,
            ),
            (
                f"({_MISSING})",
                _CONFIGURATION,
                "check the image's name and tag, and the nodes' permission to pull it (image_pull_secrets)",
                True,
            ),
            ("", _INFRASTRUCTURE, "check whether the nodes can reach the image's registry", False),
        )
    ),
    _rule(
        "BackOff",
        "restarting failed container",
        Category.USER_CODE,
        _UNKNOWN,
        "read its log: the container crashes repeatedly",
        termination="crashes repeatedly",
    ),
    # --- the scheduler
    _rule(
        _UNSCHEDULABLE,
        r"persistentvolumeclaim .* not found",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the PersistentVolumeClaim, or correct its name",
        permanent=True,
    ),
    _rule(
        _UNSCHEDULABLE,
        r"unbound .*PersistentVolumeClaim|did(n't| not) find available persistent volumes",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "check why the PersistentVolumeClaim is not bound (kubectl describe pvc): its storage class and provisioner",
    ),
    _rule(
        _UNSCHEDULABLE,
        "Insufficient |Too many pods",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "wait for free capacity, request less per node, or add nodes",
    ),
    _rule(  # the volume's own node may be one of those that are not ready
        _UNSCHEDULABLE,
        rf"^(?=.*({_VOLUME_ELSEWHERE}))(?=.*({_UNAVAILABLE}))",
        Category.SCHEDULING,
        _UNKNOWN,
        "use a volume that can be attached to the nodes, or wait: the volume's own node may not be ready",
    ),
    _rule(
        _UNSCHEDULABLE,
        _VOLUME_ELSEWHERE,
        Category.SCHEDULING,
        _CONFIGURATION,
        "use a volume that can be attached to the nodes: it belongs to other nodes or to another zone",
    ),
    _rule(  # all matching nodes
        _UNSCHEDULABLE,
        rf"^(?!.*(affinity/selector|untolerated taint\(s\)(?! \{{)|untolerated taint(\(s\))? \{{(?!{_NODE_TAINT})))"
        rf".*(were unschedulable|were not ready|{_NODE_TAINT})",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "wait until nodes are ready and schedulable again, or check their state",
    ),
    _rule(  # the message does not name the matching nodes; since Kubernetes 1.35 it does not name taints
        _UNSCHEDULABLE,
        _UNAVAILABLE,
        Category.SCHEDULING,
        _UNKNOWN,
        "correct node selector, affinity or tolerations of the job or its runtime, or wait: nodes may be not ready",
    ),
    _rule(
        _UNSCHEDULABLE,
        "node affinity/selector|untolerated taint",
        Category.SCHEDULING,
        _CONFIGURATION,
        "correct node selector, affinity or tolerations of the job or its runtime: no node matches them",
    ),
    _rule(
        f"{_UNSCHEDULABLE} SchedulingGated",
        "",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "check what the scheduler waits for: kubectl describe pod",
    ),
    # --- volumes and sandboxes, by the kubelet
    _rule(
        _MOUNT,
        "registered CSI drivers|CSINode",
        Category.CONFIGURATION,
        _INFRASTRUCTURE,
        "check that the volume's CSI driver runs on the node",
    ),
    _rule(
        _MOUNT,
        "Multi-Attach|already (used|exclusively attached)",
        Category.CONFIGURATION,
        _INFRASTRUCTURE,
        "wait until the other pod has released the volume, or use one with access mode ReadWriteMany",
    ),
    _rule(
        _MOUNT,
        "hostPath type check failed",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the path of the hostPath volume on the node, or correct path and type",
    ),
    _rule(
        _MOUNT,
        "(secret|configmap|persistentvolumeclaim)s? .*not found|non-existent",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the ConfigMap, Secret or PersistentVolumeClaim to mount, or correct its name and keys",
        permanent=True,
    ),
    _rule(_MOUNT, "", Category.CONFIGURATION, _INFRASTRUCTURE, "check whether the volume can be attached to the node"),
    _rule(
        "FailedCreatePodSandBox NetworkNotReady",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "check the node: its container runtime or network has a problem",
    ),
    # --- objects that the API server refused to the controllers of Job, JobSet and Trainer
    _rule(
        _REFUSED,
        "failed quota: .*must specify",
        Category.QUOTA,
        _CONFIGURATION,
        "set the values that the namespace's ResourceQuota requires: resources_per_node, or a LimitRange with defaults",
        permanent=True,
    ),
    _rule(  # the whole quota is free, and is too small
        _REFUSED,
        r"exceeded quota: .*, used: (\S+,)?[^\s,=]+=0[,\s].*limited: ",
        Category.QUOTA,
        _CONFIGURATION,
        "request less, or raise the namespace's ResourceQuota: the job exceeds the total quota",
        permanent=True,
    ),
    _rule(
        _REFUSED,
        "exceeded quota|insufficient quota|failed quota|status unknown for quota",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait, request less, or raise the namespace's quota",
    ),
    _rule(
        _REFUSED,
        "serviceaccount .*not found|no PriorityClass",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the service account or priority class, or correct its name in the job or its runtime",
        permanent=True,
    ),
    _rule(
        _REFUSED,
        r"(?i)(TrainingRuntime|runtime)\b.* (not found|must be created)",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the runtime again: the job needs it",
        permanent=True,
    ),
    # Kueue's webhook looks up the owner of a Job in a cache that may be outdated for a moment (0.18, busy machine).
    _rule(
        _REFUSED,
        r'denied the request: (JobSet|TrainJob|Workload)\.[\w.-]+ "[^"]*" not found',
        Category.ADMISSION,
        _INFRASTRUCTURE,
        "wait: an admission webhook does not know the job yet; the controller retries",
    ),
    _rule(
        _REFUSED,
        "being terminated",
        Category.ADMISSION,
        _CONFIGURATION,
        "use another namespace, or create the namespace again: it is being deleted",
        permanent=True,
    ),
    _rule(
        _REFUSED,
        "violates PodSecurity",
        Category.ADMISSION,
        _CONFIGURATION,
        "set the securityContext that the namespace's Pod Security level requires, or change the level",
        permanent=True,
    ),
    _rule(
        _REFUSED,
        "failed calling webhook",
        Category.ADMISSION,
        _INFRASTRUCTURE,
        "check the admission webhook named in the message: it does not respond",
    ),
    # A refusal by the API server is permanent; a conflict or an outage is over at the next try.
    _rule(
        _REFUSED,
        "denied the request|is invalid:|is forbidden:",
        Category.ADMISSION,
        _CONFIGURATION,
        "change the part that the API server refuses: the job's name, its patches or its runtime",
        permanent=True,
    ),
    _rule(_REFUSED, "", Category.ADMISSION, _INFRASTRUCTURE, "check the logs of the controllers of Trainer and JobSet"),
    # --- pods that were stopped: DisruptionTarget and the kubelet's reasons
    _rule(
        "PreemptionByScheduler Preempting Preempted",
        "",
        Category.PREEMPTED,
        RetryVerdict.PREEMPTED,
        f"{RERUN} when capacity is available, or raise its priority",
        termination="was preempted by a pod of higher priority",
    ),
    _rule(
        "Evicted TerminationByKubelet",
        r"exceed\w* (its local ephemeral storage limit|the limit|the total limit)|local storage usage exceeds",
        Category.USER_CODE,
        _UNKNOWN,
        "write less to the node's disk, or raise ephemeral-storage or the volume's size limit",
    ),
    _rule(
        "Evicted TerminationByKubelet",
        r"low on resource: memory|condition: .*\bMemoryPressure\b",
        Category.OUT_OF_MEMORY,
        _INFRASTRUCTURE,
        "request as much memory as the job uses: pods that use more than they request are evicted first",
        resource="memory",
    ),
    _rule(
        "Evicted TerminationByKubelet",
        r"low on resource: pids|condition: .*\bPIDPressure\b",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        f"{RERUN}; start fewer processes and threads (DataLoader workers) if it happens again",
    ),
    _rule(
        "Evicted TerminationByKubelet",
        r"low on resource: ephemeral-storage|condition: .*\bDiskPressure\b",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        f"{RERUN}; request the ephemeral-storage that it writes: pods that use more than requested are evicted first",
    ),
    _rule(
        "Evicted TerminationByKubelet Terminated Shutdown NodeShutdown",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        f"{RERUN}; check the node if it happens often",
    ),
    _rule(
        "DeletionByTaintManager TaintManagerEviction",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        RERUN,
        termination="lost its node: the node was tainted or does not respond",
    ),
    _rule(
        "DeletionByPodGC NodeLost",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        RERUN,
        termination="lost its node: the node was removed",
    ),
    _rule(
        "NodeNotReady",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "check the node; if it does not return, Kubernetes replaces its pods (by default after five minutes)",
    ),
    _rule(
        "EvictionByEvictionAPI",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        RERUN,
        termination="was evicted: its node is being drained",
    ),
    _rule(
        "UnexpectedAdmissionError",
        "unhealthy|no healthy devices",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        f"{RERUN}; check the node's devices: the kubelet reports them as unhealthy",
    ),
    _rule(
        "NodeAffinity UnexpectedAdmissionError OutOfcpu OutOfmemory OutOfpods OutOfnvidia.com/gpu",
        "",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        f"{RERUN}: the node had less free capacity than the scheduler assumed",
    ),
    # --- Kueue
    _rule(
        "Pending",
        r"resource \S+ unavailable in ClusterQueue",
        Category.QUOTA,
        _CONFIGURATION,
        "add the resource to the ClusterQueue, or do not request it",
        permanent=True,
    ),
    _rule(
        "Pending",
        "^(?!.*insufficient)(?=.*(untolerated taint|doesn't match node affinity))",
        Category.SCHEDULING,
        _CONFIGURATION,
        "correct node selector, affinity or tolerations of the job or its runtime: no flavor of the queue matches them",
        permanent=True,
    ),
    _rule("Pending", "> maximum capacity", Category.QUOTA, _CONFIGURATION, _TOO_MUCH, permanent=True),
    _rule("ExceedsMaxQuota", "", Category.QUOTA, _CONFIGURATION, _TOO_MUCH, permanent=True),
    _rule(
        "Inadmissible NoMatchingFlavor Misconfigured",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct the queue name (label kueue.x-k8s.io/queue-name), or set up the queue",
        permanent=True,
    ),
    _rule(
        "Pending WaitingForQuota WaitingForPreemptedWorkloads TopologyPlacementFailed",
        "",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait until other jobs of the queue finish, or request less",
    ),
    _rule(
        "Deactivated",
        "",
        Category.QUOTA,
        _CONFIGURATION,
        "find out why it was evicted, then activate its Workload or launch the job again",
        permanent=True,
    ),
    _rule(
        "WorkloadFinished",
        "",
        Category.QUOTA,
        _CONFIGURATION,
        "delete the job, and launch it again",
        permanent=True,
    ),
    _rule("PodsReadyTimeout", "", Category.SCHEDULING, _INFRASTRUCTURE, "check why the pods were not ready in time"),
    _rule(
        "AdmissionCheck",
        "is Rejected:",
        Category.ADMISSION,
        _CONFIGURATION,
        "ask the operators of the admission check for the reason",
        permanent=True,
    ),
    _rule("AdmissionCheck", "", Category.QUOTA, RetryVerdict.QUOTA, "wait for the admission check"),
    _rule(
        "AdmittedButSuspended",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "upgrade Trainer to 2.2 or newer, which Kueue 0.17 and newer require",
    ),
    # --- the job itself
    _rule(
        "DeadlineExceeded",
        "",
        Category.DEADLINE,
        _UNKNOWN,
        "raise active_deadline_seconds, or shorten the training",
    ),
    _rule(
        "TrainingRuntimeNotSupported",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "use an existing ClusterTrainingRuntime or TrainingRuntime",
    ),
    _rule(
        "RuntimeNotFound",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the runtime again, or cancel the job and launch it with another runtime",
        permanent=True,
    ),
    _rule(
        "SupervisorLost",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        f"{RERUN}; if it happens again, find out what kills processes on this machine (memory, reboot)",
    ),
    _rule(
        "LauncherLost",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "launch the same key again to start the job, or cancel it: trainjob cancel NAME",
        permanent=True,
    ),
)

_BY_REASON: dict[str, list[tuple[re.Pattern[str], Meaning]]] = defaultdict(list)
for _reasons, _message, _meaning in _RULES:
    for _reason in _reasons:
        _BY_REASON[_reason].append((_message, _meaning))

UNKNOWN = Meaning(Category.UNKNOWN, _INFRASTRUCTURE, "check the job's events and its nodes")


def while_running(advice: str) -> str:
    """The advice for a job that has not ended, since to launch it again would start a second training."""
    return f"wait: the cluster restarts it{advice.removeprefix(RERUN)}" if advice.startswith(RERUN) else advice


def find(reason: str, message: str) -> Meaning | None:
    """The meaning of `reason` with `message`; None if it is unknown."""
    searched = message[:_LONGEST]
    return next((meaning for pattern, meaning in _BY_REASON.get(reason, ()) if pattern.search(searched)), None)
