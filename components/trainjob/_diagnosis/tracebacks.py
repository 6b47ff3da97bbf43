"""Finds the exceptions that ended a process, as opposed to exceptions that were logged and handled.

An exception ended its process if the process wrote nothing after it. Some lines may still follow: more of the message,
output of Python and of native libraries at exit, a launcher's report about its workers. After any other line the
exception counts as handled, since a log cannot prove the opposite; one last line alone is taken for the message's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainjob._diagnosis import log_patterns as known
from trainjob._diagnosis.rules import raised as table
from trainjob._diagnosis.rules.row import RaisedRule
from trainjob._support.control_characters import one_line
from trainjob.errors import Category

_LONGEST = 4096  # characters of a message that are kept
_BESIDE = 200  # characters of an exception that was raised while another was handled


@dataclass(frozen=True)
class Raised:
    """An exception that ended a process.

    Attributes:
        name: Its class, as the traceback prints it.
        message: Its message, to its end.
        modules: Modules of libraries below the author's last frame, and sources of native code that the message names.
        authored: A ``raise`` or ``assert`` of the author's code raised it, so that its words are the author's.
        line: Index of its line in the log.
        causes: Exceptions that it was raised from, the first cause first.
        during: The exception that was being handled; it is quoted, and never the cause. None if none was.
        parts: For an exception group, its exceptions.
    """

    name: str
    message: str = ""
    modules: tuple[str, ...] = ()
    authored: bool = False
    line: int = -1
    causes: tuple[Raised, ...] = ()
    during: Raised | None = None
    parts: tuple[Raised, ...] = ()

    def __str__(self) -> str:
        """Class and message, with the first cause; of a group, the exception that decides."""
        if (part := self._part) is not None:
            return f"{part} (in {self.name}: {self.message})"
        message = self.message.rpartition("\nLast error:\n")[2].strip()  # PyTorch writes NCCL's after a general one
        text = f"{self.name}: {message}" if message else self.name
        cause = f" (caused by {self.causes[0]})" if self.causes else ""
        if (first := self.handled or (None if self.causes else self.during)) is None:
            return text + cause
        return f"{one_line(text, _BESIDE)}{cause[:_BESIDE]} (while handling {one_line(str(first), _BESIDE // 2)})"

    @property
    def handled(self) -> Raised | None:
        """The author's exception that was being handled, also when one of its causes came; None if none was."""
        own = [each for each in self._handled() if not each.modules and each.rule is None]
        return own[-1] if own else None

    def _handled(self) -> Iterator[Raised]:
        """The exceptions that were being handled, the latest first."""
        for each in (self, *self.causes):
            if each.during is not None:
                yield each.during
                yield from each.during._handled()

    @property
    def rule(self) -> RaisedRule | None:
        """The row of the table for it, or for the nearest cause that has one; None if none has."""
        if (part := self._part) is not None:
            return part.rule
        found = [rule for rule in self._rules() if rule is not None]
        # The end of a child process says less than what it was raised from.
        return next((rule for rule in found if rule.means not in table.OF_CHILDREN), next(iter(found), None))

    @property
    def _part(self) -> Raised | None:
        """Of a group, the first exception that no rule explains, since others may follow from it; else the first."""
        return next((part for part in self.parts if part.rule is None), next(iter(self.parts), None))

    def _rules(self) -> Iterator[RaisedRule | None]:
        for each in (self, *reversed(self.causes)):
            yield None if each.authored else table.rule_of(each.name, each.modules, each.message)

    @property
    def connection(self) -> bool:
        """Whether a connection broke, to a peer or to another service."""
        return any(each.name in known.CONNECTIONS for each in (self, *self.causes))


