"""Programs of Debian packages (apt-packages.txt): only tests marked `full` use them, so `make test` needs none."""

from __future__ import annotations

import shutil

import pytest

quick_test = ""
"""ID of the test that runs, if it is not marked `full`; `tests.conftest` sets it."""


def program(name: str, package: str = "") -> str:
    """The path of a program. Without it the test is skipped, which fails `make test-rest`.

    A quick test fails wherever it runs, also where the program is installed.

    Args:
        name: Name of the program.
        package: Package that has it, if that has another name.
    """
    assert not quick_test, f"{quick_test} uses {name} of Debian's {package or name}: mark it as full"
    path = shutil.which(name)
    if path is None:
        # pytest alone, on a machine without the package: its message names what to install
        pytest.skip(f"needs {name} (Debian: {package or name})")
    return path
