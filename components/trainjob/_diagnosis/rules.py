"""Known errors and their meaning: exceptions of common libraries, messages of Python, shells and launchers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainjob._diagnosis.meaning import Meaning
from trainjob.verdicts import Category, RetryVerdict

_USER, _UNKNOWN = RetryVerdict.USER, RetryVerdict.UNKNOWN
_CONFIGURATION, _INFRASTRUCTURE = RetryVerdict.CONFIGURATION, RetryVerdict.INFRASTRUCTURE

_OUT_OF_GPU_MEMORY = (
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|HIP out of memory|RESOURCE_EXHAUSTED: Out of memory"
)
_NO_ANSWER = (
    # DNS, connection and time-out errors of Python, requests, urllib3, httpx, aiohttp and botocore.
    r"Temporary failure in name resolution|Name or service not known|No address associated with hostname"
    r"|getaddrinfo failed|NameResolutionError|NewConnectionError|Max retries exceeded|EndpointConnectionError"
    r"|ClientConnectorError|Could not connect to the endpoint URL|\b(Read|Connect|Write|Pool)Timeout(Error)?\b"
    r"|[Rr]ead timed out"
    r"|ConnectionRefusedError|ConnectionResetError|ConnectionAbortedError|ConnectionClosedError|ConnectError\b"
    r"|Connection (refused|reset by peer|timed out|aborted)|RemoteDisconnected|RemoteProtocolError|ChunkedEncodingError"
    r"|IncompleteRead|Network is unreachable|No route to host|Server disconnected|server closed the connection"
)
_UNAVAILABLE = (
    # Errors that a server reports: S3, Google, Azure, Hugging Face, MLflow, gRPC, HTTP.
    r"\bSlowDown\b|ServiceUnavailable|ServerBusy|InternalServerError|\((InternalError|RequestTimeout|503|500|502|504)\)"
    r"|Throttling|TooManyRequests|RequestLimitExceeded|RateLimit|[Rr]ate limit(ed| exceeded)"
    r"|\b(429|50[0234]):? (Client|Server) Error|\b429:? Too Many Requests|\b502:? Bad Gateway"
    r"|\b503:? Service (Temporarily )?Unavailable|\b504:? Gateway Time-?out|error code (429|5\d\d)\b"
    r"|StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)|ServiceRequestError|ServiceResponseError"
)
_DISK = r"Stale (NFS )?file handle|Input/output error|Remote I/O error|Transport endpoint is not connected"

_SHARED_MEMORY = (
    r"Bus error|out of shared memory|unable to (mmap|allocate shared memory)|unable to write to file </torch_"
    r"|/dev/shm\b.*(No space left|Cannot allocate)|(No space left|Cannot allocate).*/dev/shm\b"
    r"|failed to extend /dev/shm"
)

# The first match counts.
_KNOWN: Sequence[tuple[re.Pattern[str], Meaning]] = tuple(
    (re.compile(pattern, re.MULTILINE), meaning)
    for pattern, meaning in (
        (
            _OUT_OF_GPU_MEMORY,
            Meaning(
                Category.OUT_OF_MEMORY, _UNKNOWN, "use a smaller batch, or a GPU with more memory: its memory was full"
            ),
        ),
        (
            _SHARED_MEMORY,
            Meaning(
                Category.OUT_OF_MEMORY,
                _UNKNOWN,
                "mount an emptyDir with medium Memory at /dev/shm in the runtime (docs/how-to/runtimes.md), or use "
                "fewer DataLoader workers: /dev/shm was full, and containers have 64 MiB of it",
            ),
        ),
        (
            r"DataLoader worker \(pid\(?s?\)? .*(killed by signal: Killed|exited unexpectedly)",
            Meaning(
                Category.UNKNOWN,
                _UNKNOWN,
                "raise the memory in resources_per_node, or use fewer DataLoader workers: often the node or the pod "
                "ran out of memory",
            ),
        ),
        (
            r"^MemoryError|std::bad_alloc|[Cc]annot allocate memory(?! in static)|Unable to allocate .* for an array",
            Meaning(
                Category.OUT_OF_MEMORY,
                _UNKNOWN,
                "raise the memory in resources_per_node, or use a smaller batch",
                resource="memory",
            ),
        ),
        (
            r"^worker \d+ was killed by signal 9$",
            Meaning(
                Category.UNKNOWN,
                _INFRASTRUCTURE,
                "find out what killed it from outside the job: often the node or the pod ran out of memory",
            ),
        ),
        (
            r"uncorrectable ECC error|fell off the bus",
            Meaning(Category.NODE_LOST, _INFRASTRUCTURE, "launch the job again; check the node's GPU"),
        ),
        # --- incompatible GPUs and images
        (
            r"Found no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are available"
            r"|CUDA driver initialization failed|libcuda\.so|libnvidia-ml|NVML.*(not found|Driver Not Loaded)"
            r"|cudaErrorNoDevice",
            Meaning(
                Category.CONFIGURATION,
                _UNKNOWN,
                "request GPUs in resources_per_node; if the job already does, check the GPU driver of the node",
            ),
        ),
        (
            r"no kernel image is available|driver version is insufficient|forward compatibility was attempted"
            r"|CUDA capability sm_\d+ is not compatible",
            Meaning(
                Category.IMAGE,
                _UNKNOWN,
                "use an image whose framework and CUDA version are compatible with the node's GPU and driver",
            ),
        ),
        # --- permanent
        (
            r"^ModuleNotFoundError\b|^\S*python[\d.]*: No module named ",
            Meaning(
                Category.USER_CODE,
                _USER,
                "add the package to the image or to packages_to_install",
                final="the module is missing in the image",
            ),
        ),
        (
            r"^ImportError\b",
            Meaning(
                Category.USER_CODE,
                _USER,
                "install compatible versions of the packages",
                final="packages in the image do not provide what the code imports",
            ),
        ),
        (
            r"^(SyntaxError|IndentationError|TabError)\b",
            Meaning(Category.USER_CODE, _USER, "fix the line shown in the log", final="the code has a syntax error"),
        ),
        (
            r"^\S*python[\d.]*: can't (open file|find '__main__' module)",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "correct the script's path in command or args, or put it into the image",
                final="the script is not at the path in the command",
            ),
        ),
        (
            r"(\\r|\^M)\S*: .*(No such file|not found|bad interpreter)|: Illegal option -$",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "save the script with LF line endings: dos2unix SCRIPT",
                final="the script has CRLF line endings",
            ),
        ),
        (
            r"[Ee]xec format error",
            Meaning(
                Category.IMAGE,
                _CONFIGURATION,
                "build the program for the nodes' architecture; a script needs a first line such as #!/bin/sh",
                final="the program is built for another architecture",
            ),
        ),
        (
            r"^\S*(sh|env)\b.*: (command )?not found$|^\S*env: .*No such file or directory|^\S+: \d+: .*: not found$",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "correct the command, or put the program into the image (and its directory on PATH); if the "
                "script exists, its interpreter does not exist: check the first line, also for CRLF line endings",
                final="a program used by the command is not in the image",
            ),
        ),
        (
            r"^\S*(sh|env)\b.*: (Permission denied|cannot execute)",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "make the file executable (chmod +x), or run it with its interpreter",
                final="a file used by the command is not executable",
            ),
        ),
        # --- services and disks
        (
            r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|self.signed certificate",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "add the server's certificate authority to the image",
                final="the image does not trust the server's certificate authority",
            ),
        ),
        (
            r"^PermissionError\b|\bAccessDenied\b|AccessDeniedException|\b(401|403):? Client Error|\b403:? Forbidden"
            r"|GatedRepoError|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentialsError|Unable to locate credentials",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "grant the job the missing permissions or credentials",
                final="access was denied",
            ),
        ),
        (
            _UNAVAILABLE,
            Meaning(Category.OUTAGE, _INFRASTRUCTURE, "check whether the service named in the log is overloaded"),
        ),
        (
            _NO_ANSWER,
            Meaning(Category.OUTAGE, _INFRASTRUCTURE, "check whether the service named in the log is reachable"),
        ),
        (_DISK, Meaning(Category.OUTAGE, _INFRASTRUCTURE, "check the node's disk or the file server")),
        (
            r"Read-only file system",
            Meaning(
                Category.CONFIGURATION, _UNKNOWN, "write to a volume that is not mounted read-only, or change its mount"
            ),
        ),
        (
            r"^IsADirectoryError\b",
            Meaning(
                Category.CONFIGURATION,
                _UNKNOWN,
                "correct the path: it is a directory; with subPath, a missing key of a ConfigMap or Secret becomes one",
            ),
        ),
        (
            r"No space left on device|Disk quota exceeded",
            Meaning(Category.USER_CODE, _UNKNOWN, "write less, or use a larger volume: the disk was full"),
        ),
    )
)  # fmt: skip

USAGE = Meaning(
    Category.USER_CODE,
    _USER,
    "correct the arguments of the command",
    final="the program rejects these arguments",
)
"""A program that printed its usage and exited with code 2."""


def meaning_of_error(text: str) -> Meaning | None:
    """The meaning of an error; None if the error is unknown.

    Args:
        text: Its line, and those of its causes.
    """
    return next((meaning for pattern, meaning in _KNOWN if pattern.search(text)), None)
