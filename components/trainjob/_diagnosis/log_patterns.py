"""The forms of lines at the end of a log: tracebacks, launchers' reports, messages of native code, other languages."""

from __future__ import annotations

import re

# ---------------------------------------------------------------- lines

# torchrun, PyTorch and mpirun prefix a worker's lines with its rank: "[rank1]: ", "[default0]:", "[1,0]<stderr>:".
PREFIX = re.compile(r"\[(?:(?:rank|default|worker|trainer)\d+\]|\d+,\d+\](?:<std(?:out|err)>)?):\s?")
BAR = re.compile(r"\d+%\|.*\| *(\d+/\d+) \[")  # tqdm prints its bar again when Python exits
JSON_FIELDS = (
    ("message", "msg", "event", "log", "text"),
    ("exc_info", "exception", "exc_text", "stack_trace", "stacktrace", "traceback", "error.stack_trace"),
)
"""Names of fields of a record in a JSON log: its text, and the traceback of an exception."""
# The start of a record of a log, which is no second line of an exception's message.
RECORD = re.compile(
    r"[\[(]?\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|\[?[WEIF]\d{3,4} |\w+=\S+ \w+="
    r"|\[?(DEBUG|INFO|WARN(ING)?|ERROR|CRITICAL|FATAL)\b"
)
WARNING = re.compile(r"\b(WARN(ING)?|ERROR|warning|error)\b")

# ---------------------------------------------------------------- tracebacks of Python

