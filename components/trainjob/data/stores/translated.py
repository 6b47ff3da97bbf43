"""Translate errors of libraries and of the operating system into those of `trainjob.errors`."""

from __future__ import annotations

from collections.abc import Callable


class Translated:
    """A block whose errors are passed to ``translate``, which raises another error or returns to keep the original.

    Not a generator with ``contextmanager``: with many small files, entering and leaving those takes noticeable time.
    """

    __slots__ = ("_translate",)

    def __init__(self, translate: Callable[[BaseException], None]) -> None:
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._translate(error)
