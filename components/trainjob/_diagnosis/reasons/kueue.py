"""What Kueue reports of the Workload of a job, and what `blockers` concludes from it."""

from __future__ import annotations

from trainjob._diagnosis.reasons.rule import rule
from trainjob.verdicts import Category, RetryVerdict

_TOO_MUCH = "raise the queue's quota, or request less: the job exceeds the total quota"

RULES = (
    # --- Kueue
    rule(
        "Pending",
        r"resource \S+ unavailable in ClusterQueue",
        Category.QUOTA,
        RetryVerdict.CONFIGURATION,
        "add the resource to the ClusterQueue, or do not request it",
        permanent=True,
    ),
    rule(
        "Pending",
        "^(?!.*insufficient)(?=.*(untolerated taint|doesn't match node affinity))",
        Category.SCHEDULING,
        RetryVerdict.CONFIGURATION,
        "correct node selector, affinity or tolerations of the job or its runtime: no flavor of the queue matches them",
        permanent=True,
    ),
    rule("Pending", "> maximum capacity", Category.QUOTA, RetryVerdict.CONFIGURATION, _TOO_MUCH, permanent=True),
    rule("ExceedsMaxQuota", "", Category.QUOTA, RetryVerdict.CONFIGURATION, _TOO_MUCH, permanent=True),
    rule(
        "Inadmissible NoMatchingFlavor Misconfigured",
        "",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "correct the queue name (label kueue.x-k8s.io/queue-name), or set up the queue",
        permanent=True,
    ),
    rule(
        "Pending WaitingForQuota WaitingForPreemptedWorkloads TopologyPlacementFailed",
        "",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait until other jobs of the queue finish, or request less",
    ),
    rule(
        "Deactivated",
        "",
        Category.QUOTA,
        RetryVerdict.CONFIGURATION,
        "find out why it was evicted, then activate its Workload or launch the job again",
        permanent=True,
    ),
    rule(
        "WorkloadFinished",
        "",
        Category.QUOTA,
        RetryVerdict.CONFIGURATION,
        "delete the job, and launch it again",
        permanent=True,
    ),
    rule(
        "PodsReadyTimeout",
        "",
        Category.SCHEDULING,
        RetryVerdict.INFRASTRUCTURE,
        "check why the pods were not ready in time",
    ),
    rule(
        "AdmissionCheck",
        "is Rejected:",
        Category.ADMISSION,
        RetryVerdict.CONFIGURATION,
        "ask the operators of the admission check for the reason",
        permanent=True,
    ),
    rule("AdmissionCheck", "", Category.QUOTA, RetryVerdict.QUOTA, "wait for the admission check"),
    rule(
        "AdmittedButSuspended",
        "",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "upgrade Trainer to 2.2 or newer, which Kueue 0.17 and newer require",
    ),
)
