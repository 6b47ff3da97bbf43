"""What the kubelet reports of containers, in their states and in Events: starts, images, kills."""

from __future__ import annotations

from trainjob._diagnosis.meaning import RERUN
from trainjob._diagnosis.reasons.rule import rule
from trainjob.verdicts import Category, RetryVerdict

NO_MEMORY_LIMIT = "the container has no memory limit"
"""Message for an OOMKilled container without a memory limit: the kubelet gives none."""

_START = "StartError ContainerCannotRun RunContainerError CreateContainerError"
_PULL = "ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable"
_MISSING = (
    "not found|does not exist|manifest unknown|access denied|[Uu]nauthorized|authorization failed"
    "|no basic auth|403 Forbidden"
)
_ENV_MISSING = "create the Secret or ConfigMap in the job's namespace, or correct its name and key in env"

RULES = (
    # --- containers, by the kubelet
    rule(
        "OOMKilled",
        f"^{NO_MEMORY_LIMIT}$",
        Category.OUT_OF_MEMORY,
        RetryVerdict.INFRASTRUCTURE,
        "set the memory in resources_per_node, so that the scheduler reserves it; or use a smaller batch",
        termination="was killed because its node ran out of memory (OOMKilled; the container has no memory limit)",
        resource="memory",
    ),
    rule(
        "OOMKilled",
        "",
        Category.OUT_OF_MEMORY,
        RetryVerdict.UNKNOWN,
        "raise the memory in resources_per_node, or use a smaller batch",
        termination="was killed because it used more memory than its limit (OOMKilled)",
        resource="memory",
    ),
    rule(
        _START,
        "exec format error",
        Category.IMAGE,
        RetryVerdict.CONFIGURATION,
        "build the image for the nodes' architecture",
        permanent=True,
    ),
    rule(
        _START,
        "failed to reserve container|[Dd]eadline ?[Ee]xceeded|[Rr]esource temporarily unavailable|no space left",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        "wait, or check the node: it is too busy or its disk is too full to start containers",
    ),
    rule(
        _START,
        "OOM-killed|memory limit too low",
        Category.OUT_OF_MEMORY,
        RetryVerdict.CONFIGURATION,
        "raise the memory in resources_per_node: the limit is too low to start the container",
        resource="memory",
    ),
    rule(
        _START,
        r"(?i)nvidia-container|nvml|\bCDI\b|could not select device driver|device plugin",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        "check the node: its GPU driver or device plugin fails",
    ),
    rule(
        _START,
        "chdir to cwd",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "correct workingDir of the container, or create the directory in the image",
    ),
    rule(
        _START,
        "no matching entries in (passwd|group) file|unable to find (user|group)",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "correct the user in the image or in securityContext: the image does not have it",
    ),
    rule(
        _START,
        "subPath|[Nn]ot a directory|mount a directory onto a file|error mounting",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "correct mountPath and subPath of the volume: subPath is missing, or a directory is mounted onto a file",
    ),
    rule(
        _START,
        "exec: |no such file or directory|[Pp]ermission denied|not found|^$",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "check that the command exists in the image (local backend: in the environment)",
    ),
    rule(
        _START,
        "",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the problem that the message names, in the spec or on the node",
    ),
    rule(
        "CreateContainerConfigError",
        "timed out|failed to sync|not yet been read|host IP",
        Category.CONFIGURATION,
        RetryVerdict.INFRASTRUCTURE,
        "check whether the node can reach the API server",
    ),
    rule(
        "CreateContainerConfigError",
        "(?i)non-?root|non-numeric user",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "set runAsUser to a numeric user other than 0, or use an image with such a user: runAsNonRoot is set",
        permanent=True,
    ),
    rule(
        "CreateContainerConfigError",
        "subPath",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        "correct subPath of the volumeMount, or create it in the volume",
        permanent=True,
    ),
    rule(
        "CreateContainerConfigError",
        "not found|couldn't find key|references non-existent",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        _ENV_MISSING,
        permanent=True,
    ),
    rule(
        "CreateContainerConfigError",
        "",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the problem that the message names, in the container's configuration",
    ),
    rule(  # as an Event, for users who may not list pods
        "Failed",
        "^Error: (secret|configmap) .*not found|^Error: couldn't find key",
        Category.CONFIGURATION,
        RetryVerdict.CONFIGURATION,
        _ENV_MISSING,
        permanent=True,
    ),
    # --- containers that the kubelet killed: only Events report this
    rule(
        "Killing",
        "failed liveness probe",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the liveness probe in the runtime (command, timeoutSeconds, failureThreshold), or its target",
        termination="was killed by the kubelet because its liveness probe failed",
    ),
    rule(
        "Killing",
        "failed startup probe",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the startup probe in the runtime (command, periodSeconds, failureThreshold), or its target",
        termination="was killed by the kubelet because its startup probe failed",
    ),
    rule(
        "Killing PostStartHookError FailedPostStartHook",
        "PostStartHook|postStart|[Ll]ifecycle hook|^$",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the postStart hook in the runtime: its command or its dependencies",
        termination="was killed by the kubelet because its postStart hook failed",
    ),
    rule(
        "PreStopHookError",
        "",
        Category.CONFIGURATION,
        RetryVerdict.UNKNOWN,
        "fix the preStop hook in the runtime: its command or its dependencies",
    ),
    rule(
        "ContainerStatusUnknown",
        "",
        Category.NODE_LOST,
        RetryVerdict.INFRASTRUCTURE,
        RERUN,
        termination="was lost with its node",
    ),
    # --- images
    rule(
        "InvalidImageName InspectFailed",
        "",
        Category.IMAGE,
        RetryVerdict.CONFIGURATION,
        "correct the image name",
        permanent=True,
    ),
    rule(
        "ErrImageNeverPull",
        "",
        Category.IMAGE,
        RetryVerdict.CONFIGURATION,
        "load the image onto the nodes, or allow it to be pulled",
        permanent=True,
    ),
    *(
        rule(reasons, about + pattern, Category.IMAGE, retry, advice, permanent=permanent)
        for reasons, about in (
            (_PULL, ""),
            ("Failed BackOff", "(?=.*[Ii]mage).*"),
        )  # as an Event, for users who may not list pods
        for pattern, retry, advice, permanent in (
            (
                "(no space left on device)",
                RetryVerdict.INFRASTRUCTURE,
                "free disk space on the node: the image does not fit",
                False,
            ),
            (
                "(x509: |failed to verify certificate|certificate signed by unknown authority)",
                RetryVerdict.CONFIGURATION,
                "add the registry's certificate authority to the nodes, or renew the registry's certificate",
                True,
            ),
            (
                "(server gave HTTP response to HTTPS client)",
                RetryVerdict.CONFIGURATION,
                "enable HTTPS in the registry, or configure the nodes' container runtime to use HTTP",
                True,
            ),
            (
                "(no match for platform|does not match the specified platform|no matching manifest)",
                RetryVerdict.CONFIGURATION,
                "build the image for the nodes' architecture",
                True,
            ),
            (
                "(toomanyrequests|429 Too Many Requests|rate limit)",
                RetryVerdict.INFRASTRUCTURE,
                "wait, or pull with credentials (image_pull_secrets): the registry limits the number of pulls",
                False,
            ),
            (
                "(no such host)",
                RetryVerdict.INFRASTRUCTURE,
                "check the registry's host name in the image, and the nodes' DNS",
                False,
            ),
            (
                f"({_MISSING})",
                RetryVerdict.CONFIGURATION,
                "check the image's name and tag, and the nodes' permission to pull it (image_pull_secrets)",
                True,
            ),
            ("", RetryVerdict.INFRASTRUCTURE, "check whether the nodes can reach the image's registry", False),
        )
    ),
    rule(
        "BackOff",
        "restarting failed container",
        Category.USER_CODE,
        RetryVerdict.UNKNOWN,
        "read its log: the container crashes repeatedly",
        termination="crashes repeatedly",
    ),
)