# The checkpoints of PyTorch print that of each rank that failed, to the logs of all ranks.
TRACEBACK = re.compile(r"Traceback \(most recent call last\):?( \(RANK \d+\)| ─+╮)?$")
BLAMED = re.compile(r"^(?:\[rank\d+\]: )?\S*CheckpointException: .*ranks:dict_keys\(\[(\d{1,9})\b", re.MULTILINE)
GROUP_PART = re.compile(r"^\s*[|+ ]*\+-[-+]* ?(\d*) ?-*$")  # between the exceptions of a group
GROUP = re.compile(r"^\s*[|+│](?:-+ ?\d* ?-+)? ?")  # Python prints exception groups with | and +, rich a box of │
BOX = re.compile(r"\s*[╭│╰]")
FRAME = re.compile(r'\s*File "([^"]*)", line \d+, in |\s*(/\S+\.py):\d+ in ')
LIBRARY = re.compile(
    r"(?:/lib/python[\d.]+/)?(?:site|dist)-packages/(.+)\.py$|/lib/python[\d.]+/(.+)\.py$"
    r"|^<frozen (.+)>$|^([\w/]+)\.pyx$"
)
INSTALLED = "-packages/"
RAISES = re.compile(r"(?:^|[:;] +)(?:raise|assert)\b")
EXCEPTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\w+\))?(?::(?: (.*))?)?$")
CAUSED = "The above exception was the direct cause of"
CHAINS = (CAUSED, "During handling of the above exception, another")
# Exceptions that only report the failure of another process.
WRAPPERS = re.compile(r"ChildFailedError|ProcessRaisedException|_RemoteTraceback|SystemExit")
# Those of launchers whose program has failed, as `accelerate launch`.
CALLED = re.compile(r"CalledProcessError$|ProcessExitedException$")
STOPPED = re.compile(r"^KeyboardInterrupt$|\bSIGTERMException$|\bSignalException$")
CONNECTIONS = ("ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError", "ConnectionRefusedError")
# Around a traceback that does not end the process, by Python, asyncio and logging. (The JVM quotes the thread's name.)
ASIDE = re.compile(
    r'^(Exception ignored (in|on|while)|Exception in (thread [^"]|callback )|Error in atexit|Error in sys\.excepthook'
    r"|(Task|Future) exception was never retrieved|(future|handle|protocol|transport): <|--- Logging error ---"
    r"|Fatal (read |write )?error on |Call stack:$|Message: |Arguments: )"
)
# More of a message, not indented: of NCCL, Hugging Face, Azure, Kubernetes, SQLAlchemy, CUDA.
MORE_OF_MESSAGE = re.compile(
    r"^(nccl\w+: |Last error:|GPU device may be out of range|Error while creating shared memory)"
    r"|^(Cannot access gated repo|Access to model|Make sure to have access|If this is a private repository)"
    r"|^(\d{3} Client Error|Check your internet connection|Please check|See https?://)"
    r"|^(ErrorCode:|RequestId:|Time:|Content: |(?i:AuthenticationErrorDetail):)"
    r"|^(\(Background on this error|\[SQL: |\[parameters: )"
    r"|^(# of tasks that reached the barrier|The first task at the barrier|\d+$|>$|RPC: /|This usually happens because)"
    r"|^(Repository Not Found for url|Please make sure you specified|If you are trying to access a private)"
    r"|^(Memory on the node \(|PID\s+MEM|\d+\s+[\d.]+\s+\S|Refer to the documentation on|Consider provisioning more)"
    r"|^(For more details, see|More information: |(DETAIL|HINT|CONTEXT):  |LINE \d+: |\[bt\] |Stack trace:$)"
    r"|^(Reason: |HTTP response (headers|body): )|^\s*OOM when allocating tensor|^Detected at node |^Hint: "
    r"|^(Collective ops is aborted by: |The error could be from a previous operation|`ptxas` stderr:|Repro command: )"
)
_NOTHING = (
    r"^((CUDA|HIP) kernel errors might|For debugging consider|Compile with `TORCH_USE|Device-side assertion)"
    r"|^(Search for `cuda|-{10,}|={10,}|\"\"\"$|For simplicity, JAX has removed|For further information visit )"
    r"|^(frame #\d+: |Exception raised from |wandb:|COMET \w+: |🏃 View run |🧪 View experiment )"
    # Python 3.14, after a fatal error.
    r"|^(Current thread's C stack trace |Binary file \".*\"(, at \S+)? \[0x|<(truncated|cannot get C stack) )"
)
# More of a message that says nothing about the cause.
SAYS_NOTHING = re.compile(
    rf"{_NOTHING}"
    r"|^(RequestId:|Time:|\(Background on this error|See https?://|Hint: |File \"|Set the environment variable HYDRA)"
    r"|^[\s~^]+$|^at \S+\(|^\.\.\. \d+ more$"
)
# Output at exit: of a crash of native code, of libraries, of programs that have started this one.
AFTERWARDS = re.compile(
    rf"{_NOTHING}"
    r"|^(terminate called|Aborted|Bus error|Segmentation fault|Fatal Python error|Current thread 0x|Thread 0x)"
    r"|^(Extension modules:|\*\*\* |C\+\+ CapturedTraceback|#\d+ \S+ from /|Stack trace of the failed)"
    r"|^(Set the environment variable HYDRA_FULL_ERROR|nccl\w+: |Last error:$|NET/\w+ ?: )"
    r"|^.*resource_tracker|^sys:1: |^<sys>:0: |^make(\[\d+\])?: \*\*\* |^ERROR conda\.cli"
)

# ---------------------------------------------------------------- native code

