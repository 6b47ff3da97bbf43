"""What the reasons mean that Kubernetes, JobSet, Trainer, Kueue and the local backend report, in objects and Events.

One table for failures and for blockers, since the same objects report both. The first row of a reason whose `says` is
found in the message counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from trainjob._diagnosis.meaning import RERUN, Meaning
from trainjob._diagnosis.rules import queues
from trainjob._diagnosis.rules.row import ObjectRule
from trainjob.errors import Category, RetryVerdict

M, C, R = Meaning, Category, RetryVerdict  # so that a row has two lines


NO_MEMORY_LIMIT = "the container has no memory limit"
"""Message for an OOMKilled container without a memory limit: the kubelet writes none."""

# fmt: off
# ---- meanings: containers
_NODE_FILLED = M(C.OUT_OF_MEMORY, R.INFRASTRUCTURE,
    "set the memory in resources_per_node, so that the scheduler reserves it; or use a smaller batch",
    "was killed because its node ran out of memory (OOMKilled; the container has no memory limit)", node_memory=True)
_LIMIT_REACHED = M(C.OUT_OF_MEMORY, R.UNKNOWN, "raise the memory in resources_per_node, or use a smaller batch",
    "was killed because it used more memory than its limit (OOMKilled)", node_memory=True)
_NODE_BUSY = M(C.NODE_LOST, R.INFRASTRUCTURE,
    "wait, or check the node: it is too busy or its disk is too full to start containers")
_LIMIT_TOO_LOW = M(C.OUT_OF_MEMORY, R.CONFIGURATION,
    "raise the memory in resources_per_node: the limit is too low to start the container", node_memory=True)
_GPU_PLUGIN = M(C.NODE_LOST, R.INFRASTRUCTURE, "check the node: its GPU driver or device plugin fails")
_WORKING_DIRECTORY = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct workingDir of the container, or create the directory in the image")
_NO_USER = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the user in the image or in securityContext: the image does not have it")
_MOUNT_PATH = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct mountPath and subPath of the volume: subPath is missing in it, or a directory is mounted onto a file")
_NO_COMMAND = M(C.CONFIGURATION, R.CONFIGURATION,
    "check that the command exists in the image (local backend: in the environment)")
_START_PROBLEM = M(C.CONFIGURATION, R.UNKNOWN, "fix the problem that the message names, in the spec or on the node")
_SECCOMP = M(C.CONFIGURATION, R.CONFIGURATION,
    "put the seccomp profile onto the nodes (below /var/lib/kubelet/seccomp), or use type RuntimeDefault")
_API_SERVER = M(C.CONFIGURATION, R.INFRASTRUCTURE, "check whether the node can reach the API server")
_NON_ROOT = M(C.CONFIGURATION, R.CONFIGURATION,
    "set runAsUser to a numeric user other than 0, or use an image with such a user: runAsNonRoot is set")
_ENV_MISSING = M(C.CONFIGURATION, R.CONFIGURATION,
    "create the Secret or ConfigMap in the job's namespace, or correct its name and key in env")
_LIVENESS = M(C.CONFIGURATION, R.UNKNOWN,
    "fix the liveness probe in the runtime (command, timeoutSeconds, failureThreshold), or its target",
    "was killed by the kubelet because its liveness probe failed")
_STARTUP = M(C.CONFIGURATION, R.UNKNOWN,
    "fix the startup probe in the runtime (command, periodSeconds, failureThreshold), or its target",
    "was killed by the kubelet because its startup probe failed")
_POST_START = M(C.CONFIGURATION, R.UNKNOWN, "fix the postStart hook in the runtime: its command or its dependencies",
    "was killed by the kubelet because its postStart hook failed")
_PRE_STOP = M(C.CONFIGURATION, R.UNKNOWN, "fix the preStop hook in the runtime: its command or its dependencies")
_CONTAINER_LOST = M(C.NODE_LOST, R.INFRASTRUCTURE, RERUN, "was lost with its node")
_CRASHES = M(C.USER_CODE, R.UNKNOWN, "read its log: the container crashes repeatedly", "crashes repeatedly")

# ---- meanings: images
_ARCHITECTURE = M(C.IMAGE, R.CONFIGURATION, "build the image for the nodes' architecture")
_IMAGE_NAME = M(C.IMAGE, R.CONFIGURATION, "correct the image name")
_NEVER_PULLED = M(C.IMAGE, R.CONFIGURATION, "load the image onto the nodes, or allow it to be pulled")
_IMAGE_DISK = M(C.IMAGE, R.INFRASTRUCTURE, "free disk space on the node: the image does not fit")
_REGISTRY_UNTRUSTED = M(C.IMAGE, R.CONFIGURATION,
    "add the registry's certificate authority to the nodes, or renew the registry's certificate")
_REGISTRY_HTTP = M(C.IMAGE, R.CONFIGURATION,
    "enable HTTPS in the registry, or configure the nodes' container runtime to use HTTP")
_REGISTRY_LIMITS = M(C.IMAGE, R.INFRASTRUCTURE,
    "wait, or pull with credentials (image_pull_secrets): the registry limits the number of pulls")
_REGISTRY_NAME = M(C.IMAGE, R.INFRASTRUCTURE, "check the registry's host name in the image, and the nodes' DNS")
_PROXY_LOGIN = M(C.IMAGE, R.CONFIGURATION, "set the proxy's credentials on the nodes: the proxy refuses the pull")
_TOKEN_EXPIRED = M(C.IMAGE, R.CONFIGURATION,
    "renew the registry's token in the Secret of image_pull_secrets: it has expired")
_NO_IMAGE = M(C.IMAGE, R.CONFIGURATION,
    "check the image's name and tag, and the nodes' permission to pull it (image_pull_secrets)")
_SIGNATURE = M(C.IMAGE, R.CONFIGURATION, "sign the image, or correct the nodes' signature policy")
_REGISTRY_AWAY = M(C.IMAGE, R.INFRASTRUCTURE, "check whether the nodes can reach the image's registry")

# ---- meanings: the scheduler and nodes
_NO_PVC = M(C.CONFIGURATION, R.CONFIGURATION, "create the PersistentVolumeClaim, or correct its name")
_PVC_DELETED = M(C.CONFIGURATION, R.CONFIGURATION,
    "use another PersistentVolumeClaim, or create it again once it is gone: it is being deleted")
_UNBOUND = M(C.CONFIGURATION, R.UNKNOWN,
    "check why the PersistentVolumeClaim is not bound (kubectl describe pvc): its storage class and provisioner")
_NO_CAPACITY = M(C.SCHEDULING, R.INFRASTRUCTURE, "wait for free capacity, request less per node, or add nodes")
_VOLUME_OR_NODE = M(C.SCHEDULING, R.UNKNOWN,
    "use a volume that can be attached to the nodes, or wait: the volume's own node may not be ready")
_VOLUME_ELSEWHERE = M(C.SCHEDULING, R.UNKNOWN,
    "use a volume that can be attached to the nodes: it belongs to other nodes or to another zone")
_NODES_AWAY = M(C.SCHEDULING, R.INFRASTRUCTURE,
    "wait until nodes are ready and schedulable again, or check their state")
_NODES_OR_SELECTOR = M(C.SCHEDULING, R.UNKNOWN,
    "correct node selector, affinity or tolerations of the job or its runtime, or wait: nodes may be not ready")
_NO_NODE_MATCHES = M(C.SCHEDULING, R.UNKNOWN,
    "correct node selector, affinity or tolerations of the job or its runtime: no node matches them")
_NO_FLAVOR_NODES = M(C.SCHEDULING, R.UNKNOWN,
    "add nodes with the labels of the flavor, or ask the operators of the queue to correct the flavor")
_ASK_SCHEDULER = M(C.SCHEDULING, R.INFRASTRUCTURE, "check what the scheduler waits for: kubectl describe pod")
_NO_SCHEDULER = M(C.SCHEDULING, R.UNKNOWN,
    "correct schedulerName of the job or its runtime, or install that scheduler: no scheduler has looked at the pod")
_NO_DRIVER = M(C.CONFIGURATION, R.INFRASTRUCTURE, "check that the volume's CSI driver runs on the node")
_VOLUME_USED = M(C.CONFIGURATION, R.INFRASTRUCTURE,
    "wait until the other pod has released the volume, or use one with access mode ReadWriteMany")
_VOLUME_OF_ITSELF = M(C.CONFIGURATION, R.CONFIGURATION,
    "use a volume with access mode ReadWriteMany: another rank of this job holds it on another node")
_HOST_PATH = M(C.CONFIGURATION, R.UNKNOWN,
    "create the path of the hostPath volume on the node, or correct path and type")
_NOT_MOUNTED = M(C.CONFIGURATION, R.CONFIGURATION,
    "create the ConfigMap, Secret or PersistentVolumeClaim to mount, or correct its name and keys")
_MOUNT = M(C.CONFIGURATION, R.INFRASTRUCTURE, "check whether the volume can be attached to the node")
_DRA = M(C.NODE_LOST, R.INFRASTRUCTURE,
    "check the DRA driver on the node: it cannot prepare the devices that the pod claims")
_SANDBOX = M(C.NODE_LOST, R.INFRASTRUCTURE, "check the node: its container runtime or network has a problem")
_SYSCTL = M(C.CONFIGURATION, R.CONFIGURATION,
    "remove the sysctl from securityContext, or allow it on the nodes (the kubelet's allowedUnsafeSysctls)")

_SIDECAR = M(C.CONFIGURATION, R.UNKNOWN,
    'keep the sidecar out of these pods (for Istio the label sidecar.istio.io/inject: "false" in the pod template of '
    "the runtime), or run it as a native sidecar: an init container with restartPolicy Always")

# ---- meanings: pods that were stopped
_PREEMPTED = M(C.PREEMPTED, R.PREEMPTED, f"{RERUN} when capacity is available, or raise its priority",
    "was preempted by a pod of higher priority")
_OWN_DISK = M(C.USER_CODE, R.UNKNOWN,
    "write less to the node's disk, or raise ephemeral-storage or the volume's size limit")
_MEMORY_PRESSURE = M(C.OUT_OF_MEMORY, R.INFRASTRUCTURE,
    "request as much memory as the job uses: pods that use more than they request are evicted first", node_memory=True)
_PID_PRESSURE = M(C.NODE_LOST, R.INFRASTRUCTURE,
    f"{RERUN}; start fewer processes and threads (DataLoader workers) if it happens again")
_DISK_PRESSURE = M(C.NODE_LOST, R.INFRASTRUCTURE,
    f"{RERUN}; request the ephemeral-storage that it writes: pods that use more than requested are evicted first")
_EVICTED = M(C.NODE_LOST, R.INFRASTRUCTURE, f"{RERUN}; check the node if it happens often")
_TAINTED = M(C.NODE_LOST, R.INFRASTRUCTURE, RERUN, "lost its node: the node was tainted or does not respond")
_REMOVED = M(C.NODE_LOST, R.INFRASTRUCTURE, RERUN, "lost its node: the node was removed")
_NOT_READY = M(C.NODE_LOST, R.INFRASTRUCTURE,
    "check the node; if it does not return, Kubernetes replaces its pods (by default after five minutes)")
_DRAINED = M(C.NODE_LOST, R.INFRASTRUCTURE, RERUN, "was evicted: its node is being drained")
_DEVICES = M(C.NODE_LOST, R.INFRASTRUCTURE,
    f"{RERUN}; check the node's devices: the kubelet reports them as unhealthy")
_TOPOLOGY = M(C.SCHEDULING, R.INFRASTRUCTURE,
    f"{RERUN}; request fewer devices and CPUs per node if it happens again: the node could not take them from one of "
    "its NUMA nodes")
_LESS_CAPACITY = M(C.SCHEDULING, R.INFRASTRUCTURE,
    f"{RERUN}: the node had less free capacity than the scheduler assumed")

# ---- meanings: objects that controllers could not create
_QUOTA_DEMANDS = M(C.QUOTA, R.CONFIGURATION,
    "set the values that the namespace's ResourceQuota requires: resources_per_node, or a LimitRange with defaults")
_QUOTA_TOO_SMALL = M(C.QUOTA, R.CONFIGURATION,
    "request less, or raise the namespace's ResourceQuota: the job exceeds the total quota")
_QUOTA_USED = M(C.QUOTA, R.QUOTA, "wait, request less, or raise the namespace's quota")
_NO_ACCOUNT = M(C.CONFIGURATION, R.CONFIGURATION,
    "create the service account or priority class, or correct its name in the job or its runtime")
_RUNTIME_AGAIN = M(C.CONFIGURATION, R.CONFIGURATION, "create the runtime again: the job needs it")
_WEBHOOK_LATE = M(C.ADMISSION, R.INFRASTRUCTURE,
    "wait: an admission webhook does not know the job yet; the controller retries")
_NAMESPACE_ENDS = M(C.ADMISSION, R.CONFIGURATION,
    "use another namespace, or create the namespace again: it is being deleted")
_POD_SECURITY = M(C.ADMISSION, R.CONFIGURATION,
    "set the securityContext that the namespace's Pod Security level requires, or change the level")
_WEBHOOK_AWAY = M(C.ADMISSION, R.INFRASTRUCTURE,
    "check the admission webhook named in the message: it does not respond")
_REFUSED = M(C.ADMISSION, R.CONFIGURATION,
    "change the part that the API server refuses: the job's name, its patches or its runtime")
_NOT_CREATED = M(C.ADMISSION, R.INFRASTRUCTURE, "check the logs of the controllers of Trainer and JobSet")
_DEADLINE = M(C.DEADLINE, R.UNKNOWN, "raise active_deadline_seconds, or shorten the training")
_NO_RUNTIME = M(C.CONFIGURATION, R.CONFIGURATION, "use an existing ClusterTrainingRuntime or TrainingRuntime")
_RUNTIME_GONE = M(C.CONFIGURATION, R.CONFIGURATION,
    "create the runtime again, or cancel the job and launch it with another runtime")
_SUPERVISOR = M(C.NODE_LOST, R.INFRASTRUCTURE,
    f"{RERUN}; if it happens again, find out what kills processes on this machine (memory, reboot)")
_LAUNCHER = M(C.NODE_LOST, R.CONFIGURATION,
    "launch the same key again to start the job, or cancel it: trainjob cancel NAME")

# ---- regular expressions
_START = "StartError ContainerCannotRun RunContainerError CreateContainerError"
# runc's and crun's words for the container's own command: other programs of the node are missing in other words.
_COMMAND_FAILED = (
    r'container (init|process)\b.*exec:? "[^"]*": |executable file .?\S* not found'
    r'|^exec: "[^"]*": |^$'
)
_CONFIG = "CreateContainerConfigError"
_PULL = "ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable Failed BackOff"
_IMAGE = r"^(?!Error: |.*restarting failed container).*?"  # `Failed` and `BackOff` are Events of other things, too
_SCHEDULER = "Unschedulable FailedScheduling"
_VOLUME = "FailedMount FailedAttachVolume FailedMapVolume"
_KUBELET = "Evicted TerminationByKubelet"
_CREATE = "FailedCreate JobCreationFailed TrainJobResourcesCreationFailed"
# Set by the node controller, `kubectl cordon`, autoscalers and cloud providers. They are temporary.
_NODE_TAINT = (
    r"node\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler|DeletionCandidateOfClusterAutoscaler"
    r"|node\.cloudprovider\.kubernetes\.io/|karpenter\.sh/"
)
_UNAVAILABLE = rf"untolerated taint\(s\)(?! \{{)|were unschedulable|were not ready|{_NODE_TAINT}"
_OTHER_NODES = "volume node affinity|PersistentVolume's node affinity"
_ONLY_UNAVAILABLE = (
    rf"^(?!.*(affinity/selector|untolerated taint\(s\)(?! \{{)|untolerated taint(\(s\))? \{{(?!{_NODE_TAINT})))"
    rf".*(were unschedulable|were not ready|{_NODE_TAINT})"
)
_ONLY_UNMATCHED = (
    r"^0/\d+ nodes are available:( \d+ node\(s\) (didn't match Pod's node affinity/selector"
    r"|had untolerated taint(\(s\))?( \{[^}]*\})?|were unschedulable|were not ready)[,.])+( |$)"
)
_NOT_FOUND = (
    "not found|does not exist|manifest unknown|access denied|[Uu]nauthorized|authorization failed"
    "|no basic auth|403 Forbidden"
)

_Rule = ObjectRule
OBJECTS: tuple[ObjectRule, ...] = (
    # ---- containers, by the kubelet
    _Rule("oom-without-limit", "OOMKilled", f"^{NO_MEMORY_LIMIT}$", _NODE_FILLED, "trainjob, of the pod's resources"),
    _Rule("oom-killed", "OOMKilled", "", _LIMIT_REACHED, "corpus/out-of-memory"),
    _Rule("start-architecture", _START, "[Ee]xec format error", _ARCHITECTURE,
        "trainjob, local backend; CPython OSError"),
    _Rule("start-node-busy", _START,
        "failed to reserve container|[Dd]eadline ?[Ee]xceeded|[Rr]esource temporarily unavailable|no space left",
        _NODE_BUSY, "containerd 2.1 internal/cri/server/container_create.go"),
    _Rule("start-memory-limit", _START, "OOM-killed|memory limit too low", _LIMIT_TOO_LOW,
        "runc 1.3 libcontainer/process_linux.go"),
    _Rule("start-gpu", _START, r"(?i)nvidia-container|nvml|\bCDI\b|could not select device driver|device plugin",
        _GPU_PLUGIN, "nvidia-container-toolkit 1.17 cmd/nvidia-container-runtime"),
    _Rule("start-seccomp", _START, "(?i)seccomp", _SECCOMP, "corpus/seccomp-profile-missing"),
    _Rule("start-working-directory", _START, "chdir to cwd|working directory .* does not exist", _WORKING_DIRECTORY,
        "runc 1.3 libcontainer/init_linux.go"),
    _Rule("start-user", _START, "no matching entries in (passwd|group) file|unable to find (user|group)", _NO_USER,
        "containerd 2.1 pkg/oci/spec_opts.go"),
    _Rule("start-mount-path", f"{_START} {_CONFIG}",
        "subPath|[Nn]ot a directory|mount a directory onto a file|error mounting", _MOUNT_PATH,
        "corpus/directory-onto-file"),
    _Rule("start-no-command", _START, _COMMAND_FAILED, _NO_COMMAND, "corpus/command-missing"),
    _Rule("config-node", _CONFIG, "failed to sync|not yet been read", _API_SERVER,
        "kubernetes 1.37 pkg/kubelet/kubelet_pods.go"),
    _Rule("config-non-root", _CONFIG, "(?i)non-?root|non-numeric user", _NON_ROOT, "corpus/run-as-non-root"),
    _Rule("config-env", _CONFIG, "not found|couldn't find key|references non-existent", _ENV_MISSING,
        "corpus/secret-key-missing"),
    _Rule("start-other", f"{_START} {_CONFIG}", "", _START_PROBLEM,
        "kubernetes 1.37 pkg/kubelet/kuberuntime/kuberuntime_container.go"),
    # For users who may not list pods: an Event in place of the container's state.
    _Rule("config-env-event", "Failed", "^Error: (secret|configmap) .*not found|^Error: couldn't find key",
        _ENV_MISSING, "corpus/secret-key-missing"),
    # ---- containers that the kubelet killed: only Events report this
    _Rule("killed-liveness", "Killing", "failed liveness probe", _LIVENESS, "corpus/liveness-probe"),
    _Rule("killed-startup", "Killing", "failed startup probe", _STARTUP, "corpus/startup-probe"),
    _Rule("killed-post-start", "Killing PostStartHookError FailedPostStartHook",
        "PostStartHook|postStart|[Ll]ifecycle hook|^$", _POST_START, "corpus/post-start-hook"),
    _Rule("pre-stop", "FailedPreStopHook", "", _PRE_STOP,
        "format: kubernetes 1.37 pkg/kubelet/kuberuntime/kuberuntime_container.go"),
    _Rule("container-lost", "ContainerStatusUnknown", "", _CONTAINER_LOST, "corpus/evicted-disk"),
    _Rule("container-unknown", "Unknown", "^$", _CONTAINER_LOST, "containerd 2.1 internal/cri/server/restart.go"),
    # ---- images
    _Rule("image-name", "InvalidImageName InspectFailed", "", _IMAGE_NAME, "corpus/image-name-invalid"),
    _Rule("image-never-pulled", "ErrImageNeverPull", "", _NEVER_PULLED,
        "format: kubernetes 1.37 pkg/kubelet/images/image_manager.go"),
    _Rule("image-disk", _PULL, f"{_IMAGE}no space left on device", _IMAGE_DISK, "errno ENOSPC"),
    _Rule("image-untrusted", _PULL, f"{_IMAGE}(x509: |failed to verify certificate|signed by unknown authority)",
        _REGISTRY_UNTRUSTED, "corpus/image-certificate-unknown"),
    _Rule("image-http", _PULL, f"{_IMAGE}server gave HTTP response to HTTPS client", _REGISTRY_HTTP,
        "go 1.25 net/http/transport.go"),
    _Rule("image-platform", _PULL,
        f"{_IMAGE}(no match for platform|does not match the specified platform|no matching manifest)", _ARCHITECTURE,
        "containerd 2.1 core/images/image.go"),
    _Rule("image-limits", _PULL, f"{_IMAGE}(toomanyrequests|429 Too Many Requests|rate limit)", _REGISTRY_LIMITS,
        "docs.docker.com/docker-hub/usage"),
    _Rule("image-host", _PULL, f"{_IMAGE}no such host", _REGISTRY_NAME, "go 1.25 net/net.go"),
    _Rule("image-proxy", _PULL, f"{_IMAGE}Proxy Authentication Required", _PROXY_LOGIN,
        "format: go 1.25 net/http/transport.go"),
    _Rule("image-token", _PULL, f"{_IMAGE}([Tt]oken has expired|token is expired|expired token)", _TOKEN_EXPIRED,
        "format: Amazon ECR, passed on by CRI-O"),
    _Rule("image-signature", "SignatureValidationFailed", "", _SIGNATURE,
        "kubernetes 1.37 pkg/kubelet/images/image_manager.go"),
    _Rule("image-missing", _PULL, f"{_IMAGE}({_NOT_FOUND})", _NO_IMAGE, "corpus/image-missing"),
    _Rule("image-other", "ErrImagePull ImagePullBackOff ImageInspectError RegistryUnavailable", "", _REGISTRY_AWAY,
        "corpus/registry-unreachable"),
    _Rule("image-other-event", "Failed BackOff", "^(?!Error: ).*[Ii]mage", _REGISTRY_AWAY,
        "corpus/image-certificate-unknown"),
    _Rule("crashes", "BackOff", "restarting failed container", _CRASHES, "corpus/command-missing"),
    # ---- the scheduler
    _Rule("pvc-missing", _SCHEDULER, r'persistentvolumeclaim "[^"]*" (not found|bound to non-existent)', _NO_PVC,
        "corpus/claim-missing"),
    _Rule("pvc-deleted", _SCHEDULER, r"persistentvolumeclaim .* is being deleted", _PVC_DELETED,
        "format: kubernetes 1.37 pkg/scheduler/framework/plugins/volumebinding/volume_binding.go"),
    _Rule("pvc-unbound", _SCHEDULER, r"unbound .*PersistentVolumeClaim|did(n't| not) find available persistent volumes",
        _UNBOUND, "corpus/claim-pending"),
    _Rule("no-capacity", _SCHEDULER, "Insufficient |Too many pods", _NO_CAPACITY, "corpus/unschedulable-gpus"),
    _Rule("volume-or-node", _SCHEDULER, rf"^(?=.*({_OTHER_NODES}))(?=.*({_UNAVAILABLE}))", _VOLUME_OR_NODE,
        "corpus/volume-of-another-node"),  # its node may be one of those that are not ready
    _Rule("volume-elsewhere", _SCHEDULER, _OTHER_NODES, _VOLUME_ELSEWHERE,
        "format: kubernetes 1.37 pkg/scheduler/framework/plugins/volumebinding/binder.go"),
    _Rule("nodes-away", _SCHEDULER, _ONLY_UNAVAILABLE, _NODES_AWAY,
        "format: kubernetes 1.37 pkg/scheduler/framework/types.go"),
    # The message names no nodes; since Kubernetes 1.35 it names no taints.
    _Rule("nodes-or-selector", _SCHEDULER, _UNAVAILABLE, _NODES_OR_SELECTOR, "corpus/unschedulable-cordoned"),
    _Rule("no-node-matches", _SCHEDULER, _ONLY_UNMATCHED, _NO_NODE_MATCHES,
        "format: kubernetes 1.37 pkg/scheduler/framework/plugins/nodeaffinity/node_affinity.go"),
    _Rule("flavor-without-nodes", "FlavorWithoutNodes", "", _NO_FLAVOR_NODES, "trainjob, of flavors and Nodes"),
    _Rule("unscheduled", f"{_SCHEDULER} SchedulingGated", "", _ASK_SCHEDULER,
        "format: kubernetes 1.37 pkg/registry/core/pod/strategy.go"),
    _Rule("no-scheduler", "NoScheduler", "", _NO_SCHEDULER, "trainjob, of a pod without the condition PodScheduled"),
    # ---- volumes and sandboxes, by the kubelet
    _Rule("csi-driver", _VOLUME, "registered CSI drivers|CSINode", _NO_DRIVER,
        "format: kubernetes 1.37 pkg/volume/csi/csi_client.go"),
    _Rule("volume-of-itself", "VolumeOfItself", "", _VOLUME_OF_ITSELF, "trainjob, of the volume and the job's pods"),
    _Rule("volume-used", _VOLUME, "Multi-Attach|already (used|exclusively attached)", _VOLUME_USED,
        "format: kubernetes 1.37 pkg/controller/volume/attachdetach/reconciler"),
    _Rule("host-path", _VOLUME, "hostPath type check failed", _HOST_PATH, "corpus/host-path-missing"),
    _Rule("mount-missing", _VOLUME,
        "(?i)(secret|configmap|persistentvolumeclaim)s? .*not found|secretproviderclass.*not found|non-existent",
        _NOT_MOUNTED, "corpus/configmap-key-missing"),
    _Rule("mount-other", _VOLUME, "", _MOUNT, "format: mount-utils 0.37 mount_linux.go"),
    _Rule("devices-not-prepared", "FailedPrepareDynamicResources", "", _DRA,
        "kubernetes 1.37 pkg/kubelet/cm/dra/manager.go"),
    _Rule("sandbox", "FailedCreatePodSandBox NetworkNotReady", "", _SANDBOX,
        "format: kubernetes 1.37 pkg/kubelet/kuberuntime/kuberuntime_manager.go"),
    _Rule("sidecar-runs", "SidecarRuns", "", _SIDECAR, "corpus/sidecar-keeps-pod"),
    _Rule("sysctl", "SysctlForbidden", "", _SYSCTL, "corpus/sysctl-forbidden"),
    # ---- pods that were stopped: DisruptionTarget and the kubelet's reasons
    _Rule("preempted", "PreemptionByScheduler Preempting Preempted", "", _PREEMPTED, "corpus/preempted-by-kueue"),
    _Rule("evicted-own-disk", _KUBELET,
        r"exceed\w* (its local ephemeral storage limit|the limit|the total limit)|local storage usage exceeds",
        _OWN_DISK, "corpus/evicted-disk"),
    _Rule("rejected-by-pressure", _KUBELET, "Pod was rejected: The node had condition", _LESS_CAPACITY,
        "kubernetes 1.37 pkg/kubelet/eviction/eviction_manager.go"),
    _Rule("evicted-memory", _KUBELET, r"low on resource: memory|condition: .*\bMemoryPressure\b", _MEMORY_PRESSURE,
        "corpus/evicted-memory"),
    _Rule("evicted-pids", _KUBELET, r"low on resource: pids|condition: .*\bPIDPressure\b", _PID_PRESSURE,
        "kubernetes 1.37 pkg/kubelet/eviction/helpers.go"),
    _Rule("evicted-disk", _KUBELET, r"low on resource: ephemeral-storage|condition: .*\bDiskPressure\b", _DISK_PRESSURE,
        "kubernetes 1.37 pkg/kubelet/eviction/helpers.go"),
    _Rule("evicted-other", f"{_KUBELET} Terminated Shutdown NodeShutdown", "", _EVICTED,
        "format: kubernetes 1.37 pkg/kubelet/nodeshutdown/nodeshutdown_manager.go"),
    _Rule("node-tainted", "DeletionByTaintManager TaintManagerEviction", "", _TAINTED, "corpus/node-tainted"),
    _Rule("node-removed", "DeletionByPodGC NodeLost", "", _REMOVED, "corpus/node-gone"),
    _Rule("node-not-ready", "NodeNotReady", "", _NOT_READY, "corpus/node-not-ready"),
    _Rule("node-drained", "EvictionByEvictionAPI", "", _DRAINED, "corpus/node-drained"),
    _Rule("devices-unhealthy", "UnexpectedAdmissionError", "unhealthy|no healthy devices", _DEVICES,
        "format: kubernetes 1.37 pkg/kubelet/cm/devicemanager/manager.go"),
    _Rule("device-plugin", "UnexpectedAdmissionError", r"\brpc (error|failed)\b", _GPU_PLUGIN,
        "format: kubernetes 1.37 pkg/kubelet/cm/devicemanager/manager.go"),
    _Rule("topology", "TopologyAffinityError", "", _TOPOLOGY, "kubernetes 1.37 pkg/kubelet/cm/topologymanager"),
    _Rule("less-capacity", "NodeAffinity UnexpectedAdmissionError OutOf", "",
        _LESS_CAPACITY, "format: kubernetes 1.37 pkg/kubelet/lifecycle/predicate.go"),
    # ---- objects that the API server refused to the controllers of Job, JobSet and Trainer
    _Rule("quota-demands", _CREATE, "failed quota: .*must specify", _QUOTA_DEMANDS,
        "corpus/resource-quota-demands-limits"),
    # The quota is free, and is too small; or the job itself uses it.
    _Rule("quota-too-small", _CREATE, r"exceeded quota: .*, used: (\S+,)?[^\s,=]+=0[,\s].*limited: ", _QUOTA_TOO_SMALL,
        "corpus/resource-quota-too-small"),
    _Rule("quota-of-itself", "QuotaOfItself", "", _QUOTA_TOO_SMALL, "trainjob, of the quota and the job's own pods"),
    _Rule("quota-used", _CREATE, "exceeded quota|insufficient quota|failed quota|status unknown for quota", _QUOTA_USED,
        "corpus/resource-quota"),
    _Rule("no-service-account", _CREATE, "serviceaccount .*not found|no PriorityClass", _NO_ACCOUNT,
        "corpus/priority-class-missing"),
    _Rule("runtime-needed", _CREATE, r"(?i)(TrainingRuntime|runtime)\b.* (not found|must be created)", _RUNTIME_AGAIN,
        "format: trainer 2.3 pkg/runtime/core/clustertrainingruntime.go"),
    # Kueue's webhook looks up the owner of a Job in a cache that may be outdated for a moment (0.18, busy machine).
    _Rule("webhook-late", _CREATE, r'denied the request: (JobSet|TrainJob|Workload)\.[\w.-]+ "[^"]*" not found',
        _WEBHOOK_LATE, "format: kueue 0.19 pkg/controller/jobframework/reconciler.go"),
    _Rule("namespace-ends", _CREATE, "being terminated", _NAMESPACE_ENDS,
        "kubernetes 1.37 apiserver plugin/namespace/lifecycle/admission.go"),
    _Rule("pod-security", _CREATE, "violates PodSecurity", _POD_SECURITY, "corpus/pod-security"),
    _Rule("webhook-away", _CREATE, "failed calling webhook", _WEBHOOK_AWAY,
        "format: apiserver 0.37 pkg/util/webhook/error.go"),
    # A refusal by the API server is permanent; a conflict or an outage is over at the next try.
    _Rule("refused", _CREATE, "denied the request|is invalid:|is forbidden:", _REFUSED, "corpus/limit-range"),
    _Rule("not-created", _CREATE, "", _NOT_CREATED, "format: trainer 2.3 pkg/controller/trainjob_controller.go"),
    # ---- the job itself
    _Rule("deadline", "DeadlineExceeded", "", _DEADLINE, "corpus/deadline"),
    _Rule("runtime-unsupported", "TrainingRuntimeNotSupported", "", _NO_RUNTIME,
        "format: trainer 2.3 pkg/controller/trainjob_controller.go"),
    _Rule("runtime-gone", "RuntimeNotFound", "", _RUNTIME_GONE, "trainjob, of a missing runtime"),
    # ---- the local backend
    _Rule("supervisor-lost", "SupervisorLost", "", _SUPERVISOR, "trainjob, local backend"),
    _Rule("launcher-lost", "LauncherLost", "", _LAUNCHER, "trainjob, local backend"),
    *queues.RULES,
)
# fmt: on

_LONGEST = 4096  # characters of a message that are searched; that of an Event has at most 1,024


def indexed(rules: Iterable[ObjectRule]) -> Mapping[str, list[tuple[re.Pattern[str], ObjectRule]]]:
    """Reason -> the rows for it, in their order."""
    found: dict[str, list[tuple[re.Pattern[str], ObjectRule]]] = defaultdict(list)
    for rule in rules:
        for reason in rule.reasons.split():
            found[reason].append((re.compile(rule.says, re.DOTALL), rule))
    return found


BY_REASON = indexed(OBJECTS)


def rule_of(reason: str, message: str) -> ObjectRule | None:
    """The row for a reason and its message; None if the table has none."""
    searched = message[:_LONGEST]
    reason = "OutOf" if reason.startswith("OutOf") else reason  # the kubelet appends the resource, as google.com/tpu
    return next((rule for pattern, rule in BY_REASON.get(reason, ()) if pattern.search(searched)), None)


def meaning_of(reason: str, message: str) -> Meaning | None:
    """What a reason means with its message; None if the table does not have it."""
    return rule.means if (rule := rule_of(reason, message)) else None
