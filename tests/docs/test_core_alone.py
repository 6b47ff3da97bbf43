"""What a newcomer meets who has installed the core alone, has no cluster and has set nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CHECKOUT = "pip install -c constraints/main.txt '.[{extra}]'"
HERE = "to run jobs on this machine: export TRAINJOB_BACKEND=local"

MISSING = {
    "run": (("run", "--runtime", "trainjob-step", "--", "true"), "kubernetes", HERE),
    "list": (("list",), "kubernetes", HERE),
    "reap": (("reap",), "kubernetes", HERE),
    "doctor": (("doctor",), "kubernetes", HERE),
    "check": (("check", "."), "airflow", "trainjob check needs Airflow"),
    "copy": (("data", "copy", "s3://bucket/x", "here"), "storage", "s3:// needs obstore"),
    "registry": (("registry", "list", "m", "--registry", "mlflow+sqlite:////r.db"), "mlflow", "MLflow"),
}


def run(core: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{core}:/usr/bin:/bin", "HOME": str(home)}
    return subprocess.run(
        ["trainjob", *words], env=environment, cwd=home, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", MISSING)
def test_one_line_names_what_to_install_or_set(command: str, core: Path, tmp_path: Path) -> None:
    words, extra, message = MISSING[command]
    done = run(core, tmp_path, *words)
    assert done.returncode == 2
    lines = (done.stdout if command == "doctor" else done.stderr).splitlines()
    assert len(lines) == (3 if command == "doctor" else 1), lines
    assert message in lines[0]
    assert CHECKOUT.format(extra=extra) in lines[0]


def test_what_needs_no_cluster_needs_no_extra(core: Path, tmp_path: Path) -> None:
    rendered = run(core, tmp_path, "render", "--runtime", "torch-distributed", "--", "torchrun", "train.py")
    assert (rendered.returncode, "namespace: default\n" in rendered.stdout) == (0, True), rendered.stderr
    assert run(core, tmp_path, "install", "--only", "rbac", "-n", "ml").returncode == 0
    assert run(core, tmp_path, "doctor", "--backend", "local").returncode == 0
