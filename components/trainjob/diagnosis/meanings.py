"""What the reasons that Kubernetes, JobSet, Trainer and Kueue give mean.

One table for what fails a job and for what is only in its way: the same objects tell of both. It holds the reasons of
container states (kubelet), pods (kubelet, scheduler, ``DisruptionTarget``), Events and Kueue's Workloads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from trainjob.errors import RetryVerdict


class Category(StrEnum):
    """What kind of failure it was; the values are a stable contract."""

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
    UNKNOWN = "unknown"
    NONE = "none"
    """Nothing failed: the job goes on, or is complete."""


@dataclass(frozen=True)
class Meaning:
    """What a reason means.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        advice: What to do, for people.
        says: What happened to a rank, in words; empty where reason and message say it better.
        lasting: It does not go away by itself.
        final: Why no retry can help, in words; empty where the verdict says it well enough.
    """

    category: Category
    retry: RetryVerdict
    advice: str
    says: str = ""
    lasting: bool = False
    final: str = ""


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
    says: str = "",
    lasting: bool = False,
) -> tuple[list[str], re.Pattern[str], Meaning]:
    """A line of the table: reasons, a regular expression that is found in the message, what the two mean."""
    return reasons.split(), re.compile(message, re.DOTALL), Meaning(category, retry, advice, says, lasting)


_LONGEST = 4096  # characters of a message that are looked at; an Event's has 1,024 at most

_START = "StartError ContainerCannotRun RunContainerError CreateContainerError"
_PULL = "ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable"
_MISSING = (
    "not found|does not exist|manifest unknown|access denied|[Uu]nauthorized|authorization failed"
    "|no basic auth|403 Forbidden"
)
_UNSCHEDULABLE = "Unschedulable FailedScheduling"
_MOUNT = "FailedMount FailedAttachVolume FailedMapVolume"
_REFUSED = "FailedCreate JobCreationFailed TrainJobResourcesCreationFailed"
_TOO_MUCH = "raise the queue's quota, or ask for less: it will never fit"

# The first rule that fits counts.
_RULES = (
    # --- containers, by the kubelet
    _rule(
        "OOMKilled",
        "",
        Category.OUT_OF_MEMORY,
        _UNKNOWN,
        "raise the memory in resources_per_node, or use a smaller batch",
        says="was killed because it used more memory than its limit (OOMKilled)",
    ),
    _rule(
        _START,
        "exec format error",
        Category.IMAGE,
        _CONFIGURATION,
        "build the image for the nodes' architecture",
        lasting=True,
    ),
    _rule(
        _START,
        "failed to reserve container|[Dd]eadline ?[Ee]xceeded",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "wait, or see to the node: it is too busy to start containers",
    ),
    _rule(
        _START,
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "check command, and that the image (locally: the environment) has it",
    ),
    _rule(
        "CreateContainerConfigError",
        "timed out|failed to sync",
        Category.CONFIGURATION,
        _INFRASTRUCTURE,
        "see whether the node reaches the API server",
    ),
    _rule(
        "CreateContainerConfigError",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the Secret or ConfigMap in the job's namespace, or correct its name and key in env",
        lasting=True,
    ),
    _rule(  # the same as an Event, where pods may not be seen
        "Failed",
        "^Error: .*not found|^Error: couldn't find key",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the Secret or ConfigMap in the job's namespace, or correct its name and key in env",
        lasting=True,
    ),
    _rule(
        "PostStartHookError PreStopHookError",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "mend the hook in the runtime",
    ),
    _rule(
        "ContainerStatusUnknown", "", Category.NODE_LOST, _INFRASTRUCTURE, "run it again", says="was lost with its node"
    ),
    # --- images
    _rule(
        "InvalidImageName InspectFailed", "", Category.IMAGE, _CONFIGURATION, "correct the image's name", lasting=True
    ),
    _rule(
        "ErrImageNeverPull",
        "",
        Category.IMAGE,
        _CONFIGURATION,
        "load the image onto the nodes, or allow it to be pulled",
        lasting=True,
    ),
    _rule(
        _PULL,
        _MISSING,
        Category.IMAGE,
        _CONFIGURATION,
        "check the image's name and tag, and that the nodes may pull it (image_pull_secrets)",
        lasting=True,
    ),
    _rule(_PULL, "", Category.IMAGE, _INFRASTRUCTURE, "see whether the nodes reach the image's registry"),
    _rule(  # the same as an Event, where pods may not be seen
        "Failed",
        f"(?s)^(?=.*(image|Image)).*({_MISSING})",
        Category.IMAGE,
        _CONFIGURATION,
        "check the image's name and tag, and that the nodes may pull it (image_pull_secrets)",
        lasting=True,
    ),
    _rule(
        "Failed BackOff",
        "image|Image",
        Category.IMAGE,
        _INFRASTRUCTURE,
        "see whether the nodes reach the image's registry",
    ),
    _rule(
        "BackOff",
        "restarting failed container",
        Category.USER_CODE,
        _UNKNOWN,
        "read its log: it ends again and again",
        says="ends again and again",
    ),
    # --- the scheduler
    _rule(
        _UNSCHEDULABLE,
        r"persistentvolumeclaim .* not found",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the volume claim, or correct its name",
        lasting=True,
    ),
    _rule(
        _UNSCHEDULABLE,
        r"unbound .*PersistentVolumeClaim|did(n't| not) find available persistent volumes",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "see why the volume claim is not bound (kubectl describe pvc): its storage class and provisioner",
    ),
    _rule(
        _UNSCHEDULABLE,
        "Insufficient |Too many pods",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "wait until the nodes have room, ask for less per node, or add nodes",
    ),
    _rule(
        _UNSCHEDULABLE,
        "node affinity/selector|untolerated taint|volume node affinity",
        Category.SCHEDULING,
        _CONFIGURATION,
        "correct node selector, affinity or tolerations of the job or its runtime: no node fits them",
    ),
    _rule(
        f"{_UNSCHEDULABLE} SchedulingGated",
        "",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "see what the scheduler waits for",
    ),
    # --- volumes and sandboxes, by the kubelet
    _rule(
        _MOUNT,
        "not found|non-existent",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the ConfigMap, Secret or claim that is to be mounted, or correct its name",
        lasting=True,
    ),
    _rule(_MOUNT, "", Category.CONFIGURATION, _INFRASTRUCTURE, "see whether the volume can be attached to the node"),
    _rule(
        "FailedCreatePodSandBox NetworkNotReady",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "see to the node: its container runtime or network has trouble",
    ),
    # --- objects that are refused: Job, JobSet and Trainer's controllers
    _rule(
        _REFUSED,
        "exceeded quota|insufficient quota|failed quota",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait, ask for less, or have the namespace's quota raised",
    ),
    _rule(
        _REFUSED,
        "serviceaccount .*not found|no PriorityClass",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the service account or priority class, or correct its name in the job or its runtime",
        lasting=True,
    ),
    _rule(
        _REFUSED,
        r"(?i)(TrainingRuntime|runtime)\b.* (not found|must be created)",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "create the runtime again: the job needs it",
        lasting=True,
    ),
    # Kueue's webhook looks up what a Job belongs to in a cache that may be behind for a moment (0.18, busy machine).
    _rule(
        _REFUSED,
        r'denied the request: (JobSet|TrainJob|Workload)\.[\w.-]+ "[^"]*" not found',
        Category.ADMISSION,
        _INFRASTRUCTURE,
        "wait: an admission webhook has not heard of the job yet, and it is created again",
    ),
    # An API server that says no will say it again; a conflict or an outage is gone at the next try.
    _rule(
        _REFUSED,
        "denied the request|is invalid:|is forbidden:",
        Category.ADMISSION,
        _CONFIGURATION,
        "change what the API server refuses: the job's name, its patches or its runtime",
        lasting=True,
    ),
    _rule(_REFUSED, "", Category.ADMISSION, _INFRASTRUCTURE, "look at Trainer's and JobSet's own logs"),
    # --- pods that were stopped: DisruptionTarget and the kubelet's reasons
    _rule(
        "PreemptionByScheduler Preempting Preempted",
        "",
        Category.PREEMPTED,
        RetryVerdict.PREEMPTED,
        "run it again when there is room, or with a higher priority",
        says="had to make room for a pod of higher priority",
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
        "request as much memory as it uses: pods that use more than they requested go first",
    ),
    _rule(
        "Evicted TerminationByKubelet Terminated Shutdown NodeShutdown",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "run it again; see to the node if it happens often",
    ),
    _rule(
        "DeletionByTaintManager TaintManagerEviction",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "run it again",
        says="lost its node: it was tainted or stopped answering",
    ),
    _rule(
        "DeletionByPodGC NodeLost",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "run it again",
        says="lost its node: it is gone",
    ),
    _rule("NodeNotReady", "", Category.NODE_LOST, _INFRASTRUCTURE, "see to the node, or run it again"),
    _rule(
        "EvictionByEvictionAPI",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "run it again",
        says="was evicted: its node is being drained",
    ),
    _rule(
        "NodeAffinity UnexpectedAdmissionError OutOfcpu OutOfmemory OutOfpods OutOfnvidia.com/gpu",
        "",
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        "run it again: the node had less room than the scheduler thought",
    ),
    # --- Kueue
    _rule("Pending", "> maximum capacity", Category.QUOTA, _CONFIGURATION, _TOO_MUCH, lasting=True),
    _rule("ExceedsMaxQuota", "", Category.QUOTA, _CONFIGURATION, _TOO_MUCH, lasting=True),
    _rule(
        "Inadmissible NoMatchingFlavor Misconfigured",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "correct the queue's name (label kueue.x-k8s.io/queue-name), or have the queue set up",
        lasting=True,
    ),
    _rule(
        "Pending WaitingForQuota WaitingForPreemptedWorkloads TopologyPlacementFailed",
        "",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait until other jobs of the queue end, or ask for less",
    ),
    _rule(
        "Deactivated",
        "",
        Category.QUOTA,
        _CONFIGURATION,
        "see what evicted it, then activate its Workload or run it again",
        lasting=True,
    ),
    _rule("PodsReadyTimeout", "", Category.SCHEDULING, _INFRASTRUCTURE, "see why its pods were not ready in time"),
    _rule(
        "AdmissionCheck",
        "is Rejected:",
        Category.ADMISSION,
        _CONFIGURATION,
        "ask whoever runs the admission check",
        lasting=True,
    ),
    _rule("AdmissionCheck", "", Category.QUOTA, RetryVerdict.QUOTA, "wait for the admission check"),
    _rule(
        "AdmittedButSuspended",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "upgrade Trainer: Kueue since 0.17 needs 2.2 or newer",
    ),
    # --- the job itself
    _rule(
        "DeadlineExceeded",
        "",
        Category.DEADLINE,
        _UNKNOWN,
        "raise active_deadline_seconds, or make the training shorter",
    ),
    _rule(
        "TrainingRuntimeNotSupported",
        "",
        Category.CONFIGURATION,
        _CONFIGURATION,
        "use a ClusterTrainingRuntime or TrainingRuntime that is there",
    ),
    _rule(
        "SupervisorLost",
        "",
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "run it again; if it happens again, look for what kills processes on this machine (memory, reboot)",
    ),
)

_BY_REASON: dict[str, list[tuple[re.Pattern[str], Meaning]]] = defaultdict(list)
for _reasons, _message, _meaning in _RULES:
    for _reason in _reasons:
        _BY_REASON[_reason].append((_message, _meaning))

UNKNOWN = Meaning(Category.UNKNOWN, _INFRASTRUCTURE, "look at the job's events and at its nodes")


def find(reason: str, message: str) -> Meaning | None:
    """What `reason` with `message` means; None if it is not known."""
    shown = message[:_LONGEST]
    return next((meaning for pattern, meaning in _BY_REASON.get(reason, ()) if pattern.search(shown)), None)