# PyTorch writes the month without a leading zero: "[E909 09:55:29".
NATIVE = re.compile(r"^\[?[WEIF]\d{3,4} \d\d:\d\d:\d\d.*(\.(cc|cpp|cu|h|hpp):\d+|torch/distributed/elastic)")
NATIVE_LINE = re.compile(r"(\[\w+\]:)?\s*\[?[WEIF]\d{3,4} .*\.(cc|cpp|cu|h|hpp):\d+\]")
MORE_OF_NATIVE = re.compile(r"^([A-Z_]{5,}: |RPC: /|Barrier |This (suggests|usually|most likely) )")
# By libstdc++, and by libc++ with its message.
CPP = re.compile(r"terminat(?:e called after throwing an instance of '([^']+)'|ing .*uncaught exception of type (.+))")
# By glog and Abseil, of C's assert, of glibc's heap: the process aborts.
FATAL = re.compile(
    r"^(?:\[?F\d{3,4} \d\d:\d\d:\d\d\.\d+\s+\d* ?\S+\] )(.+)"
    r"|^(\S+: \S+:\d+: .*Assertion `.+' failed\.|\S+:\d+: \w*ASSERT\(.+\) failed)$"
    r"|^((?:double free or corruption|(?:free|malloc|realloc|munmap_chunk)\(\): |corrupted |\*\*\* stack smashing).*)$"
)
# libstdc++, if threads of native code (PyTorch's Gloo) still run at exit: the process ends by SIGABRT or SIGSEGV.
TORN_DOWN = re.compile(r"terminate called without an active exception")
ASSERTION = re.compile(r"\.cuh?:\d+: .*(Assertion `.*` failed)")
# One that did not end, not one that raised an exception.
COLLECTIVE = re.compile(
    r"collective operation timeout: WorkNCCL"
    r"\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+),.*?Timeout\(ms\)=(?P<milliseconds>\d{1,18})\)"
)
FIRST_TIMEOUT = re.compile(r"due to a collective timeout from (?:rank (\d{1,9})\b|this local rank)")
LOST_PEER = re.compile(  # in lines of native code, which has no exception
    r"connection closed by (remote )?peer|application timeout caused pair closure"
    r"|gloo.*(timed? ?out|broken pipe|connection (reset|refused)|read error|connectFullMesh)"
    r"|watchdog caught collective operation timeout|NCCL (watchdog|.*(timeout|timed out))"
    r"|ncclRemoteError|remote process exited or there was a network error|process group watchdog"
    r"|(recvValue|sendBytes|recvVector).*failed|TCPStore.*(timed? out|timeout|closed)"
    r"|stopped sending heartbeats|heartbeat timeout|distributed service detected (fatal|an?) error"
    r"|coordination service.*(error|unavailable|failed)|another task died|barrier timed out|ShutdownBarrier"
    r"|rabit.*(reset|closed|timeout|failed)|watchdog got stuck",
    re.IGNORECASE,
)
# "closed by peer [10.0.0.7]", "closed by remote peer […]", "read error […]"; from the bracket, which is searched fast.
PEER = re.compile(r"\[(?<=by peer \[|te peer \[|d error \[)([0-9a-fA-F.:]+)\]")
JOINED = (
    re.compile(r"reached the barrier: (\d{1,9})/(\d{1,9})\b"),
    re.compile(r"\b(\d{1,9})/(\d{1,9}) clients joined"),
)

_SOURCE = re.compile(r"([\w./-]+)\.(?:cc|cpp|cu|h|hpp):\d+")  # where native code raised, in its message
_NATIVE_ERROR = re.compile(r"((?:std|c10)::\w+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*): (.*)", re.DOTALL)


def native_modules(message: str) -> tuple[str, ...]:
    """Folders of the source file that a message of native code names, as ``gloo``."""
    found = _SOURCE.search(message[:200])
    return tuple(found[1].split("/")) if found else ()


def native_error(error: str) -> tuple[str, str] | None:
    """Class and message of an error of native code; None if it has no class."""
    found = _NATIVE_ERROR.match(PREFIX.sub("", error))
    return (found[1], found[2]) if found else None


# ---------------------------------------------------------------- launchers

LAUNCHER = re.compile(  # first line of a report: the workers have ended
    r"^Primary job +terminated|^(mpirun|mpiexec|prterun)\b.* (detected|noticed) that"
    r"|^-- Process \d+ terminated with|^\[rank: \d+\] Child process with PID \d+ terminated"
    r"|^.*ChildFailedError:\s*$|^.*sigkill_handler\] Killing subprocess"
    r"|^MPI_ABORT was invoked on rank|^= +BAD TERMINATION OF ONE OF",
    re.MULTILINE,
)
# The first worker that failed: its number, its exit code or signal. A script may write any number of digits.
WORKERS = (
    re.compile(r"^\s*rank\s*: (?P<n>\d{1,9}) \(local_rank.*\n^\s*exitcode\s*: (?P<code>-?\d{1,10}) ", re.MULTILINE),
    re.compile(r"^\s*Process name: \[.*,(?P<n>\d{1,9})\]\n\s*Exit code:\s+(?P<code>-?\d{1,10})$", re.MULTILINE),
    re.compile(r"process rank (?P<n>\d{1,9}) with PID \d+ on node \S+ exited on signal (?P<signal>\d{1,3})"),
    re.compile(r"^\[rank: (?P<n>\d{1,9})\] Child process .* terminated with code (?P<code>-?\d{1,10})\.", re.MULTILINE),
    re.compile(r"--local_rank=(?P<n>\d{1,9})\b.*exits with return code = (?P<code>-?\d{1,10})"),
)
# By torchrun: its workers start again; the end of its report.
ATTEMPT = re.compile(
    r"; (will restart worker group)|^Root Cause \(first observed failure\):\n(?:.*\n){0,20}?={60}$", re.MULTILINE
)
TERMINATED = re.compile(
    r"SignalException: Process \d+ got signal: (15|2)\b|^(?:\[rank\d+\]: )?\S*SIGTERMException\b", re.MULTILINE
)

