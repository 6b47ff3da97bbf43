"""Finds the exceptions that ended a process, as opposed to exceptions that were logged and handled.

An exception ended its process if the process logged nothing after it. Some lines may still follow: more lines of the
message, output of Python and of native libraries at exit, and a launcher's report about its workers. If any other line
follows, the exception counts as handled, since a log cannot prove the opposite.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

# torchrun, PyTorch and mpirun prefix a worker's lines with its rank: "[rank1]: ", "[default0]:", "[1,0]<stderr>:".
_PREFIX = re.compile(r"\[(?:(?:rank|default|worker|trainer)\d+\]|\d+,\d+\](?:<std(?:out|err)>)?):\s?")
_GROUP = re.compile(r"^\s*[|+](?:-+ ?\d* ?-+)? ?")  # Python prints exception groups with | and +

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?::(?: (.*))?)?$")
_CHAINS = ("The above exception was the direct cause of", "During handling of the above exception, another")

# Exceptions that only report the failure of another process.
_WRAPPERS = re.compile(r"ChildFailedError|ProcessRaisedException|ProcessExitedException|_RemoteTraceback|SystemExit")
# Launchers that raise an exception if their program fails, such as `accelerate launch`.
_CALLED = re.compile(r"CalledProcessError$")
# First line of a launcher's report: its workers have terminated.
_LAUNCHER = re.compile(
    r"^Primary job +terminated|^(mpirun|mpiexec|prterun)\b.* (detected|noticed) that"
    r"|^-- Process \d+ terminated with|ChildFailedError:$"
)
# Python writes these before a traceback that does not end the process.
_ASIDE = re.compile(r"^(Exception ignored (in|on|while)|Exception in thread |Error in atexit|Error in sys\.excepthook)")
_AFTERWARDS = re.compile(
    # Native code: glog lines, and output of a crash.
    r"^\[?[WEIF]\d{4} \d\d:\d\d:\d\d.*(\.(cc|cpp|cu|h|hpp):\d+|torch/distributed/elastic)"
    r"|^(terminate called|Aborted|Segmentation fault|Fatal Python error|Current thread 0x|Thread 0x|Extension modules:)"
    r"|^(\*\*\* |frame #\d+: |C\+\+ CapturedTraceback|Exception raised from )"
    # Further lines of messages: CUDA, JAX, pydantic, Kubernetes, SQLAlchemy, Hydra, Hugging Face.
    r"|^(CUDA kernel errors might|For debugging consider|Compile with `TORCH_USE|Device-side assert|Search for `cuda)"
    r"|^(-{10,}|={10,}|\"\"\"$|For simplicity, JAX has removed|For further information visit )"
    r"|^(Reason: |HTTP response (headers|body): |\(Background on this error|\[SQL: |\[parameters: )"
    r"|^(Set the environment variable HYDRA_FULL_ERROR|If this is a private repository, make sure)"
    # Output at exit.
    r"|^wandb: |resource_tracker|^sys:1: |^<sys>:0: |^make(\[\d+\])?: \*\*\* |^ERROR conda\.cli"
)
# Messages of native code have several lines.
_NATIVE = re.compile(r"^\[?[WEIF]\d{4} \d\d:\d\d:\d\d.*\.(cc|cpp|cu|h|hpp):\d+")
_MORE_OF_NATIVE = re.compile(r"^([A-Z_]{5,}: |RPC: /|Barrier |This (suggests|usually|most likely) )")
_BAR = re.compile(r"\d+%\|.*\| *(\d+/\d+) \[")  # tqdm prints its bar again when Python exits


@dataclass(frozen=True)
class Raised:
    """An exception with a traceback.

    Attributes:
        text: Its line.
        line: Index of that line.
        causes: Exceptions that it was raised from, the first cause first.
    """

    text: str
    line: int
    causes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text + (f" (caused by {self.causes[0]})" if self.causes else "")

    @property
    def chain(self) -> str:
        """Its line and those of its causes."""
        return "\n".join((self.text, *self.causes))


@dataclass(frozen=True)
class Traced:
    """The tracebacks of a log.

    Attributes:
        ended: The exceptions that ended processes, in the order of their lines.
        survived: Index of the line of the last exception after which its process continued; -1 if there is none.
        last: Index of the last line of a process's own output; -1 if there is none.
    """

    ended: tuple[Raised, ...] = ()
    survived: int = -1
    last: int = -1


@dataclass
class _Process:
    """The output of one process so far."""

    hooked: bool = False  # PyTorch's excepthook writes it, so that it ends the process
    ended: Raised | None = None
    before: Raised | None = None
    survived: int = -1
    last: int = -1
    reading: bool = False
    aside: bool = False
    chained: bool = False
    continues: bool = False  # an indented line belongs to the line before
    native: bool = False  # in a message of native code
    launcher: bool = False
    bars: set[str] = field(default_factory=set)

    def read(self, number: int, line: str) -> None:
        bare = _GROUP.sub("", line) if line.lstrip().startswith(("|", "+")) else line
        text = bare.strip()
        bar = _BAR.search(text)
        again = bool(bar and bar[1] in self.bars)
        if bar:
            self.bars.add(bar[1])
        if text.endswith(_TRACEBACK):
            self.reading = True
        elif self.reading and bare and not bare[0].isspace():
            self._raised(number, text)
        elif not text or self.reading or self.launcher:
            return
        elif text.startswith(_CHAINS):
            self.chained = True
        elif again or (not bar and self._afterwards(line, text)):
            self.continues = True
        else:
            self._own(number)

    def _raised(self, number: int, text: str) -> None:
        """The line after the frames of a traceback."""
        aside, self.reading, self.aside, self.continues = self.aside, False, False, True
        found = _EXCEPTION.match(text)
        if found is None:
            self._own(number)
        elif _WRAPPERS.search(found[1]):
            self.launcher = bool(_LAUNCHER.search(text))
        elif not aside and not (_CALLED.search(found[1]) and self.ended):
            causes = (*self.before.causes, self.before.text) if self.before and self.chained else ()
            self.ended = self.before = Raised(text, number, causes)
        self.chained = False

    def _afterwards(self, line: str, text: str) -> bool:
        """Whether a line may follow the traceback that ended a process."""
        self.aside = bool(_ASIDE.search(text))
        self.launcher = bool(_LAUNCHER.search(text))
        more = (self.continues and line[0].isspace()) or (self.native and _MORE_OF_NATIVE.search(text))
        self.native = self.native or bool(_NATIVE.search(text))
        return bool(more) or self.aside or self.launcher or bool(_AFTERWARDS.search(text))

    def _own(self, number: int) -> None:
        self.chained, self.continues, self.native, self.last = False, False, False, number
        if self.ended and not self.hooked:
            self.survived, self.ended = self.ended.line, None


def trace(lines: Sequence[str]) -> Traced:
    """Find the exceptions of a log, which may contain several processes; the last one of each counts."""
    processes: dict[str, _Process] = {}
    for number, line in enumerate(lines):
        prefix = match[0] if (match := _PREFIX.match(line)) else ""
        process = processes.setdefault(prefix.strip(), _Process(hooked=prefix.startswith("[rank")))
        process.read(number, line[len(prefix) :])
    found = processes.values()
    return Traced(
        tuple(sorted((each.ended for each in found if each.ended), key=lambda raised: raised.line)),
        max((each.survived for each in found), default=-1),
        max((each.last for each in found), default=-1),
    )
