"""Recognize pickles by what loading them would do, without loading anything.

A pickle is a program for a small machine. Here Python's own implementation of the machine (`pickle._Unpickler`) runs it
on stand-ins: each class or function that the program names is `_Named`, which ends the run when the program uses it.
`pickletools` reads the same instructions, but not every number that the machine takes (``I0x1``), so a pickle could
hide from it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from trainjob.data.formats.candidates import Refused
from trainjob.errors import TrainJobError

_DOTTED = re.compile(r"\w+(?:\.\w+)*")
_LONGEST = 64 * 1024 * 1024
"""Bytes of a string that a pickle may start with; a longer one would have to be read into memory."""


def check(file: BinaryIO, size: int) -> None:
    r"""Check that a file does not start with a pickle that uses classes or functions, and is no pickle as a whole.

    Pickles of every protocol, and several in a row. Text often starts with valid instructions (``cat\ndog\n`` names
    the class ``at.dog``), but not with a program that uses what it names.

    Raises:
        Refused: It does.
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
            raise Refused(f"starts as a pickle does, with a string of more than {_LONGEST} bytes") from None
        except TrainJobError:
            raise  # the file could not be read
        except Exception:  # noqa: BLE001 - whatever the error, a loader would have it too: the program ends there
            return
        at = file.tell()
        if machine.named or not file.read(4096).strip():
            raise Refused("is a pickle")


class _Source:
    """The file as the machine reads it.

    Text that starts with ``Text`` is an instruction to read a string of 544 MB: more than the file has is not read.
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
    """The program has a string that is too long to be read."""


class _Uses(Exception):
    """The program uses a class or function that it has named."""


class _Stub(type):
    """Any use of the class ends the run."""

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise _Uses

    def __getattr__(cls, name: str) -> NoReturn:
        raise _Uses

    def __setitem__(cls, key: object, value: object) -> NoReturn:
        raise _Uses


class _Named(metaclass=_Stub):
    """Stands for each class and function that a pickle names."""

    def __new__(cls, *_: object, **__: object) -> NoReturn:
        raise _Uses


class _Machine(pickle._Unpickler):
    """Runs one pickle. ``named``: it has named a class or function."""

    named = False
    stack: list[object]
    append: Callable[[object], None]

    def find_class(self, module: str, name: str, /) -> Any:
        if not (_DOTTED.fullmatch(module) and _DOTTED.fullmatch(name)):
            raise pickle.UnpicklingError("no name")
        self.named = True
        return _Named

    def get_extension(self, code: int) -> None:
        """The class or function that the loader has registered under this number (`copyreg`)."""
        del code
        self.named = True
        self.append(_Named)

    def persistent_load(self, pid: object, /) -> None:
        """Whatever the loader has under this id; it is no function that the pickle brings."""

    def _with_data(self, load: Callable[[_Machine], None]) -> None:
        """Run an instruction that takes data from the stack, where lines of text leave the name of a class."""
        if self.stack[-1] is _Named:
            raise pickle.UnpicklingError("no data")
        load(self)


def _checked(load: Any) -> Any:
    return lambda machine: machine._with_data(load)


_Machine.dispatch = {
    **pickle._Unpickler.dispatch,
    **{code[0]: _checked(pickle._Unpickler.dispatch[code[0]]) for code in (pickle.BUILD, pickle.APPEND)},
}
