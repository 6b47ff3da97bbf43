"""Jobs that fail, or do not get on, each in its own way: how each is made, and what has to be said of it.

`tests/cluster/test_diagnosis.py` makes all of them on real controllers and a real kubelet; `corpus` keeps what was seen
of them, for the unit tests and for the table of docs/diagnosis.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from tests.cluster import failing as make
from tests.testcluster.access import Access
from tests.testcluster.nodes import fate

from trainjob.diagnosis import Category
from trainjob.errors import RetryVerdict
from trainjob.manifest import JobRef


@dataclass(frozen=True)
class Failure:
    """One way to fail.

    Attributes:
        name: Also of its file in the corpus.
        how: How it is made, for people.
        spec: Of the job. The image is one with Python where the node is real.
        category: What has to be said of it.
        retry: Likewise.
        says: Likewise: a regular expression that is found in the summary.
        rank: Likewise.
        exit_code: Likewise.
        node: ``real`` where pods have to run, ``jax`` or ``torch`` if these are needed in them.
        before: Makes what has to be there first, and removes it.
        after: What is done to the job once it runs; to one that is suspended, at once.
        failed: Whether the job itself has to have failed by then; the shipped runtimes start ranks again for minutes.
        alone: Whether it is made after the others, because it troubles them.
        slow: Whether it takes long, and is begun with.
        shows: A regular expression that is found in the log lines shown.
        victim: A rank that ends, too, because it loses the first one: it has to have ended when that one is blamed.
        job_name: Of the job, if it is not one of ours.
    """

    name: str
    how: str
    spec: Mapping[str, Any]
    category: Category
    retry: RetryVerdict
    says: str
    rank: str = ""
    exit_code: int | None = None
    node: Literal["simulated", "real", "jax", "torch"] = "simulated"
    before: Callable[[Access, str], AbstractContextManager[None]] | None = None
    after: Callable[[Access, JobRef], None] | None = None
    failed: bool = False
    alone: bool = False
    slow: bool = False
    shows: str = ""
    victim: str = ""
    job_name: str = ""


_USER, _UNKNOWN, _INFRASTRUCTURE = RetryVerdict.USER, RetryVerdict.UNKNOWN, RetryVerdict.INFRASTRUCTURE
_CONFIGURATION = RetryVerdict.CONFIGURATION

FAILURES = (
    # --- the training code
    Failure(
        "exit-code",
        "rank 1 of 3 ends with 3",
        make.one_of(3, "sys.exit(3)"),
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-1 exited with code 3$",
        rank="node-1",
        exit_code=3,
        node="real",
    ),
    Failure(
        "exception",
        "rank 1 of 2 raises; the runtime does not start it again",
        make.one_of(2, "raise ValueError('the answer is not 42')") | make.OWN,
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-1 exited with code 1: ValueError: the answer is not 42$",
        rank="node-1",
        exit_code=1,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
        shows="^Traceback",
    ),
    Failure(
        "exception-chained",
        "an exception raised from another one",
        make.python(make.CHAINED),
        Category.USER_CODE,
        _UNKNOWN,
        r"RuntimeError: epoch 3 cannot be read \(caused by KeyError: 'label'\)",
        rank="node-0",
        exit_code=1,
        node="real",
    ),
    Failure(
        "exception-noise",
        "an exception after lines of a megabyte and bytes that are no UTF-8",
        make.python(make.NOISE),
        Category.USER_CODE,
        _UNKNOWN,
        r"LookupError: no such layer: 7",
        rank="node-0",
        exit_code=1,
        node="real",
    ),
    Failure(
        "module-missing",
        "a package that the image does not have",
        make.python("import nosuchpackage"),
        Category.USER_CODE,
        _USER,
        "ModuleNotFoundError: No module named 'nosuchpackage'",
        rank="node-0",
        exit_code=1,
        node="real",
    ),
    Failure(
        "handled-exception",
        "an exception that is handled, and an end in words of the script's own",
        make.python(make.HANDLED) | make.OWN,
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-0 exited with code 1; last log line: the loss is not a number, giving up$",
        rank="node-0",
        exit_code=1,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
        shows="CUDA out of memory",
    ),
    Failure(
        "service-down",
        "a server that the training needs refuses the connection",
        make.python(make.OUTAGE) | make.OWN,
        Category.OUTAGE,
        _INFRASTRUCTURE,
        r"Connection refused",
        rank="node-0",
        exit_code=1,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "argument-unknown",
        "an argument that the script does not know",
        make.python(make.USAGE) | make.OWN,
        Category.USER_CODE,
        _USER,
        r"^node-0 exited with code 2: train.py: error: unrecognized arguments: --eopchs 3",
        rank="node-0",
        exit_code=2,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "script-missing",
        "a script that the image does not have",
        make.OWN | {"command": ["python3", "/opt/train.py"]},
        Category.CONFIGURATION,
        _CONFIGURATION,
        r"^node-0 exited with code 2: python3: can't open file '/opt/train.py'",
        rank="node-0",
        exit_code=2,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "program-missing",
        "a shell script calls a program that the image does not have",
        make.shell("no-such-program --epochs 3") | make.OWN,
        Category.CONFIGURATION,
        _CONFIGURATION,
        r"^node-0 exited with code 127: sh: 1: no-such-program: not found$",
        rank="node-0",
        exit_code=127,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "script-not-executable",
        "a script that may not be executed",
        make.shell(make.SCRIPT.format("sh", "chmod 644")) | make.OWN,
        Category.CONFIGURATION,
        _CONFIGURATION,
        r"^node-0 exited with code 126: sh: 1: /tmp/train.sh: Permission denied$",
        rank="node-0",
        exit_code=126,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "script-of-windows",
        "a script whose lines end with CRLF",
        make.shell(make.SCRIPT.format("sh\\r", "chmod 755")) | make.OWN,
        Category.CONFIGURATION,
        _CONFIGURATION,
        r"^node-0 exited with code 127: sh: 1: /tmp/train.sh: not found$",
        rank="node-0",
        exit_code=127,
        node="real",
        before=make.own(make.stages("node")),
        failed=True,
    ),
    Failure(
        "torchrun",
        "rank 1 of 2 raises under torchrun, which adds its own report; rank 0 loses its peer",
        make.torch(1, make.TORCHRUN),
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-1 exited with code 1: ValueError: step 3 has no labels",
        rank="node-1",
        exit_code=1,
        node="torch",
        shows="ValueError: step 3 has no labels",
        victim="node-0",
        slow=True,
    ),
    Failure(
        "gloo-torch",
        "rank 1 of 2 raises in the middle of PyTorch's all-reduce by Gloo, and rank 0 loses it",
        make.torch(1, make.PLAIN_TORCH),
        Category.USER_CODE,
        _UNKNOWN,
        # Gloo's threads still run when Python is through: now and then libstdc++ ends the process by a signal instead.
        r"^node-1 (exited with code 1|was killed by signal (6|11) \(SIG(ABRT|SEGV)\))"
        ": ValueError: step 3 has no labels",
        rank="node-1",
        node="torch",
        victim="node-0",
        slow=True,
    ),
    Failure(
        "gloo-jax",
        "rank 1 of 2 ends with 7 in the middle of JAX's all-gather by Gloo, and rank 0 loses it",
        make.jax("_exit(7)"),
        Category.USER_CODE,
        _UNKNOWN,
        "^node-1 exited with code 7$",
        rank="node-1",
        exit_code=7,
        node="jax",
        victim="node-0",
        slow=True,
    ),
    Failure(
        "segmentation-fault",
        "reads address 0",
        make.python("import ctypes; ctypes.string_at(0)"),
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-0 was killed by signal 11 \(SIGSEGV\)",
        rank="node-0",
        exit_code=139,
        node="real",
    ),
    Failure(
        "killed",
        "rank 1 of 2 is killed by SIGKILL from outside",
        make.python("import time; time.sleep(600)", 2),
        Category.UNKNOWN,
        _INFRASTRUCTURE,
        r"^node-1 was killed by signal 9 \(SIGKILL\)",
        rank="node-1",
        exit_code=137,
        node="real",
        after=make.kill_rank_1,
    ),
    Failure(
        "crash-loop",
        "ends with 5 again and again",
        make.python("import sys; print('again', flush=True); sys.exit(5)"),
        Category.USER_CODE,
        _UNKNOWN,
        r"^node-0 exited with code 5 \(started again \d times\)",
        rank="node-0",
        exit_code=5,
        node="real",
        shows="again",
        slow=True,
    ),
    Failure(
        "init-container",
        "an init container of the runtime ends with 9",
        make.OWN,
        Category.USER_CODE,
        _UNKNOWN,
        "^node-0's container fetch exited with code 9",
        rank="node-0",
        exit_code=9,
        node="real",
        before=make.own(
            make.stages("node", pod={"initContainers": [make.container("fetch", "echo no route; exit 9")]})
        ),
        failed=True,
        shows="no route",
    ),
    Failure(
        "sidecar",
        "the rank exits with 3 while a sidecar keeps running",
        make.OWN | {"command": ["sh", "-c", "exit 3"]},
        Category.USER_CODE,
        _UNKNOWN,
        "^node-0 exited with code 3$",
        rank="node-0",
        exit_code=3,
        node="real",
        before=make.own(
            make.stages(
                "node",
                pod={"initContainers": [make.container("proxy", "sleep 600") | {"restartPolicy": "Always"}]},
            )
        ),
    ),
    Failure(
        "initializer",
        "the dataset initializer ends with 4",
        make.OWN | {"initializer": {"dataset": {"storage_uri": "s3://bucket/nosuch"}}},
        Category.USER_CODE,
        _UNKNOWN,
        "^dataset-initializer-0 exited with code 4",
        rank="dataset-initializer-0",
        exit_code=4,
        node="real",
        before=make.own(make.stages("dataset-initializer", "node")),
        failed=True,
        shows="no such dataset",
    ),
    Failure(
        "deadline",
        "active_deadline_seconds of 8, and a training that takes longer",
        make.python("import time; print('epoch 1', flush=True); time.sleep(600)", active_deadline_seconds=8),
        Category.DEADLINE,
        _UNKNOWN,
        "it ran longer than its deadline allows",
        node="real",
        failed=True,
    ),
    # --- memory
    Failure(
        "out-of-memory",
        "rank 1 of 2 uses more than its limit of 64 MiB",
        make.one_of(2, "x = b'x' * (1 << 30)", resources_per_node={"memory": "64Mi"}),
        Category.OUT_OF_MEMORY,
        _UNKNOWN,
        r"^node-1 was killed because it used more memory than its limit \(OOMKilled\)",
        rank="node-1",
        exit_code=137,
        node="real",
    ),
    Failure(
        "out-of-gpu-memory",
        "writes what PyTorch writes when a GPU's memory is full (there is no GPU here)",
        make.python(make.GPU_MEMORY),
        Category.OUT_OF_MEMORY,
        _UNKNOWN,
        "torch.OutOfMemoryError: CUDA out of memory",
        rank="node-0",
        exit_code=1,
        node="real",
    ),
    # --- nodes
    Failure(
        "evicted-disk",
        "writes 40 MB where ephemeral-storage is limited to 8 MiB",
        make.python(
            "import time; open('/big', 'wb').write(bytes(40_000_000)); time.sleep(600)",
            resources_per_node={"storage": "8Mi"},
        ),
        Category.USER_CODE,
        _UNKNOWN,
        "^node-0 was stopped: Evicted: .*ephemeral",
        rank="node-0",
        node="real",
        slow=True,
    ),
    Failure(
        "evicted-memory",
        "the kubelet finds its node short of memory",
        # With a request: a kubelet that is started again lets no pod without one stay where memory is short.
        make.python(
            "import time; x = b'x' * (300 << 20); time.sleep(600)",
            resources_per_node={"requests": {"memory": "16Mi"}},
        ),
        Category.OUT_OF_MEMORY,
        _INFRASTRUCTURE,
        "^node-0 was stopped: Evicted: The node was low on resource: memory",
        rank="node-0",
        node="real",
        before=make.kubelet_as_it_was,
        after=make.squeeze,
        alone=True,
    ),
    Failure(
        "node-gone",
        "the node that it runs on is removed",
        make.simulated(env=fate(run="never")) | make.ON_OWN_NODE,
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "^node-0 lost its node: it is gone",
        rank="node-0",
        before=make.own_node,
        after=make.remove_node,
        slow=True,
    ),
    Failure(
        "node-tainted",
        "its node gets a taint with NoExecute, as one that no longer answers does",
        make.simulated(env=fate(run="never")) | make.ON_OWN_NODE,
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "^node-0 lost its node: it was tainted or stopped answering",
        rank="node-0",
        before=make.own_node,
        after=make.taint_node,
    ),
    Failure(
        "node-drained",
        "its pod is evicted by the API, as kubectl drain does",
        make.simulated(env=fate(run="never")),
        Category.NODE_LOST,
        _INFRASTRUCTURE,
        "^node-0 was evicted: its node is being drained",
        rank="node-0",
        after=make.evict,
    ),
    Failure(
        "preempted-by-scheduler",
        "a pod of higher priority needs the node that it fills",
        make.simulated(gpus=8, env=fate(run="never")) | make.ON_OWN_NODE,
        Category.PREEMPTED,
        RetryVerdict.PREEMPTED,
        "^node-0 had to make room for a pod of higher priority",
        rank="node-0",
        before=make.own_node_and_priority,
        after=make.outrank_on_node,
    ),
    Failure(
        "preempted-by-kueue",
        "a job of higher priority needs the queue that it fills",
        make.simulated(gpus=8, env=fate(run="never")) | make.queued("small"),
        Category.PREEMPTED,
        RetryVerdict.PREEMPTED,
        "Preempted to accommodate a workload",
        before=make.small_queue,
        after=make.outrank_in_queue,
    ),
    # --- images and containers
    Failure(
        "image-missing",
        "an image that its registry does not have",
        make.simulated(image=f"{make.REGISTRY}/nosuch:1"),
        Category.IMAGE,
        _CONFIGURATION,
        "^node-0 (ErrImagePull|ImagePullBackOff): .*not found",
        rank="node-0",
        node="real",
    ),
    Failure(
        "registry-unreachable",
        "a registry that does not answer",
        make.simulated(image="127.0.0.1:1/nosuch:1"),
        Category.IMAGE,
        _INFRASTRUCTURE,
        "^node-0 (ErrImagePull|ImagePullBackOff): .*",
        rank="node-0",
        node="real",
    ),
    Failure(
        "image-name-invalid",
        "an image whose name cannot be one",
        make.simulated(image="Not An Image"),
        Category.IMAGE,
        _CONFIGURATION,
        "^node-0 InvalidImageName: ",
        rank="node-0",
        node="real",
    ),
    Failure(
        "command-missing",
        "a command that the image does not have",
        {"runtime": "torch-distributed", "command": ["tran", "--epochs=3"]},
        Category.CONFIGURATION,
        _CONFIGURATION,
        r'^node-0 could not be started: exec: "tran": executable file not found in \$PATH',
        rank="node-0",
        exit_code=128,
        node="real",
    ),
    Failure(
        "secret-missing",
        "a variable from a Secret that is not there",
        make.python("", env={"TOKEN": {"valueFrom": {"secretKeyRef": {"name": "nosuch", "key": "token"}}}}),
        Category.CONFIGURATION,
        _CONFIGURATION,
        '^node-0 CreateContainerConfigError: secret "nosuch" not found',
        rank="node-0",
        node="real",
    ),
    Failure(
        "configmap-missing",
        "a volume from a ConfigMap that is not there",
        make.python("") | make.mounted({"name": "settings", "configMap": {"name": "nosuch"}}),
        Category.CONFIGURATION,
        _CONFIGURATION,
        '^node-0 FailedMount: .*configmap "nosuch" not found',
        rank="node-0",
        node="real",
    ),
    Failure(
        "image-being-pulled",
        "a registry that takes its time",
        make.simulated(image=f"{make.REGISTRY}/slow:1"),
        Category.NONE,
        _INFRASTRUCTURE,
        f'^node-0 waits for its image: Pulling image "{make.REGISTRY}/slow:1"',
        node="real",
    ),
    Failure(
        "slow-start",
        "an init container that takes its time",
        make.OWN,
        Category.NONE,
        _INFRASTRUCTURE,
        "^node-0 waits for its init container fetch",
        node="real",
        before=make.own(make.stages("node", pod={"initContainers": [make.container("fetch", "sleep 600")]})),
    ),
    # --- the scheduler
    Failure(
        "unschedulable-gpus",
        "1000 GPUs for each of two nodes",
        make.simulated(2, gpus=1000),
        Category.SCHEDULING,
        _INFRASTRUCTURE,
        r"^node-0 \(and 1 more\) is not scheduled: .*Insufficient nvidia.com/gpu",
        rank="node-0",
    ),
    Failure(
        "unschedulable-selector",
        "a node selector that no node fits",
        make.simulated() | make.patched({"nodeSelector": {"gpu": "nosuch"}}),
        Category.SCHEDULING,
        _CONFIGURATION,
        "^node-0 is not scheduled: .*didn't match Pod's node affinity/selector",
        rank="node-0",
    ),
    Failure(
        "unschedulable-taint",
        "a taint that its pods do not tolerate",
        make.simulated() | make.ON_OWN_NODE,
        Category.SCHEDULING,
        _CONFIGURATION,
        "^node-0 is not scheduled: .*untolerated taint",
        rank="node-0",
        before=make.tainted_node,
    ),
    Failure(
        "claim-missing",
        "a volume claim that is not there",
        make.simulated() | make.mounted({"name": "data", "persistentVolumeClaim": {"claimName": "nosuch"}}),
        Category.CONFIGURATION,
        _CONFIGURATION,
        '^node-0 is not scheduled: .*persistentvolumeclaim "nosuch" not found',
        rank="node-0",
    ),
    Failure(
        "claim-pending",
        "a volume claim that nothing provides a volume for",
        make.simulated() | make.mounted({"name": "data", "persistentVolumeClaim": {"claimName": "data"}}),
        Category.CONFIGURATION,
        _CONFIGURATION,
        r"^node-0 is not scheduled: .*unbound immediate PersistentVolumeClaims.*volume claims: data",
        rank="node-0",
        before=make.unbound_claim,
    ),
    # --- quotas and queues
    Failure(
        "resource-quota",
        "4 GPUs of a ResourceQuota that has 4, all of them in use",
        make.simulated(gpus=4),
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "^job .*: FailedCreate: .*exceeded quota: gpus",
        before=make.full_gpu_quota,
    ),
    Failure(
        "resource-quota-too-small",
        "8 GPUs, where the namespace's ResourceQuota has 4",
        make.simulated(gpus=8),
        Category.QUOTA,
        _CONFIGURATION,
        "^job .*: FailedCreate: .*exceeded quota: gpus",
        before=make.gpu_quota,
    ),
    Failure(
        "resource-quota-demands-limits",
        "a ResourceQuota for limits of CPU, which the job does not set",
        make.simulated(),
        Category.QUOTA,
        _CONFIGURATION,
        "^job .*: FailedCreate: .*must specify limits.cpu",
        before=make.cpu_quota,
    ),
    Failure(
        "queue-full",
        "8 GPUs of a queue that has 8, all of them in use",
        make.simulated(gpus=8) | make.queued("small"),
        Category.QUOTA,
        RetryVerdict.QUOTA,
        "insufficient unused quota for nvidia.com/gpu",
        before=make.full_queue,
    ),
    Failure(
        "queue-too-small",
        "16 GPUs of a queue that has 8",
        make.simulated(2, gpus=8) | make.queued("small"),
        Category.QUOTA,
        _CONFIGURATION,
        r"> maximum capacity \(8\)",
        before=make.small_queue,
    ),
    Failure(
        "queue-missing",
        "a LocalQueue that is not there",
        make.simulated() | make.queued("nosuch"),
        Category.CONFIGURATION,
        _CONFIGURATION,
        "LocalQueue nosuch doesn't exist",
    ),
    # --- what is refused
    Failure(
        "name-too-long",
        "a name of 60 characters, which Trainer takes and JobSet does not",
        make.simulated(),
        Category.ADMISSION,
        _CONFIGURATION,
        "denied the request",
        job_name="n" * 60,
    ),
    Failure(
        "patch-refused",
        "a patch that puts an impossible label on the JobSet",
        make.simulated()
        | {
            "runtime_patches": [{"training_runtime_spec": {"template": {"metadata": {"labels": {"a": "not a value"}}}}}]
        },
        Category.ADMISSION,
        _CONFIGURATION,
        "is invalid: metadata.labels",
    ),
    Failure(
        "volume-refused",
        "a patch with a volume whose name is impossible, which only the Job is refused for",
        make.simulated() | make.patched({"volumes": [{"name": "Not_A_Name", "emptyDir": {}}]}),
        Category.ADMISSION,
        _CONFIGURATION,
        "is invalid: ",
    ),
    Failure(
        "service-account-missing",
        "a service account that is not there",
        make.simulated() | make.patched({"serviceAccountName": "nosuch"}),
        Category.CONFIGURATION,
        _CONFIGURATION,
        '^job .*: FailedCreate: .*serviceaccount "nosuch" not found',
    ),
    Failure(
        "runtime-removed",
        "a job that waits, suspended, while its runtime is removed",
        make.OWN | {"suspend": True},
        Category.CONFIGURATION,
        _CONFIGURATION,
        "^its TrainingRuntime own does not exist any more",
        before=make.own(make.stages("node")),
        after=make.remove_runtime,
    ),
    # --- people
    Failure(
        "deleted",
        "somebody deletes the TrainJob",
        make.simulated(env=fate(run="never")),
        Category.DELETED,
        _CONFIGURATION,
        "^somebody deleted the job",
        after=make.delete,
        failed=True,
    ),
)
