"""The command line program, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainjob.cli import main

Program = Callable[..., tuple[int, str, str]]
"""Takes the words of a command; returns exit code, stdout and stderr."""


def exit_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Call the program; return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as left:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(left.value.code, int)
    assert ("Traceback" in err) == (left.value.code == 70), err  # 70: an internal error
    return left.value.code, out, err
