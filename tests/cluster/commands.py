"""`trainjob` as a person runs it: any command, `trainjob doctor`, `trainjob install`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import yaml
from tests.testcluster.access import Access

from trainjob._backends.credentials import Credentials
from trainjob._doctor import Finding, Level, cluster as doctor


def run_trainjob(*words: str, code: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINJOB_", "KUBE"))}
    command = [str(Path(sys.executable).parent / "trainjob"), *words]
    done = subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert code is None or done.returncode == code, done.stderr
    return done


# ---------------------------------------------------------------- doctor


async def examined(kubeconfig: Path, namespace: str, runtimes: Sequence[str] = (), queue: str = "") -> list[Finding]:
    found = doctor.examine(Credentials(kubeconfig=str(kubeconfig)), namespace, runtimes, queue)
    with anyio.fail_after(240):
        async with aclosing(found) as all_:
            return [finding async for finding in all_]


def of(findings: Sequence[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def failures(findings: Sequence[Finding]) -> list[str]:
    return [finding.check for finding in findings if finding.level is Level.FAILURE]


def by_command(kubeconfig: Path, namespace: str, *words: str) -> tuple[int, str]:
    """Exit code and output of the command itself, which never shows the token."""
    done = run_trainjob("doctor", "-n", namespace, *words, KUBECONFIG=str(kubeconfig))
    assert done.stderr == ""
    token = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"].get("token")
    assert token is None or token not in done.stdout
    return done.returncode, done.stdout


# ---------------------------------------------------------------- install


def printed(*words: str) -> list[str]:
    """The printed documents, as text: the API server parses YAML."""
    _, *documents = run_trainjob("install", *words, code=0).stdout.split("---\n")
    return documents


def applied(cluster: Access, documents: Sequence[str]) -> list[dict[str, Any]]:
    """The objects after `kubectl apply --server-side --force-conflicts`; other tests also apply the step runtime."""
    params = {"fieldManager": "kubectl", "fieldValidation": "Strict", "force": "true"}
    stored = []
    for document in documents:
        each = yaml.safe_load(document)
        metadata = each["metadata"]
        path = cluster.api.path(each["apiVersion"], each["kind"], metadata.get("namespace", ""), metadata["name"])
        headers = {"Content-Type": "application/apply-patch+yaml"}
        answer = cluster.api._client.patch(path, content=document, params=params, headers=headers)
        assert answer.is_success, f"{document}\n{answer.text}"
        assert "warning" not in answer.headers, answer.headers["warning"]
        stored.append(answer.json())
    return stored
