"""What Kueue reports of Workloads and queues means, and what `blockers` concludes from them."""

from __future__ import annotations

from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules.row import ObjectRule
from trainjob.errors import Category, RetryVerdict

M, C, R = Meaning, Category, RetryVerdict  # so that a row has two lines

# fmt: off
_QUEUE_RESOURCE = M(C.QUOTA, R.CONFIGURATION, "add the resource to the ClusterQueue, or do not request it")
_NO_FLAVOR = M(C.SCHEDULING, R.CONFIGURATION,
    "correct node selector, affinity or tolerations of the job or its runtime: no flavor of the queue matches them")
_QUEUE_TOO_SMALL = M(C.QUOTA, R.CONFIGURATION,
    "raise the queue's quota, or request less: the job exceeds the total quota")
_QUEUE_STOPPED = M(C.QUOTA, R.QUOTA,
    "wait, or ask the operators of the queue: it is stopped, or lacks a flavor or an admission check")
_NAMESPACE_UNMATCHED = M(C.CONFIGURATION, R.CONFIGURATION,
    "use a namespace that the ClusterQueue's namespaceSelector matches, or label the namespace")
_QUEUE_INCOMPLETE = M(C.CONFIGURATION, R.CONFIGURATION,
    "ask the operators of the queue to correct what the message names: it admits nothing until then")
_NO_PRIORITY = M(C.CONFIGURATION, R.CONFIGURATION,
    "create the WorkloadPriorityClass, or correct the label kueue.x-k8s.io/priority-class")
_NO_QUEUE = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the queue name (label kueue.x-k8s.io/queue-name), or set up the queue")
_QUEUED = M(C.QUOTA, R.QUOTA, "wait until other jobs of the queue finish, or request less")
_EXECUTION_TIME = M(C.DEADLINE, R.CONFIGURATION,
    "raise the label kueue.x-k8s.io/max-exec-time-seconds of the job, or shorten the training")
_DEACTIVATED = M(C.QUOTA, R.CONFIGURATION,
    "find out why it was evicted, then activate its Workload or launch the job again")
_FINISHED = M(C.QUOTA, R.CONFIGURATION, "delete the job, and launch it again")
_PODS_NOT_READY = M(C.SCHEDULING, R.INFRASTRUCTURE, "check why the pods were not ready in time")
_CHECK_REJECTED = M(C.ADMISSION, R.CONFIGURATION, "ask the operators of the admission check for the reason")
_CHECK = M(C.QUOTA, R.QUOTA, "wait for the admission check")
_STILL_SUSPENDED = M(C.CONFIGURATION, R.UNKNOWN,
    "upgrade Trainer to 2.2 or newer, which Kueue 0.17 and newer require")
_NO_LABEL = M(C.CONFIGURATION, R.CONFIGURATION,
    "set the label kueue.x-k8s.io/queue-name: Kueue suspends jobs without a queue, and starts none of them")

_PENDING = "Pending NoMatchingFlavor Misconfigured Inadmissible"  # by the version of Kueue, and its feature gates

_Rule = ObjectRule
RULES: tuple[ObjectRule, ...] = (
    _Rule("queue-namespace", _PENDING, "namespace doesn't match", _NAMESPACE_UNMATCHED, "corpus/queue-namespace"),
    _Rule("queue-resource", _PENDING, r"resource \S+ unavailable in ClusterQueue", _QUEUE_RESOURCE,
        "corpus/queue-resource-missing"),
    _Rule("no-flavor", _PENDING, "^(?!.*insufficient)(?=.*(untolerated taint|doesn't match node affinity))", _NO_FLAVOR,
        "kueue 0.19 pkg/scheduler/flavorassigner"),
    _Rule("queue-too-small", "Pending ExceedsMaxQuota", "> maximum capacity", _QUEUE_TOO_SMALL,
        "corpus/queue-too-small"),
    _Rule("queue-stopped", f"{_PENDING} Suspended", "is (inactive|stopped)", _QUEUE_STOPPED, "corpus/queue-stopped"),
    _Rule("queue-stopped-by-operator", "QueueStopped", "", _QUEUE_STOPPED, "trainjob, of the condition Active"),
    _Rule("queue-incomplete", "QueueIncomplete", "", _QUEUE_INCOMPLETE, "trainjob, of the condition Active"),
    _Rule("no-priority", "NoWorkloadPriorityClass", "", _NO_PRIORITY, "corpus/queue-priority-class-missing"),
    _Rule("no-queue", "Inadmissible NoMatchingFlavor Misconfigured", "", _NO_QUEUE, "corpus/queue-missing"),
    _Rule("queued",
        "Pending WaitingForQuota WaitingForPreemptedWorkloads TopologyPlacementFailed Waiting WaitingForPodsReady "
        "PendingEvaluation Suspended", "", _QUEUED, "corpus/queue-full"),
    _Rule("deactivated-deadline", "Deactivated", "maximum execution time", _EXECUTION_TIME,
        "kueue 0.19 pkg/controller/core/workload_controller.go"),
    _Rule("deactivated", "Deactivated", "", _DEACTIVATED,
        "format: kueue 0.19 pkg/controller/core/workload_controller.go"),
    _Rule("workload-finished", "WorkloadFinished", "", _FINISHED, "trainjob, of a finished Workload"),
    _Rule("pods-not-ready", "PodsReadyTimeout", "", _PODS_NOT_READY,
        "format: kueue 0.19 pkg/controller/core/workload_controller.go"),
    _Rule("check-rejected", "AdmissionCheck", "is Rejected:", _CHECK_REJECTED, "trainjob, of admissionChecks"),
    _Rule("check", "AdmissionCheck", "", _CHECK, "trainjob, of admissionChecks"),
    _Rule("admitted-suspended", "AdmittedButSuspended", "", _STILL_SUSPENDED, "trainjob; Trainer 2.1 with Kueue 0.17"),
    _Rule("no-queue-label", "NoQueueLabel", "", _NO_LABEL, "kueue 0.19, manageJobsWithoutQueueName"),
)
# fmt: on
