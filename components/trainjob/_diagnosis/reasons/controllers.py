"""What the controllers of Job, JobSet and Trainer report, and in their place the local backend."""

from __future__ import annotations

from trainjob._diagnosis.meaning import RERUN
from trainjob._diagnosis.reasons.rule import rule
from trainjob.verdicts import Category, RetryVerdict

_REFUSED = "FailedCreate JobCreationFailed TrainJobResourcesCreationFailed"

RULES = (
    # --- objects that the API server refused to the controllers of Job, JobSet and Trainer
    rule(
        _REFUSED,
        "failed quota: .*must specify",
        Category.QUOTA,
        RetryVerdict.CONFIGURATION,
        "set the values that the namespace's ResourceQuota requires: resources_per_node, or a LimitRange with defaults",
        permanent=True,
    ),
    rule(  # the whole quota is free, and is too small
        _REFUSED,
        r"exceeded quota: .*, used: (\S+,)?[^\s,=]+=0[,\s].*limited: ",
        Category.QUOTA,
        RetryVerdict.CONFIGURATION,
        "request less, or raise the namespace's ResourceQuota: the job exceeds the total quota",
        permanent=True,
    ),
    rule(
        _REFUSED,
        "exceeded quota|insufficient quota|failed quota|status unknown for quota",
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "wait, request less, or raise the namespace's quota",
    ),
    rule(
        _REFUSED,
        "serviceaccount .*not found|no PriorityClass",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the service account or priority class, or correct its name in the job or its runtime",
        permanent=True,
    ),
    rule(
        _REFUSED,
        r"(?i)(TrainingRuntime|runtime)\b.* (not found|must be created)",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the runtime again: the job needs it",
        permanent=True,
    ),
    # Kueue's webhook looks up the owner of a Job in a cache that may be outdated for a moment (0.18, busy machine).
    rule(
        _REFUSED,
        r'denied the request: (JobSet|TrainJob|Workload)\.[\w.-]+ "[^"]*" not found',
        Category.ADMISSION,
        RetryVerdict.INFRASTRUCTURE,
        "wait: an admission webhook does not know the job yet; the controller retries",
    ),
    rule(
        _REFUSED,
        "being terminated",
        Category.ADMISSION,
        RetryVerdict.CONFIGURATION,
        "use another namespace, or create the namespace again: it is being deleted",
        permanent=True,
    ),
    rule(
        _REFUSED,
        "violates PodSecurity",
        Category.ADMISSION,
        RetryVerdict.CONFIGURATION,
        "set the securityContext that the namespace's Pod Security level requires, or change the level",
        permanent=True,
    ),
    rule(
        _REFUSED,
        "failed calling webhook",
        Category.ADMISSION,
        RetryVerdict.INFRASTRUCTURE,
        "check the admission webhook named in the message: it does not respond",
    ),
    # A refusal by the API server is permanent; a conflict or an outage is over at the next try.
    rule(
        _REFUSED,
        "denied the request|is invalid:|is forbidden:",
        Category.ADMISSION,
        RetryVerdict.CONFIGURATION,
        "change the part that the API server refuses: the job's name, its patches or its runtime",
        permanent=True,
    ),
    rule(
        _REFUSED,
        "",
        Category.ADMISSION,
        RetryVerdict.INFRASTRUCTURE,
        "check the logs of the controllers of Trainer and JobSet",
    ),
    # --- the job itself
    rule(
        "DeadlineExceeded",
        "",
        Category.DEADLINE,
        RetryVerdict.UNKNOWN,
        "raise active_deadline_seconds, or shorten the training",
    ),
    rule(
        "TrainingRuntimeNotSupported",
        "",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "use an existing ClusterTrainingRuntime or TrainingRuntime",
    ),
    rule(
        "RuntimeNotFound",
        "",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "create the runtime again, or cancel the job and launch it with another runtime",
        permanent=True,
    ),
    # --- the local backend
    rule(
        "SupervisorLost",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        f"{RERUN}; if it happens again, find out what kills processes on this machine (memory, reboot)",
    ),
    rule(
        "LauncherLost",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        "launch the same key again to start the job, or cancel it: trainjob cancel NAME",
        permanent=True,
    ),
)
