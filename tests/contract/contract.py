"""The behavior that `trainjob._jobs.launching` requires of every backend."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import pytest

PARTS = ("tests.contract.jobs", "tests.contract.changes", "tests.contract.ranks")
pytest.register_assert_rewrite(*PARTS)


def contract(without: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """The tests of the contract by name, for a module with the fixtures ``harness`` and ``shell``.

    Args:
        without: Names of tests that the module replaces.
    """
    parts = [vars(import_module(part)) for part in PARTS]
    found = {name: test for part in parts for name, test in part.items() if name.startswith("test_")}
    assert found.keys() >= set(without)
    return {name: test for name, test in found.items() if name not in without}
