"""What the errors mean that programs end with: exceptions of known libraries, words of Python, shells and launchers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainjob.diagnosis.meanings import Category, Meaning
from trainjob.errors import RetryVerdict

_USER, _UNKNOWN = RetryVerdict.USER, RetryVerdict.UNKNOWN
_CONFIGURATION, _INFRASTRUCTURE = RetryVerdict.CONFIGURATION, RetryVerdict.INFRASTRUCTURE

_OUT_OF_GPU_MEMORY = (
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|HIP out of memory|RESOURCE_EXHAUSTED: Out of memory"
)
_NO_ANSWER = (
    # Names do not resolve, nobody listens, no answer comes: of Python, requests, urllib3, httpx, aiohttp, botocore.
    r"Temporary failure in name resolution|Name or service not known|No address associated with hostname"
    r"|getaddrinfo failed|NameResolutionError|NewConnectionError|Max retries exceeded|EndpointConnectionError"
    r"|ClientConnectorError|Could not connect to the endpoint URL|\b(Read|Connect|Write|Pool)Timeout(Error)?\b"
    r"|[Rr]ead timed out"
    r"|ConnectionRefusedError|ConnectionResetError|ConnectionAbortedError|ConnectionClosedError|ConnectError\b"
    r"|Connection (refused|reset by peer|timed out|aborted)|RemoteDisconnected|RemoteProtocolError|ChunkedEncodingError"
    r"|IncompleteRead|Network is unreachable|No route to host|Server disconnected|server closed the connection"
)
_UNAVAILABLE = (
    # A server says that it cannot: S3, Google, Azure, Hugging Face, MLflow, gRPC, anything that speaks HTTP.
    r"\bSlowDown\b|ServiceUnavailable|ServerBusy|InternalServerError|\((InternalError|RequestTimeout|503|500|502|504)\)"
    r"|Throttling|TooManyRequests|RequestLimitExceeded|RateLimit|[Rr]ate limit(ed| exceeded)"
    r"|\b(429|50[0234]):? (Client|Server) Error|\b429:? Too Many Requests|\b502:? Bad Gateway"
    r"|\b503:? Service (Temporarily )?Unavailable|\b504:? Gateway Time-?out|error code (429|5\d\d)\b"
    r"|StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)|ServiceRequestError|ServiceResponseError"
)
_DISK = r"Stale (NFS )?file handle|Input/output error|Remote I/O error|Transport endpoint is not connected"

# The first that fits counts.
_KNOWN: Sequence[tuple[re.Pattern[str], Meaning]] = tuple(
    (re.compile(pattern, re.MULTILINE), meaning)
    for pattern, meaning in (
        (
            _OUT_OF_GPU_MEMORY,
            Meaning(
                Category.OUT_OF_MEMORY, _UNKNOWN, "use a smaller batch, or GPUs with more memory: the GPU's was full"
            ),
        ),
        (
            r"^MemoryError|std::bad_alloc|[Cc]annot allocate memory(?! in static)|Unable to allocate .* for an array",
            Meaning(Category.OUT_OF_MEMORY, _UNKNOWN, "raise the memory in resources_per_node, or use a smaller batch"),
        ),
        (
            r"^worker \d+ was killed by signal 9$",
            Meaning(
                Category.UNKNOWN,
                _INFRASTRUCTURE,
                "something outside the job killed it: often the node or the pod ran out of memory",
            ),
        ),
        (
            r"uncorrectable ECC error|fell off the bus",
            Meaning(Category.NODE_LOST, _INFRASTRUCTURE, "run it again; have the node's GPU looked at"),
        ),
        # --- certain to happen again
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
                "install versions of the packages that fit together",
                final="the image's packages do not have what the code imports",
            ),
        ),
        (
            r"^(SyntaxError|IndentationError|TabError)\b",
            Meaning(Category.USER_CODE, _USER, "mend the line that the log shows", final="the code has a syntax error"),
        ),
        (
            r"^\S*python[\d.]*: can't (open file|find '__main__' module)",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "correct the script's path in command or args, or put it into the image",
                final="the script is not where the command looks for it",
            ),
        ),
        (
            r"(\\r|\^M)\S*: .*(No such file|not found|bad interpreter)|: Illegal option -$",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "save the script with line ends of Unix (LF, by dos2unix): its lines end with CRLF",
                final="the script has line ends of Windows",
            ),
        ),
        (
            r"[Ee]xec format error",
            Meaning(
                Category.IMAGE,
                _CONFIGURATION,
                "build the program for the nodes' architecture; a script needs a first line such as #!/bin/sh",
                final="the program is not one for this kind of machine",
            ),
        ),
        (
            r"^\S*(sh|env)\b.*: (command )?not found$|^\S*env: .*No such file or directory|^\S+: \d+: .*: not found$",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "correct the command, or put the program into the image (and its directory on PATH); of a script that "
                "is there, the program of its first line is missing: lines that end with CRLF name one that nobody has",
                final="a program that the command needs is not in the image",
            ),
        ),
        (
            r"^\S*(sh|env)\b.*: (Permission denied|cannot execute)",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "make the file executable (chmod +x), or call it by its interpreter",
                final="a program that the command names may not be executed",
            ),
        ),
        # --- services and disks
        (
            r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|self.signed certificate",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "give the image the certificate authority that the server's certificate is of",
                final="the server's certificate is of an authority that the image does not know",
            ),
        ),
        (
            r"^PermissionError\b|\bAccessDenied\b|AccessDeniedException|\b(401|403):? Client Error|\b403:? Forbidden"
            r"|GatedRepoError|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentialsError|Unable to locate credentials",
            Meaning(
                Category.CONFIGURATION,
                _CONFIGURATION,
                "give the job the rights or the credentials that it lacks",
                final="access was refused",
            ),
        ),
        (
            _UNAVAILABLE,
            Meaning(Category.OUTAGE, _INFRASTRUCTURE, "see whether the service that the log names is overloaded"),
        ),
        (
            _NO_ANSWER,
            Meaning(Category.OUTAGE, _INFRASTRUCTURE, "see whether the service that the log names can be reached"),
        ),
        (_DISK, Meaning(Category.OUTAGE, _INFRASTRUCTURE, "have the node's disk or the file server looked at")),
        (
            r"No space left on device|Disk quota exceeded",
            Meaning(Category.USER_CODE, _UNKNOWN, "write less, or give the job a larger volume: the disk was full"),
        ),
    )
)  # fmt: skip

USAGE = Meaning(
    Category.USER_CODE,
    _USER,
    "correct the arguments of the command",
    final="the program does not take these arguments",
)
"""Of a program that has printed how it is used, and ended with 2."""


def meaning_of_error(text: str) -> Meaning | None:
    """What an error means; None if it is none of the known ones.

    Args:
        text: Its line, and those of its causes.
    """
    return next((meaning for pattern, meaning in _KNOWN if pattern.search(text)), None)
