"""The package as it is after the first install line of README.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the package and no extra of it, installed by the line of README.md."""
    lines = re.findall(r"^pip install (-c \S+ \.) ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 1
    folder = tmp_path_factory.mktemp("core")
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *lines[0].split()], cwd=ROOT, check=True)
    extra = (
        "import importlib.util as u; print([m for m in ('httpx', 'kubernetes', 'airflow', 'kfp') if u.find_spec(m)])"
    )
    assert subprocess.run([python, "-c", extra], capture_output=True, text=True, check=True).stdout == "[]\n"
    return python.parent
