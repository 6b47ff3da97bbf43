"""What the last lines of a rank's log say: the exception that ended it, or that it lost its peers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainjob.diagnosis.meanings import Category, Meaning
from trainjob.errors import RetryVerdict

# torchrun and PyTorch put the rank before what a worker writes: "[rank1]: ", "[default0]:", "[trainer0]:".
_PREFIX = re.compile(r"\[(?:rank|default|worker|trainer)\d+\]:\s?")
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GROUP = re.compile(r"^\s*[|+](?:-+ ?\d* ?-+)? ?")  # Python draws exception groups with | and +

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?::(?: (.*))?)?$")
_CHAINS = ("The above exception was the direct cause of", "During handling of the above exception, another")
_CPP = re.compile(r"terminate called after throwing an instance of '([^']+)'")
# libstdc++, where threads of native code (PyTorch's Gloo) still run while the process ends: by SIGABRT, or SIGSEGV.
_TORN_DOWN = re.compile(r"terminate called without an active exception")
_USAGE = re.compile(r"^(\S+: )?error: .+")  # argparse; the programs of this package

# Those that only say that another process failed.
_WRAPPERS = re.compile(r"ChildFailedError|ProcessRaisedException|ProcessExitedException|_RemoteTraceback|SystemExit")
_TORCHRUN_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_TORCHRUN_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) ")

# Open MPI, of the first process that failed.
_MPI_PROCESS = re.compile(r"^\s*Process name: \[.*,(\d+)\]$")
_MPI_CODE = re.compile(r"^\s*Exit code:\s+(-?\d+)$")
_MPI_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")

_LOST_PEER = re.compile(
    r"connection closed by (remote )?peer"  # Gloo, NCCL
    r"|gloo.*(timed? ?out|broken pipe|connection (reset|refused)|read error|connectFullMesh)"
    r"|application timeout caused pair closure"  # Gloo
    r"|watchdog caught collective operation timeout|NCCL (watchdog|.*(timeout|timed out))|ncclRemoteError"
    r"|remote process exited or there was a network error"
    r"|process group watchdog|collective operation timeout"
    r"|(recvValue|sendBytes|recvVector).*failed|DistNetworkError|DistStoreError|TCPStore.*(timed? out|timeout|closed)"
    r"|RendezvousConnectionError|RendezvousTimeoutError"
    r"|stopped sending heartbeats|heartbeat timeout|distributed service detected (fatal|an?) error"  # JAX
    r"|coordination service.*(error|unavailable|failed)|another task died|barrier timed out|ShutdownBarrier"
    r"|HorovodInternalError|rabit.*(reset|closed|timeout|failed)",
    re.IGNORECASE,
)
_LOST_CONNECTION = re.compile(
    r"\b(ConnectionResetError|ConnectionAbortedError|BrokenPipeError|ConnectionRefusedError)\b"
)
_TOLD = re.compile(r"SignalException: Process \d+ got signal: (15|2)\b")
_PEER = re.compile(r"[Cc]losed by (?:remote )?peer \[([0-9a-fA-F.:]+)\]|[Rr]ead error \[([0-9a-fA-F.:]+)\]")

_OUT_OF_GPU_MEMORY = (
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|HIP out of memory|RESOURCE_EXHAUSTED: Out of memory"
)
_USER = RetryVerdict.USER
_ERRORS: Sequence[tuple[re.Pattern[str], Meaning]] = tuple(
    (re.compile(pattern, re.MULTILINE), meaning)
    for pattern, meaning in (
        (
            _OUT_OF_GPU_MEMORY,
            Meaning(Category.OUT_OF_MEMORY, _USER, "use a smaller batch, or GPUs with more memory: the GPU's was full"),
        ),
        (
            r"^MemoryError|std::bad_alloc|[Cc]annot allocate memory(?! in static)|Unable to allocate .* for an array",
            Meaning(Category.OUT_OF_MEMORY, _USER, "raise the memory in resources_per_node, or use a smaller batch"),
        ),
        (
            r"^worker \d+ was killed by signal 9$",
            Meaning(
                Category.UNKNOWN,
                RetryVerdict.INFRASTRUCTURE,
                "something outside the job killed it: often the node or the pod ran out of memory",
            ),
        ),
        (
            r"uncorrectable ECC error|fell off the bus",
            Meaning(Category.NODE_LOST, RetryVerdict.INFRASTRUCTURE, "run it again; have the node's GPU looked at"),
        ),
        (
            r"^(ModuleNotFoundError|ImportError)\b",
            Meaning(Category.USER_CODE, _USER, "add the package to the image or to packages_to_install"),
        ),
        (
            r"No space left on device",
            Meaning(Category.USER_CODE, _USER, "write less, or give the job a larger volume"),
        ),
    )
)


TAIL_LINES = 20
"""Lines of a failing rank's log that a diagnosis shows."""

_LONGEST = 4096  # characters of a line that are looked at