# ---------------------------------------------------------------- programs that are not Python's

USAGE = re.compile(r"^[Uu]sage: ")  # argparse, click
JVM = re.compile(r'Exception in thread "([^"]*)" ([\w.$]+)(?:: (.*))?$')
JVM_CAUSE = re.compile(r"Caused by: ([\w.$]+)(?:: (.*))?$")
REJECTED = re.compile(r"\S.*: error: |Error: |[╭+]─* ?Error\b")  # of a program that prints its usage
# argparse and click; Python, shells and env that cannot start a program; pip; the programs of this package.
ERROR_LINE = re.compile(
    r"^(\S+: )?error: .+|^E(rror|RROR): .+|^\S*python[\d.]*: (No module named|can't (open file|find)) .*"
    r"|^\S*(sh|env)\b.*: .*(not found|No such file or directory|Permission denied|cannot execute.*|format error)$"
    r"|^\S+: (line )?\d+: .*(not found|Illegal option -|Permission denied|No such file or directory)$"
    r"|^(exec \S+|ssh): .+|^panic: .+|^fatal( error)?: .+|^thread '.*' panicked at .+|^Error in .+"
    r"|^(Uncaught )?(\w+\.)*[A-Z]\w*(Error|Exception)(: .+)?$"
)
PANIC = re.compile("thread '.*' panicked at ")  # Rust; other threads panic because one has
# Frames of stacks and other lines without a message: Go, Rust, the JVM, JavaScript, R, Julia; a page's address alone.
NO_MESSAGE = re.compile(
    r"\s+(at |File \"|/\S+:\d|\d+: |\S+\.\w+:\d+)|\t|\S*env: use -\[v\]S"
    r"|goroutine \d+|\[signal \w+|main\.\w+\(|exit status \d+$|note: run with|stack backtrace:|Execution halted"
    r"|Calls: |Caused by: |\S*https?://\S+$|launch\.$| *@ \S+:\d+( |$)| +\[\d+\] |in expression starting at "
    r"|object (address|refcount|type)|lost sys\.|[})\]]+;?$|Stacktrace:|Node\.js v\d|-{4,}|={4,}"
    r"|created by \w|[\w./-]+\.(\(\*?\w+\)\.)?[\w.]+\(.*\)$|[╭╰][─╮╯ ]+$|hint: |help: |Pass --helpshort"
    r"|\s+(code|requireStack): |\s+(full_key: |object_type=)|Set the environment variable HYDRA|To append to your "
    r"|\[bt\] |Stack trace:$|\[notice\] |- /\S+$|Require stack:$|(See|More information:) https?://\S+$"
    r"|Please make sure you have the correct access|and the repository exists"  # git
    r"|\[[\w.-]+:\d+\] (\*\*\*|Signal|Failing at|\[ ?\d)"  # Open MPI
)

RULE = re.compile(r"-{60,}$")  # mpirun writes each of its errors between two of them

SPECIAL = re.compile(
    "|".join(
        f"(?P<{name}>{pattern.pattern})"
        for name, pattern in (("native", NATIVE), ("aside", ASIDE), ("launcher", LAUNCHER), ("other", AFTERWARDS))
    )
)
"""Lines that may follow the traceback that ended a process, by one match: most are none of them."""
