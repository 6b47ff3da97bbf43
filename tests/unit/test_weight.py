"""Packages that a waiter for cluster jobs must not import: each costs megabytes in every waiter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("rich", "pygments", "kubernetes", "jinja2", "mlflow", "obstore", "huggingface_hub", "requests")
HEAVY += ("pydantic_settings",)

PROGRAM = f"""
import sys
import trainjob.cli.run, trainjob._backends.kubernetes.backend
print([name for name in {HEAVY} if name in sys.modules])
"""


def printed(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_waiter_imports_no_heavy_package() -> None:
    assert printed(PROGRAM) == "[]"


HTTPX = "import trainjob._backends.kubernetes.client, httpx; httpx.Client().close(); import httpx._main; print('yes')"
BEFORE = "import httpx; main = httpx.main; from trainjob._backends.kubernetes.lean_httpx import httpx as ours; "


@pytest.mark.parametrize(
    ("program", "output"), [(HTTPX, "yes"), (BEFORE + "print(ours is httpx and httpx.main is main)", "True")]
)
def test_httpx_works_whether_it_was_imported_before_or_not(program: str, output: str) -> None:
    assert printed(program) == output
