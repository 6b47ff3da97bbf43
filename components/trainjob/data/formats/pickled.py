r"""Recognize pickles by simulating their load.

A pickle is a program for a stack machine. Here Python's implementation of the machine (`pickle._Unpickler`) runs it
with placeholders: each class or function that the program imports is `_Named`, which ends the run when the program uses
it. Numbers are read as by the machines in C of all Pythons, which accept more of them (``I0x1``, ``I1\0``), so that a
pickle cannot evade the check by the version that runs it; `pickletools` does not read these either.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from trainjob.data.formats.candidates import Refused
from trainjob.errors import TrainJobError

_DOTTED = re.compile(r"\w+(?:\.\w+)*")
_WHOLE = re.compile(rb"\s*[+-]?(?:0[xX][\da-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[\d_]+)[lL]?\s*")
"""A whole number that some Python's machine accepts: 3.14 knows no prefixes, earlier ones read ``012`` as octal."""
_LONGEST = 64 * 1024 * 1024
"""Limit of a string at the start of a pickle, in bytes: longer ones would have to be read into memory."""


def check(file: BinaryIO, size: int) -> None:
    r"""Check that a file neither starts with a pickle that uses classes or functions, nor is a pickle as a whole.

    Recognizes all protocols, and several pickles in a row. Text often starts with valid instructions (``cat\ndog\n``
    imports the class ``at.dog``), but not with a program that uses what it imports.

    Raises:
        Refused: The file is or starts with such a pickle.
    """
    at = 0
    while at < size:
        file.seek(at)
        machine = _Machine(_Source(file, size))
        try:
            machine.load()
        except _Uses:
            raise Refused("is a pickle") from None
        except _TooLong:
            raise Refused(f"starts like a pickle, with a string of more than {_LONGEST} bytes") from None
        except TrainJobError:
            raise  # the file could not be read
        except Exception:  # noqa: BLE001 - any error also ends the program in a loader
            return
        at = file.tell()
        if machine.named or not file.read(4096).strip():
            raise Refused("is a pickle")


class _Source:
    """The file, as the machine reads it.

    Text that starts with ``Text`` is an instruction to read a string of 544 MB. A read beyond the file's end is
    refused.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def read(self, length: int, /) -> bytes:
        if length > self._size - self._file.tell():
            raise EOFError
        if length > _LONGEST:
            raise _TooLong
        return self._file.read(length)

    def readline(self) -> bytes:
        line = self._file.readline(_LONGEST)
        if len(line) == _LONGEST:
            raise _TooLong
        return line


class _TooLong(Exception):
    """The program has a string that is too long to read."""


class _Uses(Exception):
    """The program uses a class or function that it has imported."""


class _Stub(type):
    """Any use of the class ends the run."""

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise _Uses

    def __getattr__(cls, name: str) -> NoReturn:
        raise _Uses

    def __setitem__(cls, key: object, value: object) -> NoReturn:
        raise _Uses


class _Named(metaclass=_Stub):
    """Placeholder for each class and function that a pickle imports."""

    def __new__(cls, *_: object, **__: object) -> NoReturn:
        raise _Uses


class _Machine(pickle._Unpickler):
    """Runs one pickle. ``named``: the pickle has imported a class or function."""

    named = False
    stack: list[object]
    append: Callable[[object], None]

    def find_class(self, module: str, name: str, /) -> Any:
        if not (_DOTTED.fullmatch(module) and _DOTTED.fullmatch(name)):
            raise pickle.UnpicklingError("no name")
        self.named = True
        return _Named

    def get_extension(self, code: int) -> None:
        """Push the class or function that the loader has registered under this number (`copyreg`)."""
        del code
        self.named = True
        self.append(_Named)

    def persistent_load(self, pid: object, /) -> None:
        """Ignore the object that the loader has under this id: the pickle does not choose its class."""

    def _with_data(self, load: Callable[[_Machine], None]) -> None:
        """Run an instruction that takes data from the stack; fail if lines of text left a class there."""
        if self.stack[-1] is _Named:
            raise pickle.UnpicklingError("no data")
        load(self)


def _checked(load: Any) -> Any:
    return lambda machine: machine._with_data(load)


def _number(code: bytes) -> Any:
    """An instruction with a number, which NUL ends in C. The value of a whole number decides nothing."""
    load = pickle._Unpickler.dispatch[code[0]]

    def run(machine: Any) -> None:
        readline = machine.readline

        def number() -> bytes:
            text = readline()[:-1].partition(b"\0")[0]
            return b"1\n" if code in (pickle.INT, pickle.LONG) and _WHOLE.fullmatch(text) else text + b"\n"

        machine.readline = number
        try:
            load(machine)
        finally:
            machine.readline = readline

    return run


_NUMBERS = (pickle.INT, pickle.LONG, pickle.FLOAT, pickle.GET, pickle.PUT)
_Machine.dispatch = {
    **pickle._Unpickler.dispatch,
    **{code[0]: _number(code) for code in _NUMBERS},
    **{code[0]: _checked(pickle._Unpickler.dispatch[code[0]]) for code in (pickle.BUILD, pickle.APPEND)},
}
