"""What the exception that ended a process means: by its class and by the package that raised it, never by words alone.

The first row that matches counts. A row matches if the class is one of `classes`, one of the packages `within` raised
the exception (a frame below the last one of the author's code), and `says` is found in the message. No row matches an
exception that a ``raise`` or ``assert`` of the author's code raised: its words are the author's.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from functools import lru_cache

from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules.row import RaisedRule
from trainjob.errors import Category, RetryVerdict

M, C, R = Meaning, Category, RetryVerdict  # so that a row has two lines


# fmt: off
# ---- meanings: memory
GPU_FULL = M(C.OUT_OF_MEMORY, R.UNKNOWN, "use a smaller batch, or a GPU with more memory: its memory was full")
_GPU_SHARED = M(C.OUT_OF_MEMORY, R.UNKNOWN,
    "find out who else uses this GPU: another process, which the message names, holds most of its memory")
_PINNED = M(C.OUT_OF_MEMORY, R.UNKNOWN,
    "pin less memory, or raise the memory in resources_per_node: pinned memory is memory of the node", node_memory=True)
NODE_FULL = M(C.OUT_OF_MEMORY, R.UNKNOWN, "raise the memory in resources_per_node, or use a smaller batch",
    node_memory=True)
SHM_FULL = M(C.OUT_OF_MEMORY, R.UNKNOWN,
    "mount an emptyDir with medium Memory at /dev/shm in the runtime (docs/how-to/runtimes.md), or use fewer "
    "DataLoader workers: /dev/shm was full, and containers have 64 MiB of it")
_CHILD_DIED = M(C.UNKNOWN, R.UNKNOWN,
    "raise the memory in resources_per_node, or use fewer DataLoader workers: a child process ended, often because the "
    "node or the pod ran out of memory")
_JVM_HEAP = M(C.OUT_OF_MEMORY, R.UNKNOWN,
    "raise the heap of the JVM (-Xmx, spark.driver.memory) within the memory in resources_per_node")
KILLED = M(C.UNKNOWN, R.INFRASTRUCTURE,
    "find out what killed it from outside the job: often the node or the pod ran out of memory (check the kernel log)")

# ---- meanings: GPUs
_GPU_BROKEN = M(C.NODE_LOST, R.INFRASTRUCTURE, "launch the job again; check the node's GPU")
_NO_GPU = M(C.CONFIGURATION, R.UNKNOWN,
    "request GPUs in resources_per_node; if the job already does, check the GPU driver of the node")
_NO_GPU_TO_LOAD = M(C.CONFIGURATION, R.CONFIGURATION,
    "request a GPU in resources_per_node, or load the checkpoint with map_location: it was saved from a GPU")
_TOO_FEW_GPUS = M(C.CONFIGURATION, R.CONFIGURATION,
    "request as many GPUs as there are processes on a node: num_proc_per_node, gpu in resources_per_node")
_ONE_GPU_TWICE = M(C.CONFIGURATION, R.CONFIGURATION,
    "use one GPU for each process: the two ranks in the message use the same one (LOCAL_RANK, num_proc_per_node, "
    "gpu in resources_per_node)")
_OTHER_GPU = M(C.IMAGE, R.UNKNOWN,
    "use an image whose framework and CUDA version are compatible with the node's GPU and driver")
_NO_CUDA = M(C.IMAGE, R.CONFIGURATION, "use an image whose PyTorch is built for CUDA: this one is for CPUs alone")
_INDEX = M(C.USER_CODE, R.UNKNOWN,
    "correct the index or label: one is out of range. Run once with CUDA_LAUNCH_BLOCKING=1: the Python line may be a "
    "later one")
_ILLEGAL = M(C.USER_CODE, R.UNKNOWN,
    "find the kernel that reads or writes outside its memory: run once with CUDA_LAUNCH_BLOCKING=1, or "
    "compute-sanitizer")
_NO_COMPILER = M(C.IMAGE, R.CONFIGURATION,
    "use an image with a C compiler, and for CUDA extensions with the CUDA toolkit (a -devel image): they are compiled "
    "when the training runs")
_LOCKED_MEMORY = M(C.CONFIGURATION, R.UNKNOWN,
    "raise the limit of locked memory on the nodes (memlock), or add the capability IPC_LOCK in the runtime: "
    "InfiniBand could not register memory")
_PORT_USED = M(C.CONFIGURATION, R.UNKNOWN,
    "use another port (MASTER_PORT): another process of the pod, or with hostNetwork of the node, listens on it")
_NO_INTERFACE = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct NCCL_SOCKET_IFNAME or NCCL_IB_HCA: the pod has no such network interface")

# ---- meanings: the code and the image
NO_MODULE = M(C.USER_CODE, R.USER, "add the missing module to the image or to packages_to_install")
_NO_NAME = M(C.USER_CODE, R.USER,
    "install compatible versions of the packages: those in the image do not provide what the code imports")
_GLIBC = M(C.IMAGE, R.CONFIGURATION,
    "use an image with a newer C library, or a package built for an older one: the two do not fit together")
NO_LIBRARY = M(C.IMAGE, R.CONFIGURATION, "add the shared library that the message names to the image")
_STATIC_TLS = M(C.USER_CODE, R.USER, "import that package first, or set LD_PRELOAD to its library")
_SYNTAX = M(C.USER_CODE, R.USER, "fix the line shown in the log: the code has a syntax error")
NO_PROGRAM = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the command, or put the program into the image (and its directory on PATH); if the script exists, its "
    "interpreter does not exist: check the first line, also for CRLF line endings")
OTHER_ARCHITECTURE = M(C.IMAGE, R.CONFIGURATION,
    "build the program for the nodes' architecture; a script needs a first line such as #!/bin/sh")
_ARGUMENTS = M(C.CONFIGURATION, R.CONFIGURATION,
    "pass less in arguments and environment variables, for example by a file: their sum exceeds the limit of Linux")
_NO_USER = M(C.CONFIGURATION, R.CONFIGURATION,
    "set USER and HOME in env, or add the user to the image: the pod runs with a user ID that the image does not have "
    "(OpenShift)")
_NO_TEMPORARY = M(C.CONFIGURATION, R.CONFIGURATION,
    "mount an emptyDir at /tmp by runtime_patches, or set TMPDIR to a volume: the pod has no directory for temporary "
    "files that its user can write")
_CACHE = M(C.CONFIGURATION, R.CONFIGURATION,
    "set HOME, or the cache's own variable (HF_HOME, XDG_CACHE_HOME, TORCH_HOME), to a directory that the pod's "
    "user can write")

# ---- meanings: other processes of the training
PEER = M(C.UNKNOWN, R.UNKNOWN,
    "check the network between the nodes, and whether a rank hangs: no rank failed by itself, as far as known")
JOINING = M(C.UNKNOWN, R.UNKNOWN,
    "check that the script waits for the right number of processes, that no process failed earlier, and the network "
    "between the nodes: not all processes started in time")
_WORLD_SIZE = M(C.CONFIGURATION, R.CONFIGURATION,
    "use as many processes as the checkpoint was written with (num_nodes, num_proc_per_node), or convert the "
    "checkpoint")

# ---- meanings: services, credentials, disks, files
_UNTRUSTED = M(C.CONFIGURATION, R.CONFIGURATION,
    "add the server's certificate authority to the image: the image does not trust it")
_CLOCK = M(C.CONFIGURATION, R.INFRASTRUCTURE, "correct the clock of the node: the server refuses its time")
_PROXY = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the proxy's credentials in HTTPS_PROXY, or list the host in NO_PROXY: the proxy refused the request")
_EXPIRED = M(C.CONFIGURATION, R.CONFIGURATION, "renew the credentials that the job uses: they have expired")
NO_CREDENTIALS = M(C.CONFIGURATION, R.CONFIGURATION,
    "give the job credentials by a Secret in env, or a service account with access: it has none")
_DENIED = M(C.CONFIGURATION, R.CONFIGURATION, "grant the job the missing permissions or credentials: access was denied")
_NO_BUCKET = M(C.CONFIGURATION, R.CONFIGURATION, "create the bucket or repository, or correct its name")
_NO_HUB = M(C.CONFIGURATION, R.UNKNOWN,
    "stage the model by an initializer and load it from its directory with HF_HUB_OFFLINE=1, or give the pods "
    "access to the Hub: it cannot be reached")
_BUSY = M(C.OUTAGE, R.INFRASTRUCTURE, "check whether the service named in the log is overloaded")
AWAY = M(C.OUTAGE, R.INFRASTRUCTURE, "check whether the service named in the log is reachable")
_DISK = M(C.OUTAGE, R.INFRASTRUCTURE, "check the node's disk or the file server")
_READ_ONLY = M(C.CONFIGURATION, R.UNKNOWN, "write to a volume that is not mounted read-only, or change its mount")
_DIRECTORY = M(C.CONFIGURATION, R.UNKNOWN,
    "correct the path: it is a directory; with subPath, a missing key of a ConfigMap or Secret becomes one")
_DISK_FULL = M(C.USER_CODE, R.UNKNOWN, "write less, or use a larger volume: the disk was full")
_TARGET_FULL = M(C.USER_CODE, R.UNKNOWN,
    "use a larger volume, or remove old checkpoints: the disk of the checkpoint is full, or was unmounted")
_TORN = M(C.CONFIGURATION, R.UNKNOWN,
    "resume from an earlier checkpoint, or replace the file: it is missing, incomplete (as after a kill while it was "
    "written), or no checkpoint (as the pointer of Git LFS)")

OF_CHILDREN = (_CHILD_DIED, KILLED)
"""Meanings of the end of a child process."""

# ---- classes and packages
_CUDA = ("torch.AcceleratorError torch.cuda.CudaError RuntimeError "
    "cupy_backends.cuda.api.runtime.CUDARuntimeError cupy_backends.cuda.api.driver.CUDADriverError")
_TORCH_MEMORY = "torch.OutOfMemoryError torch.cuda.OutOfMemoryError torch.cuda.memory.OutOfMemoryError"
_TENSORFLOW = "tensorflow.python.framework.errors_impl."
_XLA = ("jax.errors.JaxRuntimeError jaxlib.xla_extension.XlaRuntimeError jaxlib._jax.XlaRuntimeError "
    "jax._src.lib.xla_client.XlaRuntimeError XlaRuntimeError")
_COMPILERS = ("torch._inductor.exc.InductorError torch._dynamo.exc.BackendCompilerFailed "
    "triton.runtime.errors.PTXASError")
_C10D = ("torch.distributed.DistBackendError torch.distributed.DistNetworkError torch.distributed.DistStoreError "
    "torch.distributed.DistError c10::DistBackendError c10::DistNetworkError c10::DistStoreError "
    "torch.distributed.elastic.rendezvous.api.")
_COLLECTIVES = ("torch.distributed.distributed_c10d torch.distributed.rendezvous gloo jax._src.distributed "
    "jax.experimental.multihost_utils mpi4py horovod deepspeed.comm xgboost.collective xgboost.core lightgbm.basic")
_PROCESSES = ("multiprocessing.connection multiprocessing.queues multiprocessing.managers multiprocessing.popen_fork "
    "torch.utils.data torch.multiprocessing concurrent.futures.process ray")
_LOST = "ConnectionResetError ConnectionAbortedError BrokenPipeError EOFError ConnectionRefusedError"
_CLIENTS = ("requests. urllib3. httpx. httpcore. aiohttp. botocore. boto3. aiobotocore. s3fs. google. gcsfs. azure. "
    "huggingface_hub. mlflow. wandb. grpc. grpc._channel. urllib.error. http.client. datasets. kubernetes. "
    "fsspec. redis. pymongo. psycopg2. psycopg. sqlalchemy. ssl.")
_SERVICES = ("requests urllib3 httpx httpcore aiohttp botocore boto3 aiobotocore s3fs google gcsfs azure "
    "huggingface_hub transformers datasets mlflow wandb grpc urllib http socket ssl trl smart_open adlfs fsspec redis "
    "pymongo psycopg2 psycopg sqlalchemy")
_SAVED = "torch safetensors pickle zipfile"
_SAFETENSORS = "safetensors_rust.SafetensorError safetensors._safetensors_rust.SafetensorError"

# ---- messages
_GONE = (r"(?i)\bconnection (closed|reset|refused|aborted|lost|timed|failed|was)|\bsocket .{0,20}(error|fail|clos)"
    "|by (remote )?peer|timed? ?out|broken pipe|read error|fail\\w* to (connect|pass)")
_GPU_MEMORY = ("[Oo]ut of memory|: RESOURCE_EXHAUSTED|(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED"
    "|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|kIOGPUCommandBufferCallbackErrorOutOfMemory")
_NODE_MEMORY = (r"^\S*(MemoryError|OutOfMemoryError|ResourceExhaustedError)\b|bad_alloc|\[Errno 12\]"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory|: RESOURCE_EXHAUSTED: Out of memory allocating")
_NO_SHM = (r"shared memory segment|/dev/shm/nccl-|\[Errno (28|12)\].*/dev/shm/|out of shared memory"
    "|unable to (mmap|allocate shared memory|open shared memory|write to file </torch_)|DataLoader worker .*Bus error")
_NO_DEVICE = ("no NVIDIA driver|no CUDA-capable device|No CUDA GPUs|driver initialization failed|libcuda\\.so"
    "|libnvidia-ml|no GPUs found|requires at least one CUDA device|Unable to initialize backend "
    "'cuda'|cudaErrorNoDevice|CUDA_ERROR_NO_DEVICE|Driver Not Loaded|CUDA unknown error")
# Where an HTTP status is, and no other number.
_STATUS = r"(?i:^[\w.]+: '?|\bHTTP(?:/[\d.]+)? |(?:status|code|error|response)\W{1,3}|too many |\((?=\d+\)))"
# Classes of errors that the caller made: words in them are those of its values.
_MISUSE = r"^[\w.]*(Validation|Programming|Integrity|Usage|Invalid|Cast|sqlalchemy\.exc\.Timeout)"
_REFUSED = (rf"{_STATUS}40[13]\b|AccessDenied|GatedRepo|InvalidAccessKeyId|SignatureDoesNotMatch"
    "|AuthorizationPermissionMismatch|not authorized|Authentication ?(Error|[Ff]ail)|AuthorizationFailure|RefreshError"
    "|PERMISSION_DENIED|UNAUTHENTICATED|password authentication failed|Access denied for user|Forbidden|Unauthorized")
_EXPIRES = "ExpiredToken|token (included in the request )?(has|is) expired|TokenRefreshRequired|RequestExpired"
_NOTHING_GIVEN = ("NoCredentialsError|DefaultCredentialsError|LocalTokenNotFoundError|api_key not configured"
    "|Unable to locate credentials|No API key|no password supplied")
_BUCKET = (r"NoSuchBucket|DatasetNotFound|ContainerNotFound|bucket does not exist"
    r"|RepositoryNotFound|RevisionNotFound|RemoteEntryNotFound"
    r"|database \S+ does not exist")
_LATER = (rf"{_STATUS}(429|50[0234])\b|SlowDown|Throttl|RequestLimitExceeded"
    r"|StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)|ServiceUnavailable|ServerBusy|\(InternalError\)"
    "|InternalServerError|RequestTimeout|TooManyRequests|[Rr]ate ?[Ll]imit")
_UNREACHED = (  # by the name of the class, or by words of the operating system and of clients
    r"^[\w.]*(Connect|Timeout|Disconnected|IncompleteRead|URLError|ProtocolError|ChunkedEncoding|NewConnection|MaxRetry"
    r"|Service(Request|Response)Error|CommError)\w*(: |$)"
    r"|(?i:connection (was |is |has been )?(refused|reset|aborted|closed|broken|timed|error|failed|attempts?)"
    r"|timed out|(connect|connection|read|request) time-?out|name resolution|service not known|unreachable"
    r"|disconnect|max retries exceeded|connection to .* failed"
    r"|(could ?not|couldn't|cannot|can't|failed to|unable to) (connect|resolve|establish|reach)"
    r"|closed (the connection|unexpectedly))")
_TORN_SAYS = "Ran out of input|truncated|invalid load key|[Nn]ot a zip file|Bad (CRC|magic)"
_USED = r"Process \d+ has [\d.]+ GiB memory in use"
_MISUSED = "ncclInvalid|ncclUnhandledCuda|ncclInternal|invalid root|Cuda failure"

_Rule = RaisedRule

RAISED: tuple[RaisedRule, ...] = (
    # ---- memory
    # In a container PyTorch may call its own process "Process 71": then there is no "this process".
    _Rule("gpu-shared", _TORCH_MEMORY, "", rf"{_USED}.*(this process has|{_USED})|this process has.*{_USED}",
        _GPU_SHARED, "made with torch 2.11 on an H100"),
    _Rule("memory-pinned", _CUDA, "torch.utils.data._utils.pin_memory pin_memory", "out of memory", _PINNED,
        "made with torch 2.11 on an H100"),
    _Rule("shm-full", f"{_C10D} RuntimeError OSError", "", _NO_SHM, SHM_FULL, "made with torch 2.15"),
    _Rule("shm-full-python", "OSError", "multiprocessing.synchronize", r"\[Errno 28\]", SHM_FULL,
        "made with CPython 3.11"),
    _Rule("loader-killed", "RuntimeError", "torch.utils.data torch.multiprocessing datasets",
        r"subprocesses has abruptly died|DataLoader worker \(pid\(?s?\)? .*(signal: Killed|exited unexpectedly)",
        _CHILD_DIED, "made with torch 2.15"),
    _Rule("gpu-full-tensorflow", f"{_TENSORFLOW}ResourceExhaustedError", "", "device:GPU", GPU_FULL,
        "format: tensorflow 2.19 core/common_runtime/bfc_allocator.cc"),
    _Rule("memory", f"MemoryError numpy._core._exceptions._ArrayMemoryError numpy.core._exceptions._ArrayMemoryError "
        f"std::bad_alloc pyarrow.lib.ArrowMemoryError ray.exceptions.OutOfMemoryError OSError RuntimeError {_XLA} "
        f"{_TENSORFLOW}ResourceExhaustedError", "", _NODE_MEMORY, NODE_FULL, "made with numpy 2.4"),
    _Rule("gpu-full", f"{_TORCH_MEMORY} cupy.cuda.memory.OutOfMemoryError {_CUDA} {_C10D} {_XLA} std::runtime_error",
        "", _GPU_MEMORY, GPU_FULL, "made with torch 2.11 on an H100"),
    _Rule("gpu-full-accelerate", "RuntimeError", "accelerate.utils", "No executable batch size found", GPU_FULL,
        "format: accelerate 1.11 utils/memory.py"),
    _Rule("jvm-heap", "java.lang.OutOfMemoryError", "", "", _JVM_HEAP, "made with OpenJDK 17"),
    # ---- processes of the node
    _Rule("child-killed", "torch.multiprocessing.spawn.ProcessExitedException subprocess.CalledProcessError", "",
        r"(with <Signals\.|signal )SIGKILL", KILLED, "made with torch 2.15"),
    _Rule("child-died", f"{_LOST} concurrent.futures.process.BrokenProcessPool ray.exceptions.ActorDiedError",
        _PROCESSES, "", _CHILD_DIED, "made with CPython 3.11"),
    # ---- GPUs
    _Rule("gpu-broken", f"{_CUDA} {_C10D} {_XLA}", "",
        r"uncorrectable ECC|[Ff]all(en)? off the bus|\bXid\b|uncorrectable NVLink|cudaErrorDevicesUnavailable"
        "|GPU is lost|hardware stack error|Error 802", _GPU_BROKEN, "format: CUDA 13 runtime API, cudaError"),
    _Rule("gpu-not-loaded", "RuntimeError", "torch.serialization torch.storage",
        r"torch\.cuda\.is_available\(\) is False", _NO_GPU_TO_LOAD, "made with torch 2.11"),
    _Rule("no-gpu", f"{_CUDA} ValueError ImportError OSError {_XLA}", "", _NO_DEVICE, _NO_GPU, "made with torch 2.15"),
    _Rule("no-cuda", "AssertionError", "torch", "not compiled with CUDA", _NO_CUDA,
        "format: torch 2.11 torch/cuda/__init__.py"),
    _Rule("gpu-ordinal", f"{_CUDA} {_C10D}", "", "invalid device ordinal|CUDA_ERROR_INVALID_DEVICE", _TOO_FEW_GPUS,
        "made with torch 2.11 on an H100"),
    _Rule("gpu-duplicate", _C10D, "", "Duplicate GPU detected", _ONE_GPU_TWICE, "made with NCCL 2.28 on an H100"),
    _Rule("locked-memory", _C10D, "", r"\bibv_\w+ failed with error (Cannot allocate memory|Operation not permitted)",
        _LOCKED_MEMORY, "format: nccl 2.27 src/misc/ibvwrap.cc"),
    _Rule("port-used", f"{_C10D} OSError", "", r"EADDRINUSE|\[Errno 98\]", _PORT_USED, "made with torch 2.15"),
    _Rule("no-interface", _C10D, "", "no socket interface found|No interface found", _NO_INTERFACE,
        "made with NCCL 2.28 on an H100"),
    _Rule("no-compiler", f"{_COMPILERS} RuntimeError OSError {_XLA} "
        "deepspeed.ops.op_builder.builder.MissingCUDAException", "",
        "Failed to find C compiler|libdevice not found|Ninja is required"
        "|CUDA_HOME (does not exist|environment variable is not set)",
        _NO_COMPILER, "format: triton 3.5 runtime/build.py"),
    _Rule("gpu-incompatible", f"{_CUDA} {_C10D} ImportError {_XLA} {_COMPILERS}", "",
        r"no kernel image|invalid device function|driver on your system is too old|is not defined for option 'gpu-name'"
        r"|driver version is insufficient|forward compatibility|capability sm_\d+ is not compatible",
        _OTHER_GPU, "format: CUDA 13 runtime API, cudaError"),
    _Rule("gpu-assert", _CUDA, "", "device-side assert|cudaErrorAssert|CUDA_ERROR_ASSERT", _INDEX,
        "made with torch 2.11 on an H100"),
    _Rule("gpu-illegal", _CUDA, "",
        "illegal (memory access|address|instruction)|unspecified launch failure|misaligned address|IllegalAddress",
        _ILLEGAL, "made with CuPy 14 on an H100"),
    # ---- the code and the image
    _Rule("no-module", "ModuleNotFoundError", "", "", NO_MODULE, "made with CPython 3.11"),
    _Rule("glibc", "ImportError OSError", "", r"version `(GLIBC|GLIBCXX|CXXABI)\w*_[\d.]+' not found", _GLIBC,
        "made with glibc 2.36"),
    _Rule("static-tls", "ImportError OSError", "", "in static TLS block", _STATIC_TLS, "made with glibc 2.36"),
    _Rule("no-library", "ImportError OSError", "", "cannot open shared object file", NO_LIBRARY,
        "made with glibc 2.36"),
    _Rule("no-name", "ImportError", "", "^(?!.*partially initialized module)", _NO_NAME, "made with CPython 3.11"),
    _Rule("syntax", "SyntaxError", "", "", _SYNTAX, "made with CPython 3.11"),
    _Rule("no-program", "FileNotFoundError", "subprocess", "", NO_PROGRAM, "made with CPython 3.11"),
    _Rule("architecture", "OSError", "", r"\[Errno 8\]", OTHER_ARCHITECTURE, "made with CPython 3.11"),
    _Rule("arguments", "OSError", "", r"\[Errno 7\]", _ARGUMENTS, "made with CPython 3.11"),
    _Rule("no-user", "KeyError OSError", "getpass", r"getpwuid\(\): uid not found|No username set in the environment",
        _NO_USER, "made with CPython 3.11"),
    _Rule("cache", "OSError", "", r"\[Errno (13|30)\].*('/\.[a-z]|/\.cache\b)|Check cache directory permissions",
        _CACHE, "made with CPython 3.11"),
    _Rule("no-temporary-directory", "FileNotFoundError", "tempfile", "No usable temporary directory", _NO_TEMPORARY,
        "made with CPython 3.11"),
    # ---- peers
    _Rule("joining", f"{_C10D} {_XLA}", "", r"\d+/\d+ clients joined|Wait_for_all_tasks_to_register|RegisterTask"
        "|PjRT_Client_Connect", JOINING, "made with torch 2.15"),
    _Rule("peer-c10d", f"{_C10D} horovod.common.exceptions.HorovodInternalError", "", f"^(?!.*({_MISUSED}))", PEER,
        "made with torch 2.15"),
    _Rule("peer", f"RuntimeError {_LOST} xgboost.core.XGBoostError lightgbm.basic.LightGBMError", _COLLECTIVES, _GONE,
        PEER, "made with torch 2.15 and gloo"),
    _Rule("peer-tensorflow", _TENSORFLOW, "", "Collective ops is aborted by|failed to connect to all addresses", PEER,
        "format: tensorflow 2.19 core/common_runtime/base_collective_executor.cc"),
    _Rule("peer-jax-gloo", "ValueError", "", "UNKNOWN: Gloo .* failed", PEER, "made with jaxlib 0.10"),
    _Rule("peer-jax", _XLA, "",
        r"(?i)\bgloo\b|heartbeat|coordination|by peer|barrier (timed|failed|error|has)|distributed service", PEER,
        "made with jaxlib 0.10"),
    # ---- checkpoints
    _Rule("world-size", "deepspeed.runtime.zero.utils.ZeRORuntimeException RuntimeError ValueError",
        "", r"used a DP world size of \d+ but the current world size|saved with world size|was saved with .* ranks",
        _WORLD_SIZE, "format: deepspeed 0.18 runtime/zero/stage_1_and_2.py"),
    _Rule("checkpoint-torn", f"RuntimeError {_SAFETENSORS}", "",
        ": PytorchStreamReader failed|Error while deserializing header"
        "|: \\[enforce fail at inline_container.cc.*failed finding central directory", _TORN, "made with torch 2.15"),
    _Rule("checkpoint-torn-python", "EOFError _pickle.UnpicklingError pickle.UnpicklingError zipfile.BadZipFile",
        _SAVED, _TORN_SAYS, _TORN, "format: CPython 3.11 Modules/_pickle.c"),
    _Rule("checkpoint-missing", "FileNotFoundError", "", r"checkpoint-\d+/", _TORN, "made with CPython 3.11"),
    _Rule("checkpoint-disk-full", "RuntimeError", "torch.serialization",
        r"unexpected pos|iostream error|PytorchStreamWriter", _TARGET_FULL, "made with torch 2.11 on an H100"),
    # ---- services
    _Rule("proxy", f"{_CLIENTS} OSError", "",
        "Tunnel connection failed: 40[37]|407 Proxy Authentication|Proxy Authentication Required", _PROXY,
        "made with requests 2.33"),
    _Rule("untrusted", f"{_CLIENTS} OSError", "",
        "CERTIFICATE_VERIFY_FAILED|certificate verify failed|self.signed certificate",
        _UNTRUSTED, "made with requests 2.33"),
    _Rule("clock", _CLIENTS, "", "RequestTimeTooSkewed|Signature not yet current|clock skew", _CLOCK,
        "made with botocore 1.44"),
    _Rule("expired", _CLIENTS, "", _EXPIRES, _EXPIRED, "made with botocore 1.44"),
    _Rule("no-credentials", _CLIENTS, "", _NOTHING_GIVEN, NO_CREDENTIALS, "made with botocore 1.44"),
    _Rule("denied", _CLIENTS, "", _REFUSED, _DENIED, "made with botocore 1.44"),
    _Rule("denied-gated", "OSError", "", "gated repo", _DENIED, "format: transformers 4.57 utils/hub.py"),
    _Rule("no-bucket", _CLIENTS, "", _BUCKET, _NO_BUCKET, "made with botocore 1.44"),
    _Rule("no-hub",
        "huggingface_hub.errors.LocalEntryNotFoundError huggingface_hub.errors.OfflineModeIsEnabled OSError", "",
        "^huggingface_hub|^OSError: We couldn't connect to 'URL'", _NO_HUB, "made with huggingface_hub 2.4"),
    _Rule("unreachable-grpc", "grpc.", "", r"StatusCode\.UNAVAILABLE.*([Cc]onnection refused|[Ff]ailed to connect)",
        AWAY, "format: grpc 1.76 src/core"),
    _Rule("busy", _CLIENTS, "", rf"^(?!{_MISUSE})(?=.*({_LATER}))", _BUSY, "made with botocore 1.44"),
    _Rule("unreachable", _CLIENTS, "", rf"^(?!{_MISUSE})(?=.*({_UNREACHED}))", AWAY, "made with requests 2.33"),
    _Rule("timed-out", "TimeoutError ConnectionError", _SERVICES, "", AWAY, "made with CPython 3.11"),
    # A broken pipe without a client below is that of the training's own child process.
    _Rule("connection-lost", "socket.gaierror OSError", "",
        r"^(Connection(Reset|Aborted|Refused)Error|socket.gaierror)|\[Errno (100|101|110|112|113)\]", AWAY,
        "made with CPython 3.11"),
    # ---- disks and files
    _Rule("disk", "OSError", "", r"\[Errno (5|107|116|121)\]", _DISK, "made with CPython 3.11"),
    _Rule("permission", "PermissionError", "", "", _DENIED, "made with CPython 3.11"),
    _Rule("read-only", "OSError", "", r"\[Errno 30\]", _READ_ONLY, "corpus/volume-read-only"),
    _Rule("directory", "IsADirectoryError", "", "", _DIRECTORY, "corpus/sub-path-missing"),
    _Rule("disk-full", f"OSError {_SAFETENSORS}", "", r"\[Errno (28|122)\]|\(os error (28|122)\)", _DISK_FULL,
        "made with CPython 3.11"),
)
# fmt: on

_LONGEST = 4096  # characters of a message that are searched
# What a message quotes: addresses, and a statement of SQL with its values. Their words and numbers mean nothing.
_QUOTED = re.compile(
    r"(?<=with url: )\S+|(?<= for url: )\S+|\b[a-z][a-z0-9+]*://[^\s'\")\]]+|\[(?:SQL|parameters): .*?\](?=\n|$)",
    re.DOTALL,
)

PACKAGES = frozenset(
    name.partition(".")[0]
    for rule in RAISED
    for name in (*rule.within.split(), *(each for each in rule.classes.split() if "." in each))
)
"""Packages whose exceptions the table judges. The words of any other package are those of its author."""


@lru_cache(1024)
def _classes(name: str) -> tuple[str, ...]:
    """The class and its base classes, as far as they are known: those of Python's own exceptions."""
    kind = getattr(builtins, name, None)
    known = kind.__mro__ if isinstance(kind, type) and issubclass(kind, Exception) else ()
    return name, *(base.__name__ for base in known[1:] if base not in (Exception, BaseException, object))


def _is(name: str, wanted: str) -> bool:
    classes = wanted.split()
    packages = tuple(each for each in classes if each.endswith("."))
    return name.startswith(packages) or any(each in classes for each in _classes(name))


def _inside(modules: Sequence[str], wanted: str) -> bool:
    return any(f"{module}.".startswith(tuple(f"{each}." for each in wanted.split())) for module in modules)


def rule_of(name: str, modules: Sequence[str], message: str) -> RaisedRule | None:
    """The row for an exception that no `raise` of the author's code raised; None if the table has none.

    Args:
        name: Its class, as a traceback prints it.
        modules: The modules below the author's code that raised it.
        message: Its message, to its end.
    """
    searched = f"{name}: {_QUOTED.sub('URL', message[:_LONGEST])}"
    return next(
        (
            rule
            for rule in RAISED
            if _is(name, rule.classes)
            and (not rule.within or _inside(modules, rule.within))
            and re.search(rule.says, searched, re.DOTALL)
        ),
        None,
    )