@dataclass
class Tracebacks:
    """The tracebacks in the output of one process, read line by line."""

    hooked: bool = False  # PyTorch's excepthook writes it, so that it ends the process
    uncaught: bool = False  # the JVM reports it, which then runs hooks that write more
    ended: Raised | None = None
    before: Raised | None = None
    survived: Raised | None = None
    last: int = -1
    after: list[str] = field(default_factory=list)  # own lines since `ended`
    frames: list[str] | None = None  # files of the traceback that is being read, the innermost last
    source: str = ""  # the source line of the innermost frame
    aside: bool = False
    chained: str = ""
    part: bool = False  # the next line is an exception of a group
    continues: bool = False  # an indented line belongs to the line before
    opens: bool = False  # the message's last line ends with a colon, so that the next line belongs to it
    native: bool = False  # in a message of native code
    launcher: bool = False
    warned: int = -2  # the last line with a warning of a log
    logged: bool = False  # such a line is before the traceback
    bars: set[str] = field(default_factory=set)

    def end(self) -> None:
        """There is no more line. A single last one belongs to the message, except after an outage that was logged."""
        if self.ended and self.after:
            outage = (rule := self.ended.rule) is not None and rule.means.category is Category.OUTAGE
            self.ended = _longer(self.ended, self.after[0])
            self._survive(outage and self.logged)

    def read(self, number: int, line: str) -> None:
        """Read the next line."""
        bare = known.GROUP.sub("", line) if line.lstrip().startswith(("|", "+", "│")) else line
        text = bare.strip()
        bar = known.BAR.search(text) if "%|" in text else None
        again = bool(bar and bar[1] in self.bars)
        if bar:
            self.bars.add(bar[1])
        if separator := known.GROUP_PART.match(line):
            self.part = bool(separator[1])
        elif known.TRACEBACK.search(text):
            self._survive(bool(self.after))
            self.frames, self.source = [], ""
            self.logged = self.logged if self.chained else self.last == number - 1 == self.warned
        elif self._ends_traceback(line, bare, text):
            self._raised(number, text, grouped=bare is not line)
        elif self.frames is not None:
            self._frame(bare)
        elif not text or self.launcher:
            return
        elif jvm := known.JVM.match(text):
            self.ended, self.after, self.continues = Raised(jvm[2], jvm[3] or "", line=number), [], True
            self.uncaught = jvm[1] == "main"  # which ends the process; the other threads go on
        elif self.uncaught and self.ended and (cause := known.JVM_CAUSE.match(text)):
            self.ended = replace(self.ended, causes=(Raised(cause[1], cause[2] or "", line=number), *self.ended.causes))
            self.continues = True
        elif text.startswith(known.CHAINS):
            self.chained = text
        elif again or (not bar and self._afterwards(line, text)):
            self.continues = True
        else:
            self._own(number, text, bar=bool(bar))

    def _ends_traceback(self, line: str, bare: str, text: str) -> bool:
        """Whether the line has the exception: after the frames, or without frames in a group."""
        if self.frames is None:
            return self.part and bool(known.EXCEPTION.match(text))
        return bool(bare) and not bare[0].isspace() and not known.BOX.match(line)

    def _frame(self, line: str) -> None:
        """A line between the head of a traceback and the line of its exception."""
        if (found := known.FRAME.match(line)) and self.frames is not None:
            self.frames.append(found[1] or found[2] or "")
            self.source = ""
        elif self.frames and not self.source and line.strip():
            self.source = line.strip().removeprefix("❱ ").lstrip("0123456789 │")

    def _raised(self, number: int, text: str, *, grouped: bool) -> None:
        """The line after the frames of a traceback."""
        frames, self.frames, aside, self.aside, self.continues = self.frames or [], None, self.aside, False, True
        found = known.EXCEPTION.match(text)
        if found is None:
            self._own(number, text)
        elif known.WRAPPERS.search(found[1]):
            self.launcher = bool(known.LAUNCHER.match(text))
        elif not aside and not (self.ended and not self.part and self._follows(found[1], found[2] or "")):
            causes: tuple[Raised, ...] = ()
            during = None
            if self.before and self.chained.startswith(known.CAUSED):
                causes = (*self.before.causes, replace(self.before, causes=()))
            elif self.before and self.chained:
                during = self.before
            authored = _is_authored(frames, self.source)
            modules = (*_modules(frames, self.source), *(() if authored else known.native_modules(found[2] or "")))
            raised = Raised(found[1], found[2] or "", modules, authored, number, causes, during)
            ended = raised
            if grouped and self.ended and (self.part or self.chained):
                # In a group, a traceback after another one is that of the same part.
                others = self.ended.parts if self.part else self.ended.parts[:-1]
                ended = replace(self.ended, parts=(*others, raised))
            self.ended, self.before, self.after, self.launcher = ended, raised, [], False
            self.opens = text.endswith(":")
        self.chained, self.part = "", False

    def _follows(self, name: str, message: str) -> bool:
        """Whether an exception only follows from the one that ended another process."""
        rule = None if self.chained else table.rule_of(name, (), message)
        return bool(known.CALLED.search(name) or known.STOPPED.search(name)) or (
            rule is not None and rule.means is table.PEER
        )

    def _afterwards(self, line: str, text: str) -> bool:
        """Whether a line may follow the traceback that ended a process."""
        special = known.SPECIAL.match(text)
        kind = special.lastgroup if special else ""
        self.aside, self.launcher, native = kind == "aside", kind == "launcher", kind == "native"
        more = (self.continues and line[0].isspace()) or (self.native and known.MORE_OF_NATIVE.match(text))
        opens, self.opens = self.opens and not self.after, text.endswith(":") or (self.opens and text.startswith("- "))
        listed = self.hooked or opens or bool(more) or bool(known.MORE_OF_MESSAGE.match(text))
        message = bool(self.ended) and listed
        self.native = self.native or native
        if message and self.ended and not native and not known.SAYS_NOTHING.match(text):
            self.ended = self.before = _longer(self.ended, text)
        self._survive(bool(self.after) and not native and not self.launcher)
        return message or bool(more) or special is not None

    def _own(self, number: int, text: str, *, bar: bool = False) -> None:
        self.chained, self.continues, self.native, self.last = "", False, False, number
        self.warned = number if known.WARNING.search(text) else self.warned
        if self.ended and not self.hooked and not self.uncaught:
            self.after.append(text)
            self._survive(len(self.after) > 1 or bar or bool(known.RECORD.match(text)))

    def _survive(self, survived: bool, /) -> None:
        """The exception did not end the process, if `survived`."""
        if survived and self.ended:
            self.survived, self.ended, self.after = self.ended, None, []


def _longer(raised: Raised, text: str) -> Raised:
    if raised.parts:
        *before, last = raised.parts
        return replace(raised, parts=(*before, _longer(last, text)))
    return replace(raised, message=f"{raised.message}\n{text}"[:_LONGEST])


def _is_authored(frames: Sequence[str], source: str) -> bool:
    """Whether a ``raise`` or ``assert`` of the author's code, or of a package that no rule knows, raised it."""
    if not frames or not known.RAISES.search(source):
        return False
    module = _module(frames[-1])
    return not module or (known.INSTALLED in frames[-1] and module.partition(".")[0] not in table.PACKAGES)


def _modules(frames: Sequence[str], source: str) -> tuple[str, ...]:
    """The library modules that the author's last frame called, as ``torch.utils.data.dataloader``."""
    found: list[str] = []
    for file in frames:
        found = [*found, module] if (module := _module(file)) else []
    return (*found, *(["pin_memory"] if "pin_memory" in source else []))


def _module(file: str) -> str:
    """The library module of a file; empty for the author's code."""
    library = known.LIBRARY.search(file)
    return next(filter(None, library.groups())).replace("/", ".") if library else ""
