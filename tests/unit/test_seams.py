"""Callers use the protocol of `trainjob._backends.base` and never check the class of a backend."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import pods
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob.job import JobRef
from trainjob.verdicts import Evidence

ROOT = Path(__file__).parents[2]
PACKAGES = ("components", "airflow_provider", "kfp_components")
CLASSES = {"LocalBackend", "KubernetesBackend"}


def checks(program: str) -> Iterator[int]:
    """Lines that check the class of a backend with `isinstance`, `issubclass` or `match`."""
    for node in ast.walk(ast.parse(program)):
        named: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = [*node.args[1:]] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.MatchClass):
            named = [node.cls]
        for each in (part for name in named for part in ast.walk(name)):
            if (isinstance(each, ast.Name) and each.id in CLASSES) or (
                isinstance(each, ast.Attribute) and each.attr in CLASSES
            ):
                yield each.lineno


def test_callers_do_not_check_the_class_of_a_backend() -> None:
    inside = ROOT / "components" / "trainjob" / "_backends"
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert inside / "base.py" in files
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if inside not in path.parents
        for line in checks(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"use a method of trainjob._backends.base instead of the class: {', '.join(found)}"


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(backend, LocalBackend)",
        "isinstance(self.backend, local.LocalBackend | KubernetesBackend) and True",
        "issubclass(type(backend), (str, KubernetesBackend))",
        "match backend:\n  case KubernetesBackend(): pass",
    ],
)
def test_class_checks_are_detected(line: str) -> None:
    assert [*checks(line)]
    assert not [*checks(line.replace("LocalBackend", "Local").replace("KubernetesBackend", "Path"))]


@pytest.mark.anyio
@pytest.mark.parametrize("allowed", [True, False])
async def test_evidence_has_a_field_for_invisible_pods(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """A diagnosis distinguishes "no pods" from "pods cannot be listed" by this field, not by the text of `unseen`."""
    backend = KubernetesBackend(Credentials(host="http://localhost:1"))

    async def list_pods(*_: object) -> list[object]:
        if allowed:
            return []
        raise Forbidden(403, "Forbidden", "pods is forbidden")

    async def nothing(*_: object, **__: object) -> object:
        raise ObjectNotFound(404, "NotFound", "not found")

    async def no_items(*_: object, **__: object) -> list[object]:
        return []

    monkeypatch.setattr(pods, "list_pods", list_pods)
    monkeypatch.setattr(backend._client, "send", nothing)
    monkeypatch.setattr(backend._client, "items", no_items)
    evidence = await backend.evidence(JobRef("ns", "x", "uid"))
    expected = [] if allowed else ["pods: pods is forbidden"]
    assert evidence == Evidence(None, [], {}, [], None, expected, [], pods_visible=allowed)
    await backend.aclose()
