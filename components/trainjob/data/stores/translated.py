"""Errors of libraries and of the operating system as ours."""

from __future__ import annotations

from collections.abc import Callable


class Translated:
    """Within it, what is raised goes through ``translate``, which raises ours for it, or leaves it as it is.

    Not a generator with ``contextmanager``: of many small files, entering and leaving those takes its time.
    """

    __slots__ = ("_translate",)

    def __init__(self, translate: Callable[[BaseException], None]) -> None:
        self._translate = translate

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._translate(error)
