"""Reads docs/how-to/kubeflow-sdk.md and what was recorded for its calls. Imports the standard library only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.conformance.functions import train_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubeflow-sdk.md"
RECORDED = Path(__file__).parent / "recorded.json"


def rows(name: str) -> list[list[str]]:
    """The cells of a table, without its head; a cell that is code as its text."""
    found = re.search(rf"<!-- {name} -->\n(.*?)(\n\n|<!-- end -->)", PAGE.read_text(), re.DOTALL)
    assert found, f"no table {name} in {PAGE.name}"
    lines = [line.strip("|").split(" | ") for line in found[1].strip().splitlines()]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in line] for line in lines[2:]]


def sdk_calls() -> list[str]:
    """Arguments of ``TrainerClient.train``, for each call of the page."""
    return [row[0] for name in ("calls", "refusals") for row in rows(name)]


def fields(text: str) -> dict[str, Any]:
    """The fields of a spec that the page shows."""
    found: dict[str, Any] = eval(f"dict({text})", {"train_model": train_model})
    return found


def recorded() -> dict[str, Any]:
    """What `record` wrote: the SDK's ``arguments`` by class, and request and refusal of each of the ``calls``."""
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    return content