@dataclass(frozen=True)
class Tail:
    """What the end of a log says.

    Attributes:
        error: The exception or other last words, one line; empty if none is found.
        line: Index of its line; -1 if there is none.
        meaning: What the error means, where it is one of the known ones.
        lost_peer: It ended because another rank was gone, or did not answer.
        lost_connection: It ended because some connection broke: to a peer, or to anything else.
        told: It was told to stop.
        torn_down: Native code crashed only because the process was ending already, of `error`.
        peers: Addresses of the peers that it lost.
    """

    error: str = ""
    line: int = -1
    meaning: Meaning | None = None
    lost_peer: bool = False
    lost_connection: bool = False
    told: bool = False
    torn_down: bool = False
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Raised:
    kind: str
    text: str
    line: int
    causes: tuple[str, ...] = ()  # what it was raised from, the first cause first

    def __str__(self) -> str:
        return self.text + (f" (caused by {self.causes[0]})" if self.causes else "")

    @property
    def chain(self) -> str:
        return "\n".join((self.text, *self.causes))


def read(lines: Sequence[str]) -> Tail:
    """Read the end of one rank's log, which may hold the lines of several processes."""
    clean = [_COLORS.sub("", line[:_LONGEST]).rstrip() for line in lines]
    text = "\n".join(clean)
    raised = _first_to_blame(clean)
    error, line = (str(raised), raised.line) if raised else _last_words(clean)
    said = raised.chain if raised else "\n".join([error, *clean[-TAIL_LINES:]])
    return Tail(
        error,
        line,
        next((meaning for pattern, meaning in _ERRORS if pattern.search(said)), None),
        lost_peer=bool(_LOST_PEER.search(raised.chain if raised else text)),
        lost_connection=bool(raised and _LOST_CONNECTION.search(raised.chain)),
        told=bool(_TOLD.search(text)),
        torn_down=bool(raised and any(_TORN_DOWN.search(after) for after in clean[raised.line :])),
        peers=tuple(dict.fromkeys(first or second for first, second in _PEER.findall(text))),
    )


def excerpt(lines: Sequence[str], tail: Tail | None = None) -> Sequence[str]:
    """The last lines of a log, or those that end with its error, where many more came after it.

    Args:
        lines: The end of the log.
        tail: What it says, where that is known already.
    """
    line = (tail or read(lines)).line
    end = line + 1 if 0 <= line < len(lines) - TAIL_LINES else len(lines)
    return lines[max(0, end - TAIL_LINES) : end]


def _first_to_blame(lines: Sequence[str]) -> _Raised | None:
    """Of the exceptions that ended processes, the first that is no consequence of another process's end."""
    last = {worker: raised for worker, raised in _exceptions(lines) if not _WRAPPERS.search(raised.kind)}
    found = sorted(last.values(), key=lambda raised: raised.line)
    return next((each for each in found if not _LOST_PEER.search(each.chain)), found[0] if found else None)


def _exceptions(lines: Sequence[str]) -> Iterator[tuple[str, _Raised]]:
    """Every exception with a traceback, and the prefix of the process that wrote it."""
    reading: dict[str, bool] = defaultdict(bool)
    before: dict[str, _Raised | None] = defaultdict(lambda: None)
    chained: dict[str, bool] = defaultdict(bool)
    for number, line in enumerate(lines):
        prefix = match[0] if (match := _PREFIX.match(line)) else ""
        text = line[len(prefix) :]
        bare = _GROUP.sub("", text) if text.lstrip().startswith(("|", "+")) else text
        if bare.strip().endswith(_TRACEBACK):
            reading[prefix] = True
        elif any(bare.strip().startswith(chain) for chain in _CHAINS):
            chained[prefix] = True
        elif reading[prefix] and bare and not bare[0].isspace():
            reading[prefix] = False
            if found := _EXCEPTION.match(bare.strip()):
                cause = before[prefix] if chained[prefix] else None
                causes = (*cause.causes, cause.text) if cause else ()
                raised = _Raised(found[1], bare.strip(), number, causes)
                before[prefix], chained[prefix] = raised, False
                yield prefix.strip(), raised


def _last_words(lines: Sequence[str]) -> tuple[str, int]:
    """What a process that raised no exception of Python's says of its end."""
    for number, line in enumerate(lines):
        if found := _CPP.search(line):
            what = lines[number + 1].strip() if number + 1 < len(lines) else ""
            said = what.removeprefix("what():").strip() if what.startswith("what():") else ""
            return f"{found[1]}: {said}" if said else found[1], number
        if _TORCHRUN_CAUSE.search(line):
            return _worker(lines[number : number + 12], _TORCHRUN_RANK, _TORCHRUN_CODE), number
        if _MPI_PROCESS.match(line):
            return _worker(lines[number : number + 2], _MPI_PROCESS, _MPI_CODE), number
        if found := _MPI_SIGNAL.search(line):
            return f"worker {found[1]} was killed by signal {found[2]}", number
    for number in range(len(lines) - 1, max(-1, len(lines) - 4), -1):
        if _USAGE.match(lines[number]):
            return lines[number], number
    return "", -1


def _worker(report: Sequence[str], rank: re.Pattern[str], code: re.Pattern[str]) -> str:
    """How the first worker ended, by what its launcher reports of it; empty if that is cut off."""
    worker = next((found[1] for line in report if (found := rank.match(line))), "")
    ended = next((found[1] for line in report if (found := code.match(line))), "")
    if not (worker and ended):
        return ""
    how = f"was killed by signal {ended[1:]}" if ended.startswith("-") else f"exited with code {ended}"
    return f"worker {worker} {how}"
