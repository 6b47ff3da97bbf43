"""What the end of a process means that has no Python exception: its signal, its exit code, its last line."""

from __future__ import annotations

import re
from dataclasses import replace

from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules import raised
from trainjob._diagnosis.rules.row import LineRule
from trainjob.errors import Category, RetryVerdict

M, C, R = Meaning, Category, RetryVerdict  # so that a row has two lines


# fmt: off
_SCRIPT = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the script's path in command or args, or put it into the image: it is not at that path")
_NOT_READABLE = M(C.CONFIGURATION, R.CONFIGURATION,
    "make the script readable for the user of the pod (chmod a+r; OpenShift gives each namespace another user ID)")
_CRLF = M(C.CONFIGURATION, R.CONFIGURATION,
    "save the script with LF line endings: dos2unix SCRIPT (it has the CRLF line endings of Windows)")
_NOT_EXECUTABLE = M(C.CONFIGURATION, R.CONFIGURATION,
    "make the file executable (chmod +x), or run it with its interpreter")
_NO_DISTRIBUTION = M(C.CONFIGURATION, R.CONFIGURATION,
    "correct the name or version of the package, or set PIP_INDEX_URL to an index that the pods can reach: pip "
    "found no such distribution")
_USAGE = M(C.USER_CODE, R.USER, "correct the arguments of the command: the program rejects them")
_SLOTS = M(C.CONFIGURATION, R.CONFIGURATION,
    "start as many processes as the nodes have slots: mpirun -n against num_nodes times num_proc_per_node")
_NO_NODE = M(C.UNKNOWN, R.INFRASTRUCTURE,
    "check that the pods of all nodes run and accept SSH: mpirun could not start its daemon on one of them")
SIGTERM = M(C.UNKNOWN, R.INFRASTRUCTURE, "find out what terminated it from outside the job")
_SIGBUS = replace(raised.SHM_FULL, advice=raised.SHM_FULL.advice.replace("was full", "is often full"))
_SIGINT = M(C.UNKNOWN, R.UNKNOWN, "find out what interrupted it (Ctrl-C, SIGINT): the training did not fail by itself")
_SIGILL = M(C.IMAGE, R.UNKNOWN, "use packages built for the node's CPU: it lacks an instruction that they use")
_SIGSEGV = M(C.USER_CODE, R.UNKNOWN,
    "check that the versions of driver, CUDA and framework are compatible, and the last lines of the log: native code "
    "crashed")

_Rule = LineRule

LINES: tuple[LineRule, ...] = (
    _Rule("line-no-module", "", r"^\S*python[\d.]*: No module named ", raised.NO_MODULE, "made with CPython 3.11"),
    _Rule("line-no-script", "", r"^\S*python[\d.]*: can't (open file .*\[Errno (2|20)\]|find '__main__' module)",
        _SCRIPT, "corpus/script-missing"),
    _Rule("line-script-not-readable", "", r"^\S*python[\d.]*: can't open file .*\[Errno 13\]", _NOT_READABLE,
        "made with CPython 3.11"),
    _Rule("line-crlf", "", r"(\\r|\^M)\S*: .*(No such file|not found|bad interpreter)|: Illegal option -$", _CRLF,
        "made with coreutils 9.1 env"),
    _Rule("line-exec", "", r"^exec \S+: no such file or directory$", raised.NO_PROGRAM,
        "format: runc 1.3 standard_init_linux"),
    _Rule("line-architecture", "126 1 255", r"[Ee]xec format error$", raised.OTHER_ARCHITECTURE,
        "corpus/program-of-another-architecture"),
    _Rule("line-no-library", "127", "error while loading shared libraries: ", raised.NO_LIBRARY,
        "made with glibc 2.36"),
    _Rule("line-no-program", "127", r"not found( in \$PATH)?$|No such file or directory$", raised.NO_PROGRAM,
        "corpus/program-missing"),
    _Rule("line-not-executable", "126", r"Permission denied$|cannot execute", _NOT_EXECUTABLE,
        "corpus/script-not-executable"),
    _Rule("line-no-distribution", "",
        "^ERROR: (No matching distribution found for|Could not find a version that satisfies)", _NO_DISTRIBUTION,
        "made with pip 23.2"),
    _Rule("line-no-credentials", "", "^(fatal error: )?Unable to locate credentials", raised.NO_CREDENTIALS,
        "format: awscli 2.31"),
    _Rule("line-slots", "", "^There are not enough slots available in the system", _SLOTS,
        "format: openmpi 5.0 help-prte-rmaps-base.txt"),
    _Rule("line-ssh", "", "^ssh: (Could not resolve hostname|connect to host) |^[OP]RTE .* daemons?\\. This usually",
        _NO_NODE, "format: openmpi 4.1 help-errmgr-base.txt"),
    _Rule("line-usage", "2", "^usage: ", _USAGE, "made with CPython 3.11"),
    _Rule("child-killed-code", "247", "", raised.KILLED,
        "CPython: sys.exit(-9), as launchers do with a code of subprocess"),
    _Rule("signal-kill", "SIGKILL", "", raised.KILLED, "signal(7)"),
    _Rule("signal-terminate", "SIGTERM", "", SIGTERM, "signal(7)"),
    _Rule("signal-interrupt", "SIGINT", "", _SIGINT, "signal(7)"),
    _Rule("signal-bus", "SIGBUS", "", _SIGBUS, "corpus/shared-memory-full"),
    _Rule("signal-instruction", "SIGILL", "", _SIGILL, "signal(7)"),
    _Rule("line-heap", "SIGABRT",
        r"^(double free|(free|malloc|realloc|munmap_chunk)\(\): |corrupted |\*\*\* stack smashing)", _SIGSEGV,
        "format: glibc 2.36 malloc/malloc.c"),
    _Rule("signal-segmentation", "SIGSEGV", "", _SIGSEGV, "corpus/segmentation-fault"),
)
# fmt: on


def rule_of(code: str, line: str) -> LineRule | None:
    """The row for the end of a process; None if the table has none.

    Args:
        code: Its exit code, or the name of the signal that ended it.
        line: Its error, or its last line; with ``usage: `` before it if the program printed its usage.
    """
    return next(
        (
            rule
            for rule in LINES
            if (code in rule.codes.split() if rule.codes else not code.startswith("SIG")) and re.search(rule.says, line)
        ),
        None,
    )
