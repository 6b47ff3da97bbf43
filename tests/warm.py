"""`tests.forks` by its earlier name."""

from __future__ import annotations

from tests.forks import PYTHON, Warm

__all__ = ["PYTHON", "Warm"]
